//! Paths of models: which paths that a program passes to the C library name a model's file or folder.
//!
//! A model that is a folder is shown with the help of a real directory, which `blobd exec` makes: its entries are links with
//! the files' names that lead nowhere. Listing it and working in it needs no hooks. A path in it counts as the path below
//! `/blobd` that it stands for; a call without a hook finds no file and never reads wrong bytes.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::image::{self, Image};
use crate::next;
use crate::request::{FolderHead, OpenError, Request, SOCKET_VARIABLE};
use crate::sys::{AT_FDCWD, EINVAL, ENOENT, ENOTDIR, errno, set_errno};

/// The directory of the models, which does not exist on disk.
const MODELS_DIRECTORY: &[u8] = b"/blobd";

/// The longest path of the kernel.
const MAX_PATH_BYTES: usize = 4096;

/// A path that a program passed to the C library.
pub(crate) enum Path {
    Other,
    ModelsDirectory,
    /// A path below the directory of the models, relative to it, without `.` and `..`. There may be no such model.
    Model(Vec<u8>),
}

/// What a path below the directory of the models names.
pub(crate) enum Entry {
    File(Arc<Image>),
    /// A folder; the path of the directory that stands for it, as a C string.
    Directory(Vec<u8>),
}

/// A model that is a folder; it is in use until the process ends.
pub(crate) struct Folder {
    number: u64,
    /// The model's name, as the program wrote it.
    name: Vec<u8>,
    directory: Vec<u8>,
    _lease: UnixStream,
}

static FOLDERS: Mutex<Vec<Arc<Folder>>> = Mutex::new(Vec::new());
static ANY_FOLDER: AtomicBool = AtomicBool::new(false);

pub(crate) fn folders() -> MutexGuard<'static, Vec<Arc<Folder>>> {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Classifies a path that is relative to the directory `dir`. `path` must be null or a C string.
pub(crate) unsafe fn classify(dir: c_int, path: *const c_char) -> Path {
    if path.is_null() {
        return Path::Other;
    }
    // SAFETY: Needed to read the path. The caller guarantees a C string.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    match path {
        [] => Path::Other,
        [b'/', ..] => absolute(path),
        _ if uses_folders() => {
            let before = errno();
            let base = directory_path(dir);
            set_errno(before);
            // Before the paths are joined: for other directories nothing is copied.
            match base.filter(|base| in_exec_directory(base).is_some()) {
                Some(base) => absolute(&[&base, b"/".as_slice(), path].concat()),
                None => Path::Other,
            }
        }
        _ => Path::Other,
    }
}

fn absolute(path: &[u8]) -> Path {
    match path.strip_prefix(MODELS_DIRECTORY) {
        Some(b"") => Path::ModelsDirectory,
        Some(rest @ [b'/', ..]) => below(rest),
        _ if uses_folders() => in_exec_directory(path).map_or(Path::Other, below),
        _ => Path::Other,
    }
}

fn below(path: &[u8]) -> Path {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    if parts.is_empty() { Path::ModelsDirectory } else { Path::Model(parts.join(&b'/')) }
}

/// The part after `…/folders/NUMBER` of a path in the directories that stand for folders, which `blobd exec` makes beside
/// its socket.
fn in_exec_directory(path: &[u8]) -> Option<&[u8]> {
    let socket = std::env::var_os(SOCKET_VARIABLE)?;
    let beside = std::path::Path::new(&socket).parent()?.as_os_str().as_bytes();
    let rest = path.strip_prefix(beside)?.strip_prefix(b"/folders/")?;
    let end = rest.iter().position(|byte| *byte == b'/')?;
    rest.get(end..)
}

/// Whether this process has asked for a folder, or was started in one: otherwise no relative path leads into one.
fn uses_folders() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    // Not a `OnceLock`, which a child forked meanwhile could find locked.
    static STARTED_IN_FOLDER: AtomicU8 = AtomicU8::new(UNKNOWN);
    if ANY_FOLDER.load(Ordering::Acquire) {
        return true;
    }
    if STARTED_IN_FOLDER.load(Ordering::Relaxed) == UNKNOWN {
        let before = errno();
        let base = directory_path(AT_FDCWD);
        set_errno(before);
        let is_in = base.is_some_and(|base| in_exec_directory(&base).is_some());
        STARTED_IN_FOLDER.store(if is_in { YES } else { NO }, Ordering::Relaxed);
    }
    STARTED_IN_FOLDER.load(Ordering::Relaxed) == YES
}

