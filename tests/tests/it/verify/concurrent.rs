//! Verification of a store that changes meanwhile: removals and imports are not reported as damage.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{flip_byte, names};
use serde_json::Value as Json;

use super::{import, tensor_digest};

/// How long a test changes the store while it verifies it repeatedly.
const ROUND: Duration = Duration::from_secs(6);

/// Removes and imports a model until `stop` is set.
fn replace_repeatedly(daemon: &TestDaemon, seed: u64, stop: &AtomicBool) {
    let name = format!("changing{seed}");
    let path = ModelFile::dense(seed).write_to(daemon.scratch(), &format!("{name}.gguf"));
    while !stop.load(Ordering::Relaxed) {
        daemon.command().run(["import", path.to_str().unwrap(), "--name", &name]).succeeds();
        daemon.command().run(["rm", &name]).succeeds();
    }
}

/// Verifies while models are removed and imported. Returns the reported damage.
fn verify_concurrently(daemon: &TestDaemon, arguments: &[&str]) -> Vec<Json> {
    let (stop, start) = (AtomicBool::new(false), Instant::now());
    let mut reported = Vec::new();
    std::thread::scope(|scope| {
        for seed in 10..12 {
            let stop = &stop;
            scope.spawn(move || replace_repeatedly(daemon, seed, stop));
        }
        while reported.is_empty() && start.elapsed() < ROUND {
            let run = daemon.command().run([&["verify", "--json"], arguments].concat());
            reported = run.json()["corrupt"].as_array().unwrap().clone();
            assert_eq!(run.code == 0, reported.is_empty(), "{}: {}", run.code, run.stderr);
        }
        stop.store(true, Ordering::Relaxed);
    });
    reported
}

#[test]
fn concurrent_removals_and_imports_are_not_reported_as_damage() {
    let daemon = TestDaemon::start();
    import(&daemon, &ModelFile::dense(1), "m");
    let reported = verify_concurrently(&daemon, &[]);
    assert_eq!(reported, [Json::Null; 0]);
    assert_eq!(names(&daemon.root().join("quarantine")), [""; 0]);
    daemon.command().line("verify").succeeds();
    assert!(daemon.client().models().unwrap().models.iter().all(|model| model.damage.is_none()));
}

#[test]
fn damage_is_found_while_models_are_removed_and_imported() {
    let daemon = TestDaemon::start();
    import(&daemon, &ModelFile::dense(1), "m");
    let digest = tensor_digest(&daemon.command(), "m", super::TENSOR);
    flip_byte(&blobd_tests::store_dir::blob_path(daemon.root(), &digest), 77);
    let [reported] = verify_concurrently(&daemon, &[]).try_into().expect("one blob is damaged");
    assert_eq!((&reported["digest"], &reported["models"][0]), (&digest.into(), &"m:latest".into()));
}
