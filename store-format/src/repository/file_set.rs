//! Files that belong together (the shards of a model, or one file), and what they are by their names.

use std::collections::BTreeMap;

use super::{Refusal, file_name};
use crate::file_format::FileFormat;
use crate::file_type::{ShardName, quantization_bits};

/// One file, or the shards of a model that are there.
#[derive(Clone, Debug)]
pub(super) struct FileSet<'p> {
    /// The path of the first file that was listed.
    pub(super) path: &'p str,
    /// The path without extension and shard number.
    stem: &'p str,
    pub(super) kind: Kind,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Whole(usize),
    /// The position of each shard in the list by its number, from 1, and the number of shards.
    Shards(BTreeMap<usize, usize>, usize),
}

/// Groups the files with weights among `paths`, in the order of the list. Only GGUF files are models that a tag can
/// mean; others are taken by their names.
pub(super) fn file_sets<'p>(paths: &[&'p str]) -> Vec<FileSet<'p>> {
    let (mut sets, mut certainties) = (Vec::<FileSet<'p>>::new(), Vec::new());
    let mut sharded = BTreeMap::new();
    for (position, path) in paths.iter().enumerate() {
        let format = FileFormat::split_name(file_name(path)).filter(|(stem, _)| !stem.is_empty());
        let Some((_, format)) = format else { continue };
        let format = format.tensor_format();
        let stem = ShardName::stem_of(path);
        let content = match ShardName::from_path(path) {
            None => Content::Whole(position),
            Some(shard) => {
                let place = *sharded.entry(shard.set()).or_insert(sets.len());
                if let Some(FileSet { content: Content::Shards(shards, _), .. }) = sets.get_mut(place) {
                    shards.entry(shard.number()).or_insert(position);
                    continue;
                }
                Content::Shards([(shard.number(), position)].into(), shard.count())
            }
        };
        certainties.push(if format.is_gguf() { certainty(stem) } else { Certainty::Certain(Kind::Other) });
        sets.push(FileSet { path, stem, kind: Kind::Model, content });
    }
    let has_model = certainties.contains(&Certainty::Certain(Kind::Model));
    for (set, certainty) in sets.iter_mut().zip(certainties) {
        set.kind = match certainty {
            Certainty::Certain(kind) => kind,
            // If all models have the word in their names, it does not tell what they are.
            Certainty::Likely(kind) => {
                if has_model {
                    kind
                } else {
                    Kind::Model
                }
            }
        };
    }
    sets
}

impl<'p> FileSet<'p> {
    /// The folders that it is in, from the outermost.
    pub(super) fn folders(&self) -> Vec<&'p str> {
        match self.stem.rsplit_once('/') {
            Some((folders, _)) => folders.split('/').collect(),
            None => Vec::new(),
        }
    }

    /// The path without extension and shard number.
    pub(super) const fn stem(&self) -> &'p str {
        self.stem
    }

    /// The file's name without extension and shard number.
    pub(super) fn name(&self) -> &'p str {
        file_name(self.stem)
    }

    pub(super) fn depth(&self) -> usize {
        self.stem.matches('/').count()
    }

    pub(super) const fn is_sharded(&self) -> bool {
        matches!(self.content, Content::Shards(..))
    }

    pub(super) fn is_complete(&self) -> bool {
        match &self.content {
            Content::Whole(_) => true,
            Content::Shards(shards, count) => shards.len() == *count,
        }
    }

    /// The positions of its files in the list, in order.
    pub(super) fn files(&self) -> impl Iterator<Item = usize> {
        let (whole, shards) = match &self.content {
            Content::Whole(file) => (Some(*file), None),
            Content::Shards(shards, _) => (None, Some(shards.values().copied())),
        };
        whole.into_iter().chain(shards.into_iter().flatten())
    }

    /// Whether the path is that of one of its shards, present or missing.
    pub(super) fn would_have(&self, path: &str) -> bool {
        let own = ShardName::from_path(self.path).map(|shard| shard.set());
        own.is_some() && ShardName::from_path(path).map(|shard| shard.set()) == own
    }

    /// The positions of its files, unless shards are missing.
    pub(super) fn complete(&self) -> Result<Vec<usize>, Refusal> {
        if self.is_complete() {
            return Ok(self.files().collect());
        }
        let all = ShardName::from_path(self.path).map(|shard| shard.all()).unwrap_or_default();
        let count = all.len();
        let is_there = |number: usize| matches!(&self.content, Content::Shards(shards, _) if shards.contains_key(&number));
        let missing = (1..).zip(all).filter(|(number, _)| !is_there(*number)).collect();
        Err(Refusal::MissingShards { count, missing })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Model,
    Projector,
    Draft(DraftKind),
    /// An importance matrix, an adapter, a control vector, a vocabulary, or a file of another format.
    Other,
}

/// How a draft predicts, those first that are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DraftKind {
    Mtp,
    Eagle3,
    DFlash,
    DSpark,
    /// A smaller model.
    Model,
}

/// How surely a name tells what a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certainty {
    Certain(Kind),
    /// Unless all models of the repository have such names.
    Likely(Kind),
}

pub(super) const DRAFTS: [(&str, DraftKind); 6] = [
    ("mtp", DraftKind::Mtp),
    ("eagle3", DraftKind::Eagle3),
    ("dflash", DraftKind::DFlash),
    ("dspark", DraftKind::DSpark),
    ("draft", DraftKind::Model),
    ("drafts", DraftKind::Model),
];
pub(super) const PROJECTORS: [&str; 3] = ["mmproj", "mm-proj", "mm_proj"];
pub(super) const PROJECTOR_FOLDERS: [&str; 4] = ["mmproj", "mmprojs", "projector", "projectors"];
const IMATRIX: &str = "imatrix";
const VOCABULARY: &str = "ggml-vocab-";
/// Words in names of files that modify a model.
const OTHERS: [&str; 5] = ["lora", "adapter", "cvector", "control-vector", "control_vector"];

/// What a file is, from its path without extension and shard number.
fn certainty(stem: &str) -> Certainty {
    let stem = stem.to_ascii_lowercase();
    let name = file_name(&stem);
    let folder = stem.rsplit('/').nth(1).unwrap_or_default();
    if PROJECTORS.iter().any(|word| name.contains(word)) || PROJECTOR_FOLDERS.contains(&folder) {
        return Certainty::Certain(Kind::Projector);
    }
    if name.contains(IMATRIX) {
        let is_certain = name.starts_with(IMATRIX)
            || !name.split(['-', '.']).any(|part| quantization_bits(part).is_some());
        return if is_certain { Certainty::Certain(Kind::Other) } else { Certainty::Likely(Kind::Other) };
    }
    if name.starts_with(VOCABULARY) {
        return Certainty::Certain(Kind::Other);
    }
    let is_draft = |(word, _): &&(&str, DraftKind)| {
        folder == *word
            || name
                .strip_prefix(word)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_', '.']))
    };
    if let Some((_, kind)) = DRAFTS.iter().find(is_draft) {
        return Certainty::Certain(Kind::Draft(*kind));
    }
    likely(name).map_or(Certainty::Certain(Kind::Model), Certainty::Likely)
}

fn likely(name: &str) -> Option<Kind> {
    let has_part = |word: &str| name.split(['-', '.', '_', ' ']).any(|part| part == word);
    let draft = DRAFTS.iter().find(|(word, _)| has_part(word)).map(|(_, kind)| Kind::Draft(*kind));
    let other = || {
        OTHERS
            .iter()
            .any(|word| has_part(word) || word.len() > 8 && name.contains(word))
            .then_some(Kind::Other)
    };
    draft.or_else(other)
}
