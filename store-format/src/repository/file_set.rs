//! Files that belong together: the shards of a model, or one file.

use std::collections::BTreeMap;

use super::file_name;
use super::kind::{Kind, Nature, nature};
use super::refusal::Refusal;
use crate::file_format::FileFormat;
use crate::source::ShardName;

/// One file, or those shards of a model that are there.
#[derive(Clone, Debug)]
pub(super) struct FileSet<'p> {
    /// The path of its first file.
    path: &'p str,
    /// The path without extension and shard number.
    stem: &'p str,
    kind: Kind,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Whole(usize),
    /// The positions in the list by number, from 1, of so many shards.
    Shards(BTreeMap<usize, usize>, usize),
}

/// Groups the GGUF files among `paths`, in the order of the list.
pub(super) fn file_sets<'p>(paths: &[&'p str]) -> Vec<FileSet<'p>> {
    let (mut sets, mut natures) = (Vec::<FileSet<'p>>::new(), Vec::new());
    let mut sharded = BTreeMap::new();
    for (position, path) in paths.iter().enumerate() {
        if FileFormat::split_name(file_name(path)).is_none_or(|(stem, _)| stem.is_empty()) {
            continue;
        }
        let stem = ShardName::stem_of(path);
        let content = match ShardName::of(path) {
            None => Content::Whole(position),
            Some(shard) => {
                let place = *sharded.entry((stem, shard.count())).or_insert(sets.len());
                if let Some(FileSet { content: Content::Shards(shards, _), .. }) = sets.get_mut(place) {
                    shards.entry(shard.number()).or_insert(position);
                    continue;
                }
                Content::Shards([(shard.number(), position)].into(), shard.count())
            }
        };
        natures.push(nature(stem));
        sets.push(FileSet { path, stem, kind: Kind::Model, content });
    }
    let has_model = natures.contains(&Nature::Certain(Kind::Model));
    for (set, nature) in sets.iter_mut().zip(natures) {
        set.kind = match nature {
            Nature::Certain(kind) => kind,
            // If all models have the word in their names, it does not tell what they are.
            Nature::Likely(kind) => {
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
    pub(super) const fn kind(&self) -> Kind {
        self.kind
    }

    /// The path of the first file that was listed.
    pub(super) const fn path(&self) -> &'p str {
        self.path
    }

    /// The folders that it is in, from the outermost.
    pub(super) fn folders(&self) -> Vec<&'p str> {
        match self.stem.rsplit_once('/') {
            Some((folders, _)) => folders.split('/').collect(),
            None => Vec::new(),
        }
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
        let count = match &self.content {
            Content::Whole(_) => return false,
            Content::Shards(_, count) => *count,
        };
        ShardName::of(path).is_some_and(|shard| shard.count() == count)
            && ShardName::stem_of(path) == self.stem
    }

    /// The positions of its files, unless shards are missing.
    pub(super) fn complete(&self) -> Result<Vec<usize>, Refusal> {
        if self.is_complete() {
            return Ok(self.files().collect());
        }
        let all = ShardName::of(self.path).map(|shard| shard.all()).unwrap_or_default();
        let count = all.len();
        let is_there = |number: usize| matches!(&self.content, Content::Shards(shards, _) if shards.contains_key(&number));
        let missing = (1..).zip(all).filter(|(number, _)| !is_there(*number)).collect();
        Err(Refusal::MissingShards { count, missing })
    }
}
