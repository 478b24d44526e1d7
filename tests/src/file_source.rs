//! Imports of a file that this process has open; the daemon reads its clients' files in another process.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd::ops::{self, FileFacts, ImportSource, OpError};
use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::response::Imported;
use blobd_store::Store;

/// Imports a file from its start. Setting `cancelled` stops the import.
///
/// # Errors
/// What a client would be told.
pub fn import_file(
    store: &Arc<Store>,
    params: &ImportParams,
    file: &File,
    cancelled: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Imported, OpError> {
    ops::import(store, params, &mut FileSource { file, offset: 0, cancelled }, progress)
}

/// Reads at its own offset, because the file offset is shared with the caller.
struct FileSource<'f> {
    file: &'f File,
    offset: u64,
    cancelled: &'f AtomicBool,
}

impl Read for FileSource<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("the client that asked for this import has gone"));
        }
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset = self.offset.saturating_add(read as u64);
        Ok(read)
    }
}

impl ImportSource for FileSource<'_> {
    fn inspect(&mut self) -> io::Result<FileFacts> {
        FileFacts::of(self.file)
    }
}
