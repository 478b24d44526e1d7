//! The file that an export writes, or a device. A file has no name until it is complete, so that an export that fails or
//! is interrupted leaves nothing.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, fallocate, linkat, openat, renameat_with,
};
use rustix::io::Errno;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::{ErrorBody, ErrorCode, file_error, usage};

/// The temporary name of the file, if it has one. Shared with the signal handler, which removes the file.
#[derive(Clone, Debug, Default)]
pub struct TemporaryName(Arc<Mutex<Option<PathBuf>>>);

impl TemporaryName {
    /// Removes the file with this name, and blocks every thread that would create another.
    pub fn remove_and_block(&self) {
        let mut name = self.lock();
        remove(&mut name);
        // Never unlocked: the process ends, and other threads must not create a name before it does.
        std::mem::forget(name);
    }

    fn lock(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(name: &mut Option<PathBuf>) {
    if let Some(path) = name.take() {
        // Fails only if the file or its directory has been removed already.
        let _ = fs::remove_file(path);
    }
}

/// What happens to a file that has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and creating the new one fails.
    Keep,
    /// The new file takes its name.
    Replace,
}

/// A new file that gets its name when it is complete, or an existing device or pipe.
#[derive(Debug)]
pub enum Target {
    /// A new file.
    File(Box<OutputFile>),
    /// Written to directly: a rename would replace it.
    Device(File),
}

impl Target {
    /// Creates a file for `size` bytes, so that an export that does not fit fails before it writes.
    pub fn create(path: &Path, size: u64, existing: Existing, temporary: &TemporaryName) -> io::Result<Self> {
        // Follow symbolic links, such as `/dev/stdout`.
        let target = path.canonicalize().unwrap_or_else(|_new| path.to_path_buf());
        if target.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return File::options().write(true).open(&target).map(Self::Device);
        }
        Self::from_file(OutputFile::create(&target, existing, temporary)?, size)
    }

    /// For a new file; reserves disk space for `size` bytes.
    pub fn from_file(output: OutputFile, size: u64) -> io::Result<Self> {
        output.reserve(size)?;
        Ok(Self::File(Box::new(output)))
    }

    /// Makes the content durable.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(output) => output.sync(),
            Self::Device(_) => Ok(()),
        }
    }

    /// The file to write to.
    pub const fn file(&self) -> &File {
        match self {
            Self::File(output) => output.file(),
            Self::Device(file) => file,
        }
    }

    /// Gives the file its name. A device has its name already.
    pub fn publish(self) -> io::Result<()> {
        match self {
            Self::File(output) => output.publish(),
            Self::Device(_) => Ok(()),
        }
    }
}

/// Refuses to write binary data to a terminal, such as with `-o -` or `-o /dev/stdout`.
pub fn refuse_terminal(path: Option<&Path>) -> Result<(), ErrorBody> {
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
    let refused = usage(format!("{name} is a terminal, and the data is not text"));
    Err(refused.with_hint("redirect it, give a file with -o, or write it anyway with --force"))
}

/// The error of writing to a file, with the next step if the disk is full.
pub fn write_error(path: &Path, error: &io::Error) -> ErrorBody {
    let name = path.display().to_string();
    match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let body = ErrorBody::new(ErrorCode::Busy, format!("{name}: exists already"));
            body.with_hint("--force replaces it; -o names another file")
        }
        _ => file_error(&name, error),
    }
}

/// A new file under a temporary name. Dropping it before it is published deletes it.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    target: PathBuf,
    existing: Existing,
    old: Option<Metadata>,
    temporary: TemporaryName,
}

impl OutputFile {
    /// Creates the file beside its target.
    pub fn create(target: &Path, existing: Existing, temporary: &TemporaryName) -> io::Result<Self> {
        Self::create_in(directory_of(target), target, existing, temporary)
    }

    /// Creates a file without a name (`O_TMPFILE`) in a directory on the file system of `target`, or with a temporary
    /// name if the file system does not support that.
    pub fn create_in(
        directory: &Path,
        target: &Path,
        existing: Existing,
        temporary: &TemporaryName,
    ) -> io::Result<Self> {
        let old = fs::symlink_metadata(target).ok();
        // An empty file has nothing to lose: `mktemp` and a shell's redirection create some.
        let is_empty = old.as_ref().is_some_and(|old| old.is_file() && old.len() == 0);
        let existing = if is_empty { Existing::Replace } else { existing };
        if old.is_some() && existing == Existing::Keep {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let old = old.filter(Metadata::is_file);
        // Other users must not read it before it has the owner and mode of the file that it replaces.
        let mode = if old.is_some() { 0o600 } else { 0o666 };
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = match openat(CWD, directory, flags, Mode::from_raw_mode(mode)) {
            Ok(fd) => File::from(fd),
            // The kernel or the file system does not support O_TMPFILE.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT | Errno::NOSYS) => {
                create_named(directory, mode, temporary)?
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(Self { file, target: target.to_path_buf(), existing, old, temporary: temporary.clone() })
    }

    /// The file to write to.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Allocates the space in advance if the file system supports it, so that an export that does not fit
    /// fails before it writes.
    pub fn reserve(&self, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::FBIG) => Err(Errno::NOSPC.into()),
            Err(errno @ (Errno::NOSPC | Errno::DQUOT)) => Err(errno.into()),
            _ => Ok(()),
        }
    }

    /// Gives the file the owner and mode of the one that it will replace, and syncs it.
    pub fn sync(&self) -> io::Result<()> {
        if let Some(old) = &self.old {
            // Only root may change the owner; otherwise this user owns the new file.
            let _ = fchown(&self.file, Some(old.uid()), None);
            let _ = fchown(&self.file, None, Some(old.gid()));
            self.file.set_permissions(Permissions::from_mode(old.mode() & 0o777))?;
        }
        self.file.sync_all()
    }

