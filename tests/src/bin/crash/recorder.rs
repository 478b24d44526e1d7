//! A disk that remembers: a FUSE file system with one file, whose every write and flush is kept in
//! order. A loop device on that file makes it a disk.
//!
//! The loop driver answers a flush of the file system above it with `fsync` of this file. So what
//! lies before a [`Event::Flush`] is durable, and of what lies behind the last one any part may
//! be lost. No file can be made, and nothing is ever trimmed: the image keeps its size.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_tests::fuse::attributes;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, Filesystem, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite, Request, WriteFlags,
};

use crate::Outcome;

/// What the disk was told.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Bytes to be written.
    Write {
        /// Where on the disk.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// All that was written before must last.
    Flush,
}

/// The disk, mounted as a file system with one file.
#[derive(Debug)]
pub(crate) struct Recorder {
    disk: Arc<Mutex<Disk>>,
    image: PathBuf,
    session: Option<BackgroundSession>,
}

#[derive(Debug)]
struct Disk {
    content: Vec<u8>,
    events: Vec<Event>,
}

impl Recorder {
    /// Mounts a disk with this content on an empty directory.
    ///
    /// # Errors
    /// When that is not allowed.
    pub(crate) fn mount(content: Vec<u8>, directory: &Path) -> Outcome<Self> {
        let disk = Arc::new(Mutex::new(Disk { content, events: Vec::new() }));
        let file_system = DiskFile { disk: Arc::clone(&disk) };
        let session = fuser::spawn_mount(file_system, directory, &Config::default())
            .map_err(|error| format!("{}: cannot mount by FUSE: {error}", directory.display()))?;
        Ok(Self { disk, image: directory.join(FILE_NAME), session: Some(session) })
    }

    /// The file.
    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// How many events there were.
    pub(crate) fn position(&self) -> u64 {
        lock(&self.disk).events.len() as u64
    }

    /// Takes what was recorded; what is written from now on does not count.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut lock(&self.disk).events)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.session.take().map(BackgroundSession::umount_and_join) {
            eprintln!("{}: cannot unmount: {error}", self.image.display());
        }
    }
}

const FILE_NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
/// Nothing but the content ever changes.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);

struct DiskFile {
    disk: Arc<Mutex<Disk>>,
}

impl DiskFile {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let size = (inode == FILE).then(|| lock(&self.disk).content.len() as u64);
        attributes(inode, size, if size.is_some() { 0o600 } else { 0o700 })
    }
}

impl Filesystem for DiskFile {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == FILE_NAME {
            reply.entry(&FOR_EVER, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attributes(inode));
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let disk = lock(&self.disk);
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(disk.content.len());
        let end = start.saturating_add(usize::try_from(size).unwrap_or_default()).min(disk.content.len());
        reply.data(&disk.content[start..end]);
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        bytes: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut disk = lock(&self.disk);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let Some(place) = disk.content.get_mut(start..start.saturating_add(bytes.len())) else {
            return reply.error(Errno::ENOSPC);
        };
        place.copy_from_slice(bytes);
        disk.events.push(Event::Write { offset, bytes: bytes.to_vec() });
        reply.written(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    }

    fn fsync(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.disk).events.push(Event::Flush);
        reply.ok();
    }
}

fn lock(disk: &Mutex<Disk>) -> MutexGuard<'_, Disk> {
    // A panic leaves the disk as a crash would: with what was written so far.
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}
