//! The catalog: what is on disk and how large, in memory, for a million blobs.
//!
//! It answers what `df` asks. It is no authority: the file system is, and nothing is ever deleted
//! on its word. A blob has a row with a number, and a recipe is a list of such numbers, so that
//! ten thousand models that share a million blobs take some 80 MiB.
//!
//! It also remembers which of its pages and recipes have changed since somebody last asked
//! ([`Catalog::take_changes`]), for whoever keeps a copy.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;

use blobd_store_format::digest::Digest;
use hashbrown::HashTable;

use super::tally::Tally;

/// What is known of the blobs and recipes there are.
#[derive(Debug, Default)]
pub struct Catalog {
    /// The name of each row.
    digests: Vec<Digest>,
    rows: Vec<Row>,
    /// Rows that stand for nothing.
    free: Vec<u32>,
    /// Where each digest's row is.
    places: HashTable<u32>,
    /// Keyed, because whoever makes blobs can choose digests that begin alike.
    hasher: RandomState,
    recipes: HashMap<Digest, RecipeRow>,
    /// How many blobs there are of each length.
    lengths: BTreeMap<u64, u32>,
    used_bytes: u64,
    blob_count: u64,
    changes: Changes,
}

/// What a blob is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobFacts {
    /// Its length in bytes.
    pub length: u64,
    /// What it takes on disk in bytes.
    pub bytes_on_disk: u64,
}

/// What a recipe is on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecipeFacts {
    /// What its own file takes on disk in bytes.
    pub bytes_on_disk: u64,
    /// The blobs that it names, each once; `None` when it cannot be read.
    pub needs: Option<Vec<Digest>>,
}

/// What has changed since it was last asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Numbers of pages of [`PAGE_ROWS`] rows.
    pub(super) pages: BTreeSet<u32>,
    /// Recipes, by the digest of their file.
    pub(super) recipes: BTreeSet<Digest>,
}

/// A row of the table of blobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) state: RowState,
    /// A scan has looked at it.
    pub(super) is_seen: bool,
    /// How many recipes name it.
    pub(super) needed_by: u32,
    pub(super) length: u64,
    pub(super) bytes_on_disk: u64,
}

/// What a row stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RowState {
    /// Nothing.
    #[default]
    Free,
    /// A blob that some recipe names and that is not there.
    Absent,
    /// A blob.
    Present,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecipeRow {
    pub(super) bytes_on_disk: u64,
    /// Numbers of rows; `None` when it cannot be read.
    pub(super) needs: Option<Box<[u32]>>,
}

/// How many rows make a page, the unit in which a copy is kept: such a page stays below 4 KiB.
pub(super) const PAGE_ROWS: usize = 80;

impl Catalog {
    /// What blobs and recipes take on disk in bytes.
    #[must_use]
    pub const fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// How many blobs there are.
    #[must_use]
    pub const fn blob_count(&self) -> u64 {
        self.blob_count
    }

    /// How many recipes there are.
    #[must_use]
    pub fn recipe_count(&self) -> u64 {
        self.recipes.len() as u64
    }

    /// How many blobs have this length in bytes. Where there is none, a tensor of that length is
    /// certainly new.
    #[must_use]
    pub(crate) fn blobs_of_length(&self, length: u64) -> u64 {
        self.lengths.get(&length).copied().unwrap_or_default().into()
    }

    /// What is known of a blob, if there is one.
    #[must_use]
    pub fn blob(&self, digest: Digest) -> Option<BlobFacts> {
        let row = self.row(self.place(digest)?)?;
        let facts = BlobFacts { length: row.length, bytes_on_disk: row.bytes_on_disk };
        (row.state == RowState::Present).then_some(facts)
    }

    /// What is known of a file's recipe, if there is one. The blobs are in order.
    #[must_use]
    pub fn recipe(&self, file: Digest) -> Option<RecipeFacts> {
        let row = self.recipes.get(&file)?;
        let named = |needs: &[u32]| {
            let mut digests: Vec<_> = needs.iter().filter_map(|id| self.digest(*id)).collect();
            digests.sort_unstable();
            digests
        };
        Some(RecipeFacts { bytes_on_disk: row.bytes_on_disk, needs: row.needs.as_deref().map(named) })
    }

