//! Imports of files that this process has open; the daemon reads its clients' files in another process.
//!
//! Few file systems support reflinks, so a file is copied instead, without a call of the store's disk.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::fd::BorrowedFd;
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
    import_files(store, params, &[file], cancelled, progress)
}

/// Imports the listed files.
///
/// # Errors
/// What a client would be told.
pub fn import_files(
    store: &Arc<Store>,
    params: &ImportParams,
    files: &[&File],
    cancelled: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Imported, OpError> {
    let mut source = FileSource::new(files, cancelled);
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
    let files = [&file];
    ingest_file(ingest, &mut FileSource::new(&files, &cancelled), bytes.len() as u64, &mut |_, _| ())
}

/// An open file with this content.
pub fn in_memory(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create("model", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file
}

struct FileSource<'f> {
    files: &'f [&'f File],
    selected: &'f File,
    requested: VecDeque<Range<u64>>,
    cancelled: &'f AtomicBool,
}

impl<'f> FileSource<'f> {
    fn new(files: &'f [&'f File], cancelled: &'f AtomicBool) -> Self {
        Self { files, selected: files[0], requested: VecDeque::new(), cancelled }
    }
}

impl blobd_server::ingest::FileSource for FileSource<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.requested.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        self.check_wanted()?;
        let Range { start, end } = self.requested.pop_front().unwrap_or_default();
        // Reads at its own offset, because the file offset is shared with the caller.
        let mut bytes = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        let read = self.selected.read_at(&mut bytes, start)?;
        bytes.truncate(read);
        Ok(bytes.into())
    }

    fn reflink_to(&mut self, target: BorrowedFd<'_>) -> io::Result<bool> {
        let mut bytes = vec![0; usize::try_from(self.selected.metadata()?.len()).map_err(io::Error::other)?];
        self.selected.read_exact_at(&mut bytes, 0)?;
        File::from(target.try_clone_to_owned()?).write_all_at(&bytes, 0)?;
        Ok(true)
    }

    fn check_wanted(&self) -> io::Result<()> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the client of this import has disconnected")),
            false => Ok(()),
        }
    }
}

impl ImportSource for FileSource<'_> {
    fn inspect(&mut self) -> io::Result<FileFacts> {
        FileFacts::from_file(self.selected)
    }

    fn select(&mut self, number: usize) -> io::Result<()> {
        self.selected = self.files.get(number).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(())
    }
}
