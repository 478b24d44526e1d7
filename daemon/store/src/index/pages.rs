//! The form in which the catalog is kept: pages of rows, recipes as lists of row numbers.
//!
//! Measured with sled 0.34.7 and a million blobs: one key per blob takes 29 s to write and 4 s to
//! read again, pages of eighty rows 0.8 s and 0.25 s, in half the memory and half the disk.
//!
//! A page's key is its number (4 bytes, big-endian), its value 49 bytes per row: state, digest,
//! length and bytes on disk (8 bytes each, little-endian). A recipe's key is the digest of its
//! file and the number of a chunk (4 bytes, big-endian); the value of chunk 0 begins with bytes
//! on disk (8) and whether it can be read (1), then come row numbers (4 each). No value exceeds
//! 4 KiB.

use blobd_store_format::digest::Digest;

use super::cache::{Index, IndexError, Removed, Table};
use super::catalog::{Catalog, PAGE_ROWS, RecipeRow, Row, RowState};

/// Row numbers per chunk of a recipe.
const CHUNK_NEEDS: usize = 1000;

/// A change to be made to the copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Edit {
    /// An entry and its value from now on.
    Put { table: Table, key: Vec<u8>, value: Vec<u8> },
    /// The chunks of a recipe end here: this one and those that follow go.
    EndRecipe { file: Digest, chunk: u32 },
}

impl Edit {
    /// Makes the change.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) fn apply(&self, index: &mut dyn Index) -> Result<(), IndexError> {
        match self {
            Self::Put { table, key, value } => index.put(*table, key, value),
            Self::EndRecipe { file, chunk } => {
                let mut chunk = *chunk;
                while index.remove(Table::Recipes, &chunk_key(*file, chunk))? == Removed::WasThere {
                    chunk += 1;
                }
                Ok(())
            }
        }
    }
}

/// A page as it is kept.
pub(super) fn page_edit(catalog: &Catalog, number: u32) -> Edit {
    Edit::Put { table: Table::Blobs, key: number.to_be_bytes().to_vec(), value: page_value(catalog, number) }
}

/// A recipe as it is kept.
pub(super) fn recipe_edits(catalog: &Catalog, file: Digest) -> Vec<Edit> {
    let values = catalog.recipe_row(file).map(recipe_values).unwrap_or_default();
    let mut edits = Vec::with_capacity(values.len() + 1);
    let mut chunk = 0;
    for value in values {
        edits.push(Edit::Put { table: Table::Recipes, key: chunk_key(file, chunk), value });
        chunk += 1;
    }
    edits.push(Edit::EndRecipe { file, chunk });
    edits
}

fn page_value(catalog: &Catalog, number: u32) -> Vec<u8> {
    const NOTHING: [u8; 32] = [0; 32];
    let mut value = Vec::with_capacity(ROW_BYTES * PAGE_ROWS);
    for (digest, row) in catalog.page(number) {
        let (state, name) = match row.state {
            RowState::Free => (0, &NOTHING),
            RowState::Absent => (1, digest.as_bytes()),
            RowState::Present => (2, digest.as_bytes()),
        };
        value.push(state);
        value.extend(name);
        value.extend(row.length.to_le_bytes());
        value.extend(row.bytes_on_disk.to_le_bytes());
    }
    value
}

fn chunk_key(file: Digest, chunk: u32) -> Vec<u8> {
    [&file.as_bytes()[..], &chunk.to_be_bytes()].concat()
}

fn recipe_values(row: &RecipeRow) -> Vec<Vec<u8>> {
    let needs = row.needs.as_deref().unwrap_or_default();
    let mut head = row.bytes_on_disk.to_le_bytes().to_vec();
    head.push(row.needs.is_some().into());
    let mut values = vec![head];
    for (number, chunk) in needs.chunks(CHUNK_NEEDS).enumerate() {
        if number > 0 {
            values.push(Vec::with_capacity(4 * CHUNK_NEEDS));
        }
        if let Some(value) = values.last_mut() {
            value.extend(chunk.iter().flat_map(|id| id.to_le_bytes()));
        }
    }
    values
}

/// How many rows of a page are kept otherwise than the catalog says.
pub(super) fn rows_that_differ(catalog: &Catalog, number: u32, kept: &[u8]) -> u64 {
    let known = page_value(catalog, number);
    let (rows, same) = (known.len().max(kept.len()).div_ceil(ROW_BYTES), |(a, b): &(&[u8], &[u8])| a == b);
    let same = known.chunks(ROW_BYTES).zip(kept.chunks(ROW_BYTES)).filter(same).count();
    (rows - same) as u64
}

/// Whether a chunk of a recipe is kept as the catalog says.
pub(super) fn is_chunk(catalog: &Catalog, file: Digest, chunk: u32, kept: &[u8]) -> bool {
    let at = usize::try_from(chunk).unwrap_or(usize::MAX);
    let values = catalog.recipe_row(file).map(recipe_values).unwrap_or_default();
    values.get(at).is_some_and(|value| value == kept)
}

