//! Common parts of the tests' FUSE file systems.

use std::time::UNIX_EPOCH;

use fuser::{FileAttr, FileType, INodeNo};

/// The attributes of a file of this many bytes, or of a directory if there is no size.
#[must_use]
pub fn attributes(inode: INodeNo, size: Option<u64>, permissions: u16) -> FileAttr {
    let kind = if size.is_some() { FileType::RegularFile } else { FileType::Directory };
    let size = size.unwrap_or_default();
    FileAttr {
        ino: inode,
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: permissions,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
