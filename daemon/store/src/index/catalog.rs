//! The catalog: the blobs and recipes of a store and their sizes, in memory, for a million blobs.
//!
//! It is a cache: nothing is deleted because of what it says. A blob has a numbered row, and a recipe is a list of such
//! numbers, so ten thousand models that share a million blobs take some 80 MiB. It also tracks which pages of rows and
//! which recipes the database does not have yet.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};

use blobd_store_format::digest::Digest;
use hashbrown::HashTable;

/// The known blobs and recipes.
#[derive(Debug, Default)]
pub struct Catalog {
    rows: Vec<Row>,
    /// The numbers of free rows.
    free: Vec<u32>,
    /// The number of each digest's row.
    numbers: HashTable<u32>,
    /// Keyed, because users that make blobs can choose digests with equal prefixes.
    hasher: RandomState,
    recipes: HashMap<Digest, RecipeRow>,
    lengths: BTreeMap<u64, u32>,
    used_bytes: u64,
    blob_count: u64,
    /// How often a blob or recipe was removed or changed.
    removals: u64,
    unwritten: Unwritten,
}

#[derive(Debug, Default)]
pub(super) struct Unwritten {
    /// Numbers of pages of [`PAGE_ROWS`] rows.
    pub(super) pages: BTreeSet<u32>,
    /// Recipes, by the digest of their file.
    pub(super) recipes: BTreeSet<Digest>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) digest: Digest,
    pub(super) length: u64,
    pub(super) bytes_on_disk: u64,
    needed_by: u32,
    pub(super) state: RowState,
    /// Whether it was compared with the disk since the last [`Catalog::start_scan`].
    is_seen: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowState {
    Free,
    /// A recipe names the blob, but it does not exist.
    Absent,
    Present,
}

#[derive(Debug)]
pub(super) struct RecipeRow {
    pub(super) bytes_on_disk: u64,
    /// Numbers of rows; `None` when the recipe cannot be read.
    pub(super) needs: Option<Box<[u32]>>,
}

/// The state of a blob on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlobFacts {
    pub(super) length: u64,
    pub(super) bytes_on_disk: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecipeFacts {
    pub(super) bytes_on_disk: u64,
    /// The blobs that it names, each once and in order; `None` when it cannot be read.
    pub(super) needs: Option<Vec<Digest>>,
}

/// Differs for two states of a catalog of this process unless they are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CatalogVersion([u64; 4]);

/// Rows per page, the unit of storage in the database: a page stays below 4 KiB.
pub(super) const PAGE_ROWS: usize = 80;

impl Catalog {
    pub const fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub const fn blob_count(&self) -> u64 {
        self.blob_count
    }

    /// Changes whenever anything but an addition of a blob or recipe has changed the catalog.
    pub(super) const fn removals(&self) -> u64 {
        self.removals
    }

    /// Additions alone raise the counts.
    pub(super) fn version(&self) -> CatalogVersion {
        CatalogVersion([self.removals, self.blob_count, self.recipe_count(), self.used_bytes])
    }

    pub(super) fn recipe_count(&self) -> u64 {
        self.recipes.len() as u64
    }

    pub(crate) fn most_needs(&self) -> u64 {
        let counts = self.recipes.values().filter_map(|row| row.needs.as_ref().map(|needs| needs.len()));
        counts.max().unwrap_or_default() as u64
    }

    /// The number of blobs with this length in bytes. If it is 0, a tensor of that length is certainly new.
    pub(crate) fn blobs_of_length(&self, length: u64) -> u64 {
        self.lengths.get(&length).copied().unwrap_or_default().into()
    }

    #[cfg(test)]
    pub(super) fn blob(&self, digest: Digest) -> Option<BlobFacts> {
        self.row(self.find(digest)?)?.facts()
    }

    pub(super) fn recipe(&self, file: Digest) -> Option<RecipeFacts> {
        let row = self.recipes.get(&file)?;
        let named = |numbers: &[u32]| {
            let rows = numbers.iter().filter_map(|number| self.row(*number));
            let mut digests: Vec<_> = rows.map(|row| row.digest).collect();
            digests.sort_unstable();
            digests
        };
        Some(RecipeFacts { bytes_on_disk: row.bytes_on_disk, needs: row.needs.as_deref().map(named) })
    }

