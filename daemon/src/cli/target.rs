//! Where an export writes a file.

use std::fs::File;
use std::io;
use std::path::Path;

use super::output_file::{OutputFile, TemporaryName};

/// A new file that gets its name when it is complete, or an existing device or pipe.
#[derive(Debug)]
pub(super) enum Target {
    File(Box<OutputFile>),
    /// Written to directly: a rename would replace it.
    Device(File),
}

impl Target {
    /// Creates a file for `size` bytes, so that an export that does not fit fails before it writes.
    pub(super) fn create(path: &Path, size: u64, temporary: &TemporaryName) -> io::Result<Self> {
        // Follow symbolic links, such as `/dev/stdout`.
        let target = path.canonicalize().unwrap_or_else(|_new| path.to_path_buf());
        if target.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return File::options().write(true).open(&target).map(Self::Device);
        }
        let output = OutputFile::create(&target, temporary)?;
        output.reserve(size)?;
        Ok(Self::File(Box::new(output)))
    }

    pub(super) const fn file(&self) -> &File {
        match self {
            Self::File(output) => output.file(),
            Self::Device(file) => file,
        }
    }

    /// Gives a file its name.
    pub(super) fn publish(self) -> io::Result<()> {
        match self {
            Self::File(output) => output.publish(),
            Self::Device(_) => Ok(()),
        }
    }
}
