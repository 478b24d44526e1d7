//! A model as a folder: which of its files are the model, and whether they belong together.
//!
//! A pure plan. [`ListedFolder`] sorts a list of paths into files that are taken and files that are left out, with the
//! reason for each, and says which small files must be read. From their contents it makes a [`FolderPlan`]: what kind of
//! model it is, and the faults of its indexes. [`FolderPlan::check_tensors`] compares the indexes with the tensors that
//! the files really have.
//!
//! ```
//! use blobd_store_format::model_folder::{FolderFile, FolderKind, ListedFolder, Selection};
//!
//! let paths = ["config.json", "model.safetensors", "pytorch_model.bin"];
//! let files = paths.map(|path| FolderFile { path: path.to_owned(), size: 100 });
//! let folder = ListedFolder::new(files, &Selection::default())?;
//! assert_eq!(folder.texts().collect::<Vec<_>>(), ["config.json"]);
//! let plan = folder.plan(&[("config.json".to_owned(), b"{}".to_vec())].into())?;
//! assert_eq!(plan.kind(), FolderKind::Transformers);
//! assert_eq!(plan.files().iter().map(|file| &*file.path).collect::<Vec<_>>(), ["config.json", "model.safetensors"]);
//! assert!(plan.left_out()[0].to_string().starts_with("pytorch_model.bin: a pickle"));
//! # Ok::<(), blobd_store_format::model_folder::FolderError>(())
//! ```

mod index;
mod selection;
mod several;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;

use serde_json::Value as Json;

pub use self::index::{FolderFault, is_index_of_weights};
use self::index::{ShardIndex, index_name};
pub use self::selection::{LeftOut, Reason, Selection, UselessPattern, is_never_taken};
use crate::file_format::FileFormat;
use crate::file_type::ShardName;
use crate::model_file::{ModelPathError, check_paths, has_other_weights};
use crate::python_json;
use crate::shard_set::first_part;

/// A regular file with its path below the folder, `/` between the parts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FolderFile {
    pub path: String,
    pub size: u64,
}

/// The programs for which a folder is a model, by the files in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FolderKind {
    /// `config.json` beside weights.
    Transformers,
    /// `config.json` with a quantisation of MLX.
    Mlx,
    /// `params.json` or `consolidated….safetensors`, without `config.json`.
    Mistral,
    /// `model_index.json`, and a folder for each component.
    Diffusers,
    /// `adapter_config.json`.
    Adapter,
    /// Only weights.
    Weights,
}

impl FolderKind {
    /// The name for people and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Transformers => "transformers",
            Self::Mlx => "mlx",
            Self::Mistral => "mistral",
            Self::Diffusers => "diffusers",
            Self::Adapter => "adapter",
            Self::Weights => "weights",
        }
    }
}

impl fmt::Display for FolderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The files of a folder, sorted into those that are taken and the others.
#[derive(Clone, Debug)]
pub struct ListedFolder {
    /// Sorted by path.
    files: Vec<FolderFile>,
    left_out: Vec<LeftOut>,
}

/// The files of a model, which become its layers, in this order.
#[derive(Clone, Debug)]
pub struct FolderPlan {
    files: Vec<FolderFile>,
    left_out: Vec<LeftOut>,
    kind: FolderKind,
    faults: Vec<FolderFault>,
    indexes: Vec<ShardIndex>,
}

impl ListedFolder {
    /// The most files in a folder, those that are left out included, except those that a pattern excludes.
    pub const MAX_FILES: usize = 100_000;
    /// The longest file that [`plan`](Self::plan) needs. The index of a model of 100,000 tensors has 10 MB.
    pub const MAX_TEXT_BYTES: u64 = 32 << 20;