/// How many chunks a recipe takes.
pub(super) fn chunk_count(row: &RecipeRow) -> usize {
    row.needs.as_deref().unwrap_or_default().len().div_ceil(CHUNK_NEEDS).max(1)
}

/// The file and the number that a chunk's key stands for.
pub(super) fn parse_chunk_key(key: &[u8]) -> Option<(Digest, u32)> {
    let (file, chunk) = key.split_at_checked(32)?;
    Some((Digest::from_bytes(file.try_into().ok()?), u32::from_be_bytes(chunk.try_into().ok()?)))
}

/// Reads a catalog from its copy.
///
/// # Errors
/// [`IndexError`] when the copy cannot be read or is not of the form above.
pub(super) fn read(index: &dyn Index) -> Result<Catalog, IndexError> {
    let mut catalog = Catalog::default();
    index.scan(Table::Blobs, &mut |key, value| {
        read_page(&mut catalog, key, value).ok_or_else(|| malformed(Table::Blobs, key))
    })?;
    let mut recipe = None;
    index.scan(Table::Recipes, &mut |key, value| {
        read_chunk(&mut catalog, &mut recipe, key, value).ok_or_else(|| malformed(Table::Recipes, key))
    })?;
    if let Some((file, _, row)) = recipe {
        catalog.push_recipe(file, row).ok_or_else(|| malformed(Table::Recipes, file.as_bytes()))?;
    }
    catalog.take_changes();
    Ok(catalog)
}

/// What a row takes.
const ROW_BYTES: usize = 49;

fn read_page(catalog: &mut Catalog, key: &[u8], value: &[u8]) -> Option<()> {
    let number = u32::from_be_bytes(key.try_into().ok()?);
    // Pages come in order, without gaps, each full but the last.
    let rows_before = usize::try_from(number).ok()?.checked_mul(PAGE_ROWS)?;
    if rows_before != catalog.row_count()
        || !value.len().is_multiple_of(ROW_BYTES)
        || value.len() > ROW_BYTES * PAGE_ROWS
    {
        return None;
    }
    value.chunks_exact(ROW_BYTES).try_for_each(|row| read_row(catalog, row))
}

fn read_row(catalog: &mut Catalog, bytes: &[u8]) -> Option<()> {
    let (state, bytes) = bytes.split_first()?;
    let (digest, bytes) = bytes.split_at_checked(32)?;
    let (length, bytes_on_disk) = bytes.split_at_checked(8)?;
    let state = match state {
        0 => RowState::Free,
        1 => RowState::Absent,
        2 => RowState::Present,
        _ => return None,
    };
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let bytes_on_disk = u64::from_le_bytes(bytes_on_disk.try_into().ok()?);
    let row = Row { state, length, bytes_on_disk, ..Row::default() };
    catalog.push_row(Digest::from_bytes(digest.try_into().ok()?), row)
}

/// The recipe that is being read: its file, the number of its next chunk, what there is of it.
type Unfinished = Option<(Digest, u32, RecipeRow)>;

fn read_chunk(catalog: &mut Catalog, current: &mut Unfinished, key: &[u8], value: &[u8]) -> Option<()> {
    let (file, chunk) = parse_chunk_key(key)?;
    if chunk == 0 {
        if let Some((file, _, row)) = current.take() {
            catalog.push_recipe(file, row)?;
        }
        *current = Some((file, 1, read_head(value)?));
        return Some(());
    }
    let (begun, next, row) = current.as_mut()?;
    if (*begun, *next) != (file, chunk) {
        return None;
    }
    *next += 1;
    let needs = row.needs.take()?.into_iter().chain(read_ids(value)?).collect();
    row.needs = Some(needs);
    Some(())
}

fn read_head(value: &[u8]) -> Option<RecipeRow> {
    let (bytes_on_disk, rest) = value.split_at_checked(8)?;
    let (readable, ids) = rest.split_first()?;
    let ids = read_ids(ids)?;
    let needs = match (readable, ids.len()) {
        (1, _) => Some(ids.into()),
        (0, 0) => None,
        _ => return None,
    };
    Some(RecipeRow { bytes_on_disk: u64::from_le_bytes(bytes_on_disk.try_into().ok()?), needs })
}

fn read_ids(bytes: &[u8]) -> Option<Vec<u32>> {
    let ids = bytes.chunks(4).map(|id| id.try_into().ok().map(u32::from_le_bytes));
    ids.collect()
}

fn malformed(table: Table, key: &[u8]) -> IndexError {
    let key = key.iter().take(36).map(|byte| format!("{byte:02x}")).collect();
    IndexError::Malformed { table: table.name(), key }
}
