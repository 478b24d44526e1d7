//! The files of an import, which the daemon does not trust to stay as they are.

use std::io;
use std::os::fd::AsFd;

use blobd_store::StoreError;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::OpError;
use crate::ingest::{FileSource, IngestError};

/// A file to import, which is inspected before and after.
pub trait ImportSource: FileSource {
    /// Returns the file's current metadata.
    fn inspect(&mut self) -> io::Result<FileFacts>;

    /// From now on, this source is another of the files that it was made of: 0 is the model's, then come its sidecars.
    ///
    /// # Errors
    /// When it has no such file.
    fn select(&mut self, number: usize) -> io::Result<()> {
        if number == 0 { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}

/// A file's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Type and permissions, as in `stat`.
    pub mode: u32,
    /// Its length in bytes.
    pub size: u64,
    /// Modification time: seconds and nanoseconds.
    pub modified: (i64, i64),
}

impl FileFacts {
    /// Reads the metadata of an open file.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        let nanoseconds = i64::try_from(stat.st_mtime_nsec).unwrap_or_default();
        Ok(Self { mode: stat.st_mode, size, modified: (stat.st_mtime, nanoseconds) })
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// Inspects the file and refuses anything but a regular file, which could block or never end.
pub(super) fn inspect(source: &mut dyn ImportSource, name: &str) -> Result<FileFacts, OpError> {
    let facts = source.inspect().map_err(StoreError::io("inspect", name))?;
    let found = match facts.kind() {
        FileType::RegularFile => return Ok(facts),
        FileType::Directory => "a directory",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    };
    Err(OpError::NotAFile { name: name.to_owned(), found })
}

/// Refuses a file that is not as it was before it was read.
pub(super) fn refuse_changed(
    source: &mut dyn ImportSource,
    name: &str,
    before: FileFacts,
) -> Result<(), OpError> {
    let after = inspect(source, name)?;
    if (after.size, after.modified) == (before.size, before.modified) {
        return Ok(());
    }
    Err(OpError::Ingest { name: name.to_owned(), source: IngestError::Changed })
}
