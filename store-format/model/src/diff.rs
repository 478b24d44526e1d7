//! What two models have in common and how they differ: tensors by name and content, metadata by key.
//!
//! ```
//! use blobd_store_format::digest::Digest;
//! use std::sync::Arc;
//!
//! use blobd_model::diff::{Change, DiffTensor, TensorFile, diff_tensors};
//! use blobd_store_format::recipe::TensorEntry;
//! use blobd_store_format::tensor::TensorFormat;
//!
//! let file = Arc::new(TensorFile::new("model", None));
//! let tensor = |name: &str, content: &[u8]| DiffTensor {
//!     format: TensorFormat::Gguf,
//!     file: Arc::clone(&file),
//!     entry: TensorEntry {
//!         name: name.to_owned().into(),
//!         type_name: "F32".into(),
//!         shape: vec![content.len() as u64 / 4].into(),
//!         digest: Digest::of(content),
//!         offset: 0,
//!         size: content.len() as u64,
//!         experts: None,
//!     },
//! };
//! let a = [tensor("same", &[1; 8]), tensor("new_values", &[2; 8])];
//! let b = [tensor("same", &[1; 8]), tensor("new_values", &[3; 8])];
//! let diff = diff_tensors(&a, &b);
//! assert_eq!((diff.shared_bytes, diff.only_a_bytes, diff.only_b_bytes), (8, 8, 8));
//! assert_eq!(diff.tensors[1].change, Change::Changed);
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use serde::Serialize;

pub use self::tensor_file::TensorFile;

use self::ranges::BlobRanges;
use self::tensor_file::Likeness;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{Header, MetadataValue};
use blobd_store_format::recipe::TensorEntry;
use blobd_store_format::tensor::TensorFormat;

mod ranges;
mod tensor_file;

/// A tensor with its file and the format of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffTensor {
    pub format: TensorFormat,
    pub file: Arc<TensorFile>,
    pub entry: TensorEntry<'static>,
}

impl Deref for DiffTensor {
    type Target = TensorEntry<'static>;

    fn deref(&self) -> &TensorEntry<'static> {
        &self.entry
    }
}

impl DiffTensor {
    /// Whether both have the same dimensions, whose order depends on the format.
    fn has_shape_of(&self, other: &Self) -> bool {
        if self.format == other.format {
            self.shape == other.shape
        } else {
            self.shape.iter().eq(other.shape.iter().rev())
        }
    }

    const fn content_key(&self) -> ContentKey {
        (self.entry.digest, self.entry.offset, self.entry.size)
    }
}

/// The tensors of two models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDiff<'t> {
    /// The bytes of contents that both models have, under any names and however they are divided into tensors. Each
    /// content counts once.
    pub shared_bytes: u64,
    /// The bytes of contents that only the first model has.
    pub only_a_bytes: u64,
    /// The bytes of contents that only the second model has.
    pub only_b_bytes: u64,
    /// All tensors of both models: those of the first model in order, then the added ones.
    pub tensors: Vec<TensorPair<'t>>,
}

/// A tensor that at least one of two models has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPair<'t> {
    /// The first model's tensor.
    pub a: Option<&'t DiffTensor>,
    /// The second model's tensor.
    pub b: Option<&'t DiffTensor>,
    pub change: Change,
}

/// How the second model's tensor differs from the first model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Both have the same content.
    Shared,
    /// Type and shape are the same, the content differs.
    Changed,
    /// The type differs: another quantisation.
    Retyped,
    /// The shape differs.
    Reshaped,
    /// Only the second model has it.
    Added,
    /// Only the first model has it.
    Removed,
    /// Both have the content, under other names or in other tensors, such as the experts of a stack.
    Renamed,
    /// Type and shape are the same, but the content of at least one is unknown.
    Unknown,
}

impl Change {
    /// The change's name in JSON and in output for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Changed => "changed",
            Self::Retyped => "retyped",
            Self::Reshaped => "reshaped",
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Renamed => "renamed",
            Self::Unknown => "unknown",
        }
    }
}

