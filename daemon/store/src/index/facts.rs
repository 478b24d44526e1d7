//! What the disk says about one blob or recipe.

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::disk::Root;
use crate::outlines::read_outline;
use crate::root::Directory;
use crate::{FileSystem, StoreError};

/// What a blob is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlobFacts {
    /// Its length in bytes.
    pub(super) length: u64,
    /// What it takes on disk in bytes.
    pub(super) bytes_on_disk: u64,
}

/// What a recipe is on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecipeFacts {
    /// What its own file takes on disk in bytes.
    pub(super) bytes_on_disk: u64,
    /// The blobs that it names, each once and in order; `None` when it cannot be read.
    pub(super) needs: Option<Vec<Digest>>,
}

impl BlobFacts {
    /// Looks at a blob in `blobs`, the directory of all of them; `None` if it is not there.
    pub(super) fn read(
        blobs: &Directory,
        file_system: FileSystem,
        digest: Digest,
    ) -> Result<Option<Self>, StoreError> {
        let status = blobs.status(layout::blob_name(digest))?;
        Ok(status
            .map(|status| Self { length: status.len(), bytes_on_disk: file_system.bytes_on_disk(&status) }))
    }
}

impl RecipeFacts {
    /// Reads the recipe of a file; `None` if there is none.
    ///
    /// # Errors
    /// [`StoreError::Io`] when it cannot be inspected. That it cannot be read is a fact.
    pub(super) fn read(
        root: &Root,
        file_system: FileSystem,
        file: Digest,
    ) -> Result<Option<Self>, StoreError> {
        let path = layout::recipe(file);
        let Some(status) = root.status(&path)? else { return Ok(None) };
        let read = |opened| read_outline(root, file, opened);
        let needs = match root.find_file(&path).and_then(|opened| opened.map(read).transpose()) {
            Ok(Some(outline)) => Some(outline.digests().to_vec()),
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::warn!("{error}");
                None
            }
        };
        Ok(Some(Self { bytes_on_disk: file_system.bytes_on_disk(&status), needs }))
    }
}
