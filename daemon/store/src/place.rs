//! Where something of the store is, for messages.

use std::path::{Display, Path, PathBuf};

/// Where something is, for messages alone: it can be shown, and nothing can be opened by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(PathBuf);

impl Place {
    /// The path as text.
    #[must_use]
    pub fn display(&self) -> Display<'_> {
        self.0.display()
    }

    /// The place of something in this directory.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> Self {
        Self(self.0.join(name))
    }

    /// The path, for tests that look at the store from outside.
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
