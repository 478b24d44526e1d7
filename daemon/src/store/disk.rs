//! Files of the store: whole small files written durably, directories synced.
//!
//! The steps here are the ones whose order makes the store's promises true; who calls them in
//! which order is [`super::ingest`]'s business.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};

use super::error::{StoreError, optional};

/// Creates a directory and those above it, and makes their names durable.
pub(crate) fn create_dir_all(root: &Path, relative: &Path) -> Result<(), StoreError> {
    let mut path = root.to_path_buf();
    for part in relative {
        let parent = path.clone();
        path.push(part);
        match fs::create_dir(&path) {
            Ok(()) => sync_dir(&parent)?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(StoreError::io("create directory", path)(error)),
        }
    }
    Ok(())
}

/// Makes the names in a directory durable.
pub(crate) fn sync_dir(path: &Path) -> Result<(), StoreError> {
    let dir = File::open(path).map_err(StoreError::io("open directory", path))?;
    dir.sync_all().map_err(StoreError::io("sync directory", path))
}

/// Makes a file's content durable.
pub(crate) fn sync_file(path: &Path) -> Result<(), StoreError> {
    let file = File::open(path).map_err(StoreError::io("open", path))?;
    file.sync_all().map_err(StoreError::io("sync", path))
}

/// Makes everything on the file system durable.
pub(crate) fn sync_file_system(path: &Path) -> Result<(), StoreError> {
    let dir = File::open(path).map_err(StoreError::io("open directory", path))?;
    rustix::fs::syncfs(dir).map_err(StoreError::errno("sync file system of", path))
}

/// Writes a small file under a temporary name, durably, and then gives it its own: a reader sees
/// the old content or the new one, whatever happens. The new name is durable once the caller has
/// synced its directory.
pub(crate) fn replace_file(
    temporary: &Path,
    target: &Path,
    content: &[u8],
    mode: u32,
) -> Result<(), StoreError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(temporary)
        .map_err(StoreError::io("create", temporary))?;
    file.write_all(content).map_err(StoreError::io("write", temporary))?;
    file.sync_all().map_err(StoreError::io("sync", temporary))?;
    fs::rename(temporary, target).map_err(StoreError::io("rename to", target))
}

/// Gives a staged file its final name unless that name is taken; says whether it was free.
pub(crate) fn publish(staged: &Path, target: &Path) -> Result<bool, StoreError> {
    match rustix::fs::renameat_with(CWD, staged, CWD, target, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(errno) => Err(StoreError::errno("rename to", target)(errno)),
    }
}

/// Reads a file of at most `limit` bytes; `None` when there is none.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
    let Some(file) = optional(File::open(path), "open", path)? else { return Ok(None) };
    // One read where the length is known; a hostile one is capped.
    let length = file.metadata().map_err(StoreError::io("inspect", path))?.len().min(limit);
    let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or_default().saturating_add(1));
    // One byte more than allowed, so that the caller's own check of the length sees the excess.
    file.take(limit.saturating_add(1)).read_to_end(&mut content).map_err(StoreError::io("read", path))?;
    Ok(Some(content))
}

/// Removes a file; says how many bytes it took on disk, or `None` when there was none.
pub(crate) fn remove_file(path: &Path) -> Result<Option<u64>, StoreError> {
    let Some(metadata) = optional(fs::symlink_metadata(path), "inspect", path)? else { return Ok(None) };
    fs::remove_file(path).map_err(StoreError::io("remove", path))?;
    Ok(Some(bytes_on_disk(&metadata)))
}

/// What a file takes on disk, which for sparse or short files is not its length.
pub(crate) fn bytes_on_disk(metadata: &fs::Metadata) -> u64 {
    const STAT_BLOCK_BYTES: u64 = 512;
    metadata.blocks().saturating_mul(STAT_BLOCK_BYTES)
}

/// What a directory's files take on disk, all levels; a file that vanishes meanwhile counts not.
pub(crate) fn tree_bytes(path: &Path) -> u64 {
    let mut unvisited = vec![path.to_path_buf()];
    let mut bytes = 0u64;
    while let Some(dir) = unvisited.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => unvisited.push(entry.path()),
                Ok(metadata) => bytes = bytes.saturating_add(bytes_on_disk(&metadata)),
                Err(_vanished) => {}
            }
        }
    }
    bytes
}

/// What is free on the file system for a user without privileges.
pub(crate) fn free_bytes(path: &Path) -> Result<u64, StoreError> {
    let stat = rustix::fs::statvfs(path).map_err(StoreError::errno("inspect", path))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// How large the file system is.
pub(crate) fn capacity_bytes(path: &Path) -> Result<u64, StoreError> {
    let stat = rustix::fs::statvfs(path).map_err(StoreError::errno("inspect", path))?;
    Ok(stat.f_blocks.saturating_mul(stat.f_frsize))
}
