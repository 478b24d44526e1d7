//! Paths that are models, and the descriptors that stand for them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::{self, File, Permissions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::image::{self, Image, Refusal};
use crate::memory::{memory_file, place_of, reopened, seal};
use crate::next;
use crate::sys::{
    EINVAL, ENOENT, ENOTDIR, ENXIO, EROFS, Iovec, O_ACCMODE, O_CLOEXEC, O_DIRECTORY, O_PATH, O_TRUNC,
    SEEK_CUR, SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET, SYS_MEMFD_SECRET, errno, set_errno,
};

/// The directory that is not there.
const FOLDER: &[u8] = b"/blobd";

/// The name of a stand-in that could be opened, and how `/proc` shows it.
const STAND_IN: &CStr = c"blobd-model";
const STAND_IN_PLACE: &str = "/memfd:blobd-model (deleted)";

/// What a path means here.
pub(crate) enum Path {
    /// Nothing: the kernel knows it.
    Other,
    /// The pretend directory itself.
    Folder,
    /// A model, or what would be one.
    Model(Vec<u8>),
}

/// One open file: what all descriptors that were duplicated from one `open` share.
pub(crate) struct Opened {
    device: u64,
    inode: u64,
    image: Arc<Image>,
    position: AtomicI64,
}

/// All files that were opened. They stay: whether a descriptor is left cannot be seen. A new one has an
/// inode of its own.
static OPENED: Mutex<Vec<Arc<Opened>>> = Mutex::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

pub(crate) fn all_opened() -> MutexGuard<'static, Vec<Arc<Opened>>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Classifies a path.
///
/// # Safety
/// `path` must be null or a C string.
pub(crate) unsafe fn classify(path: *const c_char) -> Path {
    if path.is_null() {
        return Path::Other;
    }
    // SAFETY: Needed to read the caller's string: its promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    match path.strip_prefix(FOLDER) {
        Some(b"" | b"/") => Path::Folder,
        Some([b'/', rest @ ..]) => Path::Model(rest.to_vec()),
        _ => Path::Other,
    }
}

/// Opens a model; on failure returns -1, sets `errno` and prints the reason.
pub(crate) fn open(path: &[u8], flags: c_int) -> c_int {
    if writes(flags) {
        set_errno(EROFS);
        return -1;
    }
    match find_image(path) {
        Ok(image) => open_image(image, flags),
        Err(refusal) => {
            if !refusal.reason.is_empty() {
                eprintln!("blobd: /blobd/{}: {}", String::from_utf8_lossy(path), refusal.reason);
            }
            set_errno(refusal.errno);
            -1
        }
    }
}

/// Opens a model that is known; on failure -1, with `errno` set.
pub(crate) fn open_image(image: Arc<Image>, flags: c_int) -> c_int {
    if writes(flags) {
        set_errno(EROFS);
    } else if flags & O_DIRECTORY != 0 {
        set_errno(ENOTDIR);
    } else if let Some(fd) = opened(image, flags & O_CLOEXEC) {
        return fd;
    }
    -1
}

const fn writes(flags: c_int) -> bool {
    flags & O_ACCMODE != 0 || flags & O_TRUNC != 0
}

fn find_image(path: &[u8]) -> Result<Arc<Image>, Refusal> {
    if path.ends_with(b".gguf") {
        image::find(path)
    } else {
        Err(Refusal { errno: ENOENT, reason: String::new() })
    }
}

/// A descriptor of an empty file with the image's length, with which only `fstat` can do something.
/// `None` is a failure, with `errno` set.
fn opened(image: Arc<Image>, close_on_exec: c_int) -> Option<c_int> {
    let file = image.spare.take().or_else(|| stand_in(&image))?;
    let metadata = file.metadata().ok()?;
    let fd = reopened(&file, O_PATH | close_on_exec)?.into_raw_fd();
    let (device, inode) = (metadata.dev(), metadata.ino());
    let opened = Opened { device, inode, image, position: AtomicI64::new(0) };
    all_opened().push(Arc::new(opened));
    ANY.store(true, Ordering::Release);
    Some(fd)
}

/// An `O_PATH` descriptor of an empty file of the image's length; `None` on failure, with `errno` set.
fn stand_in(image: &Image) -> Option<File> {
    let file = unopenable().or_else(|| memory_file(STAND_IN))?;
    file.set_len(image.length() as u64).ok()?;
    file.set_permissions(Permissions::from_mode(0o444)).ok()?;
    // Fails for the first kind, which needs none. Nobody, root included, empties the second.
    seal(&file);
    reopened(&file, O_PATH | O_CLOEXEC).map(File::from)
}