impl TensorDiff<'_> {
    /// Marks the tensors that only one model has by name, but both have by content. Those of one type and shape become
    /// one pair. Needs known contents.
    pub fn find_renamed(&mut self) {
        let mut added: BTreeMap<ContentKey, VecDeque<&DiffTensor>> = BTreeMap::new();
        for tensor in
            self.tensors.iter().filter(|pair| pair.change == Change::Added).filter_map(|pair| pair.b)
        {
            added.entry(tensor.content_key()).or_default().push_back(tensor);
        }
        let of_a = BlobRanges::of(self.tensors.iter().filter_map(|pair| pair.a));
        let of_b = BlobRanges::of(self.tensors.iter().filter_map(|pair| pair.b));
        let mut paired = BTreeSet::new();
        for pair in self.tensors.iter_mut().filter(|pair| pair.change == Change::Removed) {
            let Some(tensor) = pair.a.filter(|tensor| of_b.contain(tensor)) else { continue };
            pair.change = Change::Renamed;
            let Some(others) = added.get_mut(&tensor.content_key()) else { continue };
            let is_same =
                |other: &DiffTensor| other.type_name == tensor.type_name && other.has_shape_of(tensor);
            pair.b = others.iter().position(|other| is_same(other)).and_then(|place| others.remove(place));
            paired.extend(pair.b.map(std::ptr::from_ref));
        }
        self.tensors.retain(|pair| {
            pair.change != Change::Added || !pair.b.is_some_and(|b| paired.contains(&std::ptr::from_ref(b)))
        });
        for pair in self.tensors.iter_mut().filter(|pair| pair.change == Change::Added) {
            if pair.b.is_some_and(|tensor| of_a.contain(tensor)) {
                pair.change = Change::Renamed;
            }
        }
    }

    /// Marks contents as unknown, because those of one model cannot be compared: tensors of the same type and shape may
    /// or may not differ.
    pub fn forget_contents(&mut self) {
        for pair in &mut self.tensors {
            if matches!(pair.change, Change::Shared | Change::Changed) {
                pair.change = Change::Unknown;
            }
        }
    }
}

impl<'t> TensorPair<'t> {
    fn new(a: Option<&'t DiffTensor>, b: Option<&'t DiffTensor>) -> Option<Self> {
        let change = match (a, b) {
            (Some(a), Some(b)) if !a.has_shape_of(b) => Change::Reshaped,
            (Some(a), Some(b)) if a.type_name != b.type_name => Change::Retyped,
            (Some(a), Some(b)) if a.content_key() != b.content_key() => Change::Changed,
            (Some(_), Some(_)) => Change::Shared,
            (Some(_), None) => Change::Removed,
            (None, Some(_)) => Change::Added,
            (None, None) => return None,
        };
        Some(Self { a, b, change })
    }

    pub fn name(&self) -> &'t str {
        self.a.or(self.b).map_or("", |tensor| &*tensor.name)
    }

    /// Whether the tensors must be compared byte by byte: both have the same type and shape, and their blobs differ,
    /// but at least one blob is a packed group, whose digest covers other tensors too.
    pub fn may_be_equal(&self, packed: &BTreeSet<Digest>) -> bool {
        let is_packed =
            |tensor: Option<&DiffTensor>| tensor.is_some_and(|tensor| packed.contains(&tensor.digest));
        self.change == Change::Changed && (is_packed(self.a) || is_packed(self.b))
    }
}

/// Compares the tensors of two models. Of tensors with one name, such as those of a draft model or of the components of
/// a pipeline, those are paired whose files are most alike, and then those that come first.
pub fn diff_tensors<'t>(a: &'t [DiffTensor], b: &'t [DiffTensor]) -> TensorDiff<'t> {
    let partners = partners(a, b);
    let pairs = a.iter().zip(&partners).filter_map(|(tensor, other)| TensorPair::new(Some(tensor), *other));
    let mut tensors: Vec<_> = pairs.collect();
    let paired: BTreeSet<_> = partners.iter().flatten().map(|tensor| std::ptr::from_ref(*tensor)).collect();
    let added = b.iter().filter(|tensor| !paired.contains(&std::ptr::from_ref(*tensor)));
    tensors.extend(added.filter_map(|tensor| TensorPair::new(None, Some(tensor))));
    let (of_a, of_b) = (BlobRanges::of(a), BlobRanges::of(b));
    let shared_bytes = of_a.shared_bytes(&of_b);
    TensorDiff {
        shared_bytes,
        only_a_bytes: of_a.bytes().saturating_sub(shared_bytes),
        only_b_bytes: of_b.bytes().saturating_sub(shared_bytes),
        tensors,
    }
}

