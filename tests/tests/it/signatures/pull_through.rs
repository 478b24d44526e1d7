//! Rules `[[trust]]` and `serve.upstream`: a model that is pulled for another machine is shown only if it is signed as demanded.

use std::net::SocketAddr;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_tests::archives::tar;
use blobd_tests::registry::FakeRegistry;

use super::policy::Site;
use super::transport::{
    ALL, add_signature, assert_nothing_stored, bundle_of, damaged, manifest_at, registry,
};
use super::*;
use crate::serve::{Answer, address_of, ask};

/// A machine that pulls models for others from a registry in place of this upstream.
fn site(registry: &FakeRegistry, upstream: &str, rules: &str) -> (Site, SocketAddr) {
    let site = Site::start(&format!(
        "{rules}[serve]\nlisten = \"127.0.0.1:0\"\nhub = true\nupstream = [\"{upstream}\"]\n\
         [transfer]\nstall_timeout_seconds = 1\n[mirrors]\n\"{upstream}\" = \"{}\"\n",
        registry.url()
    ));
    let address = address_of(&site.daemon);
    (site, address)
}

fn get(address: SocketAddr, path: &str) -> Answer {
    ask(address, "GET", path, "")
}

/// Requests a model that may not be had, and each of its files. None of its files may have been requested from the registry,
/// except for those of an archive, which can be compared only when they have arrived.
fn is_refused((site, address): &(Site, SocketAddr), registry: &FakeRegistry, name: &str, may_move: bool) {
    let manifest = manifest_at(registry, &format!("library/{name}"), "latest");
    let before = registry.requests().len();
    let path = format!("/v2/library/{name}");
    let mut paths =
        vec![format!("{path}/manifests/latest"), format!("{path}/manifests/{}", manifest.digest())];
    paths.extend(manifest.files().map(|file| format!("{path}/blobs/{}", file.digest)));
    for path in &paths {
        for (method, more) in [("GET", ""), ("HEAD", ""), ("GET", "Range: bytes=0-9\r\n")] {
            let answer = ask(*address, method, path, more);
            assert_eq!(answer.status, 404, "{method} {path}: {answer:?}");
            assert!(answer.body.len() < 1000, "{path}: {} bytes", answer.body.len());
        }
    }
    let files: Vec<String> = manifest.files().map(|file| file.digest.to_string()).collect();
    let requests = registry.requests().split_off(before);
    let is_of_file = |path: &str| files.iter().any(|file| path.contains(file));
    let moved = requests.iter().filter(|request| is_of_file(&request.path)).count();
    assert!(may_move || moved == 0, "{requests:?}");
    assert_nothing_stored(site);
}

/// Requests a model that is signed as demanded.
fn is_sent((site, address): &(Site, SocketAddr), name: &str, layer: &[u8]) -> String {
    let answer = get(*address, &format!("/v2/library/{name}/manifests/latest"));
    assert_eq!(answer.status, 200, "{answer:?}");
    let digest = answer.header("docker-content-digest").unwrap().to_owned();
    let path = format!("/v2/library/{name}/blobs/{}", Digest::of(layer));
    assert!(get(*address, &path).body == layer);
    let stored = || site.daemon.client().models().unwrap().models;
    eventually("the model has its name", || stored().iter().any(|model| model.name.starts_with(name)));
    digest
}

/// Publishes a model of the publisher as one of Ollama's registry.
fn push(publisher: &Site, registry: &FakeRegistry, name: &str) -> Manifest {
    let destination = registry.name(&format!("library/{name}:latest"));
    publisher.daemon.command().run(["push", name, &destination]).succeeds();
    manifest_at(registry, &format!("library/{name}"), "latest")
}

#[test]
fn registrys_model_is_sent_only_if_it_is_signed_as_demanded() {
    const UPSTREAM: &str = "registry.ollama.ai";
    for lists_referrers in [true, false] {
        let registry = registry(lists_referrers);
        let publisher = Site::start("");
        let site = site(&registry, UPSTREAM, ALL);
        for (seed, name) in (1..).zip(["unsigned", "other", "altered", "damaged", "right"]) {
            publisher.import(seed, name);
        }
        publisher.sign("other", &publisher.other);
        let right = bundle_of(&publisher, "right", &publisher.site);
        push(&publisher, &registry, "unsigned");
        push(&publisher, &registry, "other");
        // The right signature of another model.
        let altered = push(&publisher, &registry, "altered");
        add_signature(&registry, "library/altered", &altered, right.as_bytes());
        let bundle = bundle_of(&publisher, "damaged", &publisher.site);
        publisher.daemon.command().line("edit damaged damaged2 --set general.name=D").succeeds();
        let model = push(&publisher, &registry, "damaged2");
        add_signature(&registry, "library/damaged2", &model, damaged(&bundle).as_bytes());
        for name in ["unsigned", "other", "altered", "damaged2"] {
            is_refused(&site, &registry, name, false);
        }
        push(&publisher, &registry, "right");
        let weights = ModelFile::dense(5).bytes();
        let digest = is_sent(&site, "right", &weights);
        assert_eq!(state(&site.0.daemon.command(), "right", &[]).0, "signed");
        let referrers = get(site.1, &format!("/v2/library/right/referrers/{digest}")).json();
        assert_eq!(referrers["manifests"][0]["artifactType"], Bundle::MEDIA_TYPE, "{referrers}");
        // A rule that only warns.
        let warned = self::site(&registry, UPSTREAM, &ALL.replace("enforce", "warn"));
        is_sent(&warned, "unsigned", &ModelFile::dense(1).bytes());
    }
}

