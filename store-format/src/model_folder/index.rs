//! Indexes of shards: `model.safetensors.index.json` says which file has which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;

use super::{Known, folder_of};
use crate::file_format::FileFormat;
use crate::json_error::reason;
use crate::manifest::is_file_name;
use crate::text::one_line;

/// Something that is wrong with a folder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FolderFault {
    #[error("{index}: wrong index: {reason}")]
    Index { index: String, reason: String },
    #[error("{index}: wrong path of a shard: expected a path below the folder of the index, found {found:?}")]
    ShardPath { index: String, found: String },
    #[error("{shard}: missing{}", named_by(index.as_deref()))]
    MissingShard {
        /// Absent if other shards show that there must be this one.
        index: Option<String>,
        shard: String,
    },
    #[error("{index}: names {shard}, which is left out")]
    ShardLeftOut { index: String, shard: String },
    #[error("{index}: tensor {tensor:?}: expected in {expected}, found in {found}")]
    TensorElsewhere { index: String, tensor: String, expected: String, found: String },
    #[error("{index}: tensor {tensor:?}: expected in {expected}, found nowhere")]
    TensorAbsent { index: String, tensor: String, expected: String },
    #[error("{index}: tensor {tensor:?} of {shard} is not in the index")]
    TensorNotIndexed { index: String, tensor: String, shard: String },
    #[error(
        "{second}: tensor {tensor:?}: {first} has one of this name too; it depends on the program which is used"
    )]
    TensorTwice { tensor: String, first: String, second: String },
    #[error(
        "{index}: tensor {tensor:?}: the index names it twice, in {first} and in {second}; programs take the last one"
    )]
    TensorNamedTwice { index: String, tensor: String, first: String, second: String },
    #[error("{index}: wrong total_size: expected {expected} bytes of tensors, found {found}")]
    TotalSize { index: String, found: u64, expected: u64 },
    #[error("{file}: beside the shards of {index}: programs load this file, not the shards")]
    StrayFile { index: String, file: String },
    #[error("{second}: of another set of shards than {first}: it depends on the program which is used")]
    SeveralSets { first: String, second: String },
    #[error("{shard}: named like a shard, but no index names it")]
    NotInIndex { shard: String },
    #[error("{index}: wrong shard: expected a safetensors file, found {file}")]
    NotSafetensors { index: String, file: String },
    #[error("{component}/: missing: model_index.json names this component")]
    NoComponent { component: String },
    #[error("{component}/: has no weights{}, and model_index.json names this component", left_out_text(left_out.as_deref()))]
    NoWeightsOfComponent {
        component: String,
        /// Absent if its folder has only a configuration.
        left_out: Option<String>,
    },
    #[error(
        "{}: left out: pickles and weights of other formats are stored only if a pattern includes them, whole and without \
         sharing tensors",
        one_line(paths, MAX_LINE)
    )]
    WeightsLeftOut { paths: Vec<String> },
    #[error(
        "{}: stored whole, as a pattern includes {}: no tensor of {} is shared",
        one_line(paths, MAX_LINE),
        of(paths),
        of(paths)
    )]
    StoredWhole { paths: Vec<String> },
}

/// The most characters of a list of names in an error.
const MAX_LINE: usize = 240;

const fn of(paths: &[String]) -> &'static str {
    if paths.len() == 1 { "it" } else { "them" }
}

fn named_by(index: Option<&str>) -> String {
    index.map_or_else(
        || ": the other shards of its model are there".to_owned(),
        |index| format!(": {index} names this shard"),
    )
}

fn left_out_text(left_out: Option<&str>) -> String {
    left_out.map_or_else(String::new, |file| format!(": {file} is left out"))
}

impl FolderFault {
    /// Whether an index says what is wrong, and not the names of the files.
    pub const fn is_of_index(&self) -> bool {
        match self {
            Self::MissingShard { index, .. } => index.is_some(),
            Self::NoComponent { .. }
            | Self::NoWeightsOfComponent { .. }
            | Self::WeightsLeftOut { .. }
            | Self::StoredWhole { .. } => false,
            _ => true,
        }
    }

    /// Whether it says what the choice of files does with some of them, and not what is wrong with the folder.
    pub const fn is_of_selection(&self) -> bool {
        matches!(self, Self::WeightsLeftOut { .. } | Self::StoredWhole { .. })
    }

