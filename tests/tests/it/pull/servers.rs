//! The choice of servers (mirrors, proxy, plain HTTP), and the messages about their failures.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::proxy::{Proxy, ProxyBehaviour};
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;

use super::{offer, registry_with};

fn pull_with(config: &str, name: &str) -> Run {
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, config).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    blobd.run(["pull", name, "--json", "--config", path.to_str().unwrap()])
}

fn closed_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn mirrors_are_tried_in_order_until_one_has_the_model() {
    let model = ModelFile::dense(1);
    let (empty, full) = (FakeRegistry::start().unwrap(), registry_with(&model));
    let config = |bases: &[String]| format!("[mirrors]\n\"registry.ollama.ai\" = {bases:?}\n");
    let closed = format!("http://{}", closed_port());
    pull_with(&config(&[closed.clone(), empty.url(), full.url()]), "tiny").succeeds();
    assert!(empty.requests().iter().any(|request| request.path.contains("/manifests/")));
    // One fails in the middle, and one has the manifest but not the files.
    let broken = registry_with(&model);
    broken.add_fault("/blobs/", usize::MAX, Fault::Status(503));
    pull_with(&config(&[broken.url(), full.url()]), "tiny").succeeds();
    let hollow = registry_with(&model);
    hollow.add_fault("/blobs/", usize::MAX, Fault::Status(404));
    pull_with(&config(&[hollow.url(), full.url()]), "tiny").succeeds();
    // The error names the unreachable server, which might have the model, not the one without it.
    let error = pull_with(&config(&[empty.url(), closed, empty.url()]), "tiny").exits_with(1).error();
    assert!(error.message.contains("connection refused"), "{error}");
    assert!(error.hint.unwrap().contains("does not have it"));
    pull_with(&config(&[empty.url(), empty.url()]), "tiny").exits_with(3);
    assert!(pull_with(&config(&[]), "tiny").code != 0);
}

/// A mirror of several registries knows by it which one is meant, such as Spegel.
#[test]
fn mirrors_are_told_the_registry_and_the_registry_itself_is_not() {
    let model = ModelFile::dense(1);
    let registry = registry_with(&model);
    let asked = |registry: &FakeRegistry, config: &str, name: &str| -> Vec<String> {
        let before = registry.requests().len();
        pull_with(config, name).succeeds();
        let requests = registry.requests().split_off(before);
        requests.into_iter().map(|request| request.path).collect()
    };
    let of_ollama = format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url());
    let paths = asked(&registry, &of_ollama, "tiny");
    let has_host = |path: &&String| path.ends_with("?ns=registry.ollama.ai");
    let [of_registry, of_network] = [true, false].map(|is_registry| {
        paths.iter().filter(move |path| path.starts_with("/v2/") == is_registry).collect::<Vec<_>>()
    });
    assert!(of_registry.iter().any(|path| path.contains("/manifests/")), "{paths:?}");
    assert!(of_registry.iter().any(|path| path.contains("/blobs/")), "{paths:?}");
    assert!(of_registry.iter().all(has_host), "{paths:?}");
    // The URLs that a server redirects to are signed.
    assert!(!of_network.is_empty() && !of_network.iter().any(|path| path.contains("ns=")), "{paths:?}");
    let name = registry.name("library/tiny");
    let host = registry.url().trim_start_matches("http://").to_owned();
    let listed_itself = format!("[mirrors]\n\"{host}\" = \"{}\"\n", registry.url());
    for config in ["", &listed_itself] {
        let paths = asked(&registry, config, &name);
        assert!(!paths.is_empty() && !paths.iter().any(|path| path.contains("ns=")), "{config}: {paths:?}");
    }
    let hub = FakeRegistry::start().unwrap();
    hub.add_repository("me/x", &"1".repeat(40), &[("x-Q8_0.gguf", &model.bytes())]);
    let paths = asked(&hub, &format!("[mirrors]\n\"hf.co\" = \"{}\"\n", hub.url()), "hf.co/me/x/x-Q8_0.gguf");
    let of_api: Vec<_> = paths.iter().filter(|path| !path.starts_with("/v2/")).collect();
    assert!(!of_api.is_empty() && !of_api.iter().any(|path| path.contains("ns=")), "{paths:?}");
}