/// A file that the kernel opens a second time for nobody, by whatever name: `/proc/self/fd/N` of it gives
/// `ENXIO`, in programs without this library as well. `None` where there are none of the kind: Linux
/// before 5.14, some until 6.5, sandboxes.
fn unopenable() -> Option<File> {
    // SAFETY: Needed because the C library has no name for it. Takes a number.
    let fd = unsafe { next::syscall(SYS_MEMFD_SECRET, O_CLOEXEC.into(), 0, 0, 0, 0, 0) };
    // SAFETY: Needed to own it: it was made just now.
    c_int::try_from(fd).ok().filter(|fd| *fd >= 0).map(|fd| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whether a descriptor that was opened for reading would give a stand-in's zeros, be it of this process
/// or of one that left it open for this program.
pub(crate) fn is_stand_in(fd: c_int) -> bool {
    // A cheap check first, which is false for most files: has it no name?
    metadata(fd).is_some_and(|metadata| metadata.nlink() == 0 && metadata.is_file())
        && fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|place| place.as_os_str() == STAND_IN_PLACE)
}

/// What `fstat` says.
fn metadata(fd: c_int) -> Option<fs::Metadata> {
    // SAFETY: Needed to ask with std. The descriptor is looked at and not closed; if there is none with
    // this number, that is an error and no more.
    ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }).metadata().ok()
}

/// The file that the next `open` will stand for.
fn spare(image: &Image) -> Option<OwnedFd> {
    let file = image.spare.take().or_else(|| stand_in(image))?;
    let shown = file.try_clone();
    image.spare.put(file);
    shown.ok().map(OwnedFd::from)
}

/// Whether there can be a descriptor of a model.
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// The model behind a descriptor that the kernel refused with `EBADF`; `errno` stays.
pub(crate) fn find(fd: c_int) -> Option<Arc<Opened>> {
    if fd < 0 || !any() {
        return None;
    }
    let before = errno();
    let metadata = metadata(fd);
    set_errno(before);
    let metadata = metadata?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    all_opened().iter().find(|file| (file.device, file.inode) == (device, inode)).cloned()
}

impl Opened {
    /// What the file shows.
    pub(crate) const fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// `read`.
    ///
    /// # Safety
    /// `out` must be writable for `length` bytes.
    pub(crate) unsafe fn read(&self, out: *mut c_void, length: usize) -> isize {
        let position = self.position.load(Ordering::Relaxed);
        // SAFETY: The caller's promise.
        let count = unsafe { self.read_at(out, length, position) };
        self.position.fetch_add(count as i64, Ordering::Relaxed);
        count
    }

    /// `pread`.
    ///
    /// # Safety
    /// `out` must be writable for `length` bytes.
    pub(crate) unsafe fn read_at(&self, out: *mut c_void, length: usize, offset: i64) -> isize {
        let Ok(offset) = u64::try_from(offset) else { return fail(EINVAL) };
        // SAFETY: The caller's promise.
        let count = unsafe { self.image.read(offset, out, length.min(isize::MAX as usize)) };
        isize::try_from(count).unwrap_or(isize::MAX)
    }

    /// `readv`, or `preadv` if there is an offset.
    ///
    /// # Safety
    /// `parts` must be `count` descriptions of writable memory.
    pub(crate) unsafe fn read_parts(&self, parts: *const Iovec, count: c_int, offset: Option<i64>) -> isize {
        let mut done = 0_isize;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: Needed to read the caller's list: its promise.
            let part = unsafe { *parts.wrapping_add(index) };
            // SAFETY: As above.
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

    /// `lseek`.
    pub(crate) fn seek(&self, offset: i64, whence: c_int) -> i64 {
        let length = i64::try_from(self.image.length()).unwrap_or(i64::MAX);
        let from = match whence {
            SEEK_SET => 0,
            SEEK_CUR => self.position.load(Ordering::Relaxed),
            SEEK_END => length,
            // All of it is data.
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

/// Sets `errno` and gives what C returns then.
fn fail(error: c_int) -> isize {
    set_errno(error);
    -1
}

/// A path that any function of the kernel's understands in place of a model's, while it lives.
pub(crate) struct Substitute {
    path: Vec<u8>,
    _fd: Option<OwnedFd>,
}

impl Substitute {
    /// For a function that looks at a path. `None` for a path that is none of ours, `Some(None)` when
    /// it is and cannot be had: `errno` says why.
    pub(crate) fn of(path: Path) -> Option<Option<Self>> {
        match path {
            Path::Other => None,
            Path::Folder => Some(Some(Self { path: b"/\0".to_vec(), _fd: None })),
            Path::Model(model) => Some(match find_image(&model) {
                Ok(image) => spare(&image).map(|fd| Self { path: place_of(fd.as_raw_fd()), _fd: Some(fd) }),
                Err(refusal) => {
                    set_errno(refusal.errno);
                    None
                }
            }),
        }
    }

    /// The path, as a C string.
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.path.as_ptr().cast()
    }

    /// What to give as a mode or flags that are not used.
    pub(crate) const NONE: c_uint = 0;
}

/// A null pointer, for functions that return one on failure.
pub(crate) const NULL: *mut c_void = ptr::null_mut();
