//! The quota is never exceeded, with and without eviction.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::ImportParams;
use blobd_server::ops::{self, OpError};
use blobd_store::gc;
use blobd_store::{Eviction, SpacePolicy, Store, StoreOptions};
use blobd_tests::file_source::import_file;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_blobs, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs};

use super::{Limited, bytes_on_disk, model, unit};

#[test]
fn quota_without_eviction_is_a_limit() {
    let limited = Limited::start(25, "");
    let [a, b] = [("a", 1), ("b", 2)].map(|(name, seed)| limited.pull(name, seed));
    let before = check_blobs(limited.daemon.root());
    limited.try_pull("c", &model(3)).exits_with(6);
    let error = limited.try_import("d", &model(4)).exits_with(6).error();
    assert_eq!(error.code, ErrorCode::NoSpace);
    assert!(error.hint.is_some_and(|hint| hint.contains("quota")), "{}", error.message);
    assert_eq!(limited.models(), ["a", "b"]);
    assert_eq!(check_blobs(limited.daemon.root()), before);
    limited.daemon.command().run(["rm", &a]).succeeds();
    limited.pull("c", 3);
    limited.check_whole(&b, 2);
}

#[test]
fn quota_and_eviction_order_survive_a_restart() {
    let mut limited = Limited::start(25, "evict = \"pullable\"");
    limited.pull("z-first", 1);
    limited.pull("a-second", 2);
    let used = limited.plan(0)["used_bytes"].clone();
    for kill in [true, false] {
        if kill {
            limited.daemon.kill();
        } else {
            limited.daemon.stop();
        }
        limited.daemon.restart();
        assert_eq!(limited.plan(0)["used_bytes"], used);
    }
    limited.pull("third", 3);
    assert_eq!(limited.models(), ["a-second", "third"]);
    let quota = limited.plan(0)["quota_bytes"].as_u64().unwrap();
    assert!(bytes_on_disk(&limited.daemon) <= quota);
}

/// Imports six models concurrently and polls the used bytes. Returns how many imports succeeded.
fn concurrent_imports(limited: &Limited) -> usize {
    let quota = limited.plan(0)["quota_bytes"].as_u64().unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let client = limited.daemon.client();
            while !done.load(Ordering::Relaxed) {
                let used = client.eviction_plan(Some(0)).unwrap().used_bytes;
                assert!(used <= quota, "{used} bytes used of {quota}");
            }
        });
        let import = |seed: u64| scope.spawn(move || limited.try_import(&format!("m{seed}"), &model(seed)));
        let imports: Vec<_> = (1..=6).map(import).collect();
        let runs: Vec<_> = imports.into_iter().map(|import| import.join().unwrap()).collect();
        done.store(true, Ordering::Relaxed);
        for run in runs.iter().filter(|run| run.code != 0) {
            println!("{} {}", run.stderr, limited.plan(1));
            assert_eq!(run.code, 6, "{}", run.stderr);
        }
        assert_eq!(staged(limited.daemon.root()), [""; 0]);
        assert!(bytes_on_disk(&limited.daemon) <= quota);
        assert_eq!(limited.plan(0)["used_bytes"], bytes_on_disk(&limited.daemon));
        runs.iter().filter(|run| run.code == 0).count()
    })
}

#[test]
fn concurrent_imports_never_exceed_the_quota() {
    let limited = Limited::start(45, "");
    let count = concurrent_imports(&limited);
    assert!((1..=4).contains(&count), "{count} of six fit into four and a half");
    assert_eq!(limited.models().len(), count);
    check_blobs(limited.daemon.root());
}

#[test]
fn concurrent_imports_succeed_if_old_models_can_be_evicted() {
    let limited = Limited::start(45, "evict = \"all\"");
    assert_eq!(concurrent_imports(&limited), 6);
    // One more may have gone than was needed, since eviction aims at the low watermark.
    assert!((3..=4).contains(&limited.models().len()), "{:?}", limited.models());
    for name in limited.models() {
        limited.check_whole(&name, name[1..].parse().unwrap());
    }
}

/// A stored model is imported again without space for a second copy.
#[test]
fn reservation_of_a_duplicate_import_is_released() {
    let limited = Limited::start(25, "");
    limited.try_import("m", &model(1)).succeeds();
    limited.try_import("again", &model(1)).succeeds();
    let used = limited.plan(0)["used_bytes"].clone();
    for _round in 0..5 {
        limited.try_import("again", &model(1)).succeeds();
        limited.try_import("large", &ModelFile::dense_of(2, 8, 32)).exits_with(6);
        assert_eq!(limited.plan(0)["used_bytes"], used);
    }
}

/// A store above its high watermark with four models, of which two must be evicted, starting with m1.
fn full_store() -> (tempfile::TempDir, Arc<Store>) {
    let folder = tmpfs_directory();
    let space = SpacePolicy {
        quota_bytes: Some(unit() * 5),
        min_free_bytes: Some(0),
        high_percent: 70,
        low_percent: 45,
        eviction: Eviction::All,
        ..SpacePolicy::default()
    };
    let options = StoreOptions { space, ..StoreOptions::default() };
    let store = Arc::new(Store::open_with(root_in(&folder), options).unwrap());
    (1..=4).for_each(|seed| import(&store, seed, &format!("m{seed}")).unwrap());
    (folder, store)
}

