//! A disk that records its writes: a FUSE file system with one file, which records every write and flush in
//! order. A loop device on that file makes it a disk.
//!
//! The loop driver translates a flush of the file system above it into `fsync` of this file. So all writes
//! before an [`Event::Flush`] are durable, and any of the writes after the last one may be lost. The image
//! keeps its size: files cannot be created, and nothing is trimmed.

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

/// A request to the disk.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A write.
    Write {
        /// The offset on the disk.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Everything written before must be durable.
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
    /// When mounting fails.
    pub(crate) fn mount(content: Vec<u8>, directory: &Path) -> Outcome<Self> {
        let disk = Arc::new(Mutex::new(Disk { content, events: Vec::new() }));
        let file_system = DiskFile { disk: Arc::clone(&disk) };
        let session = fuser::spawn_mount(file_system, directory, &Config::default())
            .map_err(|error| format!("{}: cannot mount by FUSE: {error}", directory.display()))?;
        Ok(Self { disk, image: directory.join(FILE_NAME), session: Some(session) })
    }

    /// The path of the file.
    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// The number of events so far.
    pub(crate) fn position(&self) -> u64 {
        lock(&self.disk).events.len() as u64
    }

    /// Takes the recorded events. Later ones are of no interest.
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
/// How long the kernel may cache attributes, which never change.
const CACHE_LIFETIME: Duration = Duration::from_secs(1 << 20);

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
            reply.entry(&CACHE_LIFETIME, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&CACHE_LIFETIME, &self.attributes(inode));
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
    // After a panic the disk has everything that was written so far.
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}
