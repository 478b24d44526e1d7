//! Transfers that fail, stall, are requested twice, or reuse most of the file from the store.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, staged};
use blobd_tests::wait::{eventually, eventually_some};
use serde_json::Value as Json;

use super::{offer, registry_with};

const ALWAYS: usize = usize::MAX;
const MIB: u64 = 1 << 20;

/// A model of some 15 MiB.
fn large(seed: u64) -> ModelFile {
    ModelFile::dense_of(seed, 2, 512)
}

/// So many bytes per second on each connection.
fn slow(bytes_per_second: usize) -> Fault {
    Fault::Slow(bytes_per_second / 100, Duration::from_millis(10))
}

fn completed(lines: &[Json]) -> Vec<u64> {
    let weights = lines.iter().filter(|line| line["total"].as_u64().is_some_and(|total| total > MIB));
    weights.filter_map(|line| line["completed"].as_u64()).collect()
}

fn pull(daemon: &TestDaemon, registry: &FakeRegistry, model: &ModelFile) -> Vec<Json> {
    let name = registry.name("library/tiny:latest");
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    check_blobs(daemon.root());
    assert_eq!(staged(daemon.root()), [""; 0]);
    assert!(std::fs::read_dir(daemon.root().join("partial")).unwrap().next().is_none(), "nothing is left");
    run.json_lines()
}

#[test]
fn large_file_is_fetched_in_ranges_and_every_byte_once() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    let lines = pull(&daemon, &registry, &model);
    let size = model.bytes().len() as u64;
    assert!(registry.bytes_served() < size + 4096, "{} of {size}", registry.bytes_served());
    let done = lines.last().unwrap();
    assert!(done["downloaded_bytes"].as_u64().unwrap() >= size, "{done}");
    let ranges = registry.requests().iter().filter(|request| request.header("range").is_some()).count();
    assert!(ranges > 2, "{ranges} requests for ranges");
}

#[test]
fn server_without_ranges_gets_one_request_and_nothing_is_wasted() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, Fault::IgnoreRange);
    pull(&daemon, &registry, &model);
    let size = model.bytes().len() as u64;
    assert!(registry.bytes_served() < size + size / 50, "{} of {size}", registry.bytes_served());
}

#[test]
fn cut_and_stalled_connections_cause_little_repeated_transfer() {
    let cases = [
        (4, Fault::CutAfter(300_000)),
        (2, Fault::CutAfter(1)),
        (2, Fault::Status(503)),
        (2, Fault::WrongRange),
    ];
    for (times, fault) in cases {
        let (daemon, model) = (TestDaemon::start(), large(1));
        let registry = registry_with(&model);
        registry.add_fault("/cdn/", times, fault.clone());
        pull(&daemon, &registry, &model);
        let size = model.bytes().len() as u64;
        // A response with the wrong range is discarded, including the bytes in transit.
        let allowed = if matches!(fault, Fault::WrongRange) { size + 24 * MIB } else { size + size / 20 };
        assert!(registry.bytes_served() < allowed, "{fault:?}: {} of {size}", registry.bytes_served());
    }
}

/// Two fast ranges give the usual speed. The third would take minutes.
#[test]
fn range_far_slower_than_the_others_is_requested_again() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense_of(1, 2, 768));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", 3, slow(20 << 20));
    registry.add_fault("/cdn/", 1, slow(10_000));
    let started = Instant::now();
    pull(&daemon, &registry, &model);
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    let size = model.bytes().len() as u64;
    assert!(registry.bytes_served() < size + size / 10, "{} of {size}", registry.bytes_served());
}

