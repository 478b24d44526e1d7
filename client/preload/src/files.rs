//! The descriptors that a program gets when it opens a model, and the real paths that are passed to the kernel instead
//! of a model's path.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::image::Image;
use crate::memory::{memory_file, proc_path, reopen, seal};
use crate::mounted;
use crate::next;
use crate::paths::{self, Entry, Path};
use crate::sys::{
    EINVAL, ENOTDIR, ENXIO, EROFS, Iovec, O_ACCMODE, O_CLOEXEC, O_DIRECTORY, O_PATH, O_TRUNC, SEEK_CUR,
    SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET, SYS_MEMFD_SECRET, errno, set_errno,
};

/// The name of a placeholder that is a memory file, and the target of its link in `/proc/self/fd`.
const PLACEHOLDER: &CStr = c"blobd-model";
const PLACEHOLDER_LINK: &str = "/memfd:blobd-model (deleted)";

/// An open file description: shared by all descriptors that were duplicated from one `open`.
pub(crate) struct OpenFile {
    device: u64,
    inode: u64,
    image: Arc<Image>,
    position: AtomicI64,
}

/// All files that were opened. None is removed, because it is unknown whether a descriptor is still open.
/// Each has its own inode.
static OPEN_FILES: Mutex<Vec<Arc<OpenFile>>> = Mutex::new(Vec::new());
static ANY_OPENED: AtomicBool = AtomicBool::new(false);

pub(crate) fn open_files() -> MutexGuard<'static, Vec<Arc<OpenFile>>> {
    OPEN_FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a file or folder of a model; on failure returns -1, sets `errno` and prints the reason.
pub(crate) fn open(path: &[u8], flags: c_int) -> c_int {
    if is_for_writing(flags) {
        set_errno(EROFS);
        return -1;
    }
    match paths::find(path) {
        Ok(Entry::File(image)) => open_image(image, flags),
        // SAFETY: Needed to open the directory. The path is a C string.
        Ok(Entry::Directory(path)) => unsafe {
            next::open64(path.as_ptr().cast(), flags, SubstitutePath::UNUSED_MODE)
        },
        Err(error) => {
            if !error.reason.is_empty() {
                let path = String::from_utf8_lossy(path);
                // Not `eprintln!`, which panics, and so ends the program, if standard error cannot be written.
                let _ = writeln!(io::stderr(), "blobd: /blobd/{path}: {}", error.reason);
            }
            set_errno(error.errno);
            -1
        }
    }
}

/// Opens a model whose image is mapped; on failure returns -1 and sets `errno`.
pub(crate) fn open_image(image: Arc<Image>, flags: c_int) -> c_int {
    if is_for_writing(flags) {
        set_errno(EROFS);
    } else if flags & O_DIRECTORY != 0 {
        set_errno(ENOTDIR);
    } else if let Some(fd) = open_placeholder(image, flags & O_CLOEXEC) {
        return fd;
    }
    -1
}

const fn is_for_writing(flags: c_int) -> bool {
    flags & O_ACCMODE != 0 || flags & O_TRUNC != 0
}

/// Opens a placeholder for the image: the kernel only allows `fstat` on its descriptor. `None` on failure,
/// with `errno` set.
fn open_placeholder(image: Arc<Image>, close_on_exec: c_int) -> Option<c_int> {
    let file = image.spare.take().or_else(|| new_placeholder(&image))?;
    let metadata = file.metadata().ok()?;
    let fd = reopen(&file, O_PATH | close_on_exec)?.into_raw_fd();
    let (device, inode) = (metadata.dev(), metadata.ino());
    let file = OpenFile { device, inode, image, position: AtomicI64::new(0) };
    open_files().push(Arc::new(file));
    ANY_OPENED.store(true, Ordering::Release);
    Some(fd)
}

/// An `O_PATH` descriptor of an empty file of the image's length; `None` on failure, with `errno` set.
fn new_placeholder(image: &Image) -> Option<File> {
    let file = secret_file().or_else(|| memory_file(PLACEHOLDER))?;
    file.set_len(image.length() as u64).ok()?;
    file.set_permissions(Permissions::from_mode(0o444)).ok()?;
    // The seals prevent anyone, including root, from changing the length of a memory file. Sealing fails
    // for a secret file, which does not need it.
    seal(&file);
    reopen(&file, O_PATH | O_CLOEXEC).map(File::from)
}

/// A file of `memfd_secret`, which the kernel never opens again: opening its `/proc/self/fd/N` fails with
/// `ENXIO`, also in programs without this library. `None` if the system does not support it: Linux before
/// 5.14, some systems before 6.5, some sandboxes.
fn secret_file() -> Option<File> {
    // SAFETY: Needed because the C library has no function for it. The call takes only integers.
    let fd = unsafe { next::syscall(SYS_MEMFD_SECRET, O_CLOEXEC.into(), 0, 0, 0, 0, 0) };
    // SAFETY: Needed to own the descriptor, which was just created.
    c_int::try_from(fd).ok().filter(|fd| *fd >= 0).map(|fd| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whether a descriptor that was opened for reading refers to a placeholder, of this process or inherited
/// from another one. Reading it would return zeros.
pub(crate) fn is_placeholder(fd: c_int) -> bool {
    metadata(fd).is_some_and(|metadata| is_placeholder_file(fd, &metadata))
}

fn is_placeholder_file(fd: c_int, metadata: &fs::Metadata) -> bool {
    // The cheap check first, which is false for most files: a placeholder has no directory entry.
    metadata.nlink() == 0
        && metadata.is_file()
        && fs::read_link(format!("/proc/self/fd/{fd}"))
            .is_ok_and(|target| target.as_os_str() == PLACEHOLDER_LINK)
}

/// What a descriptor refers to that a program has opened for reading.
pub(crate) enum Opened {
    Other,
    /// A placeholder; the open model, if it is one of this process.
    Placeholder(Option<Arc<Image>>),
    /// A mounted file, which is shown as this image.
    Mounted(Arc<Image>),
}

pub(crate) fn opened(fd: c_int) -> Opened {
    match metadata(fd) {
        Some(metadata) if is_placeholder_file(fd, &metadata) => {
            Opened::Placeholder(find(fd).map(|file| Arc::clone(&file.image)))
        }
        Some(metadata) => mounted::find(&metadata).map_or(Opened::Other, Opened::Mounted),
        None => Opened::Other,
    }
}

fn metadata(fd: c_int) -> Option<fs::Metadata> {
    // SAFETY: Needed to call `fstat` through std. `ManuallyDrop` keeps the descriptor open; if
    // it is not open, the call fails.
    ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }).metadata().ok()
}

