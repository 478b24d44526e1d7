//! `[peers]`: files come from other machines that have them, and from the registry if these fail.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault, Request};
use blobd_tests::store_dir::check_blobs;
use blobd_tests::temp_dirs::tmpfs_directory;

use super::Site;

/// A registry with this file as its model.
fn upstream(file: &[u8]) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    let layers = [("application/vnd.ollama.image.model", file)];
    registry.add_model("library/tiny:latest", b"{}", &layers).unwrap();
    registry
}

fn mirrors(upstream: &FakeRegistry) -> String {
    format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", upstream.url())
}

fn peers(urls: &[String]) -> String {
    format!("[peers]\nurls = {urls:?}\n")
}

/// A machine without a daemon, whose store is in a folder of its own.
struct Machine {
    folder: tempfile::TempDir,
    blobd: Blobd,
}

impl Machine {
    fn new(config: &str) -> Self {
        let folder = tmpfs_directory();
        let path = folder.path().join("config.toml");
        fs::write(&path, config).unwrap();
        let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&path);
        Self { folder, blobd }
    }

    fn pull(&self) -> Run {
        self.blobd.run(["pull", "tiny", "--json"])
    }

    fn exported(&self) -> Vec<u8> {
        let path = self.folder.path().join("exported.gguf");
        self.blobd.run(["export", "tiny", "-o", path.to_str().unwrap(), "--force"]).succeeds();
        check_blobs(&self.folder.path().join("store"));
        fs::read(path).unwrap()
    }
}

/// How many bytes of files were requested from the registry: without manifests.
fn bytes_of_blobs(registry: &FakeRegistry, before: u64) -> u64 {
    registry.bytes_served() - before
}

#[test]
fn upstream_sends_each_file_once_to_three_machines_that_are_peers() {
    let file = ModelFile::dense(1).bytes();
    let upstream = upstream(&file);
    let first = Site::start_with(&mirrors(&upstream));
    first.daemon.command().run(["pull", "tiny"]).succeeds();
    let before = upstream.bytes_served();
    assert!(before >= file.len() as u64);
    let urls = vec![format!("http://{}", first.address)];
    let second = Site::start_with(&(mirrors(&upstream) + &peers(&urls)));
    second.daemon.command().run(["pull", "tiny"]).succeeds();
    let urls = vec![format!("http://{}", second.address), format!("http://{}", first.address)];
    let third = Machine::new(&(mirrors(&upstream) + &peers(&urls)));
    third.pull().succeeds();
    assert!(third.exported() == file);
    // Manifests, and the small configuration.
    let more = bytes_of_blobs(&upstream, before);
    assert!(more < file.len() as u64 / 4, "{more} of {}", file.len());
    let asked = |registry: &FakeRegistry| {
        let requests = registry.requests();
        requests.iter().filter(|request| request.path.contains("/blobs/")).count()
    };
    let blobs = asked(&upstream);
    Machine::new(&(mirrors(&upstream) + &peers(&urls))).pull().succeeds();
    assert_eq!(asked(&upstream), blobs, "all files come from peers");
}

/// The model's file at the registry, with its tensor index, as a push of blobd leaves them.
fn push_to(upstream: &FakeRegistry, model: &ModelFile, tag: &str) -> Vec<u8> {
    let pusher = Machine::new("");
    let path = model.write_to(pusher.folder.path(), "model.gguf");
    pusher.blobd.run(["import", path.to_str().unwrap(), "--name", tag]).succeeds();
    let to = upstream.name(&format!("library/{tag}"));
    pusher.blobd.run(["push", tag, &to]).succeeds();
    model.bytes()
}