/// The vocabulary is most of the header. One stored model has the same vocabulary; others differ in one word.
#[test]
fn stored_part_of_a_siblings_header_is_not_fetched() {
    let (daemon, model) = (TestDaemon::start(), vocabulary_model("a", 20_000));
    let registry = registry_with(&model);
    pull(&daemon, &registry, &model);
    let tuned = vocabulary_model("a", 20_000).with_changed("blk.1.ffn_up.weight");
    let retrained = vocabulary_model("b", 20_000);
    let longer = vocabulary_model("b", 20_001);
    let [mut moved, mut sizes] = [Vec::new(), Vec::new()];
    for (tag, other) in [("tuned", &tuned), ("retrained", &retrained), ("longer", &longer)] {
        let before = registry.bytes_served();
        let name = format!("library/tiny:{tag}");
        offer(&registry, &name, &other.bytes());
        let name = registry.name(&name);
        daemon.command().run(["pull", &name]).succeeds();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == other.bytes(), "{tag}");
        moved.push(registry.bytes_served() - before);
        sizes.push(other.bytes().len() as u64);
        check_blobs(daemon.root());
    }
    let tensor = 512 * 512 * 4 * 2;
    assert!(moved[0] < tensor + 100_000, "{moved:?} of {sizes:?}");
    // One word differs outside the compared samples: the digest reveals it, and the whole header is fetched.
    assert!(moved[1] < 700_000 && moved[2] < 700_000, "{moved:?} of {sizes:?}");
}

/// [`large`] with a vocabulary of about 300 KiB, one word of which is `word`.
fn vocabulary_model(word: &str, count: u64) -> ModelFile {
    let words =
        (0..count).map(|number| if number == 7_777 { word.to_owned() } else { format!("{number:08}") });
    large(1).with("tokenizer.ggml.tokens", words.collect::<Vec<_>>())
}

#[test]
fn flipped_byte_is_a_clear_error_and_the_download_is_discarded() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, Fault::FlipByte(40_000));
    let name = registry.name("library/tiny:latest");
    let error = daemon.command().run(["pull", &name, "--json"]).exits_with(1).error();
    assert!(error.message.contains("expected"), "{error}");
    registry.clear_faults();
    pull(&daemon, &registry, &model);
}

#[test]
fn killed_daemon_resumes_and_progress_never_decreases() {
    const KILLS: u64 = 30;
    let (mut daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, slow(4 << 20));
    let (name, size) = (registry.name("library/tiny:latest"), model.bytes().len() as u64);
    let mut shown = Vec::new();
    for kill in 0..KILLS {
        let mut command = daemon.command().command();
        let pull = command.args(["pull", &name, "--json"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let pull = pull.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60 + 37 * kill % 150));
        daemon.kill();
        let output = pull.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<Json> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        // The first progress line of a file is sent before the stored part is known.
        shown.extend(completed(&lines).into_iter().filter(|bytes| *bytes > 0));
        daemon.restart();
    }
    assert!(shown.is_sorted(), "{shown:?}");
    registry.clear_faults();
    pull_rest(&daemon, &registry, &model);
    let (served, range) = (registry.bytes_served(), 4 * MIB);
    assert!(served < size + size / 20 + KILLS * range, "{served} of {size}");
}

/// The server stalls in the middle of every range. Bytes that the daemon had reported before it was killed
/// are not fetched again.
#[test]
fn parts_of_unfinished_ranges_survive_a_kill() {
    let (mut daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, Fault::StallAfter(700_000, Duration::from_secs(600)));
    let name = registry.name("library/tiny:latest");
    let mut command = daemon.command().command();
    let mut pull = command.args(["pull", &name, "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(pull.stdout.take().unwrap()).lines();
    let noted = eventually_some("what came of several ranges is noted", || {
        let line = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        completed(&[line]).into_iter().find(|bytes| *bytes > MIB)
    });
    daemon.kill();
    pull.wait().unwrap();
    daemon.restart();
    // Bytes in socket buffers, or written and not yet recorded.
    let lost = registry.bytes_served().saturating_sub(noted);
    registry.clear_faults();
    pull_rest(&daemon, &registry, &model);
    let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
    assert!(served < size + lost + 4096, "{served} of {size}, {lost} lost");
}

fn pull_rest(daemon: &TestDaemon, registry: &FakeRegistry, model: &ModelFile) {
    let lines = pull(daemon, registry, model);
    let done = lines.last().unwrap();
    assert!(done["already_stored_bytes"].as_u64().unwrap() > 0, "{done}");
}

#[test]
fn interrupted_pull_is_resumed_by_the_next() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, slow(10 << 20));
    let name = registry.name("library/tiny:latest");
    let mut first = daemon.command().command().args(["pull", &name]).spawn().unwrap();
    eventually("some has come", || registry.bytes_served() > 8 * MIB);
    first.kill().unwrap();
    first.wait().unwrap();
    eventually("the pull has ended", || staged(daemon.root()).is_empty());
    registry.clear_faults();
    pull_rest(&daemon, &registry, &model);
    let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
    // Bytes in transit, in the buffers of eight connections, are lost.
    assert!(served < size + 4 * MIB, "{served} of {size}");
}

