//! Models that go from registry to registry (`transfer`): what moves, what is verified, and what failures end in.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::check_empty;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

use super::{MODEL, check_pulled, push, with_model};

const TEMPLATE: &str = "application/vnd.ollama.image.template";

/// A registry with a model `me/tiny:1`, whose manifest has fields that blobd does not know; its weights and their digest.
fn source() -> (FakeRegistry, Vec<u8>, Digest) {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense_of(1, 4, 128).bytes();
    let layers: [(&str, &[u8]); 3] =
        [(MODEL, &weights), (TEMPLATE, b"{{ .Prompt }}"), (TEMPLATE, b"{{ .Prompt }}")];
    let manifest = registry.add_model("me/tiny:1", b"{}", &layers).unwrap();
    let raw = String::from_utf8(manifest.raw().to_vec()).unwrap();
    registry.add_manifest("me/tiny:1", raw.replacen('{', "{ \"x-unknown\": [1, 2],\n", 1).as_bytes());
    let digest = Digest::of(&weights);
    (registry, weights, digest)
}

fn transfer(daemon: &TestDaemon, source: &str, destination: &str, more: &[&str]) -> Json {
    let arguments = [&["transfer", source, destination, "--json"], more].concat();
    daemon.command().run(arguments).succeeds().json_lines().pop().unwrap()
}

#[test]
fn model_goes_on_with_its_manifest_and_nothing_is_stored() {
    let ((source, weights, digest), daemon) = (source(), TestDaemon::start());
    let registry = FakeRegistry::start().unwrap();
    let (from, to) = (source.name("me/tiny:1"), registry.name("team/copy:2"));
    let planned = transfer(&daemon, &from, &to, &["--dry-run"]);
    assert_eq!((&planned["sent_bytes"], &planned["dry_run"]), (&planned["size"], &true.into()));
    let asks = |method: &str| method == "HEAD" || method == "GET";
    assert!(registry.requests().iter().all(|request| asks(&request.method)));
    assert!(source.requests().iter().all(|request| !request.path.contains("/blobs/")));
    let moved = transfer(&daemon, &from, &to, &[]);
    assert_eq!((&moved["source"], &moved["sent_bytes"]), (&from.as_str().into(), &planned["size"]));
    assert_eq!(registry.bytes_uploaded(), moved["size"].as_u64().unwrap());
    assert_eq!(source.manifest("/v2/me/tiny/manifests/1"), registry.manifest("/v2/team/copy/manifests/2"));
    assert!(registry.blob(digest).unwrap() == weights);
    check_pulled(&to, &weights);
    check_empty(daemon.root());
    // What the destination has is not moved again.
    let served = source.bytes_served();
    let again = transfer(&daemon, &from, &to, &[]);
    assert_eq!((&again["unchanged"], &again["sent_bytes"]), (&true.into(), &0.into()));
    assert!(source.bytes_served() - served < 4096);
    let text = daemon.command().run(["transfer", &from, &to]).succeeds().text();
    assert!(text.contains(", all there before\n") && text.contains("meant this model before"), "{text}");
    let log = daemon.command().run(["log", "--verb", "transfer", "--json"]).succeeds().json_lines();
    assert_eq!(log.len(), 4, "{log:?}");
}

#[test]
fn tensor_index_goes_on_with_the_model() {
    let (source, registry) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let (publisher, weights) = with_model(&ModelFile::dense_of(1, 4, 128));
    let (from, to) = (source.name("team/tiny:1"), registry.name("team/copy:1"));
    let pushed = push(&publisher, "tiny", &from, &[]);
    assert_eq!(pushed["index"]["delivery"], "sent");
    let daemon = TestDaemon::start();
    let moved = transfer(&daemon, &from, &to, &[]);
    assert_eq!((&moved["index"], &moved["digest"]), (&pushed["index"], &pushed["digest"]));
    let again = transfer(&daemon, &from, &to, &[]);
    assert_eq!(
        (&again["index"]["delivery"], &again["index"]["size"]),
        (&"present".into(), &moved["index"]["size"])
    );
    check_pulled(&to, &weights);
}

