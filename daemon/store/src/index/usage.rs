//! Counts over the catalog how much disk space models use, alone and together.

use std::collections::{BTreeSet, HashMap};

use blobd_store_format::digest::Digest;

use super::catalog::{Catalog, RecipeRow, RowState};
use crate::node::Node;

/// A count in progress: models are added one by one.
#[derive(Debug)]
pub struct UsageCounter<'c> {
    catalog: &'c Catalog,
    /// One per row of the catalog.
    blobs: Vec<BlobUse>,
    recipes: HashMap<Digest, Users>,
    models: Vec<ModelShare>,
    downloads: usize,
}

/// The space used by each counted model and by all together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// One per model, in the order of the calls of [`UsageCounter::add`].
    pub models: Vec<ModelShare>,
    /// Bytes on disk that any model needs.
    pub needed_bytes: u64,
    /// Bytes on disk that several models need, or models and the trash, each counted once.
    pub shared_bytes: u64,
    /// Bytes on disk that only the trash needs.
    pub trash_bytes: u64,
    /// Bytes on disk that only an unfinished download needs: one number per download, in the order of their numbers.
    pub download_bytes: Vec<u64>,
    /// Bytes on disk that nothing needs but that are kept, see [`UsageCounter::keep`].
    pub kept_bytes: u64,
    /// The blobs and recipes of `kept_bytes`.
    pub kept: BTreeSet<Digest>,
    pub unneeded_recipes: Vec<Digest>,
    pub unneeded_blobs: Vec<Digest>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelShare {
    /// Bytes that no other model needs.
    pub unique_bytes: u64,
    /// Bytes that others need too. Until [`UsageCounter::finish`], all bytes that this one needs.
    pub shared_bytes: u64,
    /// Whether a file or blob of it is missing.
    pub is_partial: bool,
}

/// A recipe cannot be read, so the blobs of its file are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadableRecipe {
    pub file: Digest,
}

/// A blob during a count. Its size is copied from its row, which is several times larger: for each part of each model,
/// the rows would be read in no order. A million of these take 16 MB.
#[derive(Clone, Copy, Debug)]
struct BlobUse {
    users: Users,
    /// [`ABSENT`] if there is no such blob.
    bytes_on_disk: u64,
}

const ABSENT: u64 = u64::MAX;

/// The user of a blob or recipe: the number of a model, or a constant below.
#[derive(Clone, Copy, Debug, Default)]
struct Users {
    user: u32,
    /// The model that was counted last, so that no model is counted twice.
    last: u32,
}

const UNUSED: u32 = 0;
const SEVERAL: u32 = u32::MAX;
/// No model needs it, but it is kept.
const KEPT: u32 = u32::MAX - 1;
/// The trash, whose models are counted as one.
const TRASH: u32 = u32::MAX - 2;
/// The first unfinished download needs it; the following numbers are those of the other downloads.
const FIRST_DOWNLOAD: u32 = u32::MAX - (1 << 24);
/// The last number of a download. More share this one.
const LAST_DOWNLOAD: u32 = u32::MAX - 3;
/// The last number of a model. More share this one.
const LAST_MODEL: u32 = FIRST_DOWNLOAD - 1;

impl<'c> UsageCounter<'c> {
    pub fn new(catalog: &'c Catalog) -> Self {
        let blobs = catalog.rows().iter().map(|row| BlobUse {
            users: Users::default(),
            bytes_on_disk: if row.state == RowState::Present { row.bytes_on_disk } else { ABSENT },
        });
        let blobs = blobs.collect();
        Self { catalog, blobs, recipes: HashMap::new(), models: Vec::new(), downloads: 0 }
    }

    /// Adds a model. A file with neither blob nor recipe counts nothing. The count cannot be used after an error.
    pub fn add(&mut self, files: &[Digest]) -> Result<(), UnreadableRecipe> {
        let model = u32::try_from(self.models.len() + 1).map_or(LAST_MODEL, |model| model.min(LAST_MODEL));
        let share = self.count(files, model)?;
        self.models.push(share);
        Ok(())
    }

    /// Adds a model in the trash. What a model needs as well counts as shared. Fails as [`Self::add`] does.
    pub fn add_trashed(&mut self, files: &[Digest]) -> Result<(), UnreadableRecipe> {
        self.count(files, TRASH).map(drop)
    }

    /// Marks blobs and recipes with these digests as kept, even if no model needs them.
    pub fn keep(&mut self, digests: impl IntoIterator<Item = Digest>) {
        for digest in digests {
            self.keep_blob(self.catalog.find(digest), KEPT);
            self.keep_recipe(digest, KEPT);
        }
    }

    /// Adds an unfinished download, and marks what it needs: blobs, and recipes with the blobs that they name.
    pub fn add_download(&mut self, needs: &[Node]) {
        let number = u32::try_from(self.downloads).ok().and_then(|number| FIRST_DOWNLOAD.checked_add(number));
        let download = number.map_or(LAST_DOWNLOAD, |number| number.min(LAST_DOWNLOAD));
        self.downloads += 1;
        for node in needs {
            match *node {
                Node::Blob(digest) => self.keep_blob(self.catalog.find(digest), download),
                Node::Recipe(file) => self.keep_file(file, download),
            }
        }
    }

