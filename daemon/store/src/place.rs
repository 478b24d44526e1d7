//! Paths of the store's files, for messages.

use std::path::{Display, Path, PathBuf};

/// A path that can be shown in messages but not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(PathBuf);

impl Place {
    /// The path as text.
    #[must_use]
    pub fn display(&self) -> Display<'_> {
        self.0.display()
    }

    pub(crate) fn join(&self, name: impl AsRef<Path>) -> Self {
        Self(self.0.join(name))
    }

    /// For tests that inspect the store's files directly.
    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl From<PathBuf> for Place {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Place {
    fn from(path: &P) -> Self {
        Self(path.as_ref().to_path_buf())
    }
}
