//! Tensor indexes: published by a push beside the model.

use blobd_store_format::digest::Digest;
use blobd_store_format::tensor_index::{Referrers, TensorIndex};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault, Request};
use serde_json::Value as Json;

/// A daemon that has a model with this file.
fn with_model(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    daemon
}

fn push(daemon: &TestDaemon, destination: &str, more: &[&str]) -> Json {
    let mut arguments = vec!["push", "m", destination, "--json"];
    arguments.extend(more);
    daemon.command().run(arguments).succeeds().json_lines().pop().unwrap()
}

/// A model of 1.8 MB.
fn model() -> ModelFile {
    ModelFile::dense_of(1, 4, 128)
}

/// The digest of the manifest of a pushed model.
fn digest(pushed: &Json) -> Digest {
    pushed["digest"].as_str().unwrap().parse().unwrap()
}

/// The tensor indexes that the registry keeps in a repository, by their paths.
fn puts(registry: &FakeRegistry) -> Vec<Request> {
    let is_put = |request: &Request| request.method == "PUT" && request.path.contains("/manifests/");
    registry.requests().into_iter().filter(is_put).collect()
}

#[test]
fn push_publishes_an_index_and_keeps_the_digest_of_the_model() {
    let daemon = with_model(&model());
    for lists_referrers in [true, false] {
        let registry = FakeRegistry::start().unwrap();
        if lists_referrers {
            registry.list_referrers();
        }
        let name = registry.name("team/m:1");
        let planned = push(&daemon, &name, &["--dry-run"]);
        assert_eq!(planned["index"]["delivery"], "sent");
        assert!(registry.requests().iter().all(|request| request.method == "HEAD"));
        let pushed = push(&daemon, &name, &[]);
        assert_eq!(pushed["index"], planned["index"]);
        assert_eq!(pushed["digest"], daemon.client().models().unwrap().models[0].digest.to_string());
        let tag = Referrers::fallback_tag(digest(&pushed));
        let list = registry.manifest(&format!("/v2/team/m/manifests/{tag}"));
        assert_eq!(list.is_none(), lists_referrers);
        let puts = puts(&registry);
        assert_eq!(puts.len(), if lists_referrers { 2 } else { 3 }, "the model, the index, the list");
        let index = TensorIndex::parse(&puts[1].body, digest(&pushed)).unwrap();
        let file: Digest = pushed["files"][0]["digest"].as_str().unwrap().parse().unwrap();
        let recipe = index.recipe(file).unwrap();
        let size = puts[1].body.len() as u64 + recipe.size;
        assert_eq!(pushed["index"]["size"], size);
        assert_eq!(registry.bytes_uploaded(), pushed["size"].as_u64().unwrap() + recipe.size + 2);
        // A second time it is there.
        assert_eq!(push(&daemon, &name, &[])["index"]["delivery"], "present");
        assert_eq!(push(&daemon, &name, &["--dry-run"])["index"]["delivery"], "present");
    }
}

#[test]
fn index_is_left_out_on_request_and_of_small_files() {
    let registry = FakeRegistry::start().unwrap();
    let pushed = push(&with_model(&model()), &registry.name("team/m:1"), &["--no-index"]);
    assert_eq!(pushed["index"], Json::Null);
    let pushed = push(&with_model(&ModelFile::dense(1)), &registry.name("team/small:1"), &[]);
    assert_eq!(pushed["index"], Json::Null);
    assert_eq!(puts(&registry).len(), 2);
}

#[test]
fn registry_that_refuses_the_index_has_the_model_nevertheless() {
    let registry = FakeRegistry::start().unwrap();
    let daemon = with_model(&model());
    let name = registry.name("team/m:1");
    registry.add_fault("/manifests/sha256", 9, Fault::Refusal(400, "subject is not supported"));
    let pushed = push(&daemon, &name, &[]);
    let index = &pushed["index"];
    assert_eq!(index["delivery"], "refused");
    assert!(index["reason"].as_str().unwrap().contains("400"), "{index}");
    let text = daemon.command().run(["push", "m", &name]).succeeds().text();
    assert!(text.contains("\n  without a tensor index: "), "{text}");
    registry.clear_faults();
    let text = daemon.command().run(["push", "m", &name]).succeeds().text();
    assert!(text.contains("\n  with a tensor index of "), "{text}");
    TestDaemon::start().command().run(["pull", &name]).succeeds();
}
