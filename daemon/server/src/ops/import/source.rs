//! The files of an import, which the daemon does not trust to stay as they are.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{FileType, OFlags, fcntl_getfl};
use serde::{Deserialize, Serialize};

use crate::ingest::{FileSource, IngestError};
use crate::ops::OpError;

/// A file to import, which is inspected before and after.
pub trait ImportSource: FileSource {
    /// Returns the file's current metadata.
    fn inspect(&mut self) -> io::Result<FileFacts>;

    /// Selects the file to read: 0 is the model's, then come its sidecars. Fails if there is no such file.
    fn select(&mut self, number: usize) -> io::Result<()> {
        if number == 0 { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// Closes the files and frees the memory through which they are read. Nothing can be read after that.
    fn close(&mut self) {}

    /// Has the first `count` files stay available, so that each can be selected again. False if they are too many; then
    /// files can only be selected in order.
    fn keep(&mut self, count: usize) -> bool {
        count <= 1
    }
}

/// A file's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub struct FileFacts {
    /// Type and permissions, as in `stat`.
    pub mode: u32,
    pub size: u64,
    /// Modification time: seconds and nanoseconds.
    pub modified: (i64, i64),
    pub access: FileAccess,
}

/// How a file is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileAccess {
    /// It can be read at any offset.
    Readable,
    /// With `O_WRONLY`.
    WriteOnly,
    /// With `O_PATH`.
    PathOnly,
    /// With `O_DIRECT`, so that only aligned blocks can be read. The flag belongs to the open file, which is the
    /// client's too, so it is not changed here.
    Direct,
}

impl FileAccess {
    fn from_file(file: impl AsFd) -> io::Result<Self> {
        let flags = fcntl_getfl(file)?;
        Ok(match flags & OFlags::RWMODE {
            _ if flags.contains(OFlags::PATH) => Self::PathOnly,
            OFlags::WRONLY => Self::WriteOnly,
            _ if flags.contains(OFlags::DIRECT) => Self::Direct,
            _ => Self::Readable,
        })
    }
}

impl FileFacts {
    /// Reads the metadata of an open file.
    pub fn from_file(file: impl AsFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        let nanoseconds = i64::try_from(stat.st_mtime_nsec).unwrap_or_default();
        let (modified, access) = ((stat.st_mtime, nanoseconds), FileAccess::from_file(file)?);
        Ok(Self { mode: stat.st_mode, size, modified, access })
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == FileType::RegularFile
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// Inspects the file. Refuses anything but a regular file, because it could block or never end; of a stream, anything but a
/// pipe.
pub(super) fn inspect(source: &mut dyn ImportSource, name: &str) -> Result<FileFacts, OpError> {
    let inspected = source.inspect();
    let facts = inspected
        .map_err(|error| OpError::Ingest { name: name.to_owned(), source: IngestError::Source(error) })?;
    let is_stream = source.is_stream();
    let found = match facts.kind() {
        FileType::RegularFile if !is_stream => return readable(facts, name),
        FileType::Fifo if is_stream => return readable(facts, name),
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    };
    let expected = if is_stream { "a pipe" } else { "a regular file" };
    Err(OpError::NotAFile { name: name.to_owned(), expected, found })
}

fn readable(facts: FileFacts, name: &str) -> Result<FileFacts, OpError> {
    let found = match facts.access {
        FileAccess::Readable => return Ok(facts),
        FileAccess::WriteOnly => "one that is open for writing only (O_WRONLY)",
        FileAccess::PathOnly => "one that only names the file (O_PATH)",
        FileAccess::Direct => "one that bypasses the page cache (O_DIRECT)",
    };
    Err(OpError::NotReadable { name: name.to_owned(), found })
}

/// Refuses a file that is not as it was before it was read. Nobody reads the bytes of a stream a second time.
pub(super) fn refuse_changed(
    source: &mut dyn ImportSource,
    name: &str,
    before: FileFacts,
) -> Result<(), OpError> {
    if source.is_stream() {
        return Ok(());
    }
    let after = inspect(source, name)?;
    if (after.size, after.modified) == (before.size, before.modified) {
        return Ok(());
    }
    Err(OpError::Ingest { name: name.to_owned(), source: IngestError::Changed })
}
