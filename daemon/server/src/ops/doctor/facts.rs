//! The facts that the checks of `doctor` are based on.

use std::borrow::Cow;
use std::time::SystemTime;

use blobd_client::name_service::READS_FILES_ONLY;
use blobd_store::index::IndexStatus;
use blobd_store::scrub::Cursor;
use blobd_store::{
    FileSystem, Inodes, LowerStatus, Mount, Ownership, SpacePolicy, Store, StoreError, StoreOwner, gc,
};
use blobd_store_format::text::quoted;

use crate::names::check_service;
use crate::ops::OpError;

pub(super) use crate::audit::AuditStatus;

/// Facts about the daemon for `doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub struct DoctorContext {
    pub audit: AuditStatus,
    /// Whether the configuration allows clients of the daemon's own user.
    pub is_single_user: bool,
    /// Whether a client of the daemon's own user, other than root, has connected.
    pub has_met_owner: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) context: DoctorContext,
    pub(super) now: SystemTime,
    pub(super) uid: u32,
    pub(super) pid: u32,
    pub(super) is_service: bool,
    pub(super) root: String,
    pub(super) mode: u32,
    pub(super) owner: u32,
    pub(super) ownership: Ownership,
    pub(super) read_only_reason: Option<String>,
    pub(super) file_system: FileSystem,
    pub(super) lower_stores: Vec<LowerStatus>,
    pub(super) mount: Option<Mount>,
    pub(super) has_direct_io: Option<bool>,
    /// Why files cannot get their final names, if they cannot.
    pub(super) rename_failure: Option<String>,
    pub(super) space: SpaceFacts,
    pub(super) inodes: Option<Inodes>,
    pub(super) reserve_bytes: Option<u64>,
    pub(super) index: IndexStatus,
    pub(super) misplaced: Vec<String>,
    pub(super) damaged_blobs: usize,
    pub(super) quarantine_bytes: u64,
    pub(super) scrub: Cursor,
    pub(super) metadata: Metadata,
    pub(super) newest_change: Option<SystemTime>,
    pub(super) most_blobs_of_a_file: u64,
    pub(super) most_descriptors: u64,
    pub(super) kernel: KernelFacts,
    pub(super) names: NameFacts,
}

#[derive(Clone, Debug, Default)]
pub(super) struct NameFacts {
    /// Whether this binary knows no other source than `/etc/passwd` and `/etc/group`.
    pub(super) are_of_files_only: bool,
    pub(super) failure: Option<String>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceFacts {
    pub(super) free_bytes: u64,
    pub(super) used_bytes: u64,
    /// Whether not one more byte may be stored.
    pub(super) is_short: bool,
    pub(super) policy: SpacePolicy,
}

#[derive(Clone, Debug)]
pub(super) enum Metadata {
    Readable {
        reclaimable_bytes: u64,
    },
    Unreadable(String),
    /// Not checked, because a collection was running.
    Busy,
}

#[derive(Clone, Debug, Default)]
pub(super) struct KernelFacts {
    /// Such as `6.18.5-cloud-amd64`.
    pub(super) release: String,
    pub(super) protected_hardlinks: Option<u64>,
    pub(super) max_map_count: Option<u64>,
    /// The content of `transparent_hugepage/enabled`, such as `always [madvise] never`.
    pub(super) huge_pages: Option<String>,
}

/// The size of damaged blobs on disk; 0 if it cannot be read.
fn quarantine_bytes(store: &Store) -> u64 {
    let blobs = store.content().quarantined_blobs().unwrap_or_default();
    blobs.iter().map(|blob| blob.bytes).fold(0, u64::saturating_add)
}

impl Facts {
    pub(super) fn gather(store: &Store, context: DoctorContext) -> Result<Self, OpError> {
        let status = store.content().root_status()?;
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Ok(Self {
            context,
            now: SystemTime::now(),
            uid: rustix::process::geteuid().as_raw(),
            pid: std::process::id(),
            is_service: std::env::var_os("INVOCATION_ID").is_some(),
            root: store.content().place().display().to_string(),
            mode: status.permissions() & 0o777,
            owner: status.owner(),
            ownership: store.content().ownership()?,
            read_only_reason: store.content().read_only_reason().map(Cow::into_owned),
            file_system: store.content().file_system(),
            lower_stores: store.content().lower_stores(),
            mount: store.content().mount(),
            has_direct_io: store.content().has_direct_io(),
            rename_failure: rename_failure(store),
            space: SpaceFacts {
                free_bytes: store.ledger().free_bytes()?,
                used_bytes: store.ledger().used_bytes(),
                is_short: store.ledger().shortage(1) > 0,
                policy: store.ledger().space_policy(),
            },
            inodes: store.content().inodes(),
            reserve_bytes: store.ledger().reserve_bytes(),
            index: store.content().index().status(),
            misplaced: store.content().misplaced().iter().map(ToString::to_string).collect(),
            damaged_blobs: store.content().damaged().len(),
            quarantine_bytes: quarantine_bytes(store),
            scrub: Cursor::load(store),
            metadata: Metadata::new(store),
            newest_change: store.content().newest_change(),
            most_blobs_of_a_file: store.content().most_blobs_of_a_file().unwrap_or_default(),
            most_descriptors: descriptors.maximum.unwrap_or(u64::MAX),
            kernel: KernelFacts::read(),
            names: NameFacts {
                are_of_files_only: READS_FILES_ONLY,
                failure: check_service().err().map(|error| error.to_string()),
            },
        })
    }