/// The tensor of `b` that each one of `a` is compared with.
fn partners<'t>(a: &[DiffTensor], b: &'t [DiffTensor]) -> Vec<Option<&'t DiffTensor>> {
    let mut by_name: BTreeMap<&str, VecDeque<&DiffTensor>> = BTreeMap::new();
    for tensor in b {
        by_name.entry(&tensor.name).or_default().push_back(tensor);
    }
    let mut partners = vec![None; a.len()];
    for least in Likeness::DECREASING {
        for (tensor, partner) in a.iter().zip(&mut partners).filter(|(_, partner)| partner.is_none()) {
            let Some(others) = by_name.get_mut(&*tensor.name) else { continue };
            let place = others.iter().position(|other| tensor.file.likeness(&other.file) >= least);
            *partner = place.and_then(|place| others.remove(place));
        }
    }
    partners
}

/// The blobs that contain several tensors: packed groups of experts. The digest of such a blob differs if any of its
/// tensors differs.
pub fn packed_blobs<'t>(tensors: impl IntoIterator<Item = &'t DiffTensor>) -> BTreeSet<Digest> {
    let mut offsets = BTreeMap::new();
    let mut packed = BTreeSet::new();
    for tensor in tensors {
        if *offsets.entry(tensor.digest).or_insert(tensor.offset) != tensor.offset {
            packed.insert(tensor.digest);
        }
    }
    packed
}

/// A metadata key whose values differ, or that only one model has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyChange<'h> {
    /// The key, which may be any bytes.
    pub key: &'h [u8],
    /// The first model's value.
    pub a: Option<MetadataValue<'h>>,
    /// The second model's value.
    pub b: Option<MetadataValue<'h>>,
}

/// The metadata keys with different values: those of the first header in order, then the added ones. Values of
/// different types are different; NaNs with the same bits are equal.
pub fn diff_metadata<'h>(a: &'h Header, b: &'h Header) -> Vec<KeyChange<'h>> {
    let of_b: BTreeMap<&[u8], MetadataValue<'_>> = b.metadata().collect();
    let keys_of_a: BTreeSet<&[u8]> = a.metadata().map(|(key, _)| key).collect();
    let changed = a.metadata().filter_map(|(key, value)| {
        let other = of_b.get(key).copied();
        let differs = other.is_none_or(|other| !is_same(&value, &other));
        differs.then_some(KeyChange { key, a: Some(value), b: other })
    });
    let added = b.metadata().filter(|(key, _)| !keys_of_a.contains(key));
    changed.chain(added.map(|(key, value)| KeyChange { key, a: None, b: Some(value) })).collect()
}

/// Whether two values have the same type and the same bits.
fn is_same(a: &MetadataValue<'_>, b: &MetadataValue<'_>) -> bool {
    match (a, b) {
        (MetadataValue::Array(a), MetadataValue::Array(b)) => {
            a.element_type() == b.element_type()
                && a.len() == b.len()
                && a.iter().zip(b.iter()).all(|(a, b)| is_same_scalar(&a, &b))
        }
        (a, b) => is_same_scalar(a, b),
    }
}

fn is_same_scalar(a: &MetadataValue<'_>, b: &MetadataValue<'_>) -> bool {
    match (a, b) {
        (MetadataValue::F32(a), MetadataValue::F32(b)) => a.to_bits() == b.to_bits(),
        (MetadataValue::F64(a), MetadataValue::F64(b)) => a.to_bits() == b.to_bits(),
        (a, b) => a == b,
    }
}

