//! The tensors of a recipe.

use std::borrow::Cow;

use serde::Serialize;

use crate::digest::Digest;
use crate::tensor::Experts;
use crate::tensor_table::{TableRow, TensorTable};

/// A tensor as the store records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorEntry<'t> {
    /// The tensor's name in its file: any text, perhaps empty or with control characters.
    pub name: Cow<'t, str>,
    /// The name of its type in the file's format, such as `Q4_K` or `BF16`.
    #[serde(rename = "type")]
    pub type_name: Cow<'t, str>,
    /// Its dimensions in the order of the file's format: of GGUF the fastest first, of safetensors the slowest.
    pub shape: Cow<'t, [u64]>,
    /// The blob that holds it. For a tensor without elements, the digest of empty input, which is
    /// not stored.
    pub digest: Digest,
    /// Its offset in the blob; 0 unless it belongs to a packed expert group.
    pub offset: u64,
    /// Its size in bytes. Its elements may have fewer than 8 bits each.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

/// The tensors of a file, in the order of its own table. Each takes little more memory than its name, its dimensions and
/// its digest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorEntries {
    table: TensorTable,
    places: Vec<PlaceInBlob>,
}

/// Where a tensor starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlaceInBlob {
    pub(crate) digest: Digest,
    pub(crate) offset: u64,
}

impl TensorEntries {
    /// As many places as tensors.
    pub(crate) const fn new(table: TensorTable, places: Vec<PlaceInBlob>) -> Self {
        Self { table, places }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn get(&self, index: usize) -> Option<TensorEntry<'_>> {
        Some(TensorEntry::new(self.table.get(index)?, *self.places.get(index)?))
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> + Clone {
        self.table.iter().zip(&self.places).map(|(row, place)| TensorEntry::new(row, *place))
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        self.table.iter().map(|row| row.name)
    }

    pub(super) fn append(&mut self, other: &Self) {
        self.table.append(&other.table);
        self.places.extend_from_slice(&other.places);
    }

    pub(super) fn push(&mut self, entry: &TensorEntry<'_>) {
        let TensorEntry { name, type_name, shape, digest, offset, size, experts } = entry;
        self.table.push(TableRow { name, type_name, shape, size: *size, experts: *experts });
        self.places.push(PlaceInBlob { digest: *digest, offset: *offset });
    }
}

impl<'t> FromIterator<TensorEntry<'t>> for TensorEntries {
    fn from_iter<I: IntoIterator<Item = TensorEntry<'t>>>(entries: I) -> Self {
        let mut all = Self::default();
        entries.into_iter().for_each(|entry| all.push(&entry));
        all
    }
}

impl From<Vec<TensorEntry<'_>>> for TensorEntries {
    fn from(entries: Vec<TensorEntry<'_>>) -> Self {
        entries.into_iter().collect()
    }
}

impl<'t> TensorEntry<'t> {
    const fn new(row: TableRow<'t>, place: PlaceInBlob) -> Self {
        let TableRow { name, type_name, shape, size, experts } = row;
        let PlaceInBlob { digest, offset } = place;
        let (name, type_name, shape) = (Cow::Borrowed(name), Cow::Borrowed(type_name), Cow::Borrowed(shape));
        Self { name, type_name, shape, digest, offset, size, experts }
    }

    /// The same, with texts of its own.
    pub fn into_owned(self) -> TensorEntry<'static> {
        let Self { name, type_name, shape, digest, offset, size, experts } = self;
        TensorEntry {
            name: Cow::Owned(name.into_owned()),
            type_name: Cow::Owned(type_name.into_owned()),
            shape: Cow::Owned(shape.into_owned()),
            digest,
            offset,
            size,
            experts,
        }
    }
}
