//! Files that hang: a FUSE file system whose requests are not answered, as on a network that is gone.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, Request, SessionACL,
};
use rustix::mount::{UnmountFlags, unmount};

use crate::fuse::attributes;

/// What a file does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hang {
    /// A read behind the header, by the page cache: a killed process leaves it.
    Read,
    /// The same past the page cache: the kernel lets nobody leave it, not even a process that is killed.
    DirectRead,
    /// A question for its size and times, once it was opened.
    Inspect,
    /// That a descriptor is closed.
    Close,
}

impl Hang {
    const ALL: [Self; 4] = [Self::Read, Self::DirectRead, Self::Inspect, Self::Close];

    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::DirectRead => "direct",
            Self::Inspect => "inspect",
            Self::Close => "close",
        }
    }

    /// There is a file for each number: two who open one would wait for each other in the kernel.
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

/// A mounted folder with files for each way to hang. What clients of the daemon ask themselves is
/// answered: only the daemon hangs. All is answered when it is dropped.
#[derive(Debug)]
pub struct HangingFiles {
    folder: PathBuf,
    given: AtomicU64,
    waiting: Arc<Mutex<Waiting>>,
    /// Answers requests until its channel is closed.
    _session: BackgroundSession,
}

/// Requests that nobody answers.
#[derive(Debug, Default)]
struct Waiting {
    is_over: bool,
    reads: Vec<ReplyData>,
    looks: Vec<(INodeNo, ReplyAttr)>,
    closes: Vec<ReplyEmpty>,
}

impl Waiting {
    fn count(&self) -> usize {
        self.reads.len() + self.looks.len() + self.closes.len()
    }
}

const FIRST_FILE: u64 = 2;
/// Reads before this are answered.
const ANSWERED_BYTES: u64 = 128 << 10;

impl HangingFiles {
    /// Mounts a folder whose files begin with `content`; `None`, with the reason printed, where this
    /// machine cannot mount.
    ///
    /// # Panics
    /// When the machine could and the mount fails.
    #[must_use]
    pub fn mount(folder: &Path, content: Vec<u8>) -> Option<Self> {
        if let Err(error) = fs::File::options().read(true).write(true).open("/dev/fuse") {
            println!("skipped: /dev/fuse: {error}");
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            println!("skipped: root mounts without a helper, this user does not");
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

    /// How many requests nobody has answered.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.waiting).count()
    }

    /// Answers everything that waits, with an error, and all that comes.
    pub fn let_go(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.is_over = true;
        waiting.reads.drain(..).for_each(|reply| reply.error(Errno::EIO));
        waiting.closes.drain(..).for_each(ReplyEmpty::ok);
        waiting.looks.drain(..).for_each(|(_, reply)| reply.error(Errno::EIO));
    }
}

impl Drop for HangingFiles {
    fn drop(&mut self) {
        self.let_go();
        // A daemon that still has a file open would make a plain unmount fail with EBUSY, and the mount
        // would stay after the tests: detached, it goes with the last descriptor.
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

/// Whether a request is a client's own, which imports; not one of the daemon.
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
            return waiting.looks.push((inode, reply));
        }
        reply.attr(&Duration::ZERO, &self.attributes(inode));
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = match Hang::of_inode(inode) {
            Some(Hang::DirectRead) => FopenFlags::FOPEN_DIRECT_IO,
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
        let hangs = matches!(Hang::of_inode(inode), Some(Hang::Read | Hang::DirectRead));
        if hangs && !waiting.is_over && offset.saturating_add(u64::from(size)) > ANSWERED_BYTES {
            return waiting.reads.push(reply);
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
