//! A source with the components that were chosen, as it is recorded.

use std::fmt;
use std::str::FromStr;

use super::escapes::{escaped, unescaped};
use super::{Components, Draft, Projector, PullSource, SourceError};

/// What is recorded of a pull: its source, and what was chosen other than by default, written as the options of
/// `blobd pull`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledSource {
    /// The source.
    pub source: PullSource,
    /// What is pulled with the weights.
    pub components: Components,
}

impl PulledSource {
    /// The record of a source that is given as text.
    #[must_use]
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
        format!("{source}{projector}{draft}")
    }

    /// Where a newer version would be, as [`PullSource::latest`] says, with the same components.
    #[must_use]
    pub fn latest(&self) -> Option<Self> {
        Some(Self { source: self.source.latest()?, components: self.components.clone() })
    }
}

const PROJECTOR: &str = "--projector";
const NO_PROJECTOR: &str = "--no-projector";
const NO_DRAFT: &str = "--no-draft";

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
        match option {
            PROJECTOR => {
                components.projector = Projector::Named(unescaped(options.next()?).ok()?.into_owned());
            }
            NO_PROJECTOR => components.projector = Projector::None,
            NO_DRAFT => components.draft = Draft::None,
            _ => return None,
        }
    }
    Some(components)
}
