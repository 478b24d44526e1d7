//! Opens files named by a configuration or a user, without blocking: opening a FIFO that has no writer would block
//! forever.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file for reading.
///
/// # Errors
/// Those of `open`, and if it is not a regular file. A character device, such as `/dev/null`, counts as one.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() || kind.is_char_device() {
        true => Ok(file),
        false => Err(io::Error::other("wrong kind of file: expected a regular file")),
    }
}

/// The first bytes of a regular file, at most `limit` of them.
///
/// # Errors
/// As [`open_regular`], and those of `read`.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_regular(path)?.take(limit).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn other_kinds_of_files_are_refused_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
        for name in ["", "fifo"] {
            let error = read_regular(&folder.path().join(name), 9).unwrap_err();
            assert_eq!(error.to_string(), "wrong kind of file: expected a regular file", "{name}");
        }
        assert!(read_regular(&folder.path().join("socket"), 9).is_err());
        assert_eq!(read_regular(Path::new("/dev/null"), 9).unwrap(), b"");
        std::fs::write(folder.path().join("file"), "0123456789").unwrap();
        assert_eq!(read_regular(&folder.path().join("file"), 9).unwrap(), b"012345678");
    }
}