fn start_pulls(daemon: &TestDaemon, name: &str, count: usize) -> Vec<Child> {
    let start = |_| {
        let mut command = daemon.command().command();
        command.args(["pull", name, "--json"]).stdout(Stdio::piped()).spawn().unwrap()
    };
    (0..count).map(start).collect()
}

/// Asserts that all pulls succeed, all have reported progress, and the file was transferred once.
fn check_one_transfer(pulls: Vec<Child>, registry: &FakeRegistry, model: &ModelFile) {
    for pull in pulls {
        let output = pull.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<Json> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let completed = completed(&lines);
        assert!(completed.iter().filter(|bytes| **bytes > 0).count() > 3, "{completed:?}");
    }
    let (served, size) = (registry.bytes_served(), model.bytes().len() as u64);
    assert!(served < size + size / 20, "{served} of {size}");
}

#[test]
fn pulls_of_two_users_share_one_transfer_and_both_see_its_progress() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, slow(8 << 20));
    let name = registry.name("library/tiny:latest");
    let pulls = start_pulls(&daemon, &name, 2);
    check_one_transfer(pulls, &registry, &model);
}

#[test]
fn pull_waiting_for_another_uses_no_permit_and_sees_the_progress() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.add_fault("/cdn/", ALWAYS, slow(3 << 20));
    let name = registry.name("library/tiny:latest");
    let pulls = start_pulls(&daemon, &name, 7);
    eventually("it has begun", || registry.bytes_served() > MIB);
    let other = ModelFile::dense(9).write_to(daemon.scratch(), "other.gguf");
    daemon.command().run(["import".as_ref(), other.as_os_str()]).succeeds();
    assert!(registry.bytes_served() < model.bytes().len() as u64, "the import did not wait for the pull");
    check_one_transfer(pulls, &registry, &model);
}

#[test]
fn waiting_pull_without_a_limit_removes_the_limit_of_the_transfer() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    let name = registry.name("library/tiny:latest");
    let mut slow = daemon.command().command();
    let mut slow = slow.args(["pull", &name, "--limit-rate", "100KB"]).stderr(Stdio::null()).spawn().unwrap();
    eventually("it has begun", || registry.bytes_served() > 1);
    let start = Instant::now();
    daemon.command().run(["pull", &name]).succeeds();
    assert!(slow.wait().unwrap().success());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}, minutes at that rate", start.elapsed());
}

/// Received bytes are written before the pull waits for the limit.
#[test]
fn pull_with_a_low_limit_makes_progress_before_each_interruption() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    let name = registry.name("library/tiny:latest");
    let resumed = || {
        let plan = daemon.command().run(["pull", &name, "--dry-run", "--json"]).succeeds().json();
        plan["files"].as_array().unwrap().iter().map(|file| file["resumed_bytes"].as_u64().unwrap()).sum()
    };
    let mut before = 0;
    for _ in 0..3 {
        let mut command = daemon.command().command();
        let pull = command.args(["pull", &name, "--limit-rate", "200KB"]).stderr(Stdio::null());
        let mut pull = pull.spawn().unwrap();
        eventually("more has arrived", || {
            let running = daemon.client().running_pulls().unwrap().pulls;
            running.first().is_some_and(|pull| pull.completed_bytes > before + 100_000)
        });
        pull.kill().unwrap();
        pull.wait().unwrap();
        eventually("the pull has ended", || staged(daemon.root()).is_empty());
        let now: u64 = resumed();
        assert!(now > before, "{now} after {before}");
        before = now;
    }
}

