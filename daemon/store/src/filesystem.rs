//! What the file system of a store can do: its type, whether its syncs are reliable, and direct I/O, which bypasses the
//! page cache.

use std::fs::File;

use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};

use crate::StoreError;
use crate::root::{FileStatus, Root};

/// How the content of new blobs is made durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// One `fsync` per blob for a few and where `syncfs` is not reliable, one `syncfs` for many.
    #[default]
    Auto,
    /// Always one `fsync` per blob: slower for small tensors, but independent of other writers.
    Fsync,
    Syncfs,
}

impl Durability {
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
    /// Whether it allocates blocks seconds after a write. Until then, `stat` reports almost no blocks.
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
    pub(super) fn for_root(root: &Root) -> Result<Self, StoreError> {
        let stat = rustix::fs::fstatfs(root.directory_file());
        let stat = stat.map_err(StoreError::errno("inspect", root.place()))?;
        Ok(Self::from_magic(stat.f_type))
    }

    /// What a lower store on it cannot do, if that is less than a local one.
    pub fn limit_as_lower(self) -> Option<String> {
        self.is_remote.then(|| format!("is on {}, a network file system: {REMOTE_LIMIT}", self.name))
    }

    /// Whether allocating a file's space ahead takes as long as writing the file.
    pub(crate) fn allocates_slowly(self) -> bool {
        self.name == "tmpfs"
    }

    /// A file's bytes on disk: the same when it is written and when it is removed, or the ledger becomes wrong.
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
    fn from_magic(magic: i64) -> Self {
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

/// The alignment where the kernel reports none, and the least that is used: no disk has larger sectors, and some
/// kernels report what the disk needs, not what they need.
const DEFAULT_ALIGNMENT: usize = 4096;

/// Sets `O_DIRECT` if possible. Returns the alignment of offsets, lengths and memory in bytes: at most `limit`.
pub(crate) fn set_direct(file: &File, limit: usize) -> Option<usize> {
    let reported = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let reported = reported.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let alignment = match reported {
        Some(stat) if stat.stx_dio_offset_align == 0 => return None,
        Some(stat) => usize::try_from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)).ok()?,
        None => DEFAULT_ALIGNMENT,
    };
    let alignment = alignment.max(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > limit {
        return None;
    }
    let flags = fcntl_getfl(file).ok()?;
    fcntl_setfl(file, flags.union(OFlags::DIRECT)).ok()?;
    Some(alignment)
}

pub(crate) fn unset_direct(file: &File) {
    if let Ok(flags) = fcntl_getfl(file) {
        let _ = fcntl_setfl(file, flags - OFlags::DIRECT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_used_where_blocks_are_allocated_late() {
        let [zfs, ext4] = [0x2fc1_2fc1, 0xef53].map(FileSystem::from_magic);
        for (length, allocated, on_zfs) in
            [(0, 0, 0), (1, 0, 4096), (4096, 512, 4096), (4097, 1 << 20, 8192), (u64::MAX, 512, u64::MAX)]
        {
            assert_eq!(zfs.estimate(length, allocated), on_zfs, "{length}");
            assert_eq!(ext4.estimate(length, allocated), allocated, "{length}");
        }
    }

    #[test]
    fn file_systems_are_known_by_their_numbers() {
        for (magic, name, is_remote, syncfs_is_reliable, has_warning) in [
            (0xef53, "ext4", false, true, false),
            (0x5846_5342, "xfs", false, true, false),
            (0x9123_683e, "btrfs", false, true, false),
            (0xf2f5_2010, "f2fs", false, true, false),
            (0x2fc1_2fc1, "zfs", false, true, false),
            (0xca45_1a4e, "bcachefs", false, true, false),
            (0x0102_1994, "tmpfs", false, true, true),
            (0x794c_7630, "overlay", false, false, true),
            (0x6573_5546, "fuse", true, false, true),
            (0x6969, "nfs", true, false, true),
            (0xff53_4d42, "cifs", true, false, true),
            (0xfe53_4d42, "cifs", true, false, true),
            (0x00c3_6400, "ceph", true, false, true),
            (0x0102_1997, "9p", true, false, true),
            (0x0bd0_0bd0, "lustre", true, false, true),
            (0x4750_4653, "gpfs", true, false, true),
            (0x1983_0326, "beegfs", true, false, true),
            (0x5346_414f, "afs", true, false, true),
            (0x9660, "iso9660", false, true, false),
            (0x7371_7368, "squashfs", false, true, false),
            (0xe0f5_e1e2, "erofs", false, true, false),
            (7, "unknown", false, false, true),
        ] {
            let found = FileSystem::from_magic(magic);
            let of_32_bits = FileSystem::from_magic(magic | 0xffff_ffff << 32);
            assert_eq!((found.name, of_32_bits.name), (name, name));
            let facts = (found.is_remote, found.syncfs_is_reliable, found.warning.is_some());
            assert_eq!(facts, (is_remote, syncfs_is_reliable, has_warning), "{name}");
        }
    }

    #[test]
    fn direct_reads_are_switched_on_with_a_usable_alignment_and_off_again() {
        let file = tempfile::tempfile().unwrap();
        let is_direct = || fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT);
        assert_eq!(set_direct(&file, DEFAULT_ALIGNMENT - 1), None);
        assert!(!is_direct());
        let alignment = set_direct(&file, 1 << 20);
        assert_eq!(alignment.is_some(), is_direct());
        assert!(alignment.is_none_or(|alignment| alignment % DEFAULT_ALIGNMENT == 0));
        unset_direct(&file);
        assert!(!is_direct());
    }

    #[test]
    fn remote_file_systems_have_limits_as_lower_stores() {
        for (magic, limit) in
            [(0x6969, Some("nfs")), (0x6573_5546, Some("fuse")), (0xef53, None), (0x7371_7368, None)]
        {
            let found = FileSystem::from_magic(magic).limit_as_lower();
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
            let file_system = FileSystem::from_magic(magic);
            assert_eq!((file_system.name, Durability::Auto.on(file_system)), (name, auto));
            assert_eq!(Durability::Syncfs.on(file_system), Durability::Syncfs);
        }
    }
}