/// The tags that there are help more than the mirror that is down, which is in the hint.
#[test]
fn nearest_tags_of_one_mirror_are_reported_although_another_is_down() {
    let tagged = registry_with(&ModelFile::dense(1));
    offer(&tagged, "library/tiny:8b-q4", &ModelFile::dense(1).bytes());
    tagged.add_page(
        "/v2/library/tiny/tags/list",
        br#"{"name":"library/tiny","tags":["latest","8b-q4"]}"#,
        &[],
    );
    let closed = closed_port();
    let config = format!("[mirrors]\n\"registry.ollama.ai\" = [\"http://{closed}\", {:?}]\n", tagged.url());
    let error = pull_with(&config, "tiny:8b-q5").exits_with(3).error();
    assert!(error.message.ends_with("the nearest names are 8b-q4, latest"), "{error}");
    assert!(error.hint.as_deref().unwrap().contains(&format!("{closed}: connection refused")), "{error}");
}

#[test]
fn plain_http_is_used_only_for_listed_registries() {
    let registry = registry_with(&ModelFile::dense(1));
    registry.set_blob_delivery(BlobDelivery::Direct);
    // Leads to this machine but does not name it.
    let host = registry.url().replace("http://127.0.0.1", "0.0.0.0");
    let name = format!("{host}/library/tiny");
    pull_with("", &name).exits_with(1);
    assert!(registry.requests().iter().all(|request| request.method != "GET"));
    pull_with(&format!("insecure_registries = [\"{host}\"]\n"), &name).succeeds();
}

#[test]
fn registries_on_this_machine_need_neither_a_scheme_nor_a_namespace() {
    let registry = FakeRegistry::start().unwrap();
    offer(&registry, "x:latest", &ModelFile::dense(1).bytes());
    offer(&registry, "a/x:v1", &ModelFile::dense(2).bytes());
    let host = registry.url().trim_start_matches("http://").to_owned();
    let blobd = TestDaemon::start();
    let run = |line: &[&str]| blobd.command().run(line).succeeds();
    for host in [host.clone(), host.replace("127.0.0.1", "localhost")] {
        for name in [format!("{host}/x"), format!("{host}/a/x:v1")] {
            run(&["pull", &name]);
            assert_eq!(run(&["show", &name, "--json"]).json()["architecture"], "llama");
            assert!(run(&["ls"]).text().contains(&name), "{name}");
            run(&["rm", &name]);
            run(&["fit", &name]);
        }
    }
}

#[test]
fn names_of_hugging_face_share_mirrors_and_models() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    offer(&registry, "me/x-GGUF:Q4_0", &weights);
    offer(&registry, "me/x-GGUF:latest", &weights);
    registry.add_repository("me/x-GGUF", &"1".repeat(40), &[("x-Q8_0.gguf", &ModelFile::dense(2).bytes())]);
    for mirrored in ["hf.co", "huggingface.co", "www.huggingface.co"] {
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        std::fs::write(&config, format!("[mirrors]\n\"{mirrored}\" = \"{}\"\n", registry.url())).unwrap();
        let blobd = Blobd::at_root(&folder.path().join("store"));
        let run = |verb, name| blobd.run([verb, name, "--json", "--config", config.to_str().unwrap()]);
        for (source, name) in [
            ("hf.co/me/x-GGUF:Q4_0", "hf.co/me/x-GGUF:Q4_0"),
            ("huggingface.co/me/x-GGUF:Q4_0", "hf.co/me/x-GGUF:Q4_0"),
            ("https://huggingface.co/me/x-GGUF", "hf.co/me/x-GGUF:latest"),
            ("https://huggingface.co/me/x-GGUF/tree/main", "hf.co/me/x-GGUF:latest"),
            ("https://huggingface.co/me/x-GGUF/blob/main/x-Q8_0.gguf", "hf.co/me/x-GGUF:Q8_0"),
            (
                "https://huggingface.co/me/x-GGUF/resolve/main/x-Q8_0.gguf?download=true",
                "hf.co/me/x-GGUF:Q8_0",
            ),
            ("hf.co/me/x-GGUF/x-Q8_0.gguf", "hf.co/me/x-GGUF:Q8_0"),
        ] {
            run("fit", source).succeeds();
            run("show", source).succeeds();
            let pulled = run("pull", source).succeeds().json_lines().pop().unwrap();
            assert_eq!(pulled["name"], name, "{source} with a mirror of {mirrored}");
            run("show", source).succeeds();
            run("rm", name).succeeds();
        }
    }
}