#[test]
fn rate_can_be_limited() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    let (name, start) = (registry.name("library/tiny:latest"), Instant::now());
    daemon.command().run(["pull", &name, "--limit-rate", "10MB"]).succeeds();
    let expected = model.bytes().len() as f64 / 10e6;
    let took = start.elapsed().as_secs_f64();
    assert!(took > expected * 0.85, "{took} s, {expected} s at that rate");
}

#[test]
fn changed_template_costs_only_the_header() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    pull(&daemon, &registry, &model);
    let before = registry.bytes_served();
    let changed = large(1).with("tokenizer.chat_template", "{{ another }}");
    offer(&registry, "library/tiny:other", &changed.bytes());
    let name = registry.name("library/tiny:other");
    let plan = daemon.command().run(["pull", &name, "--dry-run", "--json"]).succeeds().json();
    assert!(plan["download_bytes"].as_u64().unwrap() < 70_000, "{plan}");
    assert!(std::fs::read_dir(daemon.root().join("partial")).unwrap().next().is_none(), "nothing is kept");
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == changed.bytes());
    let (moved, size) = (registry.bytes_served() - before, changed.bytes().len() as u64);
    // Twice: once for the plan.
    assert!(moved < size / 50, "{moved} of {size}");
    let done = run.json_lines().pop().unwrap();
    assert!(done["reused_bytes"].as_u64().unwrap() > size * 98 / 100, "{done}");
    assert_eq!(sum_of_sources(&done), done["size"].as_u64().unwrap(), "{done}");
}

#[test]
fn sibling_with_other_weights_costs_no_more_than_a_plain_pull() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    pull(&daemon, &registry, &model);
    let before = registry.bytes_served();
    let other = large(2);
    offer(&registry, "library/tiny:other", &other.bytes());
    let name = registry.name("library/tiny:other");
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == other.bytes());
    let (moved, size) = (registry.bytes_served() - before, other.bytes().len() as u64);
    assert!(moved < size + size / 100, "{moved} of {size}");
}

/// Every tensor differs in one byte outside the compared samples.
#[test]
fn sibling_with_equal_samples_is_still_pulled_correctly() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    pull(&daemon, &registry, &model);
    let mut fraud = large(1);
    fraud.tensors.iter_mut().for_each(ModelTensor::flip_last_bit);
    offer(&registry, "library/tiny:other", &fraud.bytes());
    let name = registry.name("library/tiny:other");
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == fraud.bytes());
    check_blobs(daemon.root());
}

#[test]
fn one_tensor_that_differs_is_found_without_fetching_all() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    registry.set_blob_delivery(BlobDelivery::Direct);
    pull(&daemon, &registry, &model);
    let before = registry.bytes_served();
    let tuned = large(1).with_changed("blk.1.ffn_up.weight");
    offer(&registry, "library/tiny:tuned", &tuned.bytes());
    let name = registry.name("library/tiny:tuned");
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == tuned.bytes());
    let (moved, size) = (registry.bytes_served() - before, tuned.bytes().len() as u64);
    assert!(moved < size / 6, "{moved} of {size}");
}

fn sum_of_sources(done: &Json) -> u64 {
    let keys = ["downloaded_bytes", "reused_bytes", "already_stored_bytes"];
    keys.iter().map(|key| done[key].as_u64().unwrap()).sum()
}

#[test]
fn bytes_of_a_pull_add_up_to_its_size_wherever_they_come_from() {
    let (daemon, model) = (TestDaemon::start(), large(1));
    let registry = registry_with(&model);
    let done = pull(&daemon, &registry, &model).pop().unwrap();
    let size = done["size"].as_u64().unwrap();
    assert!(size > model.bytes().len() as u64, "with template, licence and configuration: {done}");
    assert_eq!((sum_of_sources(&done), &done["already_stored_bytes"]), (size, &Json::from(0)));
    let again = pull(&daemon, &registry, &model).pop().unwrap();
    assert_eq!((&again["already_stored_bytes"], sum_of_sources(&again)), (&Json::from(size), size));
    let text = daemon.command().run(["pull", &registry.name("library/tiny")]).succeeds().text();
    assert!(text.contains("unchanged, nothing downloaded"), "{text}");
}
