//! Paths whose place in the file errors name: directories of lower stores, and files with certificates.

use std::path::{Path, PathBuf};

use blobd_client::paths::{GivenPaths, default_root};
use blobd_client::protocol::error::ErrorBody;
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::{Config, ConfigError, Refusal, values};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlacedPath {
    path: PathBuf,
    /// The offset in the file, in bytes.
    start: usize,
    /// `FILE:LINE:COLUMN`, after the file was read.
    place: String,
}

impl<'de> Deserialize<'de> for PlacedPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(transparent)]
        struct AbsolutePath(
            #[serde(deserialize_with = "values::required::<values::AbsolutePath, _>")] PathBuf,
        );

        let path = Spanned::<AbsolutePath>::deserialize(deserializer)?;
        let start = path.span().start;
        Ok(Self { path: path.into_inner().0, start, place: String::new() })
    }
}

impl PlacedPath {
    pub(super) fn note_place(&mut self, place_of: impl Fn(usize) -> String) {
        self.place = place_of(self.start);
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }
}

pub(super) fn paths(placed: &[PlacedPath]) -> Vec<PathBuf> {
    placed.iter().map(|placed| placed.path.clone()).collect()
}

/// Opens nothing: the server of a network file system may not respond.
pub(super) fn check_lower(lower: &[PlacedPath]) -> Result<(), Refusal> {
    let mut listed = lower.iter().enumerate();
    let repeated =
        listed.find(|(index, store)| lower.iter().take(*index).any(|before| before.path == store.path));
    match repeated {
        None => Ok(()),
        Some((_, store)) => {
            let what = format!("expected each directory once, found {:?} again", store.path);
            Err(Refusal { start: Some(store.start), ..Refusal::new("lower", what) })
        }
    }
}

impl Config {
    pub(crate) fn lower_paths(&self) -> Vec<PathBuf> {
        paths(&self.lower)
    }

    /// The store's directory: from the command line or the environment, the file or the default.
    pub(crate) fn root_for(&self, paths: &GivenPaths) -> Result<PathBuf, ErrorBody> {
        let named = paths.root.clone().or_else(|| self.root.clone());
        named.map_or_else(default_root, Ok)
    }

    /// Refuses the directory of the store itself as a lower store.
    pub(crate) fn check_root(&self, root: &Path) -> Result<(), ConfigError> {
        let itself = self.lower.iter().find(|store| store.path == root);
        itself.map_or(Ok(()), |store| {
            let what = format!("lower: expected another store than the writable one, found {root:?}");
            Err(ConfigError::at(&store.place, what))
        })
    }

    /// `FILE:LINE:COLUMN: ca_files` of a file with certificates.
    pub(crate) fn place_of_ca_file(&self, path: &Path) -> Option<String> {
        let file = self.ca_files.iter().find(|file| file.path == path)?;
        Some(format!("{}: ca_files", file.place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("c"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn directory_that_is_listed_twice_or_is_the_store_itself_is_named_with_its_place() {
        let error = parse("lower = [\"/a\", \"/b\",\n  \"/a/\"]").unwrap_err();
        assert_eq!(error, "c:2:3: lower: expected each directory once, found \"/a/\" again");
        let config = parse("lower = [\"/a\", \"/b\"]").unwrap();
        let error = config.check_root(Path::new("/b/")).unwrap_err().to_string();
        assert_eq!(error, "c:1:16: lower: expected another store than the writable one, found \"/b/\"");
        config.check_root(Path::new("/c")).unwrap();
        assert_eq!(config.lower_paths(), [Path::new("/a"), Path::new("/b")]);
    }
}
