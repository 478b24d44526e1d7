//! What collections plan, in which order they delete, and what they leave.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use super::*;
use crate::disk::{Disk, KernelDisk, Root};
use crate::root::OPENED;
use crate::testing::{add_blobs, begin, manifest, new_store, new_store_with, recipe_of, store_with};
use crate::{Actor, StoreOptions, Verb, lock};

#[test]
fn much_garbage_is_planned_as_a_number_and_deleted_in_batches() {
    let (_folder, store) = new_store();
    for number in 0..10_u8 {
        let path = store.path(layout::blob(Digest::of(&[number])));
        std::fs::write(path, [number]).unwrap();
    }
    let plan = plan_locked(&store.liveness, Extent { deletions: 4, measures_all: true }).unwrap().0;
    assert_eq!((plan.deletions.len(), plan.unlisted.files), (4, 6));
    assert_eq!(plan.freed_bytes(), plan_locked(&store.liveness, Extent::SHOWN).unwrap().0.freed_bytes());
    assert!(plan.unlisted.bytes > 0);
    let extent = Extent { deletions: 4, measures_all: false };
    let batch =
        || collect_up_to(&store.liveness, extent, &mut |plan| assert!(plan.deletions.len() <= 4)).unwrap();
    let batches: Vec<_> = std::iter::repeat_with(batch).take(4).collect();
    assert_eq!(batches.iter().map(|batch| batch.deletions.len()).collect::<Vec<_>>(), [4, 4, 2, 0]);
    assert_eq!(batches.iter().map(GcPlan::is_last_batch).collect::<Vec<_>>(), [false, false, true, true]);
    let freed = batches.iter().map(GcPlan::freed_bytes).sum::<u64>();
    assert_eq!(freed, plan.freed_bytes());
    assert_eq!(collect(&store.liveness).unwrap(), 0);
}

/// Names of manifests that are opened, and how often.
fn manifests_read(work: impl FnOnce()) -> BTreeMap<String, usize> {
    OPENED.take();
    work();
    let mut read = BTreeMap::new();
    for path in OPENED.take().iter().filter(|path| path.starts_with(layout::MANIFESTS)) {
        let model = path.iter().nth_back(1).unwrap_or_default().to_string_lossy().into_owned();
        *read.entry(model).or_default() += 1;
    }
    read
}

#[test]
fn collection_and_removal_read_each_manifest_once() {
    let (_folder, store) = new_store();
    for name in ["a", "b", "c"] {
        let mut ingest = begin(&store);
        ingest.add_bytes(name.as_bytes()).unwrap();
        ingest.commit(&name.parse().unwrap(), &manifest(&[name.as_bytes()]), None).unwrap();
    }
    let each_once = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 1)).collect();
    let collected = manifests_read(|| assert_eq!(collect(&store.liveness).unwrap(), 0));
    assert_eq!(collected, each_once(&["a", "b", "c"]));
    let removed: Reference = "a".parse().unwrap();
    let raw = store.names.raw_manifest(&removed).unwrap();
    let untagged = Untagged::new(&store.liveness, removed.clone(), raw);
    store.names.remove_tag(&removed, Actor::daemon(Verb::Rm)).unwrap();
    let freed = manifests_read(|| {
        let (report, deleted) = free(&store.liveness, &[untagged]);
        assert_eq!(deleted.unwrap().deletions.len(), 1);
        assert!(report.kept.is_empty() && report.models[0].freed_bytes > 0, "{report:?}");
    });
    assert_eq!(freed, each_once(&["b", "c"]));
}

#[test]
fn blob_stays_condemned_while_collections_are_refused() {
    let (_folder, store, blob) = store_with(b"of a model that was evicted");
    let foreign = store.path("manifests/notes.txt");
    std::fs::write(&foreign, "of the administrator").unwrap();
    store.liveness.condemn([blob]);
    assert!(matches!(collect_condemned(&store.liveness), Err(StoreError::ForeignFile { .. })));
    std::fs::remove_file(foreign).unwrap();
    assert_eq!(collect_condemned(&store.liveness).unwrap().deletions.len(), 1);
    assert!(!store.liveness.has_condemned());
}

/// The kernel's disk, with a list of syncs of the file system and of removals.
#[derive(Debug, Default)]
struct Noted(Arc<Mutex<Vec<String>>>);

