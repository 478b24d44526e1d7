//! The type of the file system that the store is on, and whether its syncs are reliable.

use crate::StoreError;
use crate::root::{FileStatus, Root};

/// How the content of new blobs is made durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// A few blobs are synced one by one, many by one `syncfs`. Always one by one where `syncfs` is not
    /// reliable.
    #[default]
    Auto,
    /// Always one `fsync` per blob: slower for small tensors, but independent of other writers.
    Fsync,
    /// Always one `syncfs`.
    Syncfs,
}

impl Durability {
    /// The name in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fsync => "fsync",
            Self::Syncfs => "syncfs",
        }
    }
}

/// A type of file system, identified by the number that `statfs` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Its name, as `mount` prints it.
    pub name: &'static str,
    /// Whether `syncfs` makes written data durable.
    pub syncfs_is_reliable: bool,
    /// Whether it allocates blocks some seconds after a write, when its transaction group is synced. Until
    /// then, `stat` reports almost no blocks.
    pub allocates_late: bool,
    /// A risk for stores on it.
    pub warning: Option<&'static str>,
    /// Whether its files are on another machine or come from a server process, so that an access may block.
    pub is_remote: bool,
}

/// What a lower store on a remote file system cannot do.
const REMOTE_LIMIT: &str = "an access waits as long as its server does not respond, a blob is only as fast as the \
     network, and maps of it fail with SIGBUS if the server loses it";

impl FileSystem {
    pub(super) fn of(root: &Root) -> Result<Self, StoreError> {
        let stat = rustix::fs::fstatfs(root.directory_file());
        let stat = stat.map_err(StoreError::errno("inspect", root.place()))?;
        Ok(Self::by_magic(stat.f_type))
    }

    /// What a lower store on it cannot do, if that is less than a local one.
    #[must_use]
    pub fn limit_as_lower(self) -> Option<String> {
        self.is_remote.then(|| format!("is on {}, a network file system: {REMOTE_LIMIT}", self.name))
    }

    /// Whether allocating a file's space ahead takes as long as writing the file.
    pub(crate) fn allocates_slowly(self) -> bool {
        self.name == "tmpfs"
    }

    /// A file's bytes on disk. Must be the same when it is written and when it is removed, or the
    /// ledger becomes wrong.
    pub(crate) fn bytes_on_disk(self, status: &FileStatus) -> u64 {
        self.estimate(status.len(), status.allocated_bytes())
    }

    const fn estimate(self, length: u64, allocated: u64) -> u64 {
        const BLOCK_BYTES: u64 = 4096;
        if !self.allocates_late {
            return allocated;
        }
        match length.checked_next_multiple_of(BLOCK_BYTES) {
            Some(rounded) => rounded,
            None => u64::MAX,
        }
    }

    /// Numbers from `linux/magic.h`.
    fn by_magic(magic: i64) -> Self {
        let local = |name| Self {
            name,
            syncfs_is_reliable: true,
            allocates_late: false,
            warning: None,
            is_remote: false,
        };
        let unreliable =
            |name, warning| Self { syncfs_is_reliable: false, warning: Some(warning), ..local(name) };
        let remote = |name, warning| Self { is_remote: true, ..unreliable(name, warning) };
        const NETWORK: &str = "locks and syncs of network file systems cannot be relied upon";
        match magic & 0xffff_ffff {
            0xef53 => local("ext4"),
            0x5846_5342 => local("xfs"),
            0x9123_683e => local("btrfs"),
            0xf2f5_2010 => local("f2fs"),
            0x2fc1_2fc1 => Self { allocates_late: true, ..local("zfs") },
            0xca45_1a4e => local("bcachefs"),
            0x0102_1994 => Self { warning: Some("a restart of the machine empties it"), ..local("tmpfs") },
            0x794c_7630 => unreliable("overlay", "mounted `volatile` it drops syncs"),
            0x6573_5546 => remote("fuse", "whether a sync means anything is up to its server"),
            0x6969 => remote("nfs", NETWORK),
            0xff53_4d42 | 0xfe53_4d42 => remote("cifs", NETWORK),
            0x00c3_6400 => remote("ceph", NETWORK),
            0x0102_1997 => remote("9p", NETWORK),
            0x0bd0_0bd0 => remote("lustre", NETWORK),
            0x4750_4653 => remote("gpfs", NETWORK),
            0x1983_0326 => remote("beegfs", NETWORK),
            0x5346_414f => remote("afs", NETWORK),
            0x9660 => local("iso9660"),
            0x7371_7368 => local("squashfs"),
            0xe0f5_e1e2 => local("erofs"),
            _ => unreliable("unknown", "its syncs are not known to be reliable"),
        }
    }
}

impl Durability {
    /// Resolves `auto` for a file system.
    #[must_use]
    pub const fn on(self, file_system: FileSystem) -> Self {
        match self {
            Self::Auto if !file_system.syncfs_is_reliable => Self::Fsync,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_used_where_blocks_are_allocated_late() {
        let [zfs, ext4] = [0x2fc1_2fc1, 0xef53].map(FileSystem::by_magic);
        for (length, allocated, on_zfs) in
            [(0, 0, 0), (1, 0, 4096), (4096, 512, 4096), (4097, 1 << 20, 8192), (u64::MAX, 512, u64::MAX)]
        {
            assert_eq!(zfs.estimate(length, allocated), on_zfs, "{length}");
            assert_eq!(ext4.estimate(length, allocated), allocated, "{length}");
        }
    }

    #[test]
    fn remote_file_systems_have_limits_as_lower_stores() {
        for (magic, limit) in
            [(0x6969, Some("nfs")), (0x6573_5546, Some("fuse")), (0xef53, None), (0x7371_7368, None)]
        {
            let found = FileSystem::by_magic(magic).limit_as_lower();
            assert_eq!(found.is_some(), limit.is_some(), "{magic:x}");
            assert!(limit.is_none_or(|name| found.is_some_and(|found| found.contains(name))));
        }
    }

    #[test]
    fn syncfs_is_not_used_automatically_where_unreliable() {
        for (magic, name, auto) in [
            (0xef53, "ext4", Durability::Auto),
            (0x6573_5546, "fuse", Durability::Fsync),
            (0x6969, "nfs", Durability::Fsync),
            (1, "unknown", Durability::Fsync),
        ] {
            let file_system = FileSystem::by_magic(magic);
            assert_eq!((file_system.name, Durability::Auto.on(file_system)), (name, auto));
            assert_eq!(Durability::Syncfs.on(file_system), Durability::Syncfs);
        }
    }
}