    /// Sorts the regular files of a folder, in any order.
    ///
    /// # Errors
    /// [`FolderError`] when no file with weights is taken, there are too many files, or one that is taken has a path that
    /// is not allowed.
    pub fn new(
        files: impl IntoIterator<Item = FolderFile>,
        selection: &Selection,
    ) -> Result<Self, FolderError> {
        let (mut taken, mut left_out) = (Vec::new(), Vec::new());
        let mut count = 0_usize;
        for file in files {
            let reason = selection.reason_against(&file);
            count = count.saturating_add(usize::from(reason != Some(Reason::Excluded)));
            if count > Self::MAX_FILES {
                return Err(FolderError::TooManyFiles);
            }
            match reason {
                None => taken.push(file),
                Some(reason) => left_out.push(LeftOut { file, reason }),
            }
        }
        taken.sort_unstable();
        left_out.sort_unstable_by(|a, b| a.file.cmp(&b.file));
        check_paths(taken.iter().map(|file| file.path.as_str()))?;
        let folder = Self { files: taken, left_out };
        match folder.files.iter().any(|file| is_weights(&file.path, selection)) {
            true => Ok(folder),
            false => Err(folder.without_weights()),
        }
    }

    fn without_weights(&self) -> FolderError {
        let left_out = self.left_out.iter().map(|left| &left.file);
        let mut paths: Vec<&str> = self.files.iter().chain(left_out).map(|file| file.path.as_str()).collect();
        paths.sort_unstable();
        match first_part(&paths) {
            Some((path, command)) => FolderError::Part { path, command },
            None => {
                let by_patterns = self.left_out.iter().any(LeftOut::is_weights_by_pattern);
                FolderError::NoWeights { left_out: self.weights_left_out(), by_patterns }
            }
        }
    }

    /// The selected GGUF files of a folder that has no other weights: each is a model of its own, or belongs to one. `None`
    /// for a folder that is one model, or has no weights.
    pub fn gguf_files(
        files: impl IntoIterator<Item = FolderFile>,
        selection: &Selection,
    ) -> Option<Vec<FolderFile>> {
        let mut found = Vec::new();
        for file in files.into_iter().take(Self::MAX_FILES) {
            match selection.reason_against(&file) {
                None | Some(Reason::Gguf) if is_gguf(&file.path) => found.push(file),
                None if is_weights(&file.path, selection) => return None,
                _ => {}
            }
        }
        (!found.is_empty()).then_some(found)
    }

    /// The paths of the files whose contents [`plan`](Self::plan) needs.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let is_short = |file: &&FolderFile| file.size <= Self::MAX_TEXT_BYTES;
        let paths = self.files.iter().filter(is_short).map(|file| file.path.as_str());
        paths.filter(|path| [CONFIG, MODEL_INDEX].contains(path) || index_name(path).is_some())
    }

    /// Makes the plan, given the contents of the [`texts`](Self::texts) by their paths. One that is absent is not checked.
    ///
    /// # Errors
    /// [`FolderError::TextTooLong`].
    pub fn plan(self, texts: &BTreeMap<String, Vec<u8>>) -> Result<FolderPlan, FolderError> {
        let is_long = |(_, text): &(&String, &Vec<u8>)| text.len() as u64 > Self::MAX_TEXT_BYTES;
        if let Some((path, _)) = texts.iter().find(is_long) {
            return Err(FolderError::TextTooLong { path: path.clone() });
        }
        let Self { files, left_out } = self;
        let (mut faults, mut indexes) = (Vec::new(), Vec::new());
        let known = Known::new(&files, &left_out);
        let of_indexes = texts.iter().filter_map(|(path, text)| Some((path, index_name(path)?, text)));
        for (path, name, text) in of_indexes {
            match ShardIndex::parse(path, text) {
                Ok(index) => {
                    faults.extend(index.faults(&name, &known));
                    indexes.push(index);
                }
                Err(fault) => faults.push(fault),
            }
        }
        faults.extend(faults_of_numbers(&known, &indexes));
        faults.extend(texts.get(MODEL_INDEX).into_iter().flat_map(|text| faults_of_pipeline(text, &known)));
        faults.extend(stored_whole(&files));
        faults.extend(weights_left_out(&left_out));
        let kind = kind(&known, texts.get(CONFIG));
        Ok(FolderPlan { files, left_out, kind, faults, indexes })
    }

    /// The paths of files with weights of formats that are not split.
    fn weights_left_out(&self) -> Vec<String> {
        const MAX_NAMED: usize = 8;
        let weights = self.left_out.iter().filter(|left| left.reason.is_weights());
        weights.map(|left| left.file.path.clone()).take(MAX_NAMED).collect()
    }
}

