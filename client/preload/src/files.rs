//! Paths that are models, and the descriptors that stand for them.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::{File, Permissions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::image::{self, Image, Refusal};
use crate::next;
use crate::sys::{
    EINVAL, ENOENT, ENOTDIR, ENXIO, EROFS, Iovec, MFD_CLOEXEC, O_ACCMODE, O_CLOEXEC, O_DIRECTORY, O_PATH,
    O_TRUNC, SEEK_CUR, SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET, errno, memfd_create, set_errno,
};

/// The directory that is not there.
const FOLDER: &[u8] = b"/blobd";

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

/// Looks at a path.
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

/// Opens a model; on failure -1, with `errno` set and a word to the user.
pub(crate) fn open(path: &[u8], flags: c_int) -> c_int {
    if flags & O_ACCMODE != 0 || flags & O_TRUNC != 0 {
        set_errno(EROFS);
        return -1;
    }
    match find_image(path) {
        Ok(_) if flags & O_DIRECTORY != 0 => set_errno(ENOTDIR),
        Ok(image) => return opened(image, flags & O_CLOEXEC).unwrap_or(-1),
        Err(refusal) => {
            if !refusal.reason.is_empty() {
                eprintln!("blobd: /blobd/{}: {}", String::from_utf8_lossy(path), refusal.reason);
            }
            set_errno(refusal.errno);
        }
    }
    -1
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
    let spare = image.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
    let file = spare.or_else(|| stand_in(&image))?;
    // SAFETY: Needed because std cannot open without reading. The path is a C string.
    let fd = unsafe { next::open64(place_of(file.as_raw_fd()).as_ptr().cast(), O_PATH | close_on_exec, 0) };
    let metadata = file.metadata().ok().filter(|_| fd >= 0)?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let opened = Opened { device, inode, image, position: AtomicI64::new(0) };
    OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(opened));
    ANY.store(true, Ordering::Release);
    Some(fd)
}

/// An empty file of the image's length; `None` is a failure, with `errno` set.
fn stand_in(image: &Image) -> Option<File> {
    // SAFETY: Needed to make a file without a place. The name is a C string.
    let fd = unsafe { memfd_create(c"blobd-model".as_ptr(), MFD_CLOEXEC) };
    // SAFETY: Needed to own it: it was made just now.
    let file = (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))?;
    file.set_len(image.length() as u64).ok()?;
    file.set_permissions(Permissions::from_mode(0o444)).ok()?;
    Some(file)
}

/// The file that the next `open` will stand for.
fn spare(image: &Image) -> Option<OwnedFd> {
    let mut spare = image.spare.lock().unwrap_or_else(PoisonError::into_inner);
    if spare.is_none() {
        *spare = stand_in(image);
    }
    spare.as_ref()?.try_clone().ok().map(OwnedFd::from)
}

/// The path of a descriptor, as a C string.
pub(crate) fn place_of(fd: c_int) -> Vec<u8> {
    format!("/proc/self/fd/{fd}\0").into_bytes()
}

/// The model behind a descriptor that the kernel refused with `EBADF`; `errno` stays.
pub(crate) fn find(fd: c_int) -> Option<Arc<Opened>> {
    if fd < 0 || !ANY.load(Ordering::Acquire) {
        return None;
    }
    let before = errno();
    // SAFETY: Needed to ask for the inode. The descriptor is looked at and not closed; if there is
    // none with this number, that is an error and no more.
    let metadata = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }).metadata();
    set_errno(before);
    let metadata = metadata.ok()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.iter().find(|file| (file.device, file.inode) == (device, inode)).cloned()
}

impl Opened {
    /// What the file shows.
    pub(crate) fn image(&self) -> &Image {
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
    ///
    /// # Safety
    /// `path` must be null or a C string.
    pub(crate) unsafe fn of(path: *const c_char) -> Option<Option<Self>> {
        // SAFETY: The caller's promise.
        match unsafe { classify(path) } {
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

/// A null pointer for whoever returns one on failure.
pub(crate) const NULL: *mut c_void = ptr::null_mut();