type ContentKey = (Digest, u64, u64);

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use blobd_store_format::gguf::{GgufWriter, Value};

    fn tensor(name: &str, type_name: &str, shape: &[u64], content: u8, offset: u64) -> DiffTensor {
        tensor_in(TensorFile::new("model", None), name, type_name, shape, content, offset)
    }

    fn tensor_in(
        file: TensorFile,
        name: &str,
        type_name: &str,
        shape: &[u64],
        content: u8,
        offset: u64,
    ) -> DiffTensor {
        let entry = TensorEntry {
            name: name.to_owned().into(),
            type_name: type_name.to_owned().into(),
            shape: shape.to_vec().into(),
            digest: Digest::of(&[content]),
            offset,
            size: 4 * shape.iter().product::<u64>(),
            experts: None,
        };
        DiffTensor { format: TensorFormat::Gguf, file: Arc::new(file), entry }
    }

    #[test]
    fn tensors_of_one_name_are_paired_by_their_files() {
        let file = |path: &str| TensorFile::new("model", Some(path.to_owned()));
        let draft = |path: &str| TensorFile::new("draft", Some(path.to_owned()));
        let one = |file, content| tensor_in(file, "w", "F32", &[4], content, 0);
        let a = [one(file("unet/m.safetensors"), 1), one(file("vae/m.safetensors"), 2), one(draft("d"), 3)];
        let b = [one(draft("mtp"), 3), one(file("vae/m.fp16.safetensors"), 2)];
        let diff = diff_tensors(&a, &b);
        let rows: Vec<_> =
            diff.tensors.iter().map(|pair| (pair.a.map(|a| a.file.name()), pair.change)).collect();
        let expected = [
            (Some("unet/m.safetensors"), Change::Removed),
            (Some("vae/m.safetensors"), Change::Shared),
            (Some("d"), Change::Shared),
        ];
        assert_eq!(rows, expected);
        let merged = [one(file("model.safetensors"), 1)];
        assert_eq!(diff_tensors(&a[..1], &merged).tensors[0].change, Change::Shared, "only one has it");
    }

    #[test]
    fn every_kind_of_change_is_distinguished() {
        let a = [
            tensor("same", "F32", &[4], 1, 0),
            tensor("other_values", "F32", &[4], 2, 0),
            tensor("other_type", "F32", &[4], 3, 0),
            tensor("other_shape", "F32", &[4], 4, 0),
            tensor("gone", "F32", &[4], 5, 0),
        ];
        let b = [
            tensor("new", "F32", &[8], 6, 0),
            tensor("other_shape", "F32", &[2, 2], 4, 0),
            tensor("other_type", "I32", &[4], 3, 0),
            tensor("other_values", "F32", &[4], 7, 0),
            tensor("same", "F32", &[4], 1, 0),
        ];
        let diff = diff_tensors(&a, &b);
        let changes: Vec<_> = diff.tensors.iter().map(|pair| (pair.name(), pair.change)).collect();
        let expected = [
            ("same", Change::Shared),
            ("other_values", Change::Changed),
            ("other_type", Change::Retyped),
            ("other_shape", Change::Reshaped),
            ("gone", Change::Removed),
            ("new", Change::Added),
        ];
        assert_eq!(changes, expected);
        assert_eq!((diff.shared_bytes, diff.only_a_bytes, diff.only_b_bytes), (48, 32, 48));
    }

    #[test]
    fn tensors_of_a_packed_group_may_be_equal_although_the_group_differs() {
        let a = [tensor("e.0", "F32", &[4], 1, 0), tensor("e.1", "F32", &[4], 1, 16)];
        let b = [tensor("e.0", "F32", &[4], 2, 0), tensor("e.1", "F32", &[4], 2, 16)];
        let packed = packed_blobs(a.iter().chain(&b));
        assert_eq!(packed.len(), 2);
        assert!(diff_tensors(&a, &b).tensors.iter().all(|pair| pair.may_be_equal(&packed)));
        assert!(diff_tensors(&a, &a).tensors.iter().all(|pair| !pair.may_be_equal(&packed)));
    }

    #[test]
    fn contents_under_other_names_are_renamed_and_count_as_shared() {
        let a =
            [tensor("x", "F32", &[4], 1, 0), tensor("y", "F32", &[4], 2, 0), tensor("z", "F32", &[4], 3, 0)];
        let b =
            [tensor("u", "F32", &[4], 1, 0), tensor("v", "I32", &[4], 2, 0), tensor("w", "F32", &[4], 4, 0)];
        let mut diff = diff_tensors(&a, &b);
        diff.find_renamed();
        let name = |tensor: Option<&DiffTensor>| tensor.map_or("", |tensor| &*tensor.entry.name).to_owned();
        let rows: Vec<_> =
            diff.tensors.iter().map(|pair| (name(pair.a), name(pair.b), pair.change)).collect();
        let row = |a: &str, b: &str, change| (a.to_owned(), b.to_owned(), change);
        let expected = [
            row("x", "u", Change::Renamed),
            row("y", "", Change::Renamed),
            row("z", "", Change::Removed),
            row("", "v", Change::Renamed),
            row("", "w", Change::Added),
        ];
        assert_eq!(rows, expected, "a pair has one type");
        assert_eq!((diff.shared_bytes, diff.only_a_bytes, diff.only_b_bytes), (32, 16, 16));
    }

    #[test]
    fn experts_of_a_stack_are_renamed_and_count_as_shared() {
        let separate = [tensor("e.0", "F32", &[4], 1, 0), tensor("e.1", "F32", &[4], 1, 16)];
        let stack = [tensor("e", "F32", &[4, 2], 1, 0)];
        for (a, b) in [(&separate[..], &stack[..]), (&stack[..], &separate[..])] {
            let mut diff = diff_tensors(a, b);
            diff.find_renamed();
            assert!(diff.tensors.iter().all(|pair| pair.change == Change::Renamed), "{diff:?}");
            assert_eq!((diff.tensors.len(), diff.shared_bytes, diff.only_a_bytes), (3, 32, 0));
        }
        let mut part = diff_tensors(&separate[..1], &stack);
        part.find_renamed();
        let changes: Vec<_> = part.tensors.iter().map(|pair| pair.change).collect();
        assert_eq!(changes, [Change::Renamed, Change::Added]);
        assert_eq!((part.shared_bytes, part.only_a_bytes, part.only_b_bytes), (16, 0, 16));
    }

    #[test]
    fn dimensions_of_both_formats_are_compared_in_one_order() {
        let gguf = [tensor("w", "F32", &[8, 2], 1, 0)];
        let safetensors = |shape: &[u64]| {
            [DiffTensor { format: TensorFormat::Safetensors, ..tensor("w", "F32", shape, 1, 0) }]
        };
        let change = |shape: &[u64]| diff_tensors(&gguf, &safetensors(shape)).tensors[0].change;
        assert_eq!([change(&[2, 8]), change(&[8, 2])], [Change::Shared, Change::Reshaped]);
    }

    #[test]
    fn keys_that_differ_in_type_or_value_are_listed() {
        let header = |keys: &[(&str, Value)]| {
            let mut writer = GgufWriter::new();
            keys.iter().for_each(|(key, value)| {
                writer.metadata(key, value.clone()).unwrap();
            });
            Header::parse(&writer.header().unwrap()).unwrap()
        };
        let nan = || Value::from(f32::NAN);
        let a = header(&[
            ("same", 1_u32.into()),
            ("nan", nan()),
            ("list", vec![1_u32, 2].into()),
            ("width", 1_u32.into()),
            ("gone", 1_u32.into()),
        ]);
        let b = header(&[
            ("new", 1_u32.into()),
            ("width", 1_u64.into()),
            ("list", vec![1_u32, 3].into()),
            ("nan", nan()),
            ("same", 1_u32.into()),
        ]);
        let changes = diff_metadata(&a, &b);
        let keys: Vec<_> =
            changes.iter().map(|change| (change.key, change.a.is_some(), change.b.is_some())).collect();
        let expected: [(&[u8], bool, bool); 4] =
            [(b"list", true, true), (b"width", true, true), (b"gone", true, false), (b"new", false, true)];
        assert_eq!(keys, expected);
    }

    proptest! {
        #[test]
        fn each_tensor_is_in_exactly_one_pair_and_bytes_add_up(
            a in vec((0..6_u8, 0..4_u8), 0..12),
            b in vec((0..6_u8, 0..4_u8), 0..12),
        ) {
            let tensors = |parts: &[(u8, u8)]| -> Vec<_> {
                parts.iter().map(|(name, content)| tensor(&name.to_string(), "F32", &[4], *content, 0)).collect()
            };
            let (a, b) = (tensors(&a), tensors(&b));
            let diff = diff_tensors(&a, &b);
            prop_assert_eq!(diff.tensors.iter().filter(|pair| pair.a.is_some()).count(), a.len());
            prop_assert_eq!(diff.tensors.iter().filter(|pair| pair.b.is_some()).count(), b.len());
            let all = |tensors: &[DiffTensor]| {
                tensors.iter().map(DiffTensor::content_key).collect::<BTreeSet<_>>().len() as u64 * 16
            };
            prop_assert_eq!(diff.shared_bytes + diff.only_a_bytes, all(&a));
            prop_assert_eq!(diff.shared_bytes + diff.only_b_bytes, all(&b));
        }
    }
}
