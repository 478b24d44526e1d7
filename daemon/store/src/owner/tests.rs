//! Tests of the owner of a store. Those that need several users are skipped unless root runs them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::root::Root;
use crate::testing::manifest;
use crate::{Ingest, Store, StoreError};

const OWNER: StoreOwner = StoreOwner { uid: 65534, gid: 65533 };
const STRANGER: u32 = 4711;

/// A directory for a store of this user; `None` if this process is not root.
fn folder_of(owner: StoreOwner) -> Option<TempDir> {
    if !rustix::process::geteuid().is_root() {
        blobd_fixtures::skipped::skipped("only root can act as another user");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    chown(folder.path(), Some(owner.uid), Some(owner.gid)).unwrap();
    Some(folder)
}

/// The owner of each file and directory.
fn owners(root: &Path) -> BTreeMap<std::path::PathBuf, StoreOwner> {
    let mut found = BTreeMap::new();
    let mut next = vec![root.to_path_buf()];
    while let Some(path) = next.pop() {
        let status = path.symlink_metadata().unwrap();
        found.insert(path.clone(), StoreOwner { uid: status.uid(), gid: status.gid() });
        if status.is_dir() {
            next.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found
}

fn import(store: &Arc<Store>, name: &str) -> Result<(), StoreError> {
    let mut ingest = Ingest::begin(store, store.liveness.leases().grant("a test"))?;
    for bytes in [&b"{}"[..], name.as_bytes()] {
        ingest.add_bytes(bytes)?;
    }
    ingest.commit(&name.parse().unwrap(), &manifest(&[b"{}", name.as_bytes()]), None).map(drop)
}

#[test]
fn everything_that_root_creates_in_a_store_belongs_to_its_owner() {
    let Some(folder) = folder_of(OWNER) else { return };
    let store = Arc::new(Store::open(folder.path()).unwrap());
    assert_eq!(store.content.owner(), OWNER);
    import(&store, "m").unwrap();
    import(&store, "n").unwrap();
    store.ledger.make_reserve();
    store.content.start_index();
    store.content.audit_directory().unwrap();
    drop(store.content.index().catalog().unwrap());
    store.content.stop_index();
    drop(store);
    let found = owners(folder.path());
    assert!(found.keys().any(|path| path.ends_with("sled/db")), "the index's own files: {found:?}");
    assert!(found.len() > 20, "{found:?}");
    assert!(found.values().all(|owner| *owner == OWNER), "{found:?}");
    let found = Store::open(folder.path()).unwrap().content.ownership().unwrap();
    assert_eq!(found.foreign, 0, "{found:?}");
}

#[test]
fn new_store_in_a_directory_of_another_user_belongs_to_that_user() {
    let Some(folder) = folder_of(OWNER) else { return };
    let path = folder.path().join("share/store");
    assert_eq!(Store::open(&path).unwrap().content.owner(), OWNER);
    assert!(owners(folder.path()).values().all(|owner| *owner == OWNER), "{:?}", owners(folder.path()));
}

#[test]
fn store_file_decides_in_a_directory_of_root() {
    let Some(folder) = folder_of(OWNER) else { return };
    drop(Store::open(folder.path()).unwrap());
    chown(folder.path(), Some(0), Some(0)).unwrap();
    assert_eq!(Root::open(folder.path()).unwrap().owner(), OWNER, "a mount point of a volume");
    chown(folder.path(), Some(STRANGER), None).unwrap();
    assert_eq!(Root::open(folder.path()).unwrap().owner(), OWNER);
    chown(folder.path().join("store.json"), Some(0), Some(0)).unwrap();
    assert_eq!(Root::open(folder.path()).unwrap().owner().uid, STRANGER, "chown of the directory alone");
}

#[test]
fn directory_of_another_user_is_reported_unless_the_owner_can_create_files_in_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let Some(folder) = folder_of(OWNER) else { return };
    let store = Store::open(folder.path()).unwrap();
    chown(folder.path(), Some(0), Some(OWNER.gid)).unwrap();
    for (mode, foreign) in [(0o755, 1), (0o775, 0), (0o777, 0), (0o700, 1)] {
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(store.content.ownership().unwrap().foreign, foreign, "{mode:o}");
    }
}

#[test]
fn files_of_other_users_are_found_at_every_depth_and_are_not_written_to() {
    let Some(folder) = folder_of(OWNER) else { return };
    let store = Arc::new(Store::open(folder.path()).unwrap());
    import(&store, "m").unwrap();
    let all: Vec<_> = owners(folder.path()).into_keys().filter(|path| path != folder.path()).collect();
    for path in &all {
        let before = path.symlink_metadata().unwrap();
        chown(path, Some(STRANGER), None).unwrap();
        let found = store.content.ownership().unwrap();
        let expected = path.strip_prefix(folder.path()).unwrap();
        assert_eq!((found.foreign, found.files), (1, all.len() as u64 + 1));
        assert_eq!((found.examples[0].path.as_path(), found.examples[0].uid), (expected, STRANGER));
        chown(path, Some(before.uid()), None).unwrap();
    }
    chown(folder.path().join("manifests/registry.ollama.ai/library"), Some(STRANGER), None).unwrap();
    let error = import(&store, "n").unwrap_err();
    assert!(
        matches!(&error, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    );
}

#[test]
fn store_with_a_lock_file_of_another_user_is_read_only_and_says_whose_it_is() {
    let Some(folder) = folder_of(OWNER) else { return };
    let store = Arc::new(Store::open(folder.path()).unwrap());
    import(&store, "m").unwrap();
    drop(store);
    chown(folder.path().join("lock"), Some(0), Some(0)).unwrap();
    let store = Arc::new(Store::open(folder.path()).unwrap());
    let reason = store.content.read_only_reason().unwrap().into_owned();
    assert!(reason.starts_with("its lock file belongs to uid 0, and the store to uid 65534;"), "{reason}");
    assert!(matches!(import(&store, "n"), Err(StoreError::ReadOnly { .. })));
    assert_eq!(store.names.tags().unwrap().references.len(), 1, "it can be read");
}

#[test]
fn file_of_another_user_is_not_opened_for_changes() {
    use crate::disk::{Change, Disk as _, KernelDisk};
    let Some(folder) = folder_of(OWNER) else { return };
    drop(Store::open(folder.path()).unwrap());
    fs::write(folder.path().join("f"), "").unwrap();
    let root = Root::open(folder.path()).unwrap();
    let error = KernelDisk.open_file(&root, Path::new("f"), Change::Content).unwrap_err();
    let error = root.failure("open", Path::new("f"))(error);
    assert!(matches!(error, StoreError::WrongOwner { uid: 0, owner: OWNER, .. }), "{error}");
}

#[test]
fn user_outside_of_the_namespace_is_not_mapped() {
    const MAP: &str = "         0       1000          1\n      1000     100000      65536\n";
    for (uid, expected) in
        [(0, true), (1, false), (999, false), (1000, true), (66_535, true), (66_536, false)]
    {
        assert_eq!(maps(MAP, uid), expected, "{uid}");
    }
    for (map, expected) in [("", false), ("garbage", false), ("0 0 4294967295", true), ("5 0 0", false)] {
        assert_eq!(maps(map, 5), expected, "{map}");
    }
    assert!(StoreOwner::for_process().is_mapped());
    assert!(!StoreOwner { uid: u32::MAX, gid: 0 }.is_mapped(), "no user has this number");
}

#[test]
fn refusal_says_whose_the_store_is_and_how_to_run_as_that_user() {
    let own = StoreOwner::for_process();
    assert!(own.is_own() && own.act().unwrap().is_none());
    let other = StoreOwner { uid: own.uid + 1, gid: own.gid };
    assert!(!other.is_own());
    assert_eq!(own.description(), format!("uid {}", own.uid));
    assert_eq!(other.command("blobd ls"), format!("sudo -u '#{}' blobd ls", other.uid));
    if other.is_mapped() {
        let expected = format!(
            "it belongs to uid {}, and this process runs as uid {}, which cannot act as that user; run the command as \
             its owner: sudo -u '#{}' blobd …",
            other.uid, own.uid, other.uid
        );
        assert_eq!(other.refusal(), expected);
    }
}

#[test]
fn only_the_first_foreign_files_and_the_wrong_groups_are_examples() {
    let Some(folder) = folder_of(OWNER) else { return };
    let store = Store::open(folder.path()).unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        fs::write(folder.path().join("blobs").join(name), "").unwrap();
    }
    let found = store.content.ownership().unwrap();
    assert_eq!((found.foreign, found.examples.len()), (5, 3));
    for name in ["a", "b", "c", "d", "e"] {
        chown(folder.path().join("blobs").join(name), Some(OWNER.uid), Some(STRANGER)).unwrap();
    }
    let found = store.content.ownership().unwrap();
    assert_eq!((found.foreign, found.wrong_groups.files), (0, 5));
    assert_eq!(found.wrong_groups.example.unwrap().gid, STRANGER);
}
