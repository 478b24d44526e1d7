//! The modes in which the daemon makes new blobs durable.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::Outcome;

/// A value of `durability` in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// The default.
    Auto,
    /// One `fsync` per blob.
    Fsync,
    /// One `syncfs` for all blobs.
    Syncfs,
}

impl Durability {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Auto, Self::Fsync, Self::Syncfs];

    /// As it is written in the configuration.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fsync => "fsync",
            Self::Syncfs => "syncfs",
        }
    }

    /// Writes a configuration file with this mode.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write_config(self, folder: &Path) -> Outcome<PathBuf> {
        let path = folder.join(format!("{self}.toml"));
        std::fs::write(&path, format!("durability = \"{self}\"\n"))?;
        Ok(path)
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
