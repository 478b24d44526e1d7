//! Which files of a repository at a model hub make the model that a tag means.
//!
//! The rules are those of llama.cpp's `-hf`, with two differences: a tag must be a whole part of a name, and a tag
//! that means several models is refused. `docs/PULLING.md` lists them. The list of files is untrusted: the work and
//! the memory grow with its length only.

mod file_set;
mod sidecars;
mod tag;

use self::file_set::{FileSet, Kind, file_sets};
use self::sidecars::{choose_draft, choose_projector};
use self::tag::{Tag, parts_of_name};
use crate::derived_name::part;
use crate::file_format::FileFormat;
use crate::source::{Components, Draft, Projector};
use crate::text::one_line;

/// The default quantisations, in this order, if the tag is left out.
const DEFAULT_TAGS: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Which model of a repository is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted<'w> {
    /// The model that a tag means. `latest` counts as no tag.
    Tag(&'w str),
    /// The file at this path, with the other shards if it is a shard.
    File(&'w str),
}

/// The chosen files, as numbers in the list of paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The weights: one file, or all shards in order.
    pub model: Vec<usize>,
    /// The projector of a multimodal model.
    pub projector: Vec<usize>,
    /// The model for speculative decoding.
    pub draft: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    #[error("no such file")]
    NoSuchFile,
    #[error("no such tag")]
    NoSuchTag { tags: Vec<String> },
    #[error("no GGUF file with a model")]
    NoModel {
        /// The paths of the other files with tensors: projectors, drafts, importance matrices, safetensors.
        others: Vec<String>,
    },
    #[error("several models")]
    Ambiguous {
        /// The path of each; of shards, the first that is there.
        candidates: Vec<String>,
    },
    #[error("{} of {count} shards missing: {}", missing.len(), named(missing))]
    MissingShards {
        count: usize,
        /// The numbers, from 1, and paths of those that are missing.
        missing: Vec<(usize, String)>,
    },
    #[error("no such projector")]
    NoProjector { projectors: Vec<String> },
}

/// The paths of missing shards, as many as fit a line.
fn named(missing: &[(usize, String)]) -> String {
    one_line(&missing.iter().map(|(_, path)| path.as_str()).collect::<Vec<_>>(), MAX_LINE)
}

/// The most characters of a list of names in an error.
const MAX_LINE: usize = 240;

/// A model of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedModel<'p> {
    /// The first of its files that was listed.
    pub path: &'p str,
    /// A tag that no other model of the repository has.
    pub tag: String,
}

/// The files with tensors of a repository, grouped into models and what belongs to them.
#[derive(Clone, Debug)]
pub struct RepositoryFiles<'p> {
    paths: Vec<&'p str>,
    sets: Vec<FileSet<'p>>,
}

impl<'p> RepositoryFiles<'p> {
    /// Groups the files at `paths`, which are relative. Files of unknown formats are ignored.
    pub fn new(paths: impl IntoIterator<Item = &'p str>) -> Self {
        let paths: Vec<&str> = paths.into_iter().collect();
        let sets = file_sets(&paths);
        Self { paths, sets }
    }

    /// Chooses the files of a model.
    pub fn choose(&self, wanted: Wanted<'_>, components: &Components) -> Result<Choice, Refusal> {
        let set = match wanted {
            Wanted::Tag(tag) => self.set_with_tag(tag)?,
            Wanted::File(path) => self.set_with_file(path)?,
        };
        let mut choice = Choice { model: set.complete()?, ..Choice::default() };
        // A sidecar that is pulled by its own name has no sidecars.
        if set.kind == Kind::Model || matches!(components.projector, Projector::Named(_)) {
            choice.projector = self.projector(set, &components.projector)?;
        }
        if set.kind == Kind::Model && components.draft == Draft::Nearest {
            choice.draft =
                choose_draft(set, &self.sets).map(FileSet::complete).transpose()?.unwrap_or_default();
        }
        Ok(choice)
    }

    /// A tag for each model, for messages about a tag that means none.
    pub fn tags(&self) -> Vec<String> {
        self.models().map(|set| parts_of_name(set).label().to_owned()).collect()
    }