#[test]
fn tensors_that_a_peer_has_of_a_relative_are_not_requested_from_the_registry() {
    let upstream = FakeRegistry::start().unwrap();
    let old = ModelFile::dense_of(1, 4, 128);
    let new = old.clone().with_changed(&old.tensors[0].name);
    let old = push_to(&upstream, &old, "tiny:old");
    let new = push_to(&upstream, &new, "tiny:latest");
    let peer = Site::start_with(&mirrors(&upstream));
    peer.daemon.command().run(["pull", "tiny:old"]).succeeds();
    let (before, served) = (upstream.bytes_served(), upstream.requests().len());
    let machine = Machine::new(&(mirrors(&upstream) + &peers(&[format!("http://{}", peer.address)])));
    machine.pull().succeeds();
    assert!(machine.exported() == new && new != old);
    let moved = upstream.bytes_served() - before;
    assert!(moved < new.len() as u64 / 2, "{moved} of {}: {:?}", new.len(), &upstream.requests()[served..]);
}

#[test]
fn peer_that_fails_costs_neither_the_model_nor_its_bytes() {
    let file = ModelFile::dense(2).bytes();
    let digest = Digest::of(&file);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let faults = BTreeMap::from([
        ("lies", vec![Fault::FlipInFile(file.len() as u64 / 2)]),
        ("sends another file", vec![Fault::Body(vec![7; file.len()])]),
        ("sends a web page", vec![Fault::WebPage]),
        ("fails", vec![Fault::Status(503)]),
        ("lacks it", vec![Fault::Status(404)]),
        ("asks for a password", vec![Fault::Status(401)]),
        ("is silent", vec![Fault::StallAfter(0, Duration::from_secs(60))]),
        ("stalls", vec![Fault::StallAfter(1000, Duration::from_secs(60))]),
        ("cuts", vec![Fault::CutAfter(1000)]),
        ("never ends", vec![Fault::Endless]),
    ]);
    for (what, faults) in faults {
        let (upstream, peer) = (upstream(&file), FakeRegistry::start().unwrap());
        assert_eq!(peer.add_blob(file.clone()), digest);
        for fault in faults {
            peer.add_fault("/blobs/", usize::MAX, fault);
        }
        let machine = Machine::new(&(mirrors(&upstream) + &peers(&[format!("http://{closed}"), peer.url()])));
        machine.pull().succeeds();
        assert!(machine.exported() == file, "{what}");
        let asked = peer.requests();
        let path = format!("/v2/library/tiny/blobs/{digest}");
        assert!(asked.iter().any(|request| request.path.starts_with(&path)), "{what}: {asked:?}");
        assert!(!asked.iter().any(|request| request.path.contains("/manifests/")), "{what}: {asked:?}");
        assert!(upstream.bytes_served() < 3 * file.len() as u64, "{what}");
    }
}

#[test]
fn wrong_addresses_of_peers_are_named_with_their_line() {
    let refused = |urls: &str| {
        let machine = Machine::new(&format!("[peers]\nurls = {urls}\n"));
        machine.blobd.run(["ls"]).exits_with(2).stderr
    };
    for urls in ["[\"ftp://a\"]", "[\"http://u:secret@a\"]", "[\"http://a?q\"]", "\"http://a\"", "[5]"] {
        let error = refused(urls);
        assert!(error.contains("config.toml:2:") && error.contains("peers.urls"), "{urls}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn configured_headers_are_sent_to_their_server_alone() {
    let file = ModelFile::dense(1).bytes();
    let (upstream, peer) = (upstream(&file), FakeRegistry::start().unwrap());
    let headers = format!("[headers.{:?}]\nX-Dragonfly-Registry = \"https://r.example\"\n", upstream.url());
    let machine = Machine::new(&(mirrors(&upstream) + &peers(&[peer.url()]) + &headers));
    machine.pull().succeeds();
    assert!(machine.exported() == file);
    let has_it = |request: &Request| request.header("x-dragonfly-registry") == Some("https://r.example");
    let (redirected, own): (Vec<_>, Vec<_>) =
        upstream.requests().into_iter().partition(|request| request.path.starts_with("/cdn/"));
    assert!(own.len() >= 2 && own.iter().all(has_it), "{own:?}");
    // Where the mirror redirects to is another server.
    assert!(redirected.iter().chain(&peer.requests()).all(|request| !has_it(request)));
    let asked = peer.requests();
    assert!(asked.iter().any(|request| request.path.ends_with("?ns=registry.ollama.ai")), "{asked:?}");
}
