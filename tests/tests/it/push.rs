//! Pushes to a registry on a loopback port, with and without faults, and to a real one if it is installed; the forms of a manifest.

mod forms;
mod image;
mod tensors;
mod third_party;
mod transfer;

use std::process::Stdio;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::wait::{eventually, eventually_some};
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A daemon that has a model `tiny`, whose file is split into tensors, and its file.
fn with_model(model: &ModelFile) -> (TestDaemon, Vec<u8>) {
    let daemon = TestDaemon::start();
    let path = model.write_to(daemon.scratch(), "tiny.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "tiny"]).succeeds();
    (daemon, model.bytes())
}

fn push(daemon: &TestDaemon, model: &str, destination: &str, more: &[&str]) -> Json {
    let mut arguments = vec!["push", model, destination, "--json"];
    arguments.extend(more);
    daemon.command().run(arguments).succeeds().json_lines().pop().unwrap()
}

/// Pulls a name into another store, and compares the weights.
fn check_pulled(name: &str, weights: &[u8]) {
    let other = TestDaemon::start();
    other.command().run(["pull", name]).succeeds();
    assert!(other.command().run(["export", name, "-o", "-"]).stdout == weights, "{name}");
}

#[test]
fn pushed_model_is_pulled_elsewhere_bit_for_bit() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, weights) = with_model(&ModelFile::dense(1));
    let name = registry.name("team/tiny:1");
    let pushed = push(&daemon, "tiny", &name, &[]);
    assert_eq!(pushed["sent_bytes"], pushed["size"]);
    assert_eq!(registry.bytes_uploaded(), pushed["size"].as_u64().unwrap());
    assert_eq!((&pushed["name"], &pushed["destination"]), (&"tiny:latest".into(), &name.as_str().into()));
    let stored = daemon.client().models().unwrap().models.remove(0);
    assert_eq!(pushed["digest"], stored.digest.to_string());
    check_pulled(&name, &weights);
    // What the registry has is not sent again.
    let again = push(&daemon, "tiny", &name, &[]);
    assert_eq!((&again["sent_bytes"], &again["unchanged"]), (&0.into(), &true.into()));
    assert_eq!(registry.bytes_uploaded(), pushed["size"].as_u64().unwrap());
    let text = daemon.command().run(["push", "tiny", &name]).succeeds().text();
    assert!(text.contains(", all there before\n") && text.contains("meant this model before"), "{text}");
}

#[test]
fn manifest_of_a_registry_is_pushed_byte_for_byte() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(2).bytes();
    let manifest = registry.add_model("me/tiny:1", b"{}", &[(MODEL, &weights)]).unwrap();
    // Fields that blobd does not know, and white space.
    let raw = String::from_utf8(manifest.raw().to_vec()).unwrap();
    let raw = raw.replacen('{', "{ \"x-unknown\": [1, 2],\n", 1);
    registry.add_manifest("me/tiny:1", raw.as_bytes());
    let daemon = TestDaemon::start();
    daemon.command().run(["pull", &registry.name("me/tiny:1"), "--name", "tiny"]).succeeds();
    let elsewhere = FakeRegistry::start().unwrap();
    push(&daemon, "tiny", &elsewhere.name("me/copy:2"), &[]);
    let put = elsewhere
        .requests()
        .into_iter()
        .find(|request| request.path.contains("/manifests/") && request.method == "PUT");
    assert_eq!(String::from_utf8(put.unwrap().body).unwrap(), raw);
    check_pulled(&elsewhere.name("me/copy:2"), &weights);
}

#[test]
fn dry_run_says_what_the_registry_lacks_and_sends_nothing() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense(1));
    let name = registry.name("team/tiny:1");
    let planned = push(&daemon, "tiny", &name, &["--dry-run"]);
    assert_eq!((&planned["dry_run"], &planned["sent_bytes"]), (&true.into(), &planned["size"]));
    assert!(registry.requests().iter().all(|request| request.method == "HEAD"));
    push(&daemon, "tiny", &name, &[]);
    let planned = push(&daemon, "tiny", &name, &["--dry-run"]);
    assert_eq!((&planned["unchanged"], &planned["present_bytes"]), (&true.into(), &planned["size"]));
    let text = daemon.command().run(["push", "tiny", &name, "--dry-run"]).succeeds().text();
    assert!(text.contains(", all there before\n"), "{text}");
    // Another model under the name is reported.
    let path = ModelFile::dense(7).write_to(daemon.scratch(), "other.gguf");
    daemon.command().run(["import", path.to_str().unwrap()]).succeeds();
    let text = daemon.command().run(["push", "other", &name, "--dry-run"]).succeeds().text();
    assert!(text.contains("would replace ") && text.contains(", all to send in 2 files\n"), "{text}");
    let replaced = push(&daemon, "other", &name, &[]);
    assert_eq!(replaced["replaced"], planned["digest"]);
}

#[test]
fn broken_upload_ends_in_the_exact_model() {
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    for (keeps, tenth) in [true, false].into_iter().flat_map(|keeps| (1..10).map(move |tenth| (keeps, tenth)))
    {
        let registry = FakeRegistry::start().unwrap();
        registry.keep_broken_uploads(keeps);
        let name = registry.name("team/tiny:1");
        let at = weights.len() as u64 * tenth / 10;
        registry.break_uploads([at]);
        let pushed = push(&daemon, "tiny", &name, &[]);
        let twice = if keeps { 0 } else { at };
        assert_eq!(registry.bytes_uploaded(), pushed["size"].as_u64().unwrap() + twice);
        if tenth == 5 {
            check_pulled(&name, &weights);
        }
    }
}

