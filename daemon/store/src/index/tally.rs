//! What models take on disk, counted over the catalog.

use std::collections::HashMap;

use blobd_store_format::digest::Digest;

use super::catalog::{Catalog, RecipeRow, RowState};

/// A measurement in progress: models are added one by one.
#[derive(Debug)]
pub struct Tally<'c> {
    catalog: &'c Catalog,
    /// One per row of the table of blobs.
    blobs: Vec<Users>,
    recipes: HashMap<Digest, Users>,
    /// What each model needs.
    totals: Vec<Total>,
}

/// What all models that were added take together, and each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// One per model, in the order in which they were added.
    pub models: Vec<Share>,
    /// What is needed by any of them in bytes on disk.
    pub needed_bytes: u64,
    /// What only the trash needs in bytes on disk.
    pub trash_bytes: u64,
    /// What only unfinished downloads need in bytes on disk, of what is under its own name already.
    pub download_bytes: u64,
    /// The recipes that nothing needs, in bytes on disk.
    pub unneeded_recipe_bytes: u64,
    /// The blobs that nothing needs, with their bytes on disk.
    pub unneeded_blobs: Vec<(Digest, u64)>,
}

/// One model's part in bytes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// What no other model needs.
    pub unique_bytes: u64,
    /// What others need too.
    pub shared_bytes: u64,
    /// Whether a file or blob of it is missing.
    pub is_partial: bool,
}

/// What a model, or a file of it, needs.
#[derive(Clone, Copy, Debug, Default)]
struct Total {
    /// In bytes on disk, each blob once.
    bytes: u64,
    is_partial: bool,
}

impl Total {
    fn add(&mut self, part: Self) {
        self.bytes = self.bytes.saturating_add(part.bytes);
        self.is_partial |= part.is_partial;
    }
}

/// A recipe cannot be read, so nobody knows what its file needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The file.
    pub file: Digest,
}

/// Who needs an entry. Models are numbered from 1 on.
#[derive(Clone, Copy, Debug, Default)]
struct Users {
    /// The only model, [`SEVERAL`], [`TRASH`], [`KEPT`], or 0 for none.
    user: u32,
    /// The model that was counted last, so that none counts it twice.
    last: u32,
}

/// In place of a model's number.
const SEVERAL: u32 = u32::MAX;
/// In place of a model's number: no model needs it, and it stays.
const KEPT: u32 = u32::MAX - 1;
/// In place of a model's number: an unfinished download keeps it.
const DOWNLOAD: u32 = u32::MAX - 3;
/// In place of a model's number: a model in the trash. They are all one to the others.
const TRASH: u32 = u32::MAX - 2;

impl<'c> Tally<'c> {
    pub(super) fn new(catalog: &'c Catalog) -> Self {
        let blobs = vec![Users::default(); catalog.row_count()];
        Self { catalog, blobs, recipes: HashMap::new(), totals: Vec::new() }
    }

    /// Adds a model that is made of `files`. A file that is there neither as a blob nor as a
    /// recipe counts nothing.
    ///
    /// # Errors
    /// [`Unreadable`]; the tally is of no use then.
    pub fn add(&mut self, files: &[Digest]) -> Result<(), Unreadable> {
        let model = u32::try_from(self.totals.len() + 1).unwrap_or(DOWNLOAD - 1);
        let total = self.count(files, model)?;
        self.totals.push(total);
        Ok(())
    }

    /// Adds a model in the trash. What a model needs too is shared between the two.
    ///
    /// # Errors
    /// As for [`Self::add`].
    pub fn add_trashed(&mut self, files: &[Digest]) -> Result<(), Unreadable> {
        self.count(files, TRASH).map(drop)
    }

    /// Notes that blobs and recipes of these names stay although no model may need them.
    pub fn keep(&mut self, digests: impl IntoIterator<Item = Digest>) {
        for digest in digests {
            let blob =
                self.catalog.place(digest).and_then(|id| self.blobs.get_mut(usize::try_from(id).ok()?));
            let recipe = self.catalog.recipe_row(digest).map(|_| self.recipes.entry(digest).or_default());
            for users in blob.into_iter().chain(recipe) {
                users.keep(KEPT);
            }
        }
    }