    /// Starts to measure what models take.
    #[must_use]
    pub fn tally(&self) -> Tally<'_> {
        Tally::new(self)
    }

    /// Notes what the disk says about a blob; says whether that is news.
    pub(super) fn set_blob(&mut self, digest: Digest, facts: Option<BlobFacts>) -> bool {
        if let Some(row) = self.place(digest).and_then(|id| self.rows.get_mut(usize::try_from(id).ok()?)) {
            row.is_seen = true;
        }
        if self.blob(digest) == facts {
            return false;
        }
        let Some(id) = self.place(digest).or_else(|| facts.and_then(|_| self.insert(digest))) else {
            return false;
        };
        let Some(old) = self.row(id) else { return false };
        self.uncount(old);
        let row = match facts {
            Some(BlobFacts { length, bytes_on_disk }) => {
                Row { state: RowState::Present, is_seen: true, length, bytes_on_disk, ..old }
            }
            None => Row { state: RowState::Absent, length: 0, bytes_on_disk: 0, ..old },
        };
        self.count(row);
        self.replace(id, row);
        self.release(id);
        true
    }

    /// Notes what the disk says about a recipe; says whether that is news.
    pub(super) fn set_recipe(&mut self, file: Digest, facts: Option<RecipeFacts>) -> bool {
        if self.recipe(file) == facts {
            return false;
        }
        self.changes.recipes.insert(file);
        let new = facts.map(|facts| {
            let needs = facts.needs.map(|needs| self.hold_all(&needs));
            RecipeRow { bytes_on_disk: facts.bytes_on_disk, needs }
        });
        self.used_bytes = self.used_bytes.saturating_add(new.as_ref().map_or(0, |row| row.bytes_on_disk));
        let old = match new {
            Some(row) => self.recipes.insert(file, row),
            None => self.recipes.remove(&file),
        };
        let Some(old) = old else { return true };
        self.used_bytes = self.used_bytes.saturating_sub(old.bytes_on_disk);
        for id in old.needs.iter().flatten() {
            self.let_go(*id);
        }
        true
    }

    /// What has changed since this was last called.
    pub(super) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    /// Marks everything as changed.
    pub(super) fn touch_all(&mut self) {
        self.changes.pages = (0..self.page_count()).collect();
        self.changes.recipes = self.recipes.keys().copied().collect();
    }

    pub(super) const fn changes(&self) -> &Changes {
        &self.changes
    }

    pub(super) const fn changes_mut(&mut self) -> &mut Changes {
        &mut self.changes
    }

    /// How many pages the table of blobs has.
    pub(super) fn page_count(&self) -> u32 {
        u32::try_from(self.rows.len().div_ceil(PAGE_ROWS)).unwrap_or(u32::MAX)
    }

    /// The rows of one page with their names; none beyond the end.
    pub(super) fn page(&self, number: u32) -> impl Iterator<Item = (Digest, Row)> + '_ {
        let start = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(PAGE_ROWS);
        self.rows_in(start..start.saturating_add(PAGE_ROWS))
    }

    /// Begins a scan: no blob has been looked at.
    pub(super) fn unsee_all(&mut self) {
        self.rows.iter_mut().for_each(|row| row.is_seen = false);
    }

    /// The blobs in a range of rows that no scan has looked at.
    pub(super) fn unseen_in(&self, range: Range<usize>) -> impl Iterator<Item = Digest> + '_ {
        let is_unseen = |(_, row): &(Digest, Row)| row.state == RowState::Present && !row.is_seen;
        self.rows_in(range).filter(is_unseen).map(|(digest, _)| digest)
    }

    pub(super) fn named_rows(&self) -> impl Iterator<Item = (Digest, Row)> + '_ {
        self.rows_in(0..self.rows.len())
    }

    fn rows_in(&self, range: Range<usize>) -> impl Iterator<Item = (Digest, Row)> + '_ {
        let range = range.start.min(self.rows.len())..range.end.min(self.rows.len());
        let digests = self.digests.get(range.clone()).unwrap_or_default();
        let rows = self.rows.get(range).unwrap_or_default();
        digests.iter().copied().zip(rows.iter().copied())
    }

    pub(super) fn row_count(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn recipe_files(&self) -> Vec<Digest> {
        self.recipes.keys().copied().collect()
    }

    pub(super) fn recipe_row(&self, file: Digest) -> Option<&RecipeRow> {
        self.recipes.get(&file)
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(super) fn recipe_rows(&self) -> impl Iterator<Item = (&Digest, &RecipeRow)> {
        self.recipes.iter()
    }

    pub(super) fn place(&self, digest: Digest) -> Option<u32> {
        let hash = self.hasher.hash_one(digest);
        self.places.find(hash, |id| self.digest(*id) == Some(digest)).copied()
    }

    /// Appends a row as a copy of the table has it: to be followed by [`Self::push_recipe`].
    /// `None` if the row cannot be part of a table.
    pub(super) fn push_row(&mut self, digest: Digest, row: Row) -> Option<()> {
        let id = u32::try_from(self.rows.len()).ok()?;
        self.digests.push(digest);
        self.rows.push(Row { needed_by: 0, ..row });
        if row.state == RowState::Free {
            self.free.push(id);
            return Some(());
        }
        if self.place(digest).is_some() {
            return None;
        }
        self.enter(digest, id);
        self.count(row);
        Some(())
    }

    /// Adds a recipe as a copy of the table has it. `None` if it names no rows of the table.
    pub(super) fn push_recipe(&mut self, file: Digest, row: RecipeRow) -> Option<()> {
        for id in row.needs.iter().flatten() {
            let needed = self.rows.get_mut(usize::try_from(*id).ok()?)?;
            if needed.state == RowState::Free {
                return None;
            }
            needed.needed_by = needed.needed_by.checked_add(1)?;
        }
        self.used_bytes = self.used_bytes.saturating_add(row.bytes_on_disk);
        self.recipes.insert(file, row).is_none().then_some(())
    }

    fn digest(&self, id: u32) -> Option<Digest> {
        self.digests.get(usize::try_from(id).ok()?).copied()
    }

    fn row(&self, id: u32) -> Option<Row> {
        self.rows.get(usize::try_from(id).ok()?).copied()
    }

    fn replace(&mut self, id: u32, row: Row) {
        let place = usize::try_from(id).ok().and_then(|index| self.rows.get_mut(index));
        if let Some(place) = place {
            *place = row;
        }
        self.touch(id);
    }

    fn touch(&mut self, id: u32) {
        let page = usize::try_from(id).ok().and_then(|row| u32::try_from(row / PAGE_ROWS).ok());
        self.changes.pages.extend(page);
    }

    /// A row for a digest that has none. `None` if there are 2^32 already.
    fn insert(&mut self, digest: Digest) -> Option<u32> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let id = u32::try_from(self.rows.len()).ok()?;
                self.rows.push(Row::default());
                self.digests.push(digest);
                id
            }
        };
        *self.digests.get_mut(usize::try_from(id).ok()?)? = digest;
        self.enter(digest, id);
        self.replace(id, Row { state: RowState::Absent, ..Row::default() });
        Some(id)
    }

    fn enter(&mut self, digest: Digest, id: u32) {
        let (digests, hasher) = (&self.digests, &self.hasher);
        let hash_of = |id: &u32| {
            // Every number in the table is that of a row.
            usize::try_from(*id).ok().and_then(|index| digests.get(index)).map_or(0, |it| hasher.hash_one(it))
        };
        self.places.insert_unique(hasher.hash_one(digest), id, hash_of);
    }

    fn hold_all(&mut self, digests: &[Digest]) -> Box<[u32]> {
        let mut ids = Vec::with_capacity(digests.len());
        for digest in digests {
            let Some(id) = self.place(*digest).or_else(|| self.insert(*digest)) else { continue };
            let place = usize::try_from(id).ok().and_then(|index| self.rows.get_mut(index));
            if let Some(row) = place {
                row.needed_by = row.needed_by.saturating_add(1);
            }
            ids.push(id);
        }
        ids.into()
    }

    fn let_go(&mut self, id: u32) {
        let place = usize::try_from(id).ok().and_then(|index| self.rows.get_mut(index));
        if let Some(row) = place {
            row.needed_by = row.needed_by.saturating_sub(1);
        }
        self.release(id);
    }

    /// Frees a row that stands for nothing any more.
    fn release(&mut self, id: u32) {
        let (Some(row), Some(digest)) = (self.row(id), self.digest(id)) else { return };
        if row.state != RowState::Absent || row.needed_by > 0 {
            return;
        }
        let hash = self.hasher.hash_one(digest);
        if let Ok(entry) = self.places.find_entry(hash, |place| *place == id) {
            entry.remove();
        }
        self.replace(id, Row::default());
        self.free.push(id);
    }

    fn count(&mut self, row: Row) {
        if row.state == RowState::Present {
            self.blob_count += 1;
            self.used_bytes = self.used_bytes.saturating_add(row.bytes_on_disk);
            *self.lengths.entry(row.length).or_default() += 1;
        }
    }

    fn uncount(&mut self, row: Row) {
        if row.state != RowState::Present {
            return;
        }
        self.blob_count -= 1;
        self.used_bytes = self.used_bytes.saturating_sub(row.bytes_on_disk);
        if let Some(count) = self.lengths.get_mut(&row.length) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&row.length);
            }
        }
    }
}