#[test]
fn files_are_mounted_from_the_repository_that_the_model_comes_from() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(3).bytes();
    registry.add_model("team/base:1", b"{}", &[(MODEL, &weights)]).unwrap();
    registry.separate_repository("team/mine");
    let daemon = TestDaemon::start();
    daemon.command().run(["pull", &registry.name("team/base:1"), "--name", "mine"]).succeeds();
    let pushed = push(&daemon, "mine", &registry.name("team/mine:1"), &[]);
    assert_eq!((&pushed["mounted_bytes"], registry.bytes_uploaded()), (&pushed["size"], 0));
    check_pulled(&registry.name("team/mine:1"), &weights);
}

#[test]
fn refusals_say_what_to_do() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense(1));
    let name = registry.name("team/tiny:1");
    let failure = |destination: &str, code: i32| {
        daemon.command().run(["push", "tiny", destination, "--json"]).exits_with(code).error()
    };
    // The first request asks for the name's manifest.
    registry.add_fault("/manifests/", 1, Fault::Status(404));
    registry.add_fault("/manifests/", 1, Fault::Refusal(415, "manifest type is not supported"));
    let error = failure(&name, 1);
    assert!(error.message.contains("415: \"manifest type is not supported\""), "{error}");
    assert!(error.hint.unwrap().contains("\"compat\": [\"docker2s2\"]"));
    let registry = FakeRegistry::start().unwrap();
    let name = registry.name("team/tiny:1");
    registry.add_fault("/blobs/uploads/", 10, Fault::Refusal(403, "no push for you"));
    let error = failure(&name, 7);
    assert!(
        error.message.contains("push to http") && error.message.contains("\"no push for you\""),
        "{error}"
    );
    let error = failure("hf.co/team/tiny", 2);
    assert!(error.message.contains("hf upload"), "{error}");
    let error = failure("other", 2);
    assert!(error.message.contains("takes no models of users"), "{error}");
    daemon.command().run(["push", "absent", &name]).exits_with(3);
    daemon.command().run(["push", "tiny", "not a name"]).exits_with(2);
}

#[test]
fn push_ends_when_its_client_goes() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense_of(1, 2, 128));
    let name = registry.name("team/tiny:1");
    let mut command = daemon.command().command();
    command.args(["push", "tiny", &name, "--limit-rate", "1KB"]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut client = command.spawn().unwrap();
    eventually("the upload begins", || registry.requests().iter().any(|request| request.method == "POST"));
    client.kill().unwrap();
    client.wait().unwrap();
    eventually("the push is recorded as cancelled", || {
        let records = daemon.command().line("log --verb push --json").succeeds().json_lines();
        records.first().is_some_and(|record| record["result"] == "cancelled")
    });
}

#[test]
fn push_and_transfer_are_listed_while_they_run_and_limited() {
    let (registry, other) = (FakeRegistry::start().unwrap(), FakeRegistry::start().unwrap());
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    let (name, moved) = (registry.name("team/tiny:1"), other.name("team/tiny:1"));
    let blobd = daemon.command();
    for (line, kind, source, destination) in [
        (["push", "tiny", &name], "push", "tiny:latest", &name),
        (["transfer", &name, &moved], "transfer", &*name, &moved),
    ] {
        blobd.line("limit 100KB").succeeds();
        let mut command = blobd.command();
        command.args(line).stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = command.spawn().unwrap();
        let listed = eventually_some("bytes have moved", || {
            let listed = blobd.line("ps --json").succeeds().json()["pulls"].as_array().unwrap().clone();
            listed.into_iter().find(|row| row["completed_bytes"].as_u64().is_some_and(|bytes| bytes > 0))
        });
        assert_eq!((&listed["kind"], &listed["source"]), (&kind.into(), &source.into()));
        assert!(destination.ends_with(listed["destination"].as_str().unwrap()), "{listed}");
        assert!(listed["total_bytes"].as_u64().unwrap() >= weights.len() as u64, "{listed}");
        assert!(blobd.line("ps").succeeds().text().contains("PUSH OF"));
        // Only the limit of all transfers has held it back.
        blobd.line("limit off").succeeds();
        assert!(running.wait().unwrap().success(), "{kind}");
        assert_eq!(blobd.line("ps --json").succeeds().json()["pulls"], serde_json::json!([]));
    }
    check_pulled(&moved, &weights);
}

#[test]
fn damaged_model_is_not_pushed() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense(1));
    let blobs = daemon.root().join("blobs");
    let largest = std::fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
    let largest = largest.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    blobd_tests::store_dir::flip_byte(&largest, 10);
    let name = registry.name("team/tiny:1");
    // Not known yet: the registry compares the digest.
    let error = daemon.command().run(["push", "tiny", &name, "--json"]).exits_with(1).error();
    assert!(error.message.contains("did not match") && error.hint.unwrap().contains("blobd verify"));
    daemon.command().line("verify").exits_with(5);
    daemon.command().run(["push", "tiny", &name]).exits_with(5);
    let tagged = registry
        .requests()
        .iter()
        .any(|request| request.method == "PUT" && request.path.contains("/manifests/"));
    assert!(!tagged, "the name was not given to a damaged model");
}
