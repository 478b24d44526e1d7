//! A disk that forgets: the crash file system in memory.
//!
//! [`CrashDisk`] carries out every change on a real directory and keeps beside it what of it is
//! durable. At a chosen call the power fails: that call and all that follow fail. Then
//! [`CrashDisk::crash`] lays out, in a fresh directory, one of the states that the file system may
//! be in when it is mounted again.
//!
//! It is as unkind as POSIX allows. What was synced is there. Of a name that changed since its
//! directory was synced, any version may be there, each name by itself: a rename may have taken
//! effect in one directory and not in the other. A file that was written since it was synced has
//! its old content, all of the new, the beginning of it, or zeros; a change of mode may be lost.
//! Nothing is assumed of the order in which a journal writes.
//!
//! What does not go through [`Disk`], such as the lock file, is not there after a crash.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blobd_store::disk::{Change, Disk, KernelDisk, Root};

mod dice;
mod state;
mod tree;

pub use dice::Dice;

use tree::Tree;

/// A sync that is left out, to see that a test notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omission {
    /// `fsync` of files below this directory of the root.
    Files(&'static str),
    /// `fsync` of files that become blobs: their names are numbers, in `staging/` and in `partial/`.
    Blobs,
    /// `syncfs` through a transaction's directory.
    NewBlobs,
    /// `syncfs` through the root.
    Everything,
    /// `fsync` of this directory of the root and of all below it.
    Names(&'static str),
}

/// A disk that remembers what of it is durable.
#[derive(Debug)]
pub struct CrashDisk {
    root: PathBuf,
    omission: Option<Omission>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tree: Tree,
    /// How many more calls there is power for, if it is to fail.
    power_for: Option<u64>,
    is_cut: bool,
}

impl CrashDisk {
    /// A disk for the store in `root`, an existing directory. What is there now is durable. `shadow`
    /// is made, on the same file system: every file has a second name there, by which its content
    /// is found when the first is gone.
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

    /// Leaves out a kind of sync: it succeeds and makes nothing durable.
    #[must_use]
    pub fn without(mut self, omission: Option<Omission>) -> Self {
        self.omission = omission;
        self
    }

    /// Lets the power fail after so many further calls.
    pub fn cut_after(&self, calls: u64) {
        self.lock().power_for = Some(calls);
    }

    /// Whether a call has failed for want of power.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.lock().is_cut
    }

    /// Everything works again, and nothing was lost: it was the process that died.
    pub fn restore(&self) {
        let mut state = self.lock();
        (state.power_for, state.is_cut) = (None, false);
    }

    /// Lays out in `target`, a directory to be made, a state that may be found after a power cut at
    /// this moment. Unchanged files are links, so that neither this disk nor its directory is to be
    /// used after that.
    ///
    /// # Panics
    /// When that fails.
    pub fn crash(&self, dice: &mut Dice, target: &Path) {
        state::lay_out(&self.lock().tree, dice, target);
    }

    /// Does something to the disk and its books, if there is power.
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

    /// Whether a sync is one of those that are left out.
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
        // A test that has failed may have died anywhere; its disk is looked at no more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kernel's own syncs are left out: whether they work is not the question here.
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

    /// The name that every file has in `shadow` is this disk's own doing. Files with a further name in the
    /// store are refused, as the kernel's disk does.
    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        let content = change == Change::Content;
        self.call(|tree| match tree.names_of(path) {
            0 | 1 => File::options().read(true).write(content).open(self.root.join(path)),
            _ => KernelDisk.open_file(root, path, change),
        })
    }

    /// Takes no room: zeroing that of the store's reserve would be most of what a test does.
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

    /// A rename that is durable in the directory that it led to, and not in the one that it left.
    #[test]
    fn file_that_is_found_under_two_names_is_one_file_and_is_not_opened_for_a_change() {
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
        disk.crash(&mut Dice::losing(), &after);

        let (root, disk) = (Root::open(&after).unwrap(), CrashDisk::new(&after, &folder.path().join("1")));
        for name in [from, to] {
            assert!(after.join(name).is_file(), "{name:?}");
            assert!(disk.open_file(&root, name, Change::Mode).is_err(), "{name:?}");
        }
        disk.remove_file(&root, from).unwrap();
        disk.open_file(&root, to, Change::Mode).unwrap();
    }
}
