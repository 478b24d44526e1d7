//! Every fault of a registry: the pull gives a complete model, or fails with the right exit code and leaves
//! nothing.

use std::time::Duration;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};

use super::{check_nothing_but_downloads, offer, registry_with};

/// For every request of the client.
const ALWAYS: usize = usize::MAX;

/// Pulls with a fault and checks the exit code; after 0 the model must be complete.
fn check(daemon: &TestDaemon, model: &ModelFile, path: &str, times: usize, fault: Fault, codes: &[i32]) {
    let registry = registry_with(model);
    let what = format!("{path} {times} {fault:?}");
    registry.add_fault(path, times, fault);
    check_pull(daemon, &registry, model, &what, codes);
}

fn check_pull(daemon: &TestDaemon, registry: &FakeRegistry, model: &ModelFile, what: &str, codes: &[i32]) {
    let name = registry.name("library/tiny:latest");
    let run = daemon.command().run(["pull", &name, "--json"]);
    assert!(codes.contains(&run.code), "{what}: exit {}: {}", run.code, run.stderr);
    if run.code == 0 {
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes(), "{what}");
        daemon.command().run(["rm", &name]).succeeds();
    } else {
        let error = run.error();
        assert!(error.message.len() < 500 && !error.message.contains(char::is_control), "{what}: {error}");
    }
    check_nothing_but_downloads(&daemon.command(), daemon.root());
}

#[test]
fn faulty_responses_for_a_manifest_are_refused() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    let check = |fault, codes: &[i32]| check(&daemon, &model, "/manifests/", ALWAYS, fault, codes);
    check(Fault::Status(404), &[3]);
    check(Fault::Status(401), &[7]);
    check(Fault::Status(403), &[7]);
    check(Fault::Status(418), &[1]);
    check(Fault::Status(206), &[1]);
    check(Fault::Status(304), &[1]);
    check(Fault::WebPage, &[1]);
    check(Fault::Body(b"not json".to_vec()), &[1]);
    check(Fault::Body(Vec::new()), &[1]);
    check(Fault::Body(vec![b'['; 1 << 20]), &[1]);
    check(Fault::FlipByte(100), &[1]);
    check(Fault::ShortBy(1), &[1]);
    check(Fault::RedirectTo("file:///etc/passwd".into()), &[1]);
    check(Fault::RedirectTo("http://user:password@127.0.0.1/".into()), &[1]);
    check(Fault::RedirectTo("::::".into()), &[1]);
    check(Fault::RedirectLoop, &[1]);
    check(Fault::Unauthorized("file:///etc/passwd".into()), &[1, 7]);
    check(Fault::Unauthorized("http://127.0.0.1:1/token".into()), &[1, 7]);
    check(Fault::Endless, &[1]);
}

#[test]
fn faulty_responses_for_a_file_are_refused() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    let size = model.bytes().len();
    let check = |fault, codes: &[i32]| check(&daemon, &model, "/cdn/", ALWAYS, fault, codes);
    check(Fault::Status(404), &[1]);
    check(Fault::Status(403), &[1]);
    check(Fault::Status(206), &[1]);
    check(Fault::WebPage, &[1]);
    check(Fault::Body(ModelFile::dense(1).with_changed("output.weight").bytes()), &[1]);
    check(Fault::Body(Vec::new()), &[1]);
    check(Fault::FlipByte(0), &[1]);
    check(Fault::FlipByte(40), &[1]);
    check(Fault::FlipByte(size - 1), &[1]);
    check(Fault::ShortBy(1), &[1]);
    check(Fault::ShortBy(size), &[1]);
    check(Fault::ExtraBytes(1), &[1]);
    check(Fault::ContentLength(u64::MAX), &[1]);
    check(Fault::ContentLength(0), &[1]);
    check(Fault::CutAfter(0), &[1]);
    // The second request gets the second half.
    check(Fault::CutAfter(size.div_ceil(2)), &[0]);
    check(Fault::CutAfter(size / 20), &[1]);
    check(Fault::RedirectLoop, &[1]);
    check(Fault::Endless, &[1]);
}