    /// Whether this process is the store's owner, or root, which acts as the owner.
    pub(super) fn runs_as_owner(&self) -> bool {
        [0, self.ownership.owner.uid].contains(&self.uid)
    }

    /// The shell command that gives every file of the store to its owner.
    pub(super) fn chown(&self) -> String {
        let StoreOwner { uid, gid } = self.ownership.owner;
        format!("{}chown -R --no-dereference {uid}:{gid} {}", self.sudo(), quoted(&self.root))
    }

    /// The shell command that runs `doctor` as the store's owner.
    pub(super) fn as_owner(&self) -> String {
        self.ownership.owner.command(&format!("blobd --root {} doctor", quoted(&self.root)))
    }

    /// The start of a shell command that needs the rights of the store's owner.
    pub(super) fn sudo(&self) -> &'static str {
        if self.context.is_single_user && self.uid != 0 { "" } else { "sudo " }
    }
}

/// A read-only or full store cannot try renames; other checks report that.
fn rename_failure(store: &Store) -> Option<String> {
    match store.content().try_renames() {
        Err(error @ StoreError::NoSafeRename { .. }) => Some(error.to_string()),
        _ => None,
    }
}

impl Metadata {
    fn new(store: &Store) -> Self {
        match gc::plan_unless_collecting(store.liveness()) {
            Ok(None) => Self::Busy,
            Ok(Some(plan)) => Self::Readable { reclaimable_bytes: plan.freed_bytes() },
            Err(error) => Self::Unreadable(error.to_string()),
        }
    }
}

impl KernelFacts {
    fn read() -> Self {
        let number = |path| read(path)?.trim().parse().ok();
        Self {
            release: read("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            protected_hardlinks: number("/proc/sys/fs/protected_hardlinks"),
            max_map_count: number("/proc/sys/vm/max_map_count"),
            huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "files of the kernel")]
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// A machine without a finding.
#[cfg(test)]
pub(super) fn healthy() -> Facts {
    let (_folder, store) = blobd_store::testing::new_store();
    let facts = Facts::gather(&store, DoctorContext::default()).unwrap();
    Facts {
        uid: 990,
        pid: 7,
        is_service: true,
        root: "/var/lib/blobd".to_owned(),
        mode: 0o700,
        owner: 990,
        ownership: Ownership { owner: StoreOwner { uid: 990, gid: 991 }, ..facts.ownership },
        file_system: FileSystem { name: "ext4", warning: None, ..facts.file_system },
        mount: Some(Mount {
            point: "/var".to_owned(),
            options: "rw,relatime".to_owned(),
            source: "/dev/sda1".to_owned(),
        }),
        has_direct_io: Some(true),
        space: SpaceFacts {
            free_bytes: 1 << 40,
            used_bytes: 1 << 30,
            is_short: false,
            policy: SpacePolicy::default(),
        },
        inodes: Some(Inodes { total: 1 << 24, free: 1 << 23 }),
        reserve_bytes: Some(16 << 20),
        most_blobs_of_a_file: 300,
        most_descriptors: 524_288,
        kernel: KernelFacts {
            release: "6.18.5".to_owned(),
            protected_hardlinks: Some(1),
            max_map_count: Some(1_048_576),
            huge_pages: Some("always [madvise] never\n".to_owned()),
        },
        names: NameFacts::default(),
        ..facts
    }
}
