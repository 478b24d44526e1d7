//! Imports of a file that this process has open; the daemon reads its clients' files in another process.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::ImportParams;
use blobd_server::ingest::{IngestError, IngestedFile, ingest_file};
use blobd_server::ops::{self, FileFacts, ImportSource, OpError};
use blobd_store::{Ingest, Store};
use bytes::Bytes;
use rustix::fs::{MemfdFlags, memfd_create};

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
    let mut source = FileSource { file, requested: VecDeque::new(), cancelled };
    ops::import(
        store,
        ops::Requester::own(),
        &ops::CallerPolicy::default(),
        params,
        &mut source,
        (progress, &std::sync::Arc::default()),
    )
}

/// Ingests a file with this content.
///
/// # Errors
/// As [`ingest_file`].
pub fn ingest_bytes(ingest: &mut Ingest, bytes: &[u8]) -> Result<IngestedFile, IngestError> {
    let (file, cancelled) = (in_memory(bytes), AtomicBool::new(false));
    let mut source = FileSource { file: &file, requested: VecDeque::new(), cancelled: &cancelled };
    ingest_file(ingest, &mut source, bytes.len() as u64, &mut |_, _| ())
}

/// An open file with this content.
pub fn in_memory(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create("model", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file
}

struct FileSource<'f> {
    file: &'f File,
    requested: VecDeque<Range<u64>>,
    cancelled: &'f AtomicBool,
}

impl blobd_server::ingest::FileSource for FileSource<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.requested.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("the client of this import has disconnected"));
        }
        let Range { start, end } = self.requested.pop_front().unwrap_or_default();
        // Reads at its own offset, because the file offset is shared with the caller.
        let mut bytes = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        let read = self.file.read_at(&mut bytes, start)?;
        bytes.truncate(read);
        Ok(bytes.into())
    }
}

impl ImportSource for FileSource<'_> {
    fn inspect(&mut self) -> io::Result<FileFacts> {
        FileFacts::from_file(self.file)
    }
}
