//! Files whose content never comes: a FUSE file system whose reads are not answered until it is told to.
//!
//! Reads go through the page cache, as those of NFS do, so a thread that waits for one can be killed. What
//! the kernel lets nobody interrupt is avoided: `stat` is answered, and no file is used again once its
//! reads have failed, because the kernel tries such pages anew one by one.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, Request, SessionACL,
};

use crate::Outcome;

/// Any number is a file's name.
const FIRST_FILE: u64 = 2;
const FILE_BYTES: u64 = 64 << 20;
/// Attributes never change.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);

/// Reads that wait for an answer; none once they are refused.
type Waiting = Arc<Mutex<Option<Vec<ReplyData>>>>;

/// The files, mounted.
pub(crate) struct HangingFiles {
    directory: PathBuf,
    next: AtomicU64,
    waiting: Waiting,
    session: Option<BackgroundSession>,
}

impl HangingFiles {
    /// Mounts the file system on an empty directory, readable for all.
    ///
    /// # Errors
    /// When that is not allowed.
    pub(crate) fn mount(directory: &Path) -> Outcome<Self> {
        let waiting: Waiting = Arc::default();
        let mut config = Config::default();
        config.acl = SessionACL::All;
        let file_system = Files { waiting: Arc::clone(&waiting) };
        let session = fuser::spawn_mount(file_system, directory, &config)
            .map_err(|error| format!("{}: cannot mount by FUSE: {error}", directory.display()))?;
        Ok(Self {
            directory: directory.to_path_buf(),
            next: AtomicU64::new(0),
            waiting,
            session: Some(session),
        })
    }

    /// A file that nobody has used.
    pub(crate) fn new_path(&self) -> PathBuf {
        self.directory.join(self.next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// From now on reads hang.
    pub(crate) fn hang(&self) {
        lock(&self.waiting).get_or_insert_default();
    }

    /// Ends all reads that hang with an error, and all that come until [`Self::hang`].
    pub(crate) fn release(&self) {
        let waiting = lock(&self.waiting).take();
        waiting.into_iter().flatten().for_each(|reply| reply.error(Errno::EIO));
    }
}

impl Drop for HangingFiles {
    fn drop(&mut self) {
        self.release();
        if let Some(Err(error)) = self.session.take().map(BackgroundSession::umount_and_join) {
            eprintln!("{}: cannot unmount: {error}", self.directory.display());
        }
    }
}

impl fmt::Debug for HangingFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HangingFiles").field("directory", &self.directory).finish_non_exhaustive()
    }
}

struct Files {
    waiting: Waiting,
}

impl Filesystem for Files {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str().and_then(|name| name.parse::<u64>().ok()) {
            Some(number) => {
                let inode = INodeNo(FIRST_FILE.saturating_add(number));
                reply.entry(&FOR_EVER, &attributes(inode), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &attributes(inode));
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        _offset: u64,
        _size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match lock(&self.waiting).as_mut() {
            Some(waiting) => waiting.push(reply),
            None => reply.error(Errno::EIO),
        }
    }
}

fn attributes(inode: INodeNo) -> FileAttr {
    let is_file = inode.0 >= FIRST_FILE;
    let size = if is_file { FILE_BYTES } else { 0 };
    FileAttr {
        ino: inode,
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if is_file { FileType::RegularFile } else { FileType::Directory },
        perm: if is_file { 0o644 } else { 0o755 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn lock(waiting: &Mutex<Option<Vec<ReplyData>>>) -> MutexGuard<'_, Option<Vec<ReplyData>>> {
    // Every change is complete before anything could panic.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}
