//! Serves the kernel's FUSE requests.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{
    BackingId, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, Request, TimeOrNow,
};
use tracing_mutex::stdsync::{Mutex, MutexGuard, RwLock};

use super::aliases::{AliasDirectory, Aliases};
use super::catalog::{Catalog, MAX_AGE};
use super::file::OpenFile;
use super::opener::{Opener, Workers};
use super::tree::{Directory, Entry, File, Node, Tree};

#[derive(Debug)]
pub(super) struct ModelFileSystem {
    state: Arc<State>,
    workers: Workers,
}

#[derive(Debug)]
struct State {
    catalog: Catalog,
    opener: Opener,
    owner: (u32, u32),
    next_handle: AtomicU64,
    files: RwLock<HashMap<u64, OpenHandle>>,
    directories: Mutex<HashMap<u64, Arc<OpenDirectory>>>,
    aliases: Mutex<Aliases>,
    backings: Mutex<HashMap<u64, Weak<BackingId>>>,
    /// Whether the kernel supports passthrough and this process may use it.
    can_pass_through: AtomicBool,
}

#[derive(Debug)]
struct OpenHandle {
    file: Arc<OpenFile>,
    attributes: FileAttr,
    /// Lets the kernel read the blob directly; unregistered when the last handle is closed.
    _backing: Option<Arc<BackingId>>,
}

/// A directory as it was when it was opened, so that no entry is skipped or listed twice.
#[derive(Debug)]
struct OpenDirectory {
    tree: Arc<Tree>,
    parent: u64,
    /// The entries that are not in the tree.
    aliases: Vec<(String, Entry)>,
}

impl ModelFileSystem {
    pub(super) fn new(catalog: Catalog, opener: Opener) -> io::Result<Self> {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let state = State {
            catalog,
            opener,
            owner,
            next_handle: AtomicU64::new(1),
            files: RwLock::default(),
            directories: Mutex::default(),
            aliases: Mutex::default(),
            backings: Mutex::default(),
            can_pass_through: AtomicBool::new(false),
        };
        Ok(Self { state: Arc::new(state), workers: Workers::start()? })
    }
}

impl State {
    fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn attributes(&self, tree: &Tree, inode: u64, node: &Node) -> FileAttr {
        match node {
            Node::File(file) => self.file_attributes(inode, file),
            Node::Directory(directory) => {
                self.directory_attributes(inode, directory, tree.ollama_blobs() == Some(inode))
            }
        }
    }

    fn file_attributes(&self, inode: u64, file: &File) -> FileAttr {
        let common = self.common_attributes(inode, file.modified);
        FileAttr {
            size: file.size,
            blocks: file.size.div_ceil(512),
            kind: FileType::RegularFile,
            perm: 0o444,
            nlink: file.links,
            ..common
        }
    }

    fn directory_attributes(&self, inode: u64, directory: &Directory, is_writable: bool) -> FileAttr {
        let nlink = directory.directory_count().saturating_add(2);
        let perm = if is_writable { 0o755 } else { 0o555 };
        FileAttr { nlink, perm, ..self.common_attributes(inode, directory.modified) }
    }

    fn alias_attributes(&self, directory: &AliasDirectory) -> FileAttr {
        FileAttr { perm: 0o755, ..self.common_attributes(directory.inode, directory.modified) }
    }

    fn aliases(&self) -> MutexGuard<'_, Aliases> {
        self.aliases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The attributes of an entry of a directory.
    fn find(&self, tree: &Tree, parent: u64, name: &OsStr) -> Option<FileAttr> {
        let name = name.to_str()?;
        let listed = tree.directory(parent).and_then(|directory| directory.entries.get(name));
        if let Some(entry) = listed {
            return Some(self.attributes(tree, entry.inode, tree.node(entry.inode)?));
        }
        let aliases = self.aliases();
        if let Some(directory) = aliases.by_inode(parent) {
            let inode = *directory.links.get(name)?;
            return Some(self.attributes(tree, inode, tree.node(inode)?));
        }
        let directory = aliases.by_name(name).filter(|_| tree.ollama_blobs() == Some(parent))?;
        Some(self.alias_attributes(directory))
    }

    fn open_directory(&self, inode: u64) -> Option<OpenDirectory> {
        let tree = self.catalog.tree();
        let aliases = self.aliases();
        let entry = |name: &String, inode, is_directory| (name.clone(), Entry { inode, is_directory });
        if let Some(directory) = aliases.by_inode(inode) {
            let links = directory.links.iter().map(|(name, inode)| entry(name, *inode, false)).collect();
            return Some(OpenDirectory {
                parent: tree.ollama_blobs()?,
                aliases: links,
                tree: Arc::clone(&tree),
            });
        }
        let parent = tree.directory(inode)?.parent;
        let aliases = match tree.ollama_blobs() == Some(inode) {
            true => aliases.list().map(|(name, inode)| entry(name, inode, true)).collect(),
            false => Vec::new(),
        };
        Some(OpenDirectory { parent, aliases, tree: Arc::clone(&tree) })
    }