    /// Notes that an unfinished download keeps a blob of this name, or the recipe and what it needs.
    pub fn keep_for_download(&mut self, digest: Digest, is_recipe: bool) {
        let mut blobs = Vec::new();
        if !is_recipe {
            blobs.extend(self.catalog.place(digest));
        } else if let Some(row) = self.catalog.recipe_row(digest) {
            self.recipes.entry(digest).or_default().keep(DOWNLOAD);
            blobs.extend(row.needs.iter().flatten());
        }
        for id in blobs {
            if let Some(users) = usize::try_from(id).ok().and_then(|at| self.blobs.get_mut(at)) {
                users.keep(DOWNLOAD);
            }
        }
    }

    /// The sums.
    #[must_use]
    pub fn finish(self) -> Measured {
        let mut measured = Measured::default();
        measured.models.resize(self.totals.len(), Share::default());
        for ((digest, row), users) in self.catalog.named_rows().zip(&self.blobs) {
            match (row.state, users.user) {
                (RowState::Present, 0) => measured.unneeded_blobs.push((digest, row.bytes_on_disk)),
                (RowState::Present, user) => measured.enter(user, row.bytes_on_disk),
                _ => {}
            }
        }
        for (file, row) in self.catalog.recipe_rows() {
            match self.recipes.get(file).map_or(0, |users| users.user) {
                0 => measured.unneeded_recipe_bytes += row.bytes_on_disk,
                user => measured.enter(user, row.bytes_on_disk),
            }
        }
        for (share, total) in measured.models.iter_mut().zip(&self.totals) {
            share.shared_bytes = total.bytes.saturating_sub(share.unique_bytes);
            share.is_partial = total.is_partial;
        }
        measured
    }

    /// What `files` add to a model.
    fn count(&mut self, files: &[Digest], model: u32) -> Result<Total, Unreadable> {
        let mut total = Total::default();
        for file in files {
            let blob = self.count_blob(self.catalog.place(*file), model);
            match self.catalog.recipe_row(*file) {
                // A split file needs no blob of its own name.
                Some(row) => {
                    total.add(Total { is_partial: false, ..blob });
                    total.add(self.count_recipe(*file, row, model)?);
                }
                None => total.add(blob),
            }
        }
        Ok(total)
    }

    fn count_recipe(&mut self, file: Digest, row: &RecipeRow, model: u32) -> Result<Total, Unreadable> {
        let needs = row.needs.as_deref().ok_or(Unreadable { file })?;
        let mut total = Total::default();
        if self.recipes.entry(file).or_default().add(model) {
            total.bytes = row.bytes_on_disk;
            for id in needs {
                total.add(self.count_blob(Some(*id), model));
            }
        }
        Ok(total)
    }

    /// What a blob adds to a model.
    fn count_blob(&mut self, id: Option<u32>, model: u32) -> Total {
        const MISSING: Total = Total { bytes: 0, is_partial: true };
        let Some(at) = id.and_then(|id| usize::try_from(id).ok()) else { return MISSING };
        let (Some(users), Some(row)) = (self.blobs.get_mut(at), self.catalog.rows().get(at)) else {
            return MISSING;
        };
        let bytes = if users.add(model) { row.bytes_on_disk } else { 0 };
        Total { bytes, is_partial: row.state != RowState::Present }
    }
}

impl Measured {
    /// Enters what somebody needs.
    fn enter(&mut self, user: u32, bytes: u64) {
        match user {
            KEPT => {}
            DOWNLOAD => self.download_bytes += bytes,
            TRASH => self.trash_bytes += bytes,
            user => {
                self.needed_bytes += bytes;
                let model = usize::try_from(user - 1).ok().and_then(|at| self.models.get_mut(at));
                if let Some(share) = model {
                    share.unique_bytes += bytes;
                }
            }
        }
    }
}

impl Users {
    /// Notes a model; says whether it was not noted before.
    const fn add(&mut self, model: u32) -> bool {
        if self.last == model {
            return false;
        }
        self.last = model;
        self.user = if self.user == 0 || self.user == KEPT { model } else { SEVERAL };
        true
    }

    /// Notes that it stays, for who keeps it, if nothing needs it more than that.
    const fn keep(&mut self, keeper: u32) {
        if self.user == 0 || self.user == KEPT {
            self.user = keeper;
        }
    }
}