    /// Sets the state of a blob as read from disk; returns whether it changed.
    pub(super) fn set_blob(&mut self, digest: Digest, facts: Option<BlobFacts>) -> bool {
        let number = self.find(digest).or_else(|| facts.and_then(|_| self.insert(digest)));
        let Some((number, row)) = number.and_then(|number| Some((number, self.row_mut(number)?))) else {
            return false;
        };
        let old = row.facts();
        row.set(facts);
        if old == facts {
            return false;
        }
        self.recount(old, facts);
        self.mark_unwritten(number);
        self.free_if_unused(number);
        true
    }

    /// Sets the state of a recipe as read from disk; returns whether it changed.
    pub(super) fn set_recipe(&mut self, file: Digest, facts: Option<RecipeFacts>) -> bool {
        if self.recipe(file) == facts {
            return false;
        }
        self.unwritten.recipes.insert(file);
        let new = facts.map(|RecipeFacts { bytes_on_disk, needs }| RecipeRow {
            bytes_on_disk,
            needs: needs.map(|needs| self.need_all(&needs)),
        });
        self.used_bytes = self.used_bytes.saturating_add(new.as_ref().map_or(0, |row| row.bytes_on_disk));
        let old = match new {
            Some(row) => self.recipes.insert(file, row),
            None => self.recipes.remove(&file),
        };
        let Some(old) = old else { return true };
        self.removals += 1;
        self.used_bytes = self.used_bytes.saturating_sub(old.bytes_on_disk);
        for number in old.needs.iter().flatten() {
            if let Some(row) = self.row_mut(*number) {
                row.needed_by = row.needed_by.saturating_sub(1);
            }
            self.free_if_unused(*number);
        }
        true
    }

    /// Starts a comparison with the disk: marks all blobs as not compared.
    pub(super) fn start_scan(&mut self) {
        self.rows.iter_mut().for_each(|row| row.is_seen = false);
    }

    /// The blobs that were not compared since [`Self::start_scan`].
    pub(super) fn unseen(&self) -> Vec<Digest> {
        let unseen = self.rows.iter().filter(|row| row.state == RowState::Present && !row.is_seen);
        unseen.map(|row| row.digest).collect()
    }