impl FolderPlan {
    /// The files of the model, sorted by their paths.
    pub fn files(&self) -> &[FolderFile] {
        &self.files
    }

    /// The other files of the folder, sorted by their paths.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    pub const fn kind(&self) -> FolderKind {
        self.kind
    }

    /// What is wrong with the folder: what is [fatal](FolderFault::is_fatal), and what its user should know.
    pub fn faults(&self) -> &[FolderFault] {
        &self.faults
    }

    /// The paths of the files whose tensors [`check_tensors`](Self::check_tensors) needs.
    pub fn indexed_files(&self) -> BTreeSet<&str> {
        let indexed: BTreeSet<&str> = self.indexes.iter().flat_map(ShardIndex::shards).collect();
        let taken = self.files.iter().map(|file| file.path.as_str());
        taken.filter(|path| indexed.contains(path) || ShardName::from_path(path).is_some()).collect()
    }

    /// Compares the indexes with the tensors of the files that they name: name and size of each tensor, by the path of
    /// the file. Shards that are not given are not checked.
    pub fn check_tensors<'t, T>(&self, files: impl IntoIterator<Item = (&'t str, T)>) -> Vec<FolderFault>
    where
        T: IntoIterator<Item = (&'t str, u64)>,
    {
        let files = files.into_iter().map(|(path, tensors)| (path, tensors.into_iter().collect()));
        let files: BTreeMap<&str, BTreeMap<&str, u64>> = files.collect();
        let of_indexes = self.indexes.iter().flat_map(|index| index.faults_of_tensors(&files));
        of_indexes.chain(repeated_tensors(&files)).collect()
    }
}

/// The tensors that two shards of one model have, at most 20 of them.
fn repeated_tensors(files: &BTreeMap<&str, BTreeMap<&str, u64>>) -> Vec<FolderFault> {
    const MAX_NAMED: usize = 20;
    let (mut first_shards, mut faults) = (BTreeMap::new(), Vec::new());
    for (path, tensors) in files {
        let Some(shard) = ShardName::from_path(path) else { continue };
        for tensor in tensors.keys() {
            let first = *first_shards.entry((shard.set(), *tensor)).or_insert(*path);
            if first != *path && faults.len() < MAX_NAMED {
                let [first, second] = [first, path].map(str::to_owned);
                faults.push(FolderFault::TensorTwice { tensor: (*tensor).to_owned(), first, second });
            }
        }
    }
    faults
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    #[error("folder: too many files: expected at most {}", ListedFolder::MAX_FILES)]
    TooManyFiles,
    #[error(transparent)]
    Path(#[from] ModelPathError),
    #[error("folder: no weights: expected a safetensors file{}", others(left_out))]
    NoWeights {
        /// Paths of files with weights that are left out.
        left_out: Vec<String>,
        /// Whether patterns leave out files with weights.
        by_patterns: bool,
    },
    #[error("{path:?}: expected a whole file, found a part of one")]
    Part {
        path: String,
        /// What joins the parts.
        command: String,
    },
    #[error("{path:?}: too long: expected at most {} bytes", ListedFolder::MAX_TEXT_BYTES)]
    TextTooLong { path: String },
}

impl FolderError {
    /// What a user can do about it.
    pub fn advice(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::Part { command, .. } => return format!("join the parts: `{command}`").into(),
            Self::TooManyFiles => "name the folder of one model, or leave files out with `--exclude PATTERN`",
            Self::Path(_) => "rename the file, or leave it out with `--exclude PATTERN`",
            Self::NoWeights { by_patterns: true, .. } => {
                "the patterns have to match at least one file with weights"
            }
            Self::NoWeights { left_out, .. } if left_out.iter().any(|path| is_gguf(path)) => {
                "each GGUF file is a model of its own: name the files, such as `FOLDER/*.gguf`"
            }
            Self::NoWeights { left_out, .. } if !left_out.is_empty() => {
                "`--include '*'` stores all files, those of other formats whole"
            }
            Self::NoWeights { .. } => "name the folder that has the weights",
            Self::TextTooLong { .. } => "it is damaged: copy or download it again",
        })
    }
}

