//! The state of one blob or recipe on disk.

use std::fs::File;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::disk::Root;
use crate::recipe_file::read_outline;
use crate::root::Directory;
use crate::{FileSystem, StoreError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlobFacts {
    pub(super) length: u64,
    pub(super) bytes_on_disk: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecipeFacts {
    pub(super) bytes_on_disk: u64,
    /// The blobs that it names, each once and in order; `None` when it cannot be read.
    pub(super) needs: Option<Vec<Digest>>,
}

impl BlobFacts {
    /// Reads the state of a blob in `blobs`, the directory of all of them; `None` if it does not exist.
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
    /// Reads the state of a recipe; `None` if there is none. An unreadable recipe is not an error.
    pub(super) fn read(
        root: &Root,
        file_system: FileSystem,
        file: Digest,
    ) -> Result<Option<Self>, StoreError> {
        let path = layout::recipe(file);
        let Some(status) = root.status(&path)? else { return Ok(None) };
        let read = |opened: File| read_outline(root, file, &opened);
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
