//! Names of what a store contains, for the completion of words in shells.
//!
//! The store is not opened: nothing is created, locked or written, and another process may have it open. What cannot
//! be read is left out, so nothing may be decided from the result.

use std::path::Path;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use crate::StoreError;
use crate::content::downloads;
use crate::lock_file::{self, LockHolder};
use crate::names::{tags, trash};
use crate::root::Root;

/// A store that is only looked at.
#[derive(Debug)]
pub struct Glance {
    root: Root,
}

impl Glance {
    /// The store at `root`.
    ///
    /// # Errors
    /// [`StoreError::Io`] if there is no directory, or none that this user may read.
    pub fn at(root: &Path) -> Result<Self, StoreError> {
        Root::open(root).map(|root| Self { root })
    }

    /// Whether a process would find neither a store here nor the files of anything else.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root.find_directory(Path::new("")).ok().flatten().is_some_and(|directory| directory.is_empty())
    }

    /// The process that last had the store open. It may have ended.
    #[must_use]
    pub fn holder(&self) -> Option<LockHolder> {
        let file = self.root.find_file(Path::new(layout::LOCK_FILE)).ok()??;
        lock_file::recorded_holder(&file)
    }

    /// The models, in order.
    #[must_use]
    pub fn models(&self) -> Vec<Reference> {
        tags::names(&self.root)
    }

    /// The models in the trash, in order.
    #[must_use]
    pub fn trash(&self) -> Vec<Reference> {
        trash::names(&self.root)
    }

    /// What the unfinished downloads are of, in order.
    #[must_use]
    pub fn downloads(&self) -> Vec<String> {
        downloads::names(&self.root)
    }
}
