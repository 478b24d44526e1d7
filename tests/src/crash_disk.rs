//! A disk that loses unsynced data: the crash file system in memory.
//!
//! [`CrashDisk`] executes every change on a real directory and records which changes are durable. At a chosen
//! call the power fails: that call and all later ones fail. Then [`CrashDisk::crash`] writes to a new
//! directory one of the states that the file system may have when it is mounted again.
//!
//! It permits every loss that POSIX permits. Everything that was synced is kept. A name that changed since
//! its directory was synced may have any of its versions, independently of other names: a rename may have
//! taken effect in one directory and not in the other. A file that was written since its last sync has its
//! old content, the whole new content, a beginning of it, or zeros; a change of mode may be lost. No order of
//! a journal's writes is assumed.
//!
//! Files that are not written through [`Disk`], such as the lock file, do not exist after a crash.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blobd_store::disk::{Change, Disk, KernelDisk, Root};

mod choices;
mod state;
mod tree;

pub use choices::CrashChoices;

use tree::Tree;

/// A kind of sync to omit, in order to check that a test detects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omission {
    /// `fsync` of files below this directory of the root.
    Files(&'static str),
    /// `fsync` of files that become blobs, in `staging/` and `partial/`. Their names are numbers.
    Blobs,
    /// `syncfs` through a transaction's directory.
    NewBlobs,
    /// `syncfs` through the root.
    Everything,
    /// `fsync` of this directory of the root and of all below it.
    Names(&'static str),
}

/// A disk that records which of its changes are durable.
#[derive(Debug)]
pub struct CrashDisk {
    root: PathBuf,
    omission: Option<Omission>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tree: Tree,
    /// The number of calls until the power fails, if it is to fail.
    power_for: Option<u64>,
    is_cut: bool,
}

impl CrashDisk {
    /// A disk for the store in `root`, an existing directory whose content is durable. Creates `shadow` on
    /// the same file system: every file has a second name there, which keeps its content when the first is
    /// removed.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn new(root: &Path, shadow: &Path) -> Self {
        fs::create_dir(shadow).unwrap();
        let tree = Tree::adopt(root, shadow);
        let state = State { tree, power_for: None, is_cut: false };
        Self { root: root.to_path_buf(), omission: None, state: Mutex::new(state) }
    }

    /// Omits a kind of sync: it succeeds and makes nothing durable.
    #[must_use]
    pub fn without(mut self, omission: Option<Omission>) -> Self {
        self.omission = omission;
        self
    }

    /// Makes the power fail after this many more calls.
    pub fn cut_after(&self, calls: u64) {
        self.lock().power_for = Some(calls);
    }

    /// Whether a call has failed because of the power cut.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.lock().is_cut
    }

    /// Makes the disk work again without any loss, as if only the process had died.
    pub fn restore(&self) {
        let mut state = self.lock();
        (state.power_for, state.is_cut) = (None, false);
    }

    /// Creates the directory `target` with a state that a power cut at this moment may leave. Unchanged files
    /// are hard links, so this disk and its directory must not be used afterwards.
    ///
    /// # Panics
    /// When that fails.
    pub fn crash(&self, choices: &mut CrashChoices, target: &Path) {
        state::lay_out(&self.lock().tree, choices, target);
    }

    /// Changes the disk and the recorded tree, unless the power has failed.
    fn call<T>(&self, change: impl FnOnce(&mut Tree) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.lock();
        match &mut state.power_for {
            Some(0) => {
                state.is_cut = true;
                return Err(io::Error::other("the power is cut"));
            }
            Some(calls) => *calls -= 1,
            None => {}
        }
        change(&mut state.tree)
    }

    /// Whether a sync is omitted.
    fn omits(&self, is_dir: bool, path: &Path) -> bool {
        match self.omission {
            Some(Omission::Files(part)) => !is_dir && path.starts_with(part),
            Some(Omission::Blobs) => {
                let name = path.file_name().and_then(|name| name.to_str());
                !is_dir && name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            }
            Some(Omission::Names(part)) => is_dir && path.starts_with(part),
            _ => false,
        }
    }

    fn omits_file_system(&self, directory: &File) -> bool {
        let descriptor = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let is_root = fs::read_link(descriptor).is_ok_and(|path| path == self.root);
        let kind = if is_root { Omission::Everything } else { Omission::NewBlobs };
        self.omission == Some(kind)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The disk of a test that has panicked is not used any more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does not call the kernel's syncs, which are not under test here.
impl Disk for CrashDisk {
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.create_dir(root, path)?;
            tree.dir_created(path);
            Ok(())
        })
    }

    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        self.call(|tree| {
            let file = KernelDisk.create_file(root, path, mode)?;
            tree.file_created(path);
            Ok(file)
        })
    }

    fn create_reflink(
        &self,
        root: &Root,
        path: &Path,
        size: u64,
        reflink: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
    ) -> io::Result<Option<File>> {
        self.call(|tree| {
            let file = KernelDisk.create_reflink(root, path, size, reflink)?;
            if file.is_some() {
                tree.file_created(path);
            }
            Ok(file)
        })
    }

    /// Every file has a second name in `shadow`, which does not count. Files with a second name in the store
    /// are refused, as by the kernel's disk.
    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        let content = change == Change::Content;
        self.call(|tree| match tree.names_of(path) {
            0 | 1 => File::options().read(true).write(content).open(self.root.join(path)),
            _ => KernelDisk.open_file(root, path, change),
        })
    }

    /// Allocates no space: zeroing the store's reserve would take most of a test's time.
    fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()> {
        self.call(|tree| {
            tree.about_to_write(path);
            file.set_len(size)
        })
    }

    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.call(|tree| {
            tree.about_to_write(path);
            KernelDisk.write_at(path, file, bytes, offset)
        })
    }

    fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.set_mode(path, file, mode)?;
            tree.mode_set(path, mode);
            Ok(())
        })
    }

    fn sync_file(&self, path: &Path, _file: &File) -> io::Result<()> {
        self.call(|tree| {
            if !self.omits(false, path) {
                tree.file_synced(path);
            }
            Ok(())
        })
    }

    fn sync_dir(&self, path: &Path, _directory: &File) -> io::Result<()> {
        self.call(|tree| {
            if !self.omits(true, path) {
                tree.dir_synced(path);
            }
            Ok(())
        })
    }

    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        self.call(|tree| {
            if !self.omits_file_system(directory) {
                tree.all_synced();
            }
            Ok(())
        })
    }

    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.rename(root, from, to)?;
            tree.renamed(from, to);
            Ok(())
        })
    }

    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.publish(root, from, to)?;
            tree.renamed(from, to);
            Ok(())
        })
    }

    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.remove_file(root, path)?;
            tree.removed(path);
            Ok(())
        })
    }

    fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.call(|tree| {
            KernelDisk.remove_dir(root, path)?;
            tree.removed(path);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a rename that is durable in the target directory, and not in the source directory.
    #[test]
    fn file_with_two_names_after_a_crash_is_one_file_and_is_not_opened_for_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        fs::create_dir(&before).unwrap();
        let (root, disk) = (Root::open(&before).unwrap(), CrashDisk::new(&before, &folder.path().join("0")));
        let (from, to) = (Path::new("from/1"), Path::new("to/1"));
        for directory in ["from", "to"] {
            disk.create_dir(&root, Path::new(directory)).unwrap();
        }
        disk.create_file(&root, from, 0o600).unwrap();
        disk.sync_file_system(&File::open(&before).unwrap()).unwrap();
        disk.rename(&root, from, to).unwrap();
        disk.open_file(&root, to, Change::Mode).unwrap();
        disk.sync_dir(Path::new("to"), &File::open(before.join("to")).unwrap()).unwrap();
        disk.crash(&mut CrashChoices::losing_all(), &after);

        let (root, disk) = (Root::open(&after).unwrap(), CrashDisk::new(&after, &folder.path().join("1")));
        for name in [from, to] {
            assert!(after.join(name).is_file(), "{name:?}");
            assert!(disk.open_file(&root, name, Change::Mode).is_err(), "{name:?}");
        }
        disk.remove_file(&root, from).unwrap();
        disk.open_file(&root, to, Change::Mode).unwrap();
    }
}