impl Disk for Noted {
    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        lock(&self.0).push("sync".to_owned());
        KernelDisk.sync_file_system(directory)
    }
    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        let top = path.iter().next().unwrap().to_str().unwrap();
        lock(&self.0).push(format!("remove from {top}"));
        KernelDisk.remove_file(root, path)
    }
}

#[test]
fn file_system_is_synced_before_the_first_blob_is_deleted_and_only_then() {
    let noted = Arc::default();
    let disk = Arc::new(Noted(Arc::clone(&noted)));
    let (_folder, store) = new_store_with(StoreOptions { disk, ..StoreOptions::default() });
    let collected = || {
        lock(&noted).clear();
        collect(&store.liveness).unwrap();
        std::mem::take(&mut *lock(&noted))
    };
    assert_eq!(collected(), [""; 0], "there is nothing to delete");
    let blobs = add_blobs(&store, [b"a", b"b"]);
    assert_eq!(collected(), ["sync", "remove from blobs", "remove from blobs"]);
    let held = add_blobs(&store, [b"c"])[0];
    let open = store.content.open_blob(held, 0).unwrap();
    assert_eq!(collected(), ["sync"], "it may be released meanwhile");
    drop(open);
    assert_eq!(store.content.blobs().unwrap(), [held]);
    fs::write(store.path(layout::STAGING).join("left"), "").unwrap();
    assert_eq!(collected()[..2], ["remove from staging", "sync"]);
    fs::write(store.path(layout::STAGING).join("left"), "").unwrap();
    assert_eq!(collected(), ["remove from staging"]);
    assert_eq!(blobs.len(), 2);
}

/// Sets the times of a file to this many days ago.
fn age(path: &Path, days: u64) {
    let then = SystemTime::now() - Duration::from_secs(days * 86400);
    let file = File::options().append(true).open(path).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(then)).unwrap();
}

#[test]
fn leftovers_are_planned_with_their_sizes_and_removed_unless_they_are_used() {
    let (_folder, store) = new_store();
    let [abandoned, leased, recent] = [&b"1"[..], b"2", b"3"].map(Digest::of);
    for (file, days) in [(abandoned, 8), (leased, 8), (recent, 6)] {
        let directory = store.path(layout::partial(file));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("0"), vec![7; 9000]).unwrap();
        fs::write(directory.join("journal"), "").unwrap();
        age(&directory.join("journal"), days);
    }
    let lease = store.liveness.leases().grant("a pull");
    lease.protect(leased);
    fs::create_dir(store.path("staging/4711-0")).unwrap();
    fs::write(store.path("staging/4711-0/0"), vec![7; 5000]).unwrap();
    let transaction = begin(&store);
    for (tag, keep) in [("expired", Duration::ZERO), ("kept", Duration::from_secs(3600))] {
        store.names.add_to_trash(&tag.parse().unwrap(), &manifest(&[b"x"]), keep).unwrap();
    }
    // The file that the models in the trash need.
    let blob = add_blobs(&store, [b"x"])[0];
    let trash = store.names.trash().unwrap();
    let expired = trash.iter().find(|model| model.reference.model() == "expired").unwrap().record;
    let root = &store.content.root;
    let bytes_of = |path: &Path| root.allocated_bytes(path).unwrap();
    let staging = Path::new("staging/4711-0");
    let leftovers = [
        OtherDeletion::Trash { record: expired, bytes: bytes_of(&layout::trashed(expired)) },
        OtherDeletion::Staging {
            name: "4711-0".into(),
            bytes: bytes_of(staging) + bytes_of(&staging.join("0")),
        },
        OtherDeletion::Partial {
            file: abandoned,
            bytes: store.content.bytes_of_partial(abandoned).unwrap().unwrap(),
        },
    ];
    let sum: u64 = leftovers.iter().map(OtherDeletion::bytes).sum();
    assert!(sum > 3 * 4096);
    let expected = GcPlan { other_deletions: leftovers.to_vec(), ..GcPlan::default() };
    assert_eq!(plan(&store.liveness).unwrap(), expected);
    assert_eq!((expected.freed_bytes(), expected.is_last_batch()), (sum, true));
    assert_eq!(collect(&store.liveness).unwrap(), sum);
    let mut left = store.content.partial_files().unwrap();
    left.sort();
    let mut used = [leased, recent];
    used.sort();
    assert_eq!((left.as_slice(), store.names.trash().unwrap().len()), (&used[..], 1));
    assert_eq!(store.content.abandoned_staging().unwrap(), []);
    assert!(store.path(transaction.staging().directory()).is_dir());
    assert_eq!(store.content.blobs().unwrap(), [blob]);
    // A download that is continued after the plan was made stays.
    drop(lease);
    let plan = plan(&store.liveness).unwrap();
    assert_eq!(plan.other_deletions.len(), 1);
    let lease = store.liveness.leases().grant("a pull");
    lease.protect(leased);
    let done = execute(&store.liveness, &plan, &store.liveness.leases().begin_collection()).unwrap();
    assert_eq!(done, GcPlan::default());
    assert!(store.content.partial_files().unwrap().contains(&leased));
}

