//! Files that hang: a FUSE file system that does not respond, like a network file system without its server.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_fixtures::skipped::skipped;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, Request, SessionACL,
};
use rustix::mount::{UnmountFlags, unmount};

use crate::fuse::attributes;

/// The operation of a file that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hang {
    /// A read after the header through the page cache; it ends when the process is killed.
    Read,
    /// The same with direct I/O; it does not end even when the process is killed.
    DirectRead,
    /// `fstat` after the file was opened.
    Inspect,
    /// Closing a descriptor.
    Close,
    /// It does not hang: each read after the header is interrupted.
    Interrupted,
    /// Each read after the header fails with EIO.
    Failing,
}

impl Hang {
    const ALL: [Self; 6] =
        [Self::Read, Self::DirectRead, Self::Inspect, Self::Close, Self::Interrupted, Self::Failing];

    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::DirectRead => "direct",
            Self::Inspect => "inspect",
            Self::Close => "close",
            Self::Interrupted => "interrupted",
            Self::Failing => "failing",
        }
    }

    /// Each number is another file, because two processes with the same file open would wait for each other
    /// in the kernel.
    fn inode_of(name: &OsStr) -> Option<INodeNo> {
        let (kind, number) = name.to_str()?.strip_suffix(".gguf")?.split_once('-')?;
        let place = Self::ALL.iter().position(|hang| hang.name() == kind)? as u64;
        let number = number.parse::<u64>().ok()?;
        Some(INodeNo(FIRST_FILE + number * Self::ALL.len() as u64 + place))
    }

    fn of_inode(inode: INodeNo) -> Option<Self> {
        let place = inode.0.checked_sub(FIRST_FILE)? % Self::ALL.len() as u64;
        Self::ALL.get(usize::try_from(place).ok()?).copied()
    }
}

/// A mounted directory with files for each way to hang. Only the daemon hangs: requests of its clients get a
/// response. When this is dropped, all requests get a response.
#[derive(Debug)]
pub struct HangingFiles {
    folder: PathBuf,
    given: AtomicU64,
    waiting: Arc<Mutex<Waiting>>,
    /// Serves requests until its channel is closed.
    _session: BackgroundSession,
}

/// Requests without a response.
#[derive(Debug, Default)]
struct Waiting {
    is_over: bool,
    reads: Vec<ReplyData>,
    inspections: Vec<(INodeNo, ReplyAttr)>,
    closes: Vec<ReplyEmpty>,
}

impl Waiting {
    fn count(&self) -> usize {
        self.reads.len() + self.inspections.len() + self.closes.len()
    }
}

const FIRST_FILE: u64 = 2;
/// Reads up to this offset succeed.
const ANSWERED_BYTES: u64 = 128 << 10;

impl HangingFiles {
    /// Mounts a directory whose files have `content`. Prints the reason and returns `None` if mounting is not
    /// possible here.
    ///
    /// # Panics
    /// When mounting is possible and fails.
    #[must_use]
    pub fn mount(folder: &Path, content: Vec<u8>) -> Option<Self> {
        if let Err(error) = fs::File::options().read(true).write(true).open("/dev/fuse") {
            skipped(format_args!("/dev/fuse: {error}"));
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skipped("root mounts without a helper, this user does not");
            return None;
        }
        fs::create_dir_all(folder).expect("a directory to mount at");
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let files = Files { content, waiting: Arc::clone(&waiting) };
        let mut config = Config::default();
        config.acl = SessionACL::All;
        let session = fuser::spawn_mount(files, folder, &config).expect("root can mount");
        Some(Self { folder: folder.to_path_buf(), given: AtomicU64::new(0), waiting, _session: session })
    }

    /// Another file that hangs in this way.
    #[must_use]
    pub fn path(&self, hang: Hang) -> PathBuf {
        let number = self.given.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{}-{number}.gguf", hang.name()))
    }

    /// The number of requests without a response.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.waiting).count()
    }

    /// Ends all waiting requests, with an error where there is one, and serves all later ones.
    pub fn unblock(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.is_over = true;
        waiting.reads.drain(..).for_each(|reply| reply.error(Errno::EIO));
        waiting.closes.drain(..).for_each(ReplyEmpty::ok);
        waiting.inspections.drain(..).for_each(|(_, reply)| reply.error(Errno::EIO));
    }
}

impl Drop for HangingFiles {
    fn drop(&mut self) {
        self.unblock();
        // If the daemon still has a file open, a plain unmount fails with EBUSY and the mount stays after the
        // tests. A detached mount ends with its last descriptor.
        if let Err(error) = unmount(&self.folder, UnmountFlags::DETACH) {
            eprintln!("{}: {error}", self.folder.display());
        }
    }
}

#[derive(Debug)]
struct Files {
    content: Vec<u8>,
    waiting: Arc<Mutex<Waiting>>,
}

impl Files {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let size = Hang::of_inode(inode).map(|_| self.content.len() as u64);
        attributes(inode, size, if size.is_some() { 0o444 } else { 0o555 })
    }
}

/// Whether a request comes from a client (`blobd import`), not from the daemon.
fn is_of_client(request: &Request) -> bool {
    let words = fs::read(format!("/proc/{}/cmdline", request.pid())).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word == b"import") || request.pid() == 0
}

impl Filesystem for Files {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match Hang::inode_of(name) {
            Some(inode) => reply.entry(&Duration::ZERO, &self.attributes(inode), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, request: &Request, inode: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        let mut waiting = lock(&self.waiting);
        let hangs = Hang::of_inode(inode) == Some(Hang::Inspect) && !is_of_client(request);
        if hangs && !waiting.is_over {
            return waiting.inspections.push((inode, reply));
        }
        reply.attr(&Duration::ZERO, &self.attributes(inode));
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = match Hang::of_inode(inode) {
            // The page cache would turn every error into EIO.
            Some(Hang::DirectRead | Hang::Interrupted) => FopenFlags::FOPEN_DIRECT_IO,
            _ => FopenFlags::empty(),
        };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut waiting = lock(&self.waiting);
        if !waiting.is_over && offset.saturating_add(u64::from(size)) > ANSWERED_BYTES {
            match Hang::of_inode(inode) {
                Some(Hang::Read | Hang::DirectRead) => return waiting.reads.push(reply),
                Some(Hang::Interrupted) => return reply.error(Errno::EINTR),
                Some(Hang::Failing) => return reply.error(Errno::EIO),
                _ => {}
            }
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.content.len());
        let end = start.saturating_add(usize::try_from(size).unwrap_or_default()).min(self.content.len());
        reply.data(self.content.get(start..end).unwrap_or_default());
    }

    fn flush(
        &self,
        request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let mut waiting = lock(&self.waiting);
        let hangs = Hang::of_inode(inode) == Some(Hang::Close) && !is_of_client(request);
        if hangs && !waiting.is_over {
            return waiting.closes.push(reply);
        }
        reply.ok();
    }
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}