    fn keep_file(&mut self, file: Digest, keeper: u32) {
        self.keep_recipe(file, keeper);
        let needs = self.catalog.recipes().get(&file).and_then(|row| row.needs.as_deref());
        for number in needs.unwrap_or_default() {
            self.keep_blob(Some(*number), keeper);
        }
    }

    pub fn finish(self) -> Usage {
        let download_bytes = vec![0; self.downloads];
        let mut usage = Usage { models: self.models, download_bytes, ..Usage::default() };
        let present = self.catalog.rows().iter().zip(&self.blobs);
        for (row, blob) in present.filter(|(_, blob)| blob.bytes_on_disk != ABSENT) {
            match blob.users.user {
                UNUSED => usage.unneeded_blobs.push(row.digest),
                user => usage.add(user, &row.digest, blob.bytes_on_disk),
            }
        }
        for (file, row) in self.catalog.recipes() {
            match self.recipes.get(file).map_or(UNUSED, |users| users.user) {
                UNUSED => usage.unneeded_recipes.push(*file),
                user => usage.add(user, file, row.bytes_on_disk),
            }
        }
        for share in &mut usage.models {
            share.shared_bytes = share.shared_bytes.saturating_sub(share.unique_bytes);
        }
        usage
    }

    fn keep_blob(&mut self, number: Option<u32>, keeper: u32) {
        if let Some(blob) = number.and_then(|number| self.blobs.get_mut(number as usize)) {
            blob.users.keep(keeper);
        }
    }

    fn keep_recipe(&mut self, file: Digest, keeper: u32) {
        if self.catalog.recipes().contains_key(&file) {
            self.recipes.entry(file).or_default().keep(keeper);
        }
    }

    fn count(&mut self, files: &[Digest], model: u32) -> Result<ModelShare, UnreadableRecipe> {
        let mut share = ModelShare::default();
        for file in files {
            let blob = self.count_blob(self.catalog.find(*file), model);
            match self.catalog.recipes().get(file) {
                // A split file does not need a blob with its own digest.
                Some(row) => {
                    share.add(ModelShare { is_partial: false, ..blob });
                    share.add(self.count_recipe(*file, row, model)?);
                }
                None => share.add(blob),
            }
        }
        Ok(share)
    }

    fn count_recipe(
        &mut self,
        file: Digest,
        row: &RecipeRow,
        model: u32,
    ) -> Result<ModelShare, UnreadableRecipe> {
        let numbers = row.needs.as_deref().ok_or(UnreadableRecipe { file })?;
        let mut share = ModelShare::default();
        if self.recipes.entry(file).or_default().add(model) {
            share.shared_bytes = row.bytes_on_disk;
            for number in numbers {
                share.add(self.count_blob(Some(*number), model));
            }
        }
        Ok(share)
    }

    fn count_blob(&mut self, number: Option<u32>, model: u32) -> ModelShare {
        let Some(blob) = number.and_then(|number| self.blobs.get_mut(number as usize)) else {
            return ModelShare { is_partial: true, ..ModelShare::default() };
        };
        let (is_new, is_partial) = (blob.users.add(model), blob.bytes_on_disk == ABSENT);
        let shared_bytes = if is_new && !is_partial { blob.bytes_on_disk } else { 0 };
        ModelShare { unique_bytes: 0, shared_bytes, is_partial }
    }
}

impl Usage {
    fn add(&mut self, user: u32, digest: &Digest, bytes: u64) {
        match user {
            UNUSED => {}
            KEPT => {
                self.kept_bytes += bytes;
                self.kept.insert(*digest);
            }
            FIRST_DOWNLOAD..=LAST_DOWNLOAD => {
                if let Some(sum) = self.download_bytes.get_mut((user - FIRST_DOWNLOAD) as usize) {
                    *sum += bytes;
                }
            }
            TRASH => self.trash_bytes += bytes,
            user => {
                self.needed_bytes += bytes;
                match self.models.get_mut((user - 1) as usize) {
                    Some(share) => share.unique_bytes += bytes,
                    None => self.shared_bytes += bytes,
                }
            }
        }
    }
}

impl ModelShare {
    /// The share of one of several names of the model: no single one keeps any bytes.
    #[must_use]
    pub const fn all_shared(self) -> Self {
        let shared_bytes = self.unique_bytes.saturating_add(self.shared_bytes);
        Self { unique_bytes: 0, shared_bytes, ..self }
    }

    fn add(&mut self, part: Self) {
        self.shared_bytes = self.shared_bytes.saturating_add(part.shared_bytes);
        self.is_partial |= part.is_partial;
    }
}

impl Users {
    /// Adds a user; returns false if it was the last one added.
    const fn add(&mut self, model: u32) -> bool {
        if self.last == model {
            return false;
        }
        self.last = model;
        self.user = if self.user == UNUSED || self.user == KEPT { model } else { SEVERAL };
        true
    }

    /// Sets the keeper, unless it has a stronger user.
    const fn keep(&mut self, keeper: u32) {
        if self.user == UNUSED || self.user == KEPT {
            self.user = keeper;
        }
    }
}
