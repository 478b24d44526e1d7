//! The file that an export writes: it has no name until it is complete, so nothing is left of an
//! export that fails or is interrupted.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, linkat, openat};
use rustix::io::Errno;

/// The temporary name that a file has now, if it has one: whoever ends the process removes it.
#[derive(Clone, Debug, Default)]
pub(super) struct TemporaryName(Arc<Mutex<Option<PathBuf>>>);

impl TemporaryName {
    /// Removes the file of this name and lets none be made any more.
    pub(super) fn remove_for_good(&self) {
        let mut name = self.lock();
        remove(&mut name);
        // Never given back: the process ends, and whoever would make a name waits.
        std::mem::forget(name);
    }

    fn lock(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(name: &mut Option<PathBuf>) {
    if let Some(path) = name.take() {
        // It is gone, or its directory is: there is nobody to tell.
        let _ = fs::remove_file(path);
    }
}

/// A file on its way to a name.
#[derive(Debug)]
pub(super) struct OutputFile {
    file: File,
    target: PathBuf,
    /// What is there under that name and is to be replaced.
    old: Option<Metadata>,
    temporary: TemporaryName,
}

impl OutputFile {
    /// Makes a file without a name in the directory of `target`, or one with a temporary name where the
    /// file system has no such files.
    ///
    /// # Errors
    /// When none can be made there.
    pub(super) fn create(target: &Path, temporary: &TemporaryName) -> io::Result<Self> {
        let old = fs::symlink_metadata(target).ok().filter(Metadata::is_file);
        // What replaces a file is nobody else's until it has that file's owner and mode.
        let mode = if old.is_some() { 0o600 } else { 0o666 };
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = match openat(CWD, directory_of(target), flags, Mode::from_raw_mode(mode)) {
            Ok(fd) => File::from(fd),
            // The kernel, or the file system, has none.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT | Errno::NOSYS) => {
                create_named(target, mode, temporary)?
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(Self { file, target: target.to_path_buf(), old, temporary: temporary.clone() })
    }

    /// What is written to.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Takes the room for so many bytes at once, where the file system can: an export that does not fit
    /// fails before it writes.
    ///
    /// # Errors
    /// When there is no such room.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::FBIG) => Err(Errno::NOSPC.into()),
            Err(errno @ (Errno::NOSPC | Errno::DQUOT)) => Err(errno.into()),
            _ => Ok(()),
        }
    }

    /// Makes the content durable and gives the file its name, in place of what had it before; owner and
    /// mode of that are kept as far as this user may.
    ///
    /// # Errors
    /// Those of the disk; the old file is there then.
    pub(super) fn publish(self) -> io::Result<()> {
        if let Some(old) = &self.old {
            // A user who may not give files away owns the new one.
            let _ = fchown(&self.file, Some(old.uid()), None);
            let _ = fchown(&self.file, None, Some(old.gid()));
            self.file.set_permissions(Permissions::from_mode(old.mode() & 0o777))?;
        }
        self.file.sync_all()?;
        // A signal that ends the process waits until the name is the final one.
        let mut name = self.temporary.lock();
        if name.is_none() {
            if self.old.is_none() && self.link(&self.target)? {
                return Ok(());
            }
            *name = Some(self.link_temporary()?);
        }
        let renamed = match name.as_ref() {
            Some(temporary) => fs::rename(temporary, &self.target),
            None => Ok(()),
        };
        if renamed.is_ok() {
            *name = None;
        }
        remove(&mut name);
        renamed
    }

    /// Gives the file a name; says whether that was free.
    fn link(&self, name: &Path) -> io::Result<bool> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let linked = linkat(CWD, own, CWD, name, AtFlags::SYMLINK_FOLLOW);
        // Without /proc; a user may do that with a file of their own since Linux 6.10.
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
            let name = temporary_name(&self.target);
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

fn create_named(target: &Path, mode: u32, temporary: &TemporaryName) -> io::Result<File> {
    let mut name = temporary.lock();
    loop {
        let path = temporary_name(target);
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

/// Another name in the same directory each time.
fn temporary_name(target: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!(".blobd-export-{}-{number}", std::process::id());
    directory_of(target).join(OsString::from(name))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn write(target: &Path, has_name: bool) -> OutputFile {
        let temporary = TemporaryName::default();
        let mut output = OutputFile::create(target, &temporary).unwrap();
        if has_name && temporary.lock().is_none() {
            output.file = create_named(target, 0o600, &temporary).unwrap();
        }
        output.file().write_all(b"new").unwrap();
        output
    }

    fn names(folder: &Path) -> Vec<OsString> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn file_gets_its_name_when_it_is_complete_and_replaces_one_with_its_mode() {
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
    fn file_that_is_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for has_name in [false, true] {
            drop(write(&folder.path().join("m.gguf"), has_name));
            assert_eq!(names(folder.path()), [""; 0]);
            let output = write(&folder.path().join("m.gguf"), has_name);
            // As a signal does.
            output.temporary.clone().remove_for_good();
            assert_eq!(names(folder.path()), [""; 0]);
            std::mem::forget(output);
        }
    }

    #[test]
    fn file_that_appeared_meanwhile_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("m.gguf");
        let output = write(&target, false);
        fs::write(&target, "somebody else's").unwrap();
        output.publish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }
}