const CONFIG: &str = "config.json";
const MODEL_INDEX: &str = "model_index.json";

fn others(paths: &[String]) -> String {
    let named: Vec<String> = paths.iter().map(|path| format!("{path:?}")).collect();
    if named.is_empty() { String::new() } else { format!(", found {}", named.join(", ")) }
}

fn is_gguf(path: &str) -> bool {
    FileFormat::DEFAULT.stem_of(path).is_some()
}

fn is_weights(path: &str, selection: &Selection) -> bool {
    FileFormat::split_name(path).is_some() || (selection.has_includes() && has_other_weights(path))
}

/// What is in the folder, by path.
pub(in crate::model_folder) struct Known<'f> {
    taken: BTreeSet<&'f str>,
    left_out: BTreeMap<&'f str, Reason>,
}

impl<'f> Known<'f> {
    fn new(files: &'f [FolderFile], left_out: &'f [LeftOut]) -> Self {
        let taken = files.iter().map(|file| file.path.as_str()).collect();
        // A file that is still being downloaded is not there yet.
        let left_out = left_out.iter().filter(|left| left.reason != Reason::Partial);
        Self { taken, left_out: left_out.map(|left| (left.file.path.as_str(), left.reason)).collect() }
    }

    fn has(&self, path: &str) -> bool {
        self.taken.contains(path) || self.left_out.contains_key(path)
    }

    fn takes(&self, path: &str) -> bool {
        self.taken.contains(path)
    }

    /// The files that are taken in this folder, and those that are not.
    fn in_folder(&self, name: &str) -> (Vec<&'f str>, Vec<(&'f str, Reason)>) {
        let start = format!("{name}/");
        let from = (Bound::Included(start.as_str()), Bound::Unbounded);
        let taken = self.taken.range::<str, _>(from).take_while(|path| path.starts_with(&start));
        let left_out = self.left_out.range::<str, _>(from).take_while(|(path, _)| path.starts_with(&start));
        (taken.copied().collect(), left_out.map(|(path, reason)| (*path, *reason)).collect())
    }
}

/// Shards that are missing by their numbers, or that no index names.
fn faults_of_numbers(known: &Known<'_>, indexes: &[ShardIndex]) -> Vec<FolderFault> {
    let indexed: BTreeSet<&str> = indexes.iter().flat_map(ShardIndex::shards).collect();
    // Of an index without shards too.
    let with_index: BTreeSet<&str> = indexes.iter().map(|index| folder_of(index.path())).collect();
    let (mut faults, mut seen) = (Vec::new(), BTreeSet::new());
    let mut sets: BTreeMap<String, &str> = BTreeMap::new();
    let safetensors = |path: &&&str| FileFormat::SAFETENSORS.stem_of(path).is_some();
    for path in known.taken.iter().filter(safetensors) {
        let Some(shard) = ShardName::from_path(path).filter(|_| !indexed.contains(path)) else { continue };
        if with_index.contains(folder_of(path)) {
            faults.push(FolderFault::NotInIndex { shard: (*path).to_owned() });
            continue;
        }
        let all = shard.all();
        if seen.insert(all.first().cloned().unwrap_or_default()) {
            let first = *sets.entry(shard.set().text()).or_insert(path);
            if first != *path {
                let (first, second) = (first.to_owned(), (*path).to_owned());
                faults.push(FolderFault::SeveralSets { first, second });
            }
            let missing = all.into_iter().filter(|shard| !known.has(shard));
            faults.extend(missing.map(|shard| FolderFault::MissingShard { index: None, shard }));
        }
    }
    faults
}

fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Components of a pipeline that have no folder.
fn faults_of_pipeline(text: &[u8], known: &Known<'_>) -> Vec<FolderFault> {
    let Ok(Json::Object(index)) = python_json::parse(text) else {
        let reason = "expected a JSON object of components".to_owned();
        return vec![FolderFault::Index { index: MODEL_INDEX.to_owned(), reason }];
    };
    // A component is a list of its library and its class; null, if the pipeline has none.
    let is_component =
        |value: &Json| value.as_array().and_then(|parts| parts.first()).is_some_and(Json::is_string);
    let named = index.into_iter().filter(|(_, value)| is_component(value)).map(|(name, _)| name);
    named.filter(|name| !name.starts_with('_')).filter_map(|name| fault_of_component(name, known)).collect()
}

fn fault_of_component(component: String, known: &Known<'_>) -> Option<FolderFault> {
    let (taken, left_out) = known.in_folder(&component);
    if taken.is_empty() && left_out.is_empty() {
        return Some(FolderFault::NoComponent { component });
    }
    if taken.iter().any(|path| FileFormat::split_name(path).is_some() || has_other_weights(path)) {
        return None;
    }
    let left_out =
        left_out.iter().find(|(_, reason)| reason.is_weights()).map(|(path, _)| (*path).to_owned());
    // Components without weights, such as schedulers and tokenizers, call their configuration otherwise.
    let is_model = left_out.is_some() || known.has(&format!("{component}/{CONFIG}"));
    is_model.then_some(FolderFault::NoWeightsOfComponent { component, left_out })
}

/// Names the files with weights that are not split: nothing of them is shared, which their user may not expect.
fn stored_whole(files: &[FolderFile]) -> Option<FolderFault> {
    let whole = files.iter().filter(|file| has_other_weights(&file.path));
    let paths: Vec<String> = whole.map(|file| file.path.clone()).collect();
    (!paths.is_empty()).then_some(FolderFault::StoredWhole { paths })
}

/// Names the files with weights that are not taken, which their user may miss. GGUF files are models of their own.
fn weights_left_out(left_out: &[LeftOut]) -> Option<FolderFault> {
    let weights = left_out.iter().filter(|left| left.reason.is_weights() && left.reason != Reason::Gguf);
    let paths: Vec<String> = weights.map(|left| left.file.path.clone()).collect();
    (!paths.is_empty()).then_some(FolderFault::WeightsLeftOut { paths })
}

fn kind(known: &Known<'_>, config: Option<&Vec<u8>>) -> FolderKind {
    let is_consolidated = |path: &&str| path.starts_with("consolidated") && !path.contains('/');
    match () {
        () if known.takes(MODEL_INDEX) => FolderKind::Diffusers,
        () if known.takes("adapter_config.json") => FolderKind::Adapter,
        () if known.takes(CONFIG) => match config.is_some_and(|config| has_mlx_quantization(config)) {
            true => FolderKind::Mlx,
            false => FolderKind::Transformers,
        },
        () if known.takes("params.json") || known.taken.iter().any(is_consolidated) => FolderKind::Mistral,
        () => FolderKind::Weights,
    }
}

/// transformers writes `quantization_config`, MLX also `quantization`, without a method.
fn has_mlx_quantization(config: &[u8]) -> bool {
    let config = python_json::parse(config).unwrap_or_default();
    config.get("quantization").is_some_and(|found| found.get("bits").is_some())
}