#[test]
fn stored_model_stays_when_its_registry_has_one_that_is_not_signed() {
    let registry = registry(true);
    let publisher = Site::start("");
    let (site, address) = site(&registry, "registry.ollama.ai", ALL);
    publisher.import(1, "m");
    publisher.sign("m", &publisher.site);
    let signed = push(&publisher, &registry, "m").digest().to_string();
    site.daemon.command().line("pull m").succeeds();
    publisher.daemon.command().line("edit m other --set general.name=Other").succeeds();
    publisher.daemon.command().run(["push", "other", &registry.name("library/m:latest")]).succeeds();
    let unsigned = manifest_at(&registry, "library/m", "latest");
    assert_ne!(unsigned.digest().to_string(), signed);
    let asked = registry.requests().len();
    let answer = get(address, "/v2/library/m/manifests/latest");
    assert_eq!((answer.status, answer.header("docker-content-digest")), (200, Some(&*signed)));
    let weights = unsigned.layers()[0].digest;
    assert_eq!(get(address, &format!("/v2/library/m/blobs/{weights}")).status, 404);
    let requests = registry.requests().split_off(asked);
    assert!(!requests.is_empty(), "the registry was asked");
    assert!(requests.iter().all(|request| !request.path.contains(&weights.to_string())), "{requests:?}");
}

#[test]
fn files_in_an_archive_are_compared_before_anything_of_it_is_sent() {
    const ARCHIVE: &str = "application/vnd.cncf.model.weight.v1.tar";
    let registry = registry(true);
    let publisher = Site::start("");
    let site = site(&registry, "registry.ollama.ai", ALL);
    let archives = [1, 2].map(|seed| tar(&[("models/tiny.gguf", &ModelFile::dense(seed).bytes())]));
    for (name, archive) in ["packed", "swapped"].into_iter().zip(&archives) {
        registry.add_model(&format!("library/{name}"), b"{}", &[(ARCHIVE, archive)]).unwrap();
    }
    let name = registry.name("library/packed:latest");
    publisher.daemon.command().run(["pull", &name]).succeeds();
    let bundle = bundle_of(&publisher, &name, &publisher.site);
    for name in ["packed", "swapped"] {
        let repository = format!("library/{name}");
        let manifest = manifest_at(&registry, &repository, "latest");
        add_signature(&registry, &repository, &manifest, bundle.as_bytes());
    }
    // An ordinary pull too.
    let error = site.0.daemon.command().run(["pull", "swapped", "--json"]).exits_with(7).error();
    assert!(error.to_string().contains("wrong signature: file models/tiny.gguf"), "{error}");
    is_refused(&site, &registry, "swapped", true);
    is_sent(&site, "packed", &archives[0]);
    assert_eq!(state(&site.0.daemon.command(), "packed", &[]).0, "signed");
}

#[test]
fn hubs_model_is_sent_only_if_it_is_signed_as_demanded() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    const PATHS: [&str; 4] =
        ["config.json", "extra/generation_config.json", "model.safetensors", "tokenizer.json"];
    let hub = FakeRegistry::start().unwrap();
    let publisher = Site::start("");
    let (site, address) = site(&hub, "hf.co", ALL);
    let folder = publish(publisher.daemon.scratch());
    import(&publisher.daemon.command(), &folder);
    let right = bundle_of(&publisher, "acme", &publisher.site);
    let by_other = bundle_of(&publisher, "acme", &publisher.other);
    let contents = PATHS.map(|path| fs::read(folder.join(path)).unwrap());
    let add = |repository: &str, altered: Option<usize>, signature: Option<&str>| {
        let mut contents = contents.clone();
        if let Some(number) = altered {
            *contents[number].last_mut().unwrap() ^= 1;
        }
        let mut files: Vec<_> = PATHS.into_iter().zip(contents.iter().map(Vec::as_slice)).collect();
        files.extend(signature.map(|signature| ("model.sig", signature.as_bytes())));
        hub.add_folder(repository, COMMIT, &files);
    };
    add("org/unsigned", None, None);
    add("org/other", None, Some(&by_other));
    add("org/weights", Some(2), Some(&right));
    add("org/config", Some(0), Some(&right));
    add("org/damaged", None, Some(&damaged(&right)));
    for repository in ["org/unsigned", "org/other", "org/weights", "org/config", "org/damaged"] {
        let asked = hub.requests().len();
        let answer = get(address, &format!("/api/models/{repository}/revision/main"));
        assert_eq!(
            (answer.status, answer.header("x-error-code")),
            (404, Some("RepoNotFound")),
            "{repository}"
        );
        for path in PATHS {
            let answer = get(address, &format!("/{repository}/resolve/main/{path}"));
            assert_eq!(
                (answer.status, answer.body.len() < 1000),
                (404, true),
                "{repository} {path}: {answer:?}"
            );
        }
        let requests = hub.requests().split_off(asked);
        let weights = format!("{repository}/resolve/{COMMIT}/model.safetensors");
        let digest = Digest::of(&contents[2]).to_string();
        let is_of_weights = |path: &str| path.contains(&weights) || path.contains(&digest);
        assert!(!requests.iter().any(|request| is_of_weights(&request.path)), "{requests:?}");
        assert_nothing_stored(&site);
    }
    add("org/right", None, Some(&right));
    assert_eq!(get(address, "/api/models/org/right/revision/main").status, 200);
    for (path, content) in PATHS.into_iter().zip(&contents) {
        assert!(get(address, &format!("/org/right/resolve/main/{path}")).body == *content, "{path}");
    }
    eventually("it is signed here too", || {
        let run = site.daemon.command().line("verify hf.co/org/right --signatures");
        run.code == 0
    });
    assert_eq!(get(address, "/org/right/resolve/main/model.sig").body, right.as_bytes());
}