/// The digest shows that the bytes are right, whatever the response says about them.
#[test]
fn wrong_headers_do_not_affect_correct_bytes() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for path in ["/manifests/", "/cdn/"] {
        check(&daemon, &model, path, ALWAYS, Fault::Gzip, &[0]);
    }
    check(&daemon, &model, "/cdn/", ALWAYS, Fault::UnnamedRange, &[0]);
    check(&daemon, &model, "/cdn/", ALWAYS, Fault::WrongRange, &[0]);
}

/// A server that accepts ranges and sends nothing of them is asked for the whole file.
#[test]
fn ranges_are_given_up_after_two_attempts_without_progress() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for first in [0, 1] {
        check(&daemon, &model, "/cdn/", ALWAYS, Fault::EmptyRange(first), &[0]);
    }
}

#[test]
fn temporary_faults_are_retried() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for path in ["/manifests/", "/cdn/"] {
        check(&daemon, &model, path, 1, Fault::Status(503), &[0]);
        check(&daemon, &model, path, 1, Fault::TooManyRequests(1), &[0]);
        check(&daemon, &model, path, 1, Fault::CutAfter(0), &[0]);
        check(&daemon, &model, path, ALWAYS, Fault::StallAfter(100, Duration::from_millis(300)), &[0]);
    }
    check(&daemon, &model, "/cdn/", ALWAYS, Fault::Slow(8 << 10, Duration::from_millis(10)), &[0]);
}

#[test]
fn permanent_faults_end_with_an_error() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for path in ["/manifests/", "/cdn/"] {
        check(&daemon, &model, path, ALWAYS, Fault::Status(500), &[1]);
        check(&daemon, &model, path, ALWAYS, Fault::TooManyRequests(0), &[1]);
        check(&daemon, &model, path, ALWAYS, Fault::CutAfter(0), &[1]);
    }
}

/// A fault in a small file must not discard the downloaded weights.
#[test]
fn small_file_is_requested_again() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for file in [&b"{{ .Prompt }}"[..], super::CONFIG] {
        let digest = blobd_tests::oracle::sha256(file);
        check(&daemon, &model, &format!("/cdn/sha256:{digest}"), 1, Fault::CutAfter(4), &[0]);
    }
}

/// Small layers are stored whole; they are verified like the weights.
#[test]
fn every_file_of_a_model_is_verified() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for file in [&b"{{ .Prompt }}"[..], b"do what you want", super::CONFIG] {
        let digest = blobd_tests::oracle::sha256(file);
        check(&daemon, &model, &format!("/cdn/sha256:{digest}"), ALWAYS, Fault::FlipByte(1), &[1]);
        check(&daemon, &model, &format!("/cdn/sha256:{digest}"), ALWAYS, Fault::Status(404), &[1]);
    }
}

#[test]
fn faults_are_handled_without_redirects() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    for delivery in [BlobDelivery::Direct, BlobDelivery::RelativeLocation] {
        for fault in [Fault::FlipByte(5000), Fault::CutAfter(5000), Fault::ExtraBytes(9), Fault::WebPage] {
            let registry = registry_with(&model);
            registry.set_blob_delivery(delivery);
            registry.add_fault("/blobs/", ALWAYS, fault.clone());
            check_pull(&daemon, &registry, &model, &format!("{delivery:?} {fault:?}"), &[1]);
        }
    }
}

/// A failed pull neither deletes nor changes stored models.
#[test]
fn failed_pull_does_not_affect_other_models() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    let registry = registry_with(&model);
    let name = registry.name("library/tiny:latest");
    daemon.command().run(["pull", &name]).succeeds();
    let before = blobd_tests::store_dir::snapshot(&daemon.root().join("blobs"));
    // The same tag now names a model that cannot be pulled.
    offer(&registry, "library/tiny:latest", &ModelFile::dense(1).with_changed("output.weight").bytes());
    registry.add_fault("/cdn/", ALWAYS, Fault::FlipByte(9000));
    daemon.command().run(["pull", &name]).exits_with(1);
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    assert_eq!(blobd_tests::store_dir::snapshot(&daemon.root().join("blobs")), before);
}