    /// The models in the order of the list. The tags differ: where two models have the same, theirs are their paths.
    pub fn all_models(&self) -> Vec<ListedModel<'p>> {
        let labels: Vec<&str> = self.models().map(|set| parts_of_name(set).label()).collect();
        let count = |label: &str| labels.iter().filter(|other| other.eq_ignore_ascii_case(label)).count();
        let model = |(set, label): (&FileSet<'p>, &&str)| {
            let tag = if count(label) == 1 { part(label) } else { part(&set.stem().replace('/', "-")) };
            ListedModel { path: set.path, tag }
        };
        self.models().zip(&labels).map(model).collect()
    }

    /// The first path of each GGUF file, or shards of one, that is no model: adapters, importance matrices, vocabularies.
    pub fn other_gguf_files(&self) -> impl Iterator<Item = &'p str> {
        let others = self.sets.iter().filter(|set| set.kind == Kind::Other);
        others.map(|set| set.path).filter(|path| FileFormat::GGUF.stem_of(path).is_some())
    }

    fn models(&self) -> impl Iterator<Item = &FileSet<'p>> {
        self.sets.iter().filter(|set| set.kind == Kind::Model)
    }

    fn set_with_file(&self, path: &str) -> Result<&FileSet<'p>, Refusal> {
        let position = self.paths.iter().position(|known| *known == path);
        let has_file = |set: &&FileSet<'_>| match position {
            Some(position) => set.files().any(|file| file == position),
            // A shard that is not there, of a model that is.
            None => set.would_have(path),
        };
        self.sets.iter().find(has_file).ok_or(Refusal::NoSuchFile)
    }

    fn set_with_tag(&self, tag: &str) -> Result<&FileSet<'p>, Refusal> {
        if let Some(named) = self.sets.iter().find(|set| self.is_file_name(set, tag)) {
            return Ok(named);
        }
        if self.models().next().is_none() {
            let others = self.sets.iter().map(|set| set.path.to_owned()).collect();
            return Err(Refusal::NoModel { others });
        }
        if !tag.eq_ignore_ascii_case(LATEST) {
            return self.best(&Tag::new(tag))?.ok_or_else(|| Refusal::NoSuchTag { tags: self.tags() });
        }
        for tag in DEFAULT_TAGS {
            if let Some(set) = self.best(&Tag::new(tag))? {
                return Ok(set);
            }
        }
        let models: Vec<_> = self.models().collect();
        only_one(&models, |set| parts_of_name(set).model())
    }

    fn best(&self, tag: &Tag) -> Result<Option<&FileSet<'p>>, Refusal> {
        let ranked: Vec<_> = self.models().filter_map(|set| Some((tag.rank(set)?, set))).collect();
        let Some(best) = ranked.iter().map(|(rank, _)| *rank).min() else { return Ok(None) };
        let matching: Vec<_> =
            ranked.into_iter().filter(|(rank, _)| *rank == best).map(|(_, set)| set).collect();
        only_one(&matching, |set| parts_of_name(set).file()).map(Some)
    }

    /// Whether the text is the name of a file of the set, with its extension.
    fn is_file_name(&self, set: &FileSet<'_>, text: &str) -> bool {
        let mut paths = set.files().filter_map(|file| self.paths.get(file));
        paths.any(|path| *path == text || file_name(path) == text)
    }

    fn projector(&self, model: &FileSet<'p>, wanted: &Projector) -> Result<Vec<usize>, Refusal> {
        let chosen = match wanted {
            Projector::None => None,
            Projector::Nearest => choose_projector(model, &self.sets),
            Projector::Named(name) => Some(self.named_projector(name)?),
        };
        chosen.map(FileSet::complete).transpose().map(Option::unwrap_or_default)
    }

    fn named_projector(&self, name: &str) -> Result<&FileSet<'p>, Refusal> {
        let projectors = || self.sets.iter().filter(|set| set.kind == Kind::Projector);
        let none =
            || Refusal::NoProjector { projectors: projectors().map(|set| set.path.to_owned()).collect() };
        let is_named = |set: &&FileSet<'p>| self.is_file_name(set, name);
        if let Some(named) = projectors().find(is_named) {
            return Ok(named);
        }
        // The name of another file must not be taken for a part of a projector's name.
        if self.sets.iter().any(|set| is_named(&set)) {
            return Err(none());
        }
        let tag = Tag::new(name);
        let ranked: Vec<_> = projectors().filter_map(|set| Some((tag.rank(set)?, set))).collect();
        let best = ranked.iter().map(|(rank, _)| *rank).min().ok_or_else(none)?;
        let matching: Vec<_> =
            ranked.into_iter().filter(|(rank, _)| *rank == best).map(|(_, set)| set).collect();
        only_one(&matching, |set| parts_of_name(set).file())
    }
}

/// What a reference without a tag has as its tag.
const LATEST: &str = "latest";

/// One of several forms of the same model; another model among them makes the choice ambiguous.
fn only_one<'s, 'p>(
    sets: &[&'s FileSet<'p>],
    identity: impl Fn(&FileSet<'p>) -> String,
) -> Result<&'s FileSet<'p>, Refusal> {
    let mut identities = sets.iter().map(|set| identity(set));
    let first = identities.next();
    if identities.any(|other| Some(&other) != first.as_ref()) {
        return Err(Refusal::Ambiguous { candidates: sets.iter().map(|set| set.path.to_owned()).collect() });
    }
    // `min_by_key` takes the first of several that are equal.
    let best = sets.iter().min_by_key(|set| (!set.is_complete(), set.is_sharded(), set.depth()));
    best.copied().ok_or(Refusal::NoSuchFile)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
