//! A disk with chosen faults: the n-th call, or the n-th call of one kind, fails once or from then on.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blobd_store::disk::{Change, Disk, KernelDisk, Root};
use rustix::io::Errno;

/// The calls of a [`Disk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "they are the trait's own names")]
pub enum Call {
    CreateDir,
    CreateFile,
    CreateReflink,
    OpenFile,
    Reserve,
    WriteAt,
    SetMode,
    SyncFile,
    SyncDir,
    SyncFileSystem,
    Rename,
    Publish,
    RemoveFile,
    RemoveDir,
}

impl Call {
    /// Whether its failure means that data is lost.
    #[must_use]
    pub const fn is_sync(self) -> bool {
        matches!(self, Self::SyncFile | Self::SyncDir | Self::SyncFileSystem)
    }
}

/// Which call fails, and how.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The number of calls that succeed before.
    pub after: u64,
    /// Only calls of this kind count and fail.
    pub only: Option<Call>,
    /// The error.
    pub errno: Errno,
    /// Whether all later calls fail, too.
    pub stays: bool,
}

/// The kernel's disk with faults.
#[derive(Debug, Default)]
pub struct FaultyDisk(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    fault: Option<Fault>,
    /// The calls that have failed.
    failed: Vec<Call>,
}

impl FaultyDisk {
    /// Sets a fault; calls are counted from now on.
    pub fn arm(&self, fault: Fault) {
        *self.lock() = State { fault: Some(fault), failed: Vec::new() };
    }

    /// Removes the fault; returns the calls that have failed.
    pub fn disarm(&self) -> Vec<Call> {
        std::mem::take(&mut *self.lock()).failed
    }

    fn check(&self, call: Call) -> io::Result<()> {
        let mut state = self.lock();
        let Some(fault) = &mut state.fault else { return Ok(()) };
        if fault.only.is_some_and(|only| only != call) {
            return Ok(());
        }
        if fault.after > 0 {
            fault.after -= 1;
            return Ok(());
        }
        let Fault { errno, stays, .. } = *fault;
        if !stays {
            state.fault = None;
        }
        state.failed.push(call);
        Err(errno.into())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for FaultyDisk {
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.check(Call::CreateDir)?;
        KernelDisk.create_dir(root, path)
    }

    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        self.check(Call::CreateFile)?;
        KernelDisk.create_file(root, path, mode)
    }

    fn create_reflink(
        &self,
        root: &Root,
        path: &Path,
        size: u64,
        reflink: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
    ) -> io::Result<Option<File>> {
        self.check(Call::CreateReflink)?;
        KernelDisk.create_reflink(root, path, size, reflink)
    }

    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        self.check(Call::OpenFile)?;
        KernelDisk.open_file(root, path, change)
    }

    /// Allocates no space: zeroing the store's reserve would take most of a test's time.
    fn reserve(&self, _path: &Path, file: &File, size: u64) -> io::Result<()> {
        self.check(Call::Reserve)?;
        file.set_len(size)
    }

    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.check(Call::WriteAt).inspect_err(|_| {
            // As on a real disk, a failed write may have written a part.
            let _ = KernelDisk.write_at(path, file, &bytes[..bytes.len() / 2], offset);
        })?;
        KernelDisk.write_at(path, file, bytes, offset)
    }

    fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()> {
        self.check(Call::SetMode)?;
        KernelDisk.set_mode(path, file, mode)
    }

    fn sync_file(&self, path: &Path, file: &File) -> io::Result<()> {
        self.check(Call::SyncFile)?;
        KernelDisk.sync_file(path, file)
    }

    fn sync_dir(&self, path: &Path, directory: &File) -> io::Result<()> {
        self.check(Call::SyncDir)?;
        KernelDisk.sync_dir(path, directory)
    }

    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        self.check(Call::SyncFileSystem)?;
        KernelDisk.sync_file_system(directory)
    }

    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        self.check(Call::Rename)?;
        KernelDisk.rename(root, from, to)
    }

    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        self.check(Call::Publish)?;
        KernelDisk.publish(root, from, to)
    }

    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.check(Call::RemoveFile)?;
        KernelDisk.remove_file(root, path)
    }

    fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        self.check(Call::RemoveDir)?;
        KernelDisk.remove_dir(root, path)
    }
}