    /// Syncs the content and gives the file its name. An existing file is replaced, if that was requested, and its
    /// mode and, where this user may set them, owner and group are kept. If this fails, the existing file is
    /// unchanged.
    pub fn publish(self) -> io::Result<()> {
        self.sync()?;
        // Locked: the signal handler waits until the file has its final name.
        let mut name = self.temporary.lock();
        if name.is_none() {
            if self.old.is_none() && self.link(&self.target)? {
                return Ok(());
            }
            if self.existing == Existing::Keep {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            *name = Some(self.link_temporary()?);
        }
        let renamed = match name.as_ref() {
            Some(temporary) if self.existing == Existing::Keep => rename_to_new(temporary, &self.target),
            Some(temporary) => fs::rename(temporary, &self.target),
            None => Ok(()),
        };
        if renamed.is_ok() {
            *name = None;
        }
        remove(&mut name);
        renamed
    }

    /// Gives the file a name; returns false if the name is in use.
    fn link(&self, name: &Path) -> io::Result<bool> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let linked = linkat(CWD, own, CWD, name, AtFlags::SYMLINK_FOLLOW);
        // Without /proc. Since Linux 6.10 unprivileged users may do this with their own files.
        let linked = match linked {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::XDEV) => {
                linkat(self.file.as_fd(), "", CWD, name, AtFlags::EMPTY_PATH)
            }
            linked => linked,
        };
        match linked {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn link_temporary(&self) -> io::Result<PathBuf> {
        loop {
            let name = temporary_name(directory_of(&self.target));
            if self.link(&name)? {
                return Ok(name);
            }
        }
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        remove(&mut self.temporary.lock());
    }
}

fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not support the flag.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => link_to_new(from, to),
        renamed => Ok(renamed?),
    }
}

/// A hard link replaces nothing either.
fn link_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match linkat(CWD, from, CWD, to, AtFlags::empty()) {
        // The file system, such as FAT, supports no links. Another program may then create the name in between.
        Err(Errno::PERM | Errno::NOSYS | Errno::NOTSUP) if fs::symlink_metadata(to).is_err() => {
            fs::rename(from, to)
        }
        Err(Errno::PERM | Errno::NOSYS | Errno::NOTSUP) => Err(io::ErrorKind::AlreadyExists.into()),
        linked => linked.map_err(io::Error::from).and_then(|()| fs::remove_file(from)),
    }
}

fn create_named(directory: &Path, mode: u32, temporary: &TemporaryName) -> io::Result<File> {
    let mut name = temporary.lock();
    loop {
        let path = temporary_name(directory);
        match File::options().write(true).create_new(true).mode(mode).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                *name = Some(path);
                return Ok(file);
            }
        }
    }
}

fn directory_of(target: &Path) -> &Path {
    target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary_name(directory: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!(".blobd-export-{}-{number}", std::process::id());
    directory.join(OsString::from(name))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn write(target: &Path, has_name: bool) -> OutputFile {
        write_over(target, Existing::Replace, has_name)
    }

    fn write_over(target: &Path, existing: Existing, has_name: bool) -> OutputFile {
        let temporary = TemporaryName::default();
        let mut output = OutputFile::create(target, existing, &temporary).unwrap();
        if has_name && temporary.lock().is_none() {
            output.file = create_named(directory_of(target), 0o600, &temporary).unwrap();
        }
        output.file().write_all(b"new").unwrap();
        output
    }

    fn names(folder: &Path) -> Vec<OsString> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn complete_file_gets_its_name_and_the_mode_of_the_file_that_it_replaces() {
        for has_name in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("m.gguf");
            let output = write(&target, has_name);
            assert!(!target.exists());
            output.publish().unwrap();
            fs::set_permissions(&target, Permissions::from_mode(0o640)).unwrap();
            fs::write(&target, "old").unwrap();
            write(&target, has_name).publish().unwrap();
            assert_eq!(fs::read(&target).unwrap(), b"new");
            assert_eq!(fs::metadata(&target).unwrap().mode() & 0o7777, 0o640);
            assert_eq!(names(folder.path()), ["m.gguf"]);
        }
    }

    #[test]
    fn unpublished_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for has_name in [false, true] {
            drop(write(&folder.path().join("m.gguf"), has_name));
            assert_eq!(names(folder.path()), [""; 0]);
            let output = write(&folder.path().join("m.gguf"), has_name);
            // As the signal handler does.
            output.temporary.clone().remove_and_block();
            assert_eq!(names(folder.path()), [""; 0]);
            std::mem::forget(output);
        }
    }

    #[test]
    fn file_that_was_created_during_the_export_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("m.gguf");
        let output = write(&target, false);
        fs::write(&target, "somebody else's").unwrap();
        output.publish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }

    #[test]
    fn existing_file_is_kept_unless_it_is_to_be_replaced() {
        for has_name in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("m.gguf");
            let output = write_over(&target, Existing::Keep, has_name);
            fs::write(&target, "somebody else's").unwrap();
            assert_eq!(output.publish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            let again = OutputFile::create(&target, Existing::Keep, &TemporaryName::default());
            assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&target).unwrap(), b"somebody else's");
            assert_eq!(names(folder.path()), ["m.gguf"]);
            fs::remove_file(&target).unwrap();
            write_over(&target, Existing::Keep, has_name).publish().unwrap();
            assert_eq!(fs::read(&target).unwrap(), b"new");
        }
    }
}
