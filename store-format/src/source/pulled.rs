//! A source with the components to pull, as it is recorded.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::escapes::{escaped, unescaped};
use super::hub::is_commit;
use super::{PullSource, SourceError};

/// What is recorded of a pull: its source, and what was chosen other than by default, written as the options of
/// `blobd pull`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledSource {
    pub source: PullSource,
    pub components: Components,
}

impl PulledSource {
    /// The record of a source that is given as text.
    pub fn record(source: &str, components: &Components) -> String {
        let projector = match &components.projector {
            Projector::Nearest => String::new(),
            Projector::None => format!(" {NO_PROJECTOR}"),
            Projector::Named(name) => format!(" {PROJECTOR} {}", escaped(name)),
        };
        let draft = match components.draft {
            Draft::Nearest => String::new(),
            Draft::None => format!(" {NO_DRAFT}"),
        };
        let mut record = format!("{source}{projector}{draft}");
        let patterns = [(INCLUDE, &components.include), (EXCLUDE, &components.exclude)];
        let patterns =
            patterns.iter().flat_map(|(option, list)| list.iter().map(move |text| (*option, text)));
        for (option, text) in patterns.chain(components.revision.iter().map(|revision| (REVISION, revision)))
        {
            record.push_str(&format!(" {option} {}", escaped(text)));
        }
        record
    }

    /// Where a newer version would be, as [`PullSource::latest`] says, with the same components.
    pub fn latest(&self) -> Option<Self> {
        Some(Self { source: self.source.latest()?, components: self.components.clone() })
    }
}

/// Which files of a repository are pulled, other than by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Components {
    #[serde(default)]
    pub projector: Projector,
    #[serde(default)]
    pub draft: Draft,
    /// Patterns of the paths to pull: then exactly these files are the model, in any format.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Patterns of paths that are not pulled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// The branch, tag or commit; the default branch if it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl Components {
    pub const DEFAULT: Self = Self {
        projector: Projector::Nearest,
        draft: Draft::Nearest,
        include: Vec::new(),
        exclude: Vec::new(),
        revision: None,
    };

    pub fn are_default(&self) -> bool {
        *self == Self::DEFAULT
    }

    /// Whether both take the same files of a repository at the same revision, apart from projector and draft. If not, they
    /// are different models, neither a newer version of the other.
    pub fn is_same_part(&self, other: &Self) -> bool {
        self.include == other.include && self.exclude == other.exclude && self.revision == other.revision
    }

    /// Whether the revision is a commit: then no newer version exists.
    pub fn are_fixed(&self) -> bool {
        self.revision.as_deref().is_some_and(is_commit)
    }

    /// Whether patterns say which files are pulled.
    pub fn have_patterns(&self) -> bool {
        !self.include.is_empty() || !self.exclude.is_empty()
    }
}

/// The projector that is pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Projector {
    /// The one that belongs to the model, if there is one.
    #[default]
    Nearest,
    None,
    /// The one with this name: its path, the name of its file, or a tag such as `BF16`.
    Named(String),
}

/// The model for speculative decoding that is pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draft {
    /// The one that belongs to the model, if there is one.
    #[default]
    Nearest,
    None,
}

const PROJECTOR: &str = "--projector";
const NO_PROJECTOR: &str = "--no-projector";
const NO_DRAFT: &str = "--no-draft";
const INCLUDE: &str = "--include";
const EXCLUDE: &str = "--exclude";
const REVISION: &str = "--revision";

impl fmt::Display for PulledSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Self::record(&self.source.to_string(), &self.components))
    }
}

impl FromStr for PulledSource {
    type Err = SourceError;

    /// Earlier versions recorded paths with spaces: a text without valid options is a source.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        let options = text.find(" --").map(|start| text.split_at(start));
        if let Some((source, options)) = options
            && let Some(components) = components(options)
        {
            return Ok(Self { source: source.parse()?, components });
        }
        Ok(Self { source: text.parse()?, components: Components::default() })
    }
}

fn components(options: &str) -> Option<Components> {
    let mut components = Components::default();
    let mut options = options.split_ascii_whitespace();
    while let Some(option) = options.next() {
        let mut text = || Some(unescaped(options.next()?).ok()?.into_owned());
        match option {
            PROJECTOR => components.projector = Projector::Named(text()?),
            INCLUDE => components.include.push(text()?),
            EXCLUDE => components.exclude.push(text()?),
            REVISION => components.revision = Some(text()?),
            NO_PROJECTOR => components.projector = Projector::None,
            NO_DRAFT => components.draft = Draft::None,
            _ => return None,
        }
    }
    Some(components)
}
