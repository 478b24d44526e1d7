//! Which servers are asked, and what is said when they do not answer as they should.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;
use blobd_tests::registry::{FakeRegistry, Fault, Manner};

use super::{offer, registry_with};

fn pull_with(config: &str, name: &str) -> Run {
    let folder = fast_folder();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, config).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.run(["pull", name, "--json", "--config", path.to_str().unwrap()])
}

fn closed_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn mirrors_are_asked_in_order_until_one_has_it() {
    let model = ModelFile::dense(1);
    let (empty, full) = (FakeRegistry::start().unwrap(), registry_with(&model));
    let config = |bases: &[String]| format!("[mirrors]\n\"registry.ollama.ai\" = {bases:?}\n");
    let closed = format!("http://{}", closed_port());
    pull_with(&config(&[closed.clone(), empty.url(), full.url()]), "tiny").succeeds();
    assert!(empty.requests().iter().any(|request| request.path.contains("/manifests/")));
    // One that breaks in the middle, and one that has the manifest but not the files.
    let broken = registry_with(&model);
    broken.add_fault("/blobs/", usize::MAX, Fault::Status(503));
    pull_with(&config(&[broken.url(), full.url()]), "tiny").succeeds();
    let hollow = registry_with(&model);
    hollow.add_fault("/blobs/", usize::MAX, Fault::Status(404));
    pull_with(&config(&[hollow.url(), full.url()]), "tiny").succeeds();
    // A lack is less of a reason than a server that might have had it.
    let error = pull_with(&config(&[empty.url(), closed, empty.url()]), "tiny").exits_with(1).error();
    assert!(error.message.contains("connection refused"), "{error}");
    pull_with(&config(&[empty.url(), empty.url()]), "tiny").exits_with(3);
    assert!(pull_with(&config(&[]), "tiny").code != 0);
}

#[test]
fn registry_is_spoken_to_in_the_clear_only_if_it_is_listed() {
    let registry = registry_with(&ModelFile::dense(1));
    registry.set_manner(Manner::Direct);
    let host = registry.url().trim_start_matches("http://").to_owned();
    let name = format!("{host}/library/tiny");
    pull_with("", &name).exits_with(1);
    assert!(registry.requests().iter().all(|request| request.method != "GET"));
    pull_with(&format!("insecure_registries = [\"{host}\"]\n"), &name).succeeds();
}

#[test]
fn tag_that_is_not_there_is_answered_with_those_that_are_nearest() {
    let registry = registry_with(&ModelFile::dense(1));
    offer(&registry, "library/tiny:8b-q4", &ModelFile::dense(1).bytes());
    let daemon = TestDaemon::start();
    let pull = || {
        daemon.command().run(["pull", &registry.name("library/tiny:8b-q5"), "--json"]).exits_with(3).error()
    };
    assert!(pull().message.contains("not found at"), "{}", pull());
    registry.add_page(
        "/v2/library/tiny/tags/list",
        br#"{"name":"library/tiny","tags":["latest","8b-q4"]}"#,
        &[],
    );
    assert!(pull().message.ends_with("the nearest names are 8b-q4, latest"), "{}", pull());
    for fault in [Fault::Endless, Fault::WebPage, Fault::Body(b"[".to_vec()), Fault::Status(500)] {
        registry.add_fault("/tags/list", 1, fault);
        assert!(pull().message.contains("not found at"), "{}", pull());
    }
}

#[test]
fn connections_that_fail_say_what_to_look_at() {
    let daemon = TestDaemon::start();
    let failure = |name: &str| daemon.command().run(["pull", name, "--json"]).exits_with(1).error().message;
    let refused = failure(&format!("http://{}/library/tiny", closed_port()));
    assert!(refused.contains("is the port right"), "{refused}");
    let unknown = failure("registry.invalid/library/tiny");
    assert!(unknown.contains("no address found"), "{unknown}");
}

#[test]
fn login_page_of_a_network_is_named_where_a_file_should_be() {
    let registry = registry_with(&ModelFile::dense(1));
    let daemon = TestDaemon::start();
    for path in ["/manifests/", "/cdn/"] {
        registry.add_fault(path, 1, Fault::WebPage);
        let error =
            daemon.command().run(["pull", &registry.name("library/tiny"), "--json"]).exits_with(1).error();
        assert!(error.message.contains("login page"), "{error}");
    }
}

#[test]
fn proxy_of_the_environment_is_asked_unless_the_host_is_excepted() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap().to_string();
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = proxy.accept().unwrap();
        let mut head = [0; 512];
        let length = stream.read(&mut head).unwrap();
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    });
    let folder = fast_folder();
    let pull = |excepted: &str| {
        let mut command = Blobd::at_root(&folder.path().join("store")).command();
        command.args(["pull", "registry.invalid/library/tiny", "--json"]);
        command.env("HTTPS_PROXY", format!("http://{address}")).env("NO_PROXY", excepted);
        command::run(&mut command).exits_with(1).error().message
    };
    assert!(pull("registry.invalid").contains("no address found"));
    pull("other.invalid");
    assert!(asked.join().unwrap().starts_with("CONNECT registry.invalid:443 "));
}