/// A descriptor of the placeholder that the next `open` will use.
fn next_placeholder(image: &Image) -> Option<OwnedFd> {
    let file = image.spare.take().or_else(|| new_placeholder(image))?;
    let copy = file.try_clone();
    image.spare.put(file);
    copy.ok().map(OwnedFd::from)
}

pub(crate) fn any_opened() -> bool {
    ANY_OPENED.load(Ordering::Acquire)
}

/// The open model with this descriptor, if it is one; `errno` is unchanged.
pub(crate) fn find(fd: c_int) -> Option<Arc<OpenFile>> {
    if fd < 0 || !any_opened() {
        return None;
    }
    let before = errno();
    let metadata = metadata(fd);
    set_errno(before);
    let metadata = metadata?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    open_files().iter().find(|file| (file.device, file.inode) == (device, inode)).cloned()
}

impl OpenFile {
    pub(crate) const fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// `read`. `out` must be writable for `length` bytes.
    pub(crate) unsafe fn read(&self, out: *mut c_void, length: usize) -> isize {
        let position = self.position.load(Ordering::Relaxed);
        // SAFETY: The caller guarantees the same.
        let count = unsafe { self.read_at(out, length, position) };
        self.position.fetch_add(count as i64, Ordering::Relaxed);
        count
    }

    /// `pread`. `out` must be writable for `length` bytes.
    pub(crate) unsafe fn read_at(&self, out: *mut c_void, length: usize, offset: i64) -> isize {
        let Ok(offset) = u64::try_from(offset) else { return fail(EINVAL) };
        // SAFETY: The caller guarantees the same.
        let count = unsafe { self.image.read(offset, out, length.min(isize::MAX as usize)) };
        isize::try_from(count).unwrap_or(isize::MAX)
    }

    /// `readv`, or `preadv` if `offset` is given. `parts` must point to `count` elements, each of which describes
    /// writable memory.
    pub(crate) unsafe fn read_parts(&self, parts: *const Iovec, count: c_int, offset: Option<i64>) -> isize {
        let mut done = 0_isize;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: Needed to read the list. The caller guarantees that it has `count` elements.
            let part = unsafe { *parts.wrapping_add(index) };
            // SAFETY: The caller guarantees that the element describes writable memory.
            let read = unsafe {
                match offset {
                    Some(offset) => self.read_at(part.base, part.length, offset.saturating_add(done as i64)),
                    None => self.read(part.base, part.length),
                }
            };
            done += read.max(0);
            if read < 0 || read.unsigned_abs() < part.length {
                return if done > 0 { done } else { read };
            }
        }
        done
    }

    pub(crate) fn seek(&self, offset: i64, whence: c_int) -> i64 {
        let length = i64::try_from(self.image.length()).unwrap_or(i64::MAX);
        let from = match whence {
            SEEK_SET => 0,
            SEEK_CUR => self.position.load(Ordering::Relaxed),
            SEEK_END => length,
            // The file has no holes.
            SEEK_DATA | SEEK_HOLE if !(0..length).contains(&offset) => return fail(ENXIO) as i64,
            SEEK_DATA => 0,
            SEEK_HOLE => length - offset,
            _ => return fail(EINVAL) as i64,
        };
        match from.checked_add(offset).filter(|position| *position >= 0) {
            Some(position) => {
                self.position.store(position, Ordering::Relaxed);
                position
            }
            None => fail(EINVAL) as i64,
        }
    }
}

/// Sets `errno` and returns -1.
fn fail(error: c_int) -> isize {
    set_errno(error);
    -1
}

/// A path that the kernel accepts in place of a model's path, valid until this is dropped.
pub(crate) struct SubstitutePath {
    path: Vec<u8>,
    _fd: Option<OwnedFd>,
}

impl SubstitutePath {
    /// The substitute for a path. `None` if the path is outside the directory of the models; `Some(None)`
    /// if the model cannot be opened, with `errno` set.
    pub(crate) fn of(path: Path) -> Option<Option<Self>> {
        match path {
            Path::Other => None,
            Path::ModelsDirectory => Some(Some(Self { path: b"/\0".to_vec(), _fd: None })),
            Path::Model(model) => Some(match paths::find(&model) {
                Ok(Entry::File(image)) => {
                    next_placeholder(&image).map(|fd| Self { path: proc_path(fd.as_raw_fd()), _fd: Some(fd) })
                }
                Ok(Entry::Directory(path)) => Some(Self { path, _fd: None }),
                Err(error) => {
                    set_errno(error.errno);
                    None
                }
            }),
        }
    }

    pub(crate) fn pointer(&self) -> *const c_char {
        self.path.as_ptr().cast()
    }

    /// The `mode` argument of an `open` that does not create a file.
    pub(crate) const UNUSED_MODE: c_uint = 0;
}

pub(crate) const NULL: *mut c_void = ptr::null_mut();