#[test]
fn connection_that_breaks_on_either_side_ends_in_the_exact_model() {
    let daemon = TestDaemon::start();
    for tenth in [0, 1, 5, 9] {
        let (source, weights, digest) = source();
        let at = weights.len() * tenth / 10;
        source.add_fault(&sent(digest), 1, Fault::CutAfter(at));
        let registry = FakeRegistry::start().unwrap();
        transfer(&daemon, &source.name("me/tiny:1"), &registry.name("me/tiny:1"), &[]);
        assert!(registry.blob(digest).unwrap() == weights, "source, {tenth}");
        let requests = source.requests();
        let parts = requests.iter().filter(|request| request.path.contains(&sent(digest))).count();
        assert_eq!(parts, 2, "source, {tenth}");
        // The rest was requested, not all of it.
        assert!(source.bytes_served() < weights.len() as u64 + 100_000, "{}", source.bytes_served());
        for keeps in [true, false] {
            let registry = FakeRegistry::start().unwrap();
            registry.keep_broken_uploads(keeps);
            registry.break_uploads([at as u64]);
            transfer(&daemon, &source.name("me/tiny:1"), &registry.name("me/tiny:1"), &[]);
            assert!(registry.blob(digest).unwrap() == weights, "destination, {keeps}, {tenth}");
        }
    }
    check_empty(daemon.root());
}

#[test]
fn file_with_a_wrong_digest_is_not_published() {
    let daemon = TestDaemon::start();
    let (source, weights, digest) = source();
    for at in [0, weights.len() / 2, weights.len() - 1] {
        let registry = FakeRegistry::start().unwrap();
        source.add_fault(&sent(digest), 1, Fault::FlipByte(at));
        let (from, to) = (source.name("me/tiny:1"), registry.name("me/tiny:1"));
        let error = daemon.command().run(["transfer", &from, &to, "--json"]).exits_with(1).error();
        assert!(error.message.contains("wrong digest: expected"), "{error}");
        assert!(error.hint.unwrap().contains("was not published"));
        assert_eq!(registry.manifest("/v2/me/tiny/manifests/1"), None);
        assert_eq!(registry.blob(digest), None);
        // Then it is right.
        transfer(&daemon, &from, &to, &[]);
        check_pulled(&to, &weights);
    }
}

#[test]
fn ctrl_c_ends_a_transfer_and_leaves_nothing() {
    let ((source, weights, digest), daemon) = (source(), TestDaemon::start());
    let registry = FakeRegistry::start().unwrap();
    let (from, to) = (source.name("me/tiny:1"), registry.name("me/tiny:1"));
    // SIGINT may be ignored in the tests' own process.
    let mut command = Command::new("env");
    daemon.command().prepare(&mut command);
    command.args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()]);
    command.args(["transfer", &from, &to, "--limit-rate", "1KB"]);
    let transferring = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("a file moves", || registry.requests().iter().any(|request| request.method == "POST"));
    kill_process(Pid::from_child(&transferring), Signal::INT).unwrap();
    let output = transferring.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    eventually("it is recorded as cancelled", || {
        let records = daemon.command().line("log --verb transfer --json").succeeds().json_lines();
        records.first().is_some_and(|record| record["result"] == "cancelled")
    });
    assert_eq!(registry.manifest("/v2/me/tiny/manifests/1"), None);
    assert_eq!(registry.blob(digest), None);
    check_empty(daemon.root());
    transfer(&daemon, &from, &to, &[]);
    check_pulled(&to, &weights);
}

#[test]
fn rate_limit_of_a_transfer_applies_to_all_its_files_together() {
    let ((source, weights, _), daemon) = (source(), TestDaemon::start());
    let registry = FakeRegistry::start().unwrap();
    let (from, to) = (source.name("me/tiny:1"), registry.name("me/tiny:1"));
    let rate = format!("{}B", weights.len() / 3);
    let begun = Instant::now();
    transfer(&daemon, &from, &to, &["--limit-rate", &rate]);
    // At this rate it takes three seconds; the limit may let a first part pass at once.
    assert!(begun.elapsed() > Duration::from_millis(1500), "{:?}", begun.elapsed());
    check_pulled(&to, &weights);
}

#[test]
fn files_are_mounted_at_the_same_registry_and_others_are_refused() {
    let daemon = TestDaemon::start();
    let (registry, weights, _) = source();
    registry.separate_repository("me/copy");
    let (from, to) = (registry.name("me/tiny:1"), registry.name("me/copy:1"));
    let moved = transfer(&daemon, &from, &to, &[]);
    assert_eq!((&moved["mounted_bytes"], registry.bytes_uploaded()), (&moved["size"], 0));
    check_pulled(&to, &weights);
    for (source, destination, code, expected) in [
        (from.as_str(), "llama3:8b", 2, "takes no models of users"),
        (&from, &format!("{to}@sha256:{}", "0".repeat(64)), 2, "cannot include a digest"),
        (&registry.name("me/none:1"), &to, 3, "not found"),
        (&from, "hf.co/me/tiny", 2, "hf.co"),
    ] {
        let error =
            daemon.command().run(["transfer", source, destination, "--json"]).exits_with(code).error();
        assert!(error.message.contains(expected), "{error}");
    }
}

/// Where the source sends the bytes of a file, after a redirect.
fn sent(digest: Digest) -> String {
    format!("/cdn/{digest}")
}