    pub(super) const fn recipes(&self) -> &HashMap<Digest, RecipeRow> {
        &self.recipes
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(super) fn find(&self, digest: Digest) -> Option<u32> {
        let is_it = |number: &u32| self.row(*number).is_some_and(|row| row.digest == digest);
        self.numbers.find(self.hasher.hash_one(digest), is_it).copied()
    }

    pub(super) fn page(&self, number: u32) -> &[Row] {
        self.rows.chunks(PAGE_ROWS).nth(number as usize).unwrap_or_default()
    }

    pub(super) fn has_unwritten(&self) -> bool {
        !self.unwritten.pages.is_empty() || !self.unwritten.recipes.is_empty()
    }

    /// Takes at most `limit` pages and `limit` recipes that are to be written.
    pub(super) fn take_unwritten(&mut self, limit: usize) -> Unwritten {
        let Unwritten { pages, recipes } = &mut self.unwritten;
        Unwritten {
            pages: std::iter::from_fn(|| pages.pop_first()).take(limit).collect(),
            recipes: std::iter::from_fn(|| recipes.pop_first()).take(limit).collect(),
        }
    }

    pub(super) fn mark_all_unwritten(&mut self) {
        let page_count = u32::try_from(self.rows.len().div_ceil(PAGE_ROWS)).unwrap_or(u32::MAX);
        self.unwritten =
            Unwritten { pages: (0..page_count).collect(), recipes: self.recipes.keys().copied().collect() };
    }

    /// Appends a row from the database; all rows come before recipes. `None` if the row is invalid.
    pub(super) fn push_row(&mut self, digest: Digest, state: RowState, facts: BlobFacts) -> Option<()> {
        let number = u32::try_from(self.rows.len()).ok()?;
        if state != RowState::Free && self.find(digest).is_some() {
            return None;
        }
        self.rows.push(Row::new(digest, state, facts));
        if state == RowState::Free {
            self.free.push(number);
        } else {
            self.add_number(digest, number);
            self.recount(None, (state == RowState::Present).then_some(facts));
        }
        Some(())
    }

    pub(super) fn push_recipe(&mut self, file: Digest, row: RecipeRow) -> Option<()> {
        for number in row.needs.iter().flatten() {
            let needed = self.row_mut(*number).filter(|row| row.state != RowState::Free)?;
            needed.needed_by = needed.needed_by.checked_add(1)?;
        }
        self.used_bytes = self.used_bytes.saturating_add(row.bytes_on_disk);
        self.recipes.insert(file, row).is_none().then_some(())
    }

    fn row(&self, number: u32) -> Option<&Row> {
        self.rows.get(number as usize)
    }

    fn row_mut(&mut self, number: u32) -> Option<&mut Row> {
        self.rows.get_mut(number as usize)
    }

    fn mark_unwritten(&mut self, number: u32) {
        self.unwritten.pages.extend(u32::try_from(number as usize / PAGE_ROWS));
    }

    /// Adds a row for a digest that has none. `None` if there are 2^32 already.
    fn insert(&mut self, digest: Digest) -> Option<u32> {
        let row = Row::new(digest, RowState::Absent, BlobFacts { length: 0, bytes_on_disk: 0 });
        let number = match self.free.pop() {
            Some(number) => {
                *self.row_mut(number)? = row;
                number
            }
            None => {
                let number = u32::try_from(self.rows.len()).ok()?;
                self.rows.push(row);
                number
            }
        };
        self.add_number(digest, number);
        self.mark_unwritten(number);
        Some(number)
    }

    fn add_number(&mut self, digest: Digest, number: u32) {
        let Self { rows, hasher, .. } = self;
        let hash_of = |number: &u32| rows.get(*number as usize).map_or(0, |row| hasher.hash_one(row.digest));
        self.numbers.insert_unique(hasher.hash_one(digest), number, hash_of);
    }

    /// Counts one more recipe that names these blobs; returns the numbers of their rows.
    fn need_all(&mut self, digests: &[Digest]) -> Box<[u32]> {
        let mut numbers = Vec::with_capacity(digests.len());
        for digest in digests {
            let Some(number) = self.find(*digest).or_else(|| self.insert(*digest)) else { continue };
            if let Some(row) = self.row_mut(number) {
                row.needed_by = row.needed_by.saturating_add(1);
            }
            numbers.push(number);
        }
        numbers.into()
    }

    /// Frees a row without a blob that no recipe names any more.
    fn free_if_unused(&mut self, number: u32) {
        let Some(row) = self.row_mut(number) else { return };
        if row.state != RowState::Absent || row.needed_by > 0 {
            return;
        }
        row.state = RowState::Free;
        let digest = row.digest;
        let hash = self.hasher.hash_one(digest);
        if let Ok(entry) = self.numbers.find_entry(hash, |other| *other == number) {
            entry.remove();
        }
        self.free.push(number);
        self.mark_unwritten(number);
    }

    /// Updates the sums after a blob has changed.
    fn recount(&mut self, old: Option<BlobFacts>, new: Option<BlobFacts>) {
        if let Some(new) = new {
            self.blob_count += 1;
            self.used_bytes = self.used_bytes.saturating_add(new.bytes_on_disk);
            *self.lengths.entry(new.length).or_default() += 1;
        }
        if let Some(old) = old {
            self.removals += 1;
            self.blob_count -= 1;
            self.used_bytes = self.used_bytes.saturating_sub(old.bytes_on_disk);
            if let Entry::Occupied(mut count) = self.lengths.entry(old.length) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

impl Row {
    const fn new(digest: Digest, state: RowState, facts: BlobFacts) -> Self {
        let BlobFacts { length, bytes_on_disk } = facts;
        Self { digest, length, bytes_on_disk, needed_by: 0, state, is_seen: false }
    }

    fn facts(&self) -> Option<BlobFacts> {
        let facts = BlobFacts { length: self.length, bytes_on_disk: self.bytes_on_disk };
        (self.state == RowState::Present).then_some(facts)
    }

    fn set(&mut self, facts: Option<BlobFacts>) {
        self.state = if facts.is_some() { RowState::Present } else { RowState::Absent };
        self.length = facts.map_or(0, |facts| facts.length);
        self.bytes_on_disk = facts.map_or(0, |facts| facts.bytes_on_disk);
        self.is_seen = true;
    }
}