    /// The attributes of an empty directory.
    fn common_attributes(&self, inode: u64, modified: SystemTime) -> FileAttr {
        FileAttr {
            ino: INodeNo(inode),
            size: 0,
            blocks: 0,
            atime: modified,
            mtime: modified,
            ctime: modified,
            crtime: UNIX_EPOCH,
            kind: FileType::Directory,
            perm: 0o555,
            nlink: 2,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    /// For an open file that is no longer in a directory.
    fn attributes_of_open(&self, inode: u64) -> Option<FileAttr> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files.values().find(|handle| handle.attributes.ino == INodeNo(inode)).map(|handle| handle.attributes)
    }

    fn open_file(&self, inode: u64) -> Result<OpenHandle, Errno> {
        let tree = self.catalog.tree();
        let Some(node) = tree.node(inode) else {
            // Removed between lookup and open; it can be opened if another process has it open.
            let file = self.opener.opened(inode).ok_or(Errno::ESTALE)?;
            let attributes = self.attributes_of_open(inode).ok_or(Errno::ESTALE)?;
            return Ok(OpenHandle { file, attributes, _backing: None });
        };
        let Node::File(listed) = node else { return Err(Errno::EISDIR) };
        let file = self.opener.open(inode, &listed.content).map_err(|error| {
            tracing::warn!("inode {inode}: cannot open: {error}");
            error.errno()
        })?;
        if file.size() != listed.size {
            return Err(Errno::EIO);
        }
        Ok(OpenHandle { file, attributes: self.file_attributes(inode, listed), _backing: None })
    }

    fn open(&self, inode: u64, reply: ReplyOpen) {
        let mut opened = match self.open_file(inode) {
            Ok(opened) => opened,
            Err(errno) => return reply.error(errno),
        };
        let backing = self.backing(inode, &opened.file, &reply);
        opened._backing.clone_from(&backing);
        let handle = self.new_handle();
        self.files.write().unwrap_or_else(PoisonError::into_inner).insert(handle, opened);
        match backing {
            Some(backing) => reply.opened_passthrough(FileHandle(handle), FopenFlags::empty(), &backing),
            // The content of an inode never changes, so the cache of an earlier open is valid.
            None => reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE),
        }
    }

    /// Registers the blob of a file that is stored as one blob for passthrough: the kernel then reads it
    /// directly and caches it once. All handles of an inode must use the same registration.
    fn backing(&self, inode: u64, file: &OpenFile, reply: &ReplyOpen) -> Option<Arc<BackingId>> {
        if !self.can_pass_through.load(Ordering::Relaxed) {
            return None;
        }
        let fd = file.whole_blob()?;
        let mut backings = self.backings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = backings.get(&inode).and_then(Weak::upgrade) {
            return Some(known);
        }
        match reply.open_backing(fd) {
            Ok(backing) => {
                let backing = Arc::new(backing);
                backings.retain(|_, known| known.strong_count() > 0);
                backings.insert(inode, Arc::downgrade(&backing));
                Some(backing)
            }
            Err(error) => {
                // The kernel refuses handles with and without passthrough for the same inode.
                self.can_pass_through.store(false, Ordering::Relaxed);
                tracing::info!(
                    "FUSE passthrough: not available, so files stored as one blob are cached twice: {error}"
                );
                None
            }
        }
    }

    fn file(&self, handle: FileHandle) -> Option<Arc<OpenFile>> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(&files.get(&handle.0)?.file))
    }
}