    /// Whether no program can load the model. The others are for the user to know.
    pub const fn is_fatal(&self) -> bool {
        match self {
            Self::Index { .. }
            | Self::ShardPath { .. }
            | Self::MissingShard { .. }
            | Self::NotSafetensors { .. }
            | Self::TensorElsewhere { .. }
            | Self::TensorAbsent { .. } => true,
            Self::ShardLeftOut { .. }
            | Self::TensorNotIndexed { .. }
            | Self::TensorTwice { .. }
            | Self::TensorNamedTwice { .. }
            | Self::TotalSize { .. }
            | Self::StrayFile { .. }
            | Self::SeveralSets { .. }
            | Self::NotInIndex { .. }
            | Self::NoComponent { .. }
            | Self::NoWeightsOfComponent { .. }
            | Self::WeightsLeftOut { .. }
            | Self::StoredWhole { .. } => false,
        }
    }
}

/// What the path of an index says.
pub(super) struct IndexName {
    /// The path of the file that would have all tensors.
    whole: String,
}

/// Parses `model.safetensors.index.json`, with a variant `model.safetensors.index.fp16.json`.
pub(super) fn index_name(path: &str) -> Option<IndexName> {
    let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
    let (stem, end) = name.split_once(".safetensors.index")?;
    let variant =
        end.strip_suffix(".json").filter(|variant| variant.is_empty() || variant.starts_with('.'))?;
    Some(IndexName {
        whole: joined(folder, &format!("{stem}{variant}{}", FileFormat::SAFETENSORS.extension())),
    })
}

/// Whether a path is that of an index of shards, in any format of weights.
pub fn is_index_of_weights(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".json") && name.contains(".index.")
}

/// A parsed index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardIndex {
    path: String,
    /// The paths of the shards in the model's folder, or what is in their place if that is not a path.
    shards: Vec<Result<String, String>>,
    /// The index in `shards` of each tensor.
    tensors: BTreeMap<Box<str>, usize>,
    total_size: Option<u64>,
    /// A tensor that is named twice, with both shards.
    named_twice: Option<[Box<str>; 3]>,
}

#[derive(Deserialize)]
struct RawIndex {
    #[serde(default)]
    metadata: Option<Json>,
    weight_map: WeightMap,
}

/// The shard of each tensor. Of a name that comes twice, the last one counts.
#[derive(Default)]
struct WeightMap {
    shards: BTreeMap<Box<str>, Box<str>>,
    /// The first tensor that comes twice with different shards, and these.
    named_twice: Option<[Box<str>; 3]>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut weights = WeightMap::default();
        while let Some((tensor, shard)) = map.next_entry::<Box<str>, Box<str>>()? {
            let first = weights.shards.insert(tensor.clone(), shard.clone());
            if let Some(first) = first.filter(|first| *first != shard) {
                weights.named_twice.get_or_insert([tensor, first, shard]);
            }
        }
        Ok(weights)
    }
}

impl ShardIndex {
    /// More than any model has. A shard is a file of the folder.
    const MAX_SHARDS: usize = 10_000;
    const MAX_TENSORS: usize = 1_000_000;

    pub(super) fn parse(path: &str, json: &[u8]) -> Result<Self, FolderFault> {
        let refused = |reason| FolderFault::Index { index: path.to_owned(), reason };
        let raw: RawIndex = serde_json::from_slice(json).map_err(|error| refused(reason(&error)))?;
        let folder = folder_of(path);
        let WeightMap { shards: weight_map, named_twice } = raw.weight_map;
        let names: BTreeSet<&str> = weight_map.values().map(|name| &**name).collect();
        let names: Vec<&str> = names.into_iter().collect();
        if names.len() > Self::MAX_SHARDS || weight_map.len() > Self::MAX_TENSORS {
            let (tensors, shards) = (Self::MAX_TENSORS, Self::MAX_SHARDS);
            return Err(refused(format!("expected at most {tensors} tensors in {shards} shards")));
        }
        let place = |name: &str| names.binary_search(&name).unwrap_or_default();
        let tensors = weight_map.iter().map(|(tensor, name)| (tensor.clone(), place(name))).collect();
        let shard = |name: &&str| match is_file_name(name) {
            true => Ok(joined(folder, name)),
            false => Err((*name).to_owned()),
        };
        let total_size = raw.metadata.as_ref().and_then(|metadata| size(metadata.get("total_size")?));
        let shards = names.iter().map(shard).collect();
        Ok(Self { path: path.to_owned(), shards, tensors, total_size, named_twice })
    }

