//! Hosts that limit each connection, and connections that stall.

use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;

use super::registry_with;

const ALWAYS: usize = usize::MAX;
/// Longer than any test may take.
const LONG_PAUSE: Duration = Duration::from_secs(3600);

/// So many bytes per second on each connection.
fn slow(bytes_per_second: usize) -> Fault {
    Fault::Slow(bytes_per_second / 50, Duration::from_millis(20))
}

fn daemon_with(config: &str) -> TestDaemon {
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, config).unwrap();
    let variable = format!("BLOBD_CONFIG={}", path.display());
    TestDaemon::start_under(&["env", &variable], folder)
}

/// Pulls the registry's model with these options. Returns the progress.
fn pull(daemon: &TestDaemon, registry: &FakeRegistry, model: &ModelFile, options: &[&str]) -> Vec<Json> {
    let name = registry.name("library/tiny:latest");
    let words = ["pull", &name, "--json"].into_iter().chain(options.iter().copied());
    let lines = daemon.command().run(words).succeeds().json_lines();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    lines
}

fn waits(lines: &[Json]) -> Vec<&str> {
    let (waiting, others): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line["state"] == "waiting");
    let status = |line: &&Json| line["status"].as_str().unwrap().starts_with("waiting for 127.0.0.1");
    assert!(waiting.iter().all(status) && !others.iter().any(status), "{lines:?}");
    waiting.iter().filter_map(|line| line["status"].as_str()).collect()
}

#[test]
fn limit_is_reached_by_several_connections_to_a_host_that_limits_each() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense_of(1, 2, 256));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, slow(100_000));
    let started = Instant::now();
    pull(&daemon, &registry, &model, &["--limit-rate", "400KB"]);
    assert!(registry.most_at_once() >= 4, "{} connections", registry.most_at_once());
    let least = model.bytes().len() as f64 / 400e3;
    assert!(started.elapsed().as_secs_f64() > least * 0.85, "the limit was exceeded");
    let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
    assert!(served < size + size / 4, "{served} of {size}");
}

#[test]
fn host_that_is_fast_enough_for_the_limit_gets_no_second_connection() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense_of(1, 2, 256));
    let registry = registry_with(&model);
    pull(&daemon, &registry, &model, &["--limit-rate", "500KB"]);
    // The fake server may still be closing the connection of an earlier request.
    assert!(registry.most_at_once() <= 2, "{} connections", registry.most_at_once());
}

#[test]
fn pulls_that_share_a_limit_do_not_exceed_it_together() {
    let daemon = daemon_with("[transfer]\nlimit_rate = \"1MB\"\n");
    let models = [1, 2].map(|seed| ModelFile::dense_of(seed, 2, 256));
    let registries = models.each_ref().map(registry_with);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (registry, model) in registries.iter().zip(&models) {
            registry.add_fault("/cdn/", ALWAYS, slow(200_000));
            scope.spawn(|| pull(&daemon, registry, model, &[]));
        }
    });
    let bytes: usize = models.iter().map(|model| model.bytes().len()).sum();
    assert!(started.elapsed().as_secs_f64() > bytes as f64 / 1e6 * 0.85, "{:?}", started.elapsed());
    let connections: usize = registries.iter().map(FakeRegistry::most_at_once).sum();
    assert!(connections >= 4, "{connections} connections");
}

/// The first answer, one in the middle of the file, and both before the first byte and after some.
#[test]
fn stalled_connection_is_reported_and_replaced() {
    let model = ModelFile::dense_of(1, 2, 256);
    for (earlier, sent) in [(0, 0), (0, 40_000), (1, 0), (1, 700_000)] {
        let daemon = daemon_with("[transfer]\nstall_timeout_seconds = 3\nmax_connections = 1\n");
        let registry = registry_with(&model);
        registry.add_fault("/cdn/", earlier, slow(10 << 20));
        registry.add_fault("/cdn/", 1, Fault::StallAfter(sent, LONG_PAUSE));
        let lines = pull(&daemon, &registry, &model, &[]);
        let waits = waits(&lines);
        let reported =
            format!("waiting for {}: no data for 1 s", registry.url().trim_start_matches("http://"));
        assert!(waits.contains(&reported.as_str()), "{earlier} {sent}: {waits:?}");
        let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
        assert!(served < size + size / 4, "{sent}: {served} of {size}");
    }
}

#[test]
fn silent_registry_is_reported_while_its_manifest_is_awaited() {
    let daemon = daemon_with("[transfer]\nstall_timeout_seconds = 3\n");
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    registry.add_fault("/manifests/", 1, Fault::StallAfter(0, Duration::from_secs(4)));
    let lines = pull(&daemon, &registry, &model, &[]);
    assert!(waits(&lines).iter().any(|status| status.contains(": no answer for ")), "{lines:?}");
}

/// The others are slow, so that they are busy until the silent one is given up. What it had sent is kept.
#[test]
fn range_of_a_stalled_connection_is_taken_over_by_the_others() {
    let daemon = daemon_with("[transfer]\nstall_timeout_seconds = 6\n");
    let model = ModelFile::dense_of(1, 2, 512);
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", 2, slow(2 << 20));
    registry.add_fault("/cdn/", 1, Fault::StallAfter(700_000, LONG_PAUSE));
    registry.add_fault("/cdn/", ALWAYS, slow(2 << 20));
    let lines = pull(&daemon, &registry, &model, &[]);
    let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
    assert!(served < size + size / 4, "{served} of {size}");
    assert_eq!(waits(&lines), [""; 0], "the others made progress all the time");
}

#[test]
fn slow_connection_without_pauses_is_kept() {
    let daemon = daemon_with("[transfer]\nstall_timeout_seconds = 3\nmax_connections = 1\n");
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, Fault::Slow(4 << 10, Duration::from_millis(100)));
    let lines = pull(&daemon, &registry, &model, &[]);
    assert!(registry.bytes_served() <= model.bytes().len() as u64 + 4096, "{lines:?}");
}
