//! The quota as a limit, with and without eviction, at every moment.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use blobd::ops;
use blobd::store::{Eviction, SpacePolicy, Store, StoreOptions};
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::ImportParams;
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;
use blobd_tests::store_dir::{check_blobs, staged};
use blobd_tests::verbs::{InProcess, Verbs};

use super::{Limited, bytes_on_disk, model, unit};

#[test]
fn quota_without_eviction_is_just_a_limit() {
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
fn quota_and_order_outlive_a_restart() {
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

/// Imports six models at once and looks at the books all the while; how many got in.
fn imports_at_once(limited: &Limited) -> usize {
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
fn imports_at_once_never_take_more_than_the_quota() {
    let limited = Limited::start(45, "");
    let count = imports_at_once(&limited);
    assert!((1..=4).contains(&count), "{count} of six fit into four and a half");
    assert_eq!(limited.models().len(), count);
    check_blobs(limited.daemon.root());
}

#[test]
fn imports_at_once_all_succeed_when_old_models_may_go() {
    let limited = Limited::start(45, "evict = \"all\"");
    assert_eq!(imports_at_once(&limited), 6);
    // One more may have gone than was needed, since eviction aims at the low watermark.
    assert!((3..=4).contains(&limited.models().len()), "{:?}", limited.models());
    for name in limited.models() {
        limited.check_whole(&name, name[1..].parse().unwrap());
    }
}

/// A model that is imported while there is no room for its duplicate stays one model.
#[test]
fn file_whose_staging_needs_room_gives_it_back() {
    let limited = Limited::start(25, "");
    limited.try_import("m", &model(1)).succeeds();
    let used = limited.plan(0)["used_bytes"].clone();
    for round in 0..5 {
        limited.try_import(&format!("again-{round}"), &model(1)).succeeds();
        limited.try_import("large", &ModelFile::dense_of(2, 8, 32)).exits_with(6);
        assert_eq!(limited.plan(0)["used_bytes"], used);
    }
}

/// The plan is a value: what it says is what happens.
#[test]
fn plan_for_the_low_watermark_is_what_is_done() {
    let folder = fast_folder();
    let quota_bytes = Some(unit() * 5);
    let space = SpacePolicy {
        quota_bytes,
        min_free_bytes: Some(0),
        high_percent: 70,
        low_percent: 45,
        eviction: Eviction::All,
    };
    let options = StoreOptions { space, ..StoreOptions::default() };
    let store = Arc::new(Store::open_with(folder.path().join("store"), options).unwrap());
    for seed in 1..=4 {
        let path = model(seed).write_to(folder.path(), "m.gguf");
        let name = Some(format!("m{seed}").parse().unwrap());
        let params = ImportParams { file_name: "m.gguf".into(), name };
        ops::import(&store, &params, &File::open(path).unwrap(), &AtomicBool::new(false), &mut |_, _| ())
            .unwrap();
    }
    let verbs = InProcess { store: Arc::clone(&store) };
    let plan = verbs.eviction_plan(None).unwrap();
    let evicted: Vec<_> = plan.evicted.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(evicted, ["m1:latest", "m2:latest"]);
    assert_eq!(ops::evict_excess(&store, &|_| None).unwrap(), plan.freed_bytes);
    assert_eq!(store.used_bytes(), plan.used_bytes - plan.freed_bytes);
    assert!(store.used_bytes() <= store.space_policy().low_bytes().unwrap());
    let left: Vec<_> = verbs.list().unwrap().models.into_iter().map(|model| model.name).collect();
    assert_eq!(left, ["m3:latest", "m4:latest"]);
    assert_eq!(ops::evict_excess(&store, &|_| None).unwrap(), 0, "it is below the watermark now");
}