/// The path of an open directory, or of the current one.
fn directory_path(dir: c_int) -> Option<Vec<u8>> {
    match dir {
        AT_FDCWD => read_link(b"/proc/self/cwd\0"),
        _ => read_link(format!("/proc/self/fd/{dir}\0").as_bytes()),
    }
}

/// Whether an open directory stands for a folder.
fn is_folder(dir: c_int) -> bool {
    uses_folders() && directory_path(dir).is_some_and(|path| in_exec_directory(&path).is_some())
}

/// The target of a link; `None` on failure, with `errno` set. `path` must end with a zero byte.
fn read_link(path: &[u8]) -> Option<Vec<u8>> {
    let mut target = vec![0; MAX_PATH_BYTES];
    // SAFETY: Needed because std would call the hook. The path is a C string, and the length is that of the buffer.
    let length = unsafe { next::readlink(path.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
    target.truncate(usize::try_from(length).ok()?);
    Some(target)
}

/// What a path below the directory of the models names. The model of a path that ends in `.gguf` is one file.
pub(crate) fn find(path: &[u8]) -> Result<Entry, OpenError> {
    if let Some(folder) = known(path) {
        return folder.find(path);
    }
    if path.ends_with(b".gguf") {
        match image::find(path, || Request::File { path: path.to_vec() }) {
            Ok(image) => return Ok(Entry::File(image)),
            Err(error) if error.errno != ENOENT || !path.contains(&b'/') => return Err(error),
            // It may be a file in a folder.
            Err(missing) => return request(path).map_err(|_missing| missing)?.find(path),
        }
    }
    request(path)?.find(path)
}

/// The folder of this process that the path is in.
fn known(path: &[u8]) -> Option<Arc<Folder>> {
    let is_in = |folder: &&Arc<Folder>| matches!(path.strip_prefix(&*folder.name), Some([] | [b'/', ..]));
    ANY_FOLDER
        .load(Ordering::Acquire)
        .then(|| folders().iter().filter(is_in).max_by_key(|f| f.name.len()).cloned())?
}

/// Asks for the folder that the path is in.
fn request(path: &[u8]) -> Result<Arc<Folder>, OpenError> {
    let mut stream = Request::Folder { path: path.to_vec() }.send()?;
    let head = FolderHead::read(&mut stream)?;
    let name = path.get(..head.name_length).unwrap_or(path).to_vec();
    let folder = Folder { number: head.number, name, directory: head.directory, _lease: stream };
    let mut folders = folders();
    // Another thread may have asked for it meanwhile.
    if let Some(known) = folders.iter().find(|known| known.name == folder.name) {
        return Ok(Arc::clone(known));
    }
    let folder = Arc::new(folder);
    folders.push(Arc::clone(&folder));
    ANY_FOLDER.store(true, Ordering::Release);
    Ok(folder)
}

impl Folder {
    fn find(&self, path: &[u8]) -> Result<Entry, OpenError> {
        let rest = path.get(self.name.len()..).unwrap_or_default();
        let place = [&*self.directory, rest, b"\0"].concat();
        if read_link(&place).is_some() {
            let file = rest.strip_prefix(b"/").unwrap_or(rest).to_vec();
            let request = || Request::FileOfFolder { folder: self.number, path: file };
            return image::find(path, request).map(Entry::File);
        }
        if errno() == EINVAL {
            return Ok(Entry::Directory(place));
        }
        // A link that leads nowhere stands for a file, which has nothing below it.
        let above =
            rest.iter().enumerate().filter(|(_, byte)| **byte == b'/').filter_map(|(end, _)| rest.get(..end));
        let is_below_file = above
            .map(|above| [&*self.directory, above, b"\0"].concat())
            .any(|path| read_link(&path).is_some());
        Err(OpenError { errno: if is_below_file { ENOTDIR } else { ENOENT }, reason: String::new() })
    }
}

/// `DT_LNK` and `DT_REG` of a directory entry, and the place of this type in it.
const LINK: u8 = 10;
const REGULAR: u8 = 8;
const TYPE_OFFSET: usize = 18;

/// Makes an entry of a directory that stands for a folder that of a file. `entry` must be null or point to an entry of the
/// open directory `stream`.
pub(crate) unsafe fn correct_entry(stream: *mut c_void, entry: *mut c_void) {
    if entry.is_null() || !uses_folders() {
        return;
    }
    // SAFETY: Needed to read and change the entry's type. The entry is in the stream's buffer, which is writable.
    unsafe {
        let kind = entry.cast::<u8>().wrapping_add(TYPE_OFFSET);
        if *kind == LINK && is_folder(next::dirfd(stream)) {
            *kind = REGULAR;
        }
    }
}