#[test]
fn expired_models_leave_the_trash_with_what_only_they_need() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    ingest.add_bytes(b"shared").unwrap();
    ingest.add_bytes(b"own").unwrap();
    ingest.publish().unwrap();
    let [own, shared] = [&b"own"[..], b"shared"].map(Digest::of);
    let keep = |tag: &str, files: &[&[u8]], keep| {
        store.names.add_to_trash(&tag.parse().unwrap(), &manifest(files), keep).unwrap();
    };
    keep("kept", &[b"shared"], Duration::from_secs(3600));
    assert_eq!(empty_trash(&store.liveness).unwrap(), GcPlan::default());
    keep("expired", &[b"own", b"shared"], Duration::ZERO);
    drop(ingest);
    store.liveness.take_condemned();
    let done = empty_trash(&store.liveness).unwrap();
    assert_eq!(done.deletions.iter().map(|(node, _)| *node).collect::<Vec<_>>(), [Node::Blob(own)]);
    assert_eq!(store.names.trash().unwrap().len(), 1);
    assert_eq!(store.content.blobs().unwrap(), [shared]);
}

#[test]
fn needed_and_unneeded_data_of_a_store_are_distinguished() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    for bytes in [&b"head"[..], b"tensor", b"config"] {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.add_recipe(recipe_of(&[b"head", b"tensor"]));
    ingest.commit(&"m".parse().unwrap(), &manifest(&[b"config", b"headtensor"]), None).unwrap();
    let garbage = recipe_of(&[b"other", b"parts"]);
    fs::write(store.path(layout::recipe(garbage.file())), garbage.to_json()).unwrap();
    let [other, leased] = add_blobs(&store, [&b"other"[..], b"leased"]).try_into().unwrap();
    let lease = store.liveness.leases().grant("a test");
    lease.protect(leased);
    let found = plan(&store.liveness).unwrap();
    let unneeded = [Node::Recipe(garbage.file()), Node::Blob(other)];
    assert_eq!(found.deletions.iter().map(|(node, _)| *node).collect::<Vec<_>>(), unneeded);
    assert_eq!(
        (found.leased.as_slice(), found.held.len(), found.other_deletions.len()),
        (&[leased][..], 0, 0)
    );
    assert_eq!(found.blobs(), [other].into());
    assert_eq!(plan_unless_collecting(&store.liveness).unwrap(), Some(found));
    let names = |files: &[&[u8]]| files.iter().map(|bytes| Digest::of(bytes)).collect::<BTreeSet<_>>();
    collect(&store.liveness).unwrap();
    let blobs: BTreeSet<Digest> = store.content.blobs().unwrap().into_iter().collect();
    assert_eq!(blobs, names(&[b"head", b"tensor", b"config", b"leased"]));
    assert_eq!(store.content.recipes().unwrap(), [Digest::of(b"headtensor")]);
    assert!(store.liveness.is_condemned(leased), "it is collected when the lease ends");
    let needs = needs(&store.liveness, &manifest(&[b"config", b"headtensor"])).unwrap();
    let mut all: BTreeSet<_> = [&b"head"[..], b"tensor"].map(|bytes| Node::Blob(Digest::of(bytes))).into();
    all.extend([&b"config"[..], b"headtensor"].into_iter().flat_map(|bytes| Node::both(Digest::of(bytes))));
    assert_eq!(needs, all);
}
