//! Where an export writes a file.

use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};

use super::output_file::{Existing, OutputFile, TemporaryName};
use super::{file_error, usage};

/// A new file that gets its name when it is complete, or an existing device or pipe.
#[derive(Debug)]
pub(super) enum Target {
    File(Box<OutputFile>),
    /// Written to directly: a rename would replace it.
    Device(File),
}

impl Target {
    /// Creates a file for `size` bytes, so that an export that does not fit fails before it writes.
    pub(super) fn create(
        path: &Path,
        size: u64,
        existing: Existing,
        temporary: &TemporaryName,
    ) -> io::Result<Self> {
        // Follow symbolic links, such as `/dev/stdout`.
        let target = path.canonicalize().unwrap_or_else(|_new| path.to_path_buf());
        if target.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return File::options().write(true).open(&target).map(Self::Device);
        }
        Self::of_file(OutputFile::create(&target, existing, temporary)?, size)
    }

    /// A file that has space for `size` bytes.
    pub(super) fn of_file(output: OutputFile, size: u64) -> io::Result<Self> {
        output.reserve(size)?;
        Ok(Self::File(Box::new(output)))
    }

    /// Makes the content of a file durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(output) => output.sync(),
            Self::Device(_) => Ok(()),
        }
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

/// Refuses to write bytes that are no text to a terminal, such as with `-o -` or `-o /dev/stdout`.
pub(super) fn refuse_terminal(path: Option<&Path>) -> Result<(), ErrorBody> {
    let path = path.filter(|path| *path != Path::new("-"));
    let (name, is_terminal) = match path {
        None => ("standard output".to_owned(), io::stdout().is_terminal()),
        Some(path) => {
            let is_device = path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir());
            // Opening a pipe would wait for its reader.
            let is_pipe = path.metadata().is_ok_and(|found| found.file_type().is_fifo());
            let device =
                if is_device && !is_pipe { File::options().write(true).open(path).ok() } else { None };
            (path.display().to_string(), device.is_some_and(|device| device.is_terminal()))
        }
    };
    if !is_terminal {
        return Ok(());
    }
    let refused = usage(format!("{name} is a terminal, and the data is no text"));
    Err(refused.with_hint("redirect it, give a file with -o, or write it all the same with --force"))
}

/// The error for a file that exists and must not be replaced.
pub(super) fn write_error(path: &Path, error: &io::Error) -> ErrorBody {
    let name = path.display().to_string();
    match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let body = ErrorBody::new(ErrorCode::Busy, format!("{name}: exists already"));
            body.with_hint("--force replaces it; -o names another file")
        }
        _ => file_error(&name, error),
    }
}
