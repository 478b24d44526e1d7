//! Files of `blobd mount`, which a program may get as paths from a parent without this library, such as `ollama serve`: they
//! are shown as `/blobd` shows them, so that their pages are the blobs'.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::image::{self, Image};
use crate::next;
use crate::request::Request;
use crate::sys::{O_CLOEXEC, errno, set_errno};

/// The type of the mount's file system if root or the helper has mounted it, and its source.
const FILE_SYSTEMS: [&str; 2] = ["fuse", "fuse.blobd"];
const SOURCE: &str = "blobd";

/// The image of a mounted file that holds weights; `None` for any other file. `errno` is unchanged.
pub(crate) fn find(metadata: &fs::Metadata) -> Option<Arc<Image>> {
    if !metadata.is_file() || !devices().contains(&metadata.dev()) {
        return None;
    }
    let (before, inode) = (errno(), metadata.ino());
    // Not the path of a model, which contains no zero byte.
    let key = [b"\0mounted ", inode.to_string().as_bytes()].concat();
    let image = image::find(&key, || Request::Mounted { inode });
    set_errno(before);
    // If the file cannot be shown that way, the program reads it through the mount.
    image.ok()
}

/// The devices of the mounts that exist when this process first opens a file.
fn devices() -> &'static [u64] {
    // Not a `OnceLock`, which a child forked meanwhile could find locked.
    static FOUND: AtomicPtr<Vec<u64>> = AtomicPtr::new(ptr::null_mut());
    let mut found = FOUND.load(Ordering::Acquire);
    if found.is_null() {
        let before = errno();
        found = Box::into_raw(Box::new(read_devices().unwrap_or_default()));
        set_errno(before);
        FOUND.store(found, Ordering::Release);
    }
    // SAFETY: Needed to read the list, which was leaked and never changes.
    unsafe { &*found }
}

fn read_devices() -> Option<Vec<u64>> {
    // SAFETY: Needed because std would call the hook of `open`. The path is a C string.
    let fd = unsafe { next::open64(c"/proc/self/mountinfo".as_ptr(), O_CLOEXEC, 0) };
    // SAFETY: Needed to own the descriptor, which was just created.
    let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })?;
    let mut mounts = Vec::new();
    File::from(fd).read_to_end(&mut mounts).ok()?;
    Some(String::from_utf8_lossy(&mounts).lines().filter_map(device).collect())
}

/// The device in a line of `mountinfo` (`36 35 98:0 / /mnt rw - TYPE SOURCE OPTIONS`), if it is a mount of blobd.
fn device(line: &str) -> Option<u64> {
    let (place, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    if !kind.next().is_some_and(|kind| FILE_SYSTEMS.contains(&kind)) || kind.next() != Some(SOURCE) {
        return None;
    }
    let (major, minor) = place.split(' ').nth(2)?.split_once(':')?;
    let (major, minor): (u64, u64) = (major.parse().ok()?, minor.parse().ok()?);
    // As `makedev` of the C library.
    Some((major & 0xfff) << 8 | (major & !0xfff) << 32 | (minor & 0xff) | (minor & !0xff) << 12)
}