fn root_in(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("store")
}

fn import(store: &Arc<Store>, seed: u64, name: &str) -> Result<(), OpError> {
    let folder = tmpfs_directory();
    let path = model(seed).write_to(folder.path(), "m.gguf");
    let params = ImportParams { name: Some(name.parse().unwrap()), ..ImportParams::new("m.gguf") };
    let file = File::open(path).unwrap();
    import_file(store, &params, &file, &AtomicBool::new(false), &mut |_, _| ()).map(drop)
}

fn models(store: &Arc<Store>) -> Vec<String> {
    let list = ops::list(store).unwrap();
    list.models.into_iter().map(|model| model.name.trim_end_matches(":latest").to_owned()).collect()
}

/// Damages a store so that collections refuse. Returns what the error must name.
type Damage = fn(&Path) -> String;

const DAMAGES: [Damage; 3] = [
    |root| {
        let path = root.join("manifests/notes.txt");
        fs::write(&path, "of the administrator").unwrap();
        path.display().to_string()
    },
    // Incomplete, so that the blobs that it needs are unknown.
    |root| {
        let recipe = fs::read_dir(root.join("recipes")).unwrap().next().unwrap().unwrap().path();
        fs::remove_file(&recipe).unwrap();
        recipe.file_stem().unwrap().to_str().unwrap().trim_start_matches("sha256-").to_owned()
    },
    |root| {
        let recipe = fs::read_dir(root.join("recipes")).unwrap().next().unwrap().unwrap().path();
        fs::set_permissions(&recipe, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(&recipe, "{").unwrap();
        recipe.display().to_string()
    },
];

/// Otherwise all models would be evicted without freeing a byte.
#[test]
fn no_model_is_evicted_while_collections_refuse() {
    for damage in DAMAGES {
        let (folder, store) = full_store();
        let named = damage(&root_in(&folder));
        let evicted = ops::evict_excess(&store, &|_, _| None, &|_, _| ()).map(drop).unwrap_err();
        let planned = ops::eviction_plan(&store, &|_, _| None, None).map(drop).unwrap_err();
        for error in [evicted.to_string(), planned.to_string()] {
            assert!(error.contains(&named), "{error}: {named}");
        }
        assert_eq!(models(&store), ["m1", "m2", "m3", "m4"]);
    }
}

#[test]
fn plan_evicts_no_model_if_collections_refuse_by_then() {
    for damage in DAMAGES {
        let (folder, store) = full_store();
        let plan = gc::plan_eviction(store.liveness(), &[1], &|_, _| None).unwrap();
        assert_eq!(plan.victims.len(), 1);
        let named = damage(&root_in(&folder));
        let error = gc::evict(store.liveness(), &plan, &|_| ()).unwrap_err().to_string();
        assert!(error.contains(&named), "{error}: {named}");
        assert_eq!(models(&store), ["m1", "m2", "m3", "m4"]);
    }
}

/// Unneeded blobs are deleted before any model is evicted.
#[test]
fn garbage_is_deleted_before_any_model() {
    let (folder, store) = full_store();
    let pinned = store.liveness().leases().grant("a test");
    for name in ["m1", "m2"] {
        let reference = name.parse().unwrap();
        // As if a session had ended and its blobs were not collected.
        store.names().leased_model(&reference, &pinned).unwrap();
        fs::remove_file(root_in(&folder).join(blobd_store_format::layout::manifest(&reference))).unwrap();
    }
    drop(pinned);
    let verbs = InProcess::of(Arc::clone(&store), &root_in(&folder));
    let plan = verbs.eviction_plan(None).unwrap();
    assert!(plan.needed_bytes > 0 && plan.garbage_bytes >= plan.needed_bytes, "{plan:?}");
    assert_eq!((plan.evicted.len(), plan.freed_bytes), (0, plan.garbage_bytes));
    assert_eq!(verbs.eviction_plan(Some(plan.garbage_bytes + 1)).unwrap().evicted.len(), 1);
    assert_eq!(ops::evict_excess(&store, &|_, _| None, &|_, _| ()).unwrap(), plan.garbage_bytes);
    assert_eq!(models(&store), ["m3", "m4"]);
}

/// Eviction does exactly what its plan lists.
#[test]
fn plan_for_the_low_watermark_is_executed_as_printed() {
    let (folder, store) = full_store();
    let verbs = InProcess::of(Arc::clone(&store), &root_in(&folder));
    let plan = verbs.eviction_plan(None).unwrap();
    let evicted: Vec<_> = plan.evicted.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(evicted, ["m1:latest", "m2:latest"]);
    assert_eq!(ops::evict_excess(&store, &|_, _| None, &|_, _| ()).unwrap(), plan.freed_bytes);
    // Each has a block for its manifest and one for its origin beside what the plan counts.
    assert_eq!(store.ledger().used_bytes(), plan.used_bytes - plan.freed_bytes - 2 * 2 * 4096);
    assert!(store.ledger().used_bytes() <= store.ledger().space_policy().low_bytes().unwrap());
    assert_eq!(models(&store), ["m3", "m4"]);
    assert_eq!(
        ops::evict_excess(&store, &|_, _| None, &|_, _| ()).unwrap(),
        0,
        "it is below the watermark now"
    );
}