    /// The path of the index itself.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// The paths of the shards.
    pub(super) fn shards(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flatten().map(String::as_str)
    }

    /// The faults that the list of files shows.
    pub(super) fn faults(&self, name: &IndexName, known: &Known<'_>) -> Vec<FolderFault> {
        let index = || self.path.clone();
        let fault = |shard: &Result<String, String>| match shard {
            Err(found) => Some(FolderFault::ShardPath { index: index(), found: found.clone() }),
            Ok(shard) if FileFormat::SAFETENSORS.stem_of(shard).is_none() => {
                Some(FolderFault::NotSafetensors { index: index(), file: shard.clone() })
            }
            Ok(shard) if known.takes(shard) => None,
            Ok(shard) if known.has(shard) => {
                Some(FolderFault::ShardLeftOut { index: index(), shard: shard.clone() })
            }
            Ok(shard) => Some(FolderFault::MissingShard { index: Some(index()), shard: shard.clone() }),
        };
        let mut faults: Vec<_> = self.shards.iter().filter_map(fault).collect();
        if known.takes(&name.whole) && !self.shards().any(|shard| shard == name.whole) {
            faults.push(FolderFault::StrayFile { index: index(), file: name.whole.clone() });
        }
        faults.extend(self.named_twice.as_ref().map(|names| {
            let [tensor, first, second] = names.each_ref().map(ToString::to_string);
            FolderFault::TensorNamedTwice { index: index(), tensor, first, second }
        }));
        faults
    }

    /// The faults that the tensors of the shards show; at most [`MAX_NAMED`](Self::MAX_NAMED) of them.
    pub(super) fn faults_of_tensors(&self, files: &BTreeMap<&str, BTreeMap<&str, u64>>) -> Vec<FolderFault> {
        let own: Vec<_> = self.shards().filter_map(|path| Some((path, files.get(path)?))).collect();
        let missing = self.tensors.iter().filter_map(|(tensor, place)| {
            let expected = self.shards.get(*place)?.as_ref().ok()?;
            let is_there = files.get(expected.as_str())?.contains_key(&**tensor);
            (!is_there).then(|| self.misplaced(tensor, expected, files))
        });
        let extra = own.iter().flat_map(|(path, tensors)| {
            let not_indexed = tensors.keys().filter(|tensor| !self.tensors.contains_key(**tensor));
            not_indexed.map(|tensor| FolderFault::TensorNotIndexed {
                index: self.path.clone(),
                tensor: (*tensor).to_owned(),
                shard: (*path).to_owned(),
            })
        });
        let mut faults: Vec<_> = missing.chain(extra).take(Self::MAX_NAMED).collect();
        let is_complete = own.len() == self.shards.len();
        faults.extend(self.wrong_total(&own).filter(|_| is_complete && faults.is_empty()));
        faults
    }

    /// An index of another model contradicts every tensor.
    const MAX_NAMED: usize = 20;

    /// The tensor may be in a shard that the index does not name.
    fn misplaced(
        &self,
        tensor: &str,
        expected: &str,
        files: &BTreeMap<&str, BTreeMap<&str, u64>>,
    ) -> FolderFault {
        let mut in_folder = files.iter().filter(|(path, _)| folder_of(path) == folder_of(expected));
        let found = in_folder.find(|(_, tensors)| tensors.contains_key(tensor));
        let (index, expected, tensor) = (self.path.clone(), expected.to_owned(), tensor.to_owned());
        match found {
            Some((found, _)) => {
                FolderFault::TensorElsewhere { index, tensor, expected, found: (*found).to_owned() }
            }
            None => FolderFault::TensorAbsent { index, tensor, expected },
        }
    }

    fn wrong_total(&self, own: &[(&str, &BTreeMap<&str, u64>)]) -> Option<FolderFault> {
        let sizes = own.iter().flat_map(|(_, tensors)| tensors.values());
        let expected = sizes.fold(0, |sum: u64, size| sum.saturating_add(*size));
        let found = self.total_size.filter(|found| *found != expected)?;
        Some(FolderFault::TotalSize { index: self.path.clone(), found, expected })
    }
}

/// Some programs write the number as a float or as text.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of bytes below 2^53")]
fn size(total: &Json) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || total.as_f64().filter(|size| (0.0..EXACT).contains(size) && size.fract() == 0.0);
    total.as_u64().or_else(|| float().map(|size| size as u64)).or_else(|| total.as_str()?.parse().ok())
}

fn joined(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}