#[test]
fn model_stored_under_another_name_of_hugging_face_is_found() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let path = ModelFile::dense(1).write_to(folder.path(), "x.gguf");
    let blobd = Blobd::at_root(&root);
    blobd.run(["import", path.to_str().unwrap(), "--name", "hf.co/me/x:q"]).succeeds();
    let manifests = root.join("manifests");
    std::fs::rename(manifests.join("hf.co"), manifests.join("huggingface.co")).unwrap();
    for name in ["huggingface.co/me/x:q", "hf.co/me/x:q"] {
        blobd.run(["show", name, "--stored"]).succeeds();
    }
    blobd.run(["rm", "hf.co/me/x:q"]).succeeds();
    assert!(blobd.run(["ls", "--json"]).json()["models"].as_array().unwrap().is_empty());
}

#[test]
fn missing_tag_is_reported_with_the_nearest_names() {
    let registry = registry_with(&ModelFile::dense(1));
    offer(&registry, "library/tiny:8b-q4", &ModelFile::dense(1).bytes());
    let daemon = TestDaemon::start();
    let pull = || {
        daemon.command().run(["pull", &registry.name("library/tiny:8b-q5"), "--json"]).exits_with(3).error()
    };
    assert!(pull().message.contains("not found at"), "{}", pull());
    // It has the tag latest, although it does not list that.
    let missing = pull();
    assert!(missing.message.ends_with("/library/tiny:latest"), "{missing:?}");
    assert!(missing.hint.as_ref().unwrap().contains("does not list its tags"), "{missing:?}");
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
fn failed_connections_give_a_hint() {
    let daemon = TestDaemon::start();
    let failure = |name: &str| daemon.command().run(["pull", name, "--json"]).exits_with(1).error().message;
    let refused = failure(&format!("http://{}/library/tiny", closed_port()));
    assert!(refused.contains("is the port right"), "{refused}");
    let unknown = failure("registry.invalid/library/tiny");
    assert!(unknown.contains("no address found"), "{unknown}");
}

#[test]
fn login_page_in_place_of_a_file_is_reported() {
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
fn proxy_of_the_environment_is_used_except_for_no_proxy_hosts() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap().to_string();
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = proxy.accept().unwrap();
        let mut head = [0; 512];
        let length = stream.read(&mut head).unwrap();
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    });
    let folder = tmpfs_directory();
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

/// What the proxy is asked for during a pull of a model at `registry.invalid`, and the message of its failure.
fn asked_with(variable: &str, value: &str) -> (Vec<String>, String) {
    let proxy = Proxy::start(ProxyBehaviour::default()).unwrap();
    let folder = tmpfs_directory();
    let mut command = Blobd::at_root(&folder.path().join("store")).command();
    command.args(["pull", "registry.invalid/library/tiny", "--json"]);
    command.env(variable, value.replace("PROXY", &proxy.address().to_string()));
    let message = command::run(&mut command).error().message;
    (proxy.asked(), message)
}

#[test]
fn proxies_in_every_form_are_used_for_all_connections() {
    for (variable, value, expected) in [
        ("ALL_PROXY", "socks5h://PROXY", "SOCKS5 registry.invalid:443"),
        ("all_proxy", "socks://PROXY/", "SOCKS5 registry.invalid:443"),
        ("https_proxy", "socks4a://PROXY", "SOCKS4a registry.invalid:443"),
        ("HTTPS_PROXY", "PROXY", "CONNECT registry.invalid:443 HTTP/1.1"),
        (
            "HTTPS_PROXY",
            "http://dom\\user:p@ss@PROXY",
            "CONNECT registry.invalid:443 HTTP/1.1 Proxy-Authorization: Basic ZG9tXHVzZXI6cEBzcw==",
        ),
    ] {
        let (asked, message) = asked_with(variable, value);
        assert_eq!(asked, [expected], "{variable}={value}");
        let names_variable = message.contains(&format!("is {variable} right?"));
        assert!(names_variable && !message.contains("p@ss"), "{variable}={value}: {message}");
    }
    for value in ["gopher://me:secret@PROXY", "http://me:secret@PROXY/proxy.pac", "http://me:secret@h:port"] {
        let (asked, message) = asked_with("all_proxy", value);
        assert!(asked.is_empty(), "{value}");
        assert!(message.starts_with("all_proxy: not understood: expected "), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
}