impl Filesystem for ModelFileSystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The kernel reduces the value to its own limit.
        let readahead = config.set_max_readahead(MAX_READAHEAD_BYTES);
        let _ = readahead.or_else(|largest| config.set_max_readahead(largest));
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        let can = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok();
        let can = can && config.set_max_stack_depth(1).is_ok();
        self.state.can_pass_through.store(can, Ordering::Relaxed);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let tree = self.state.catalog.tree();
        match self.state.find(&tree, parent.0, name) {
            Some(attributes) => reply.entry(&MAX_AGE, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let tree = self.state.catalog.tree();
        let listed = tree.node(inode.0).map(|node| self.state.attributes(&tree, inode.0, node));
        let alias = || {
            let aliases = self.state.aliases();
            aliases.by_inode(inode.0).map(|directory| self.state.alias_attributes(directory))
        };
        match listed.or_else(alias).or_else(|| self.state.attributes_of_open(inode.0)) {
            Some(attributes) => reply.attr(&MAX_AGE, &attributes),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let tree = self.state.catalog.tree();
        match self.state.aliases().make(&tree, parent.0, name) {
            Ok(made) => reply.entry(&MAX_AGE, &self.state.alias_attributes(made), Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let tree = self.state.catalog.tree();
        answer(self.state.aliases().remove(&tree, parent.0, name), reply);
    }

    fn link(&self, _request: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let tree = self.state.catalog.tree();
        if let Err(errno) = self.state.aliases().link(&tree, inode.0, parent.0, name) {
            return reply.error(errno);
        }
        match tree.node(inode.0) {
            Some(node) => {
                reply.entry(&MAX_AGE, &self.state.attributes(&tree, inode.0, node), Generation(0));
            }
            None => reply.error(Errno::ESTALE),
        }
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(self.state.aliases().unlink(parent.0, name), reply);
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EROFS);
    }

    fn symlink(&self, _: &Request, _parent: INodeNo, _name: &OsStr, _target: &Path, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn mknod(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _device: u32,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EROFS);
    }

    fn rename(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _new_parent: INodeNo,
        _new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EROFS);
    }

    fn setattr(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _accessed: Option<TimeOrNow>,
        _modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _flags_changed: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(Errno::EROFS);
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        // A file that is open already needs no request to the daemon. Other opens wait for the daemon on
        // another thread, so that reads are served meanwhile.
        if self.state.opener.opened(inode.0).is_some() {
            return self.state.open(inode.0, reply);
        }
        let state = Arc::clone(&self.state);
        self.workers.run(move || state.open(inode.0, reply));
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = self.state.file(handle) else { return reply.error(Errno::EBADF) };
        let size = usize::try_from(size).unwrap_or(usize::MAX).min(MAX_READ_BYTES);
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            match file.read(offset, buffer.get_mut(..size).unwrap_or_default()) {
                Ok(count) => reply.data(buffer.get(..count).unwrap_or_default()),
                Err(error) => {
                    tracing::error!("inode {inode}: cannot read at {offset}: {error}");
                    reply.error(Errno::EIO);
                }
            }
        });
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let closed = self.state.files.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0);
        // Before the drop, which may take long.
        reply.ok();
        drop(closed);
    }

    fn opendir(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(directory) = self.state.open_directory(inode.0) else { return reply.error(Errno::ESTALE) };
        let handle = self.state.new_handle();
        let mut directories = self.state.directories.lock().unwrap_or_else(PoisonError::into_inner);
        directories.insert(handle, Arc::new(directory));
        drop(directories);
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let open =
            self.state.directories.lock().unwrap_or_else(PoisonError::into_inner).get(&handle.0).cloned();
        let Some(open) = open else { return reply.error(Errno::EBADF) };
        let dots = [(".", inode.0, true), ("..", open.parent, true)].into_iter();
        let listed = open.tree.directory(inode.0).into_iter().flat_map(|directory| &directory.entries);
        let listed = listed.map(|(name, entry)| (&**name, entry));
        let aliases = open.aliases.iter().map(|(name, entry)| (name.as_str(), entry));
        let entries = listed.chain(aliases).map(|(name, entry)| (name, entry.inode, entry.is_directory));
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for ((name, inode, is_directory), next) in dots.chain(entries).zip(1u64..).skip(skip) {
            let kind = if is_directory { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(inode), next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.state.directories.lock().unwrap_or_else(PoisonError::into_inner).remove(&handle.0);
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        const MAX_NAME_BYTES: u32 = 255;
        let tree = self.state.catalog.tree();
        let blocks = tree.total_bytes().div_ceil(BLOCK_BYTES.into());
        reply.statfs(blocks, 0, 0, tree.node_count(), 0, BLOCK_BYTES, MAX_NAME_BYTES, BLOCK_BYTES);
    }
}

fn answer(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

thread_local! {
    /// Each thread's read buffer, which grows to the largest request.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

const BLOCK_BYTES: u32 = 4096;
/// More than the kernel can request (1 MiB unless its limit is raised): it would take a short response for
/// zeros.
const MAX_READ_BYTES: usize = 256 << 20;
/// The most that the kernel may read ahead; its limit `read_ahead_kb` is usually lower.
const MAX_READAHEAD_BYTES: u32 = 16 << 20;
/// The most read-ahead requests of the kernel in progress: enough to keep all threads busy.
const MAX_BACKGROUND: u16 = 64;
