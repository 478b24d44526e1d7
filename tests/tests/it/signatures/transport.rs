//! Signatures on their way: pushed beside models, fetched and checked by a pull before a layer moves, and served.

use blobd_store_format::artifact::Referrers;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::signature::SignatureArtifact;
use blobd_tests::registry::{FakeRegistry, Fault};

use super::policy::Site;
use super::*;
use crate::serve::{address_of, ask};

/// All models must be signed by the key `site`.
pub(super) const ALL: &str = "[[trust]]\npattern = \"*\"\nkeys = {site}\nmode = \"enforce\"\n";

/// A registry that lists what refers to a manifest, or leaves that to a tag.
pub(super) fn registry(lists_referrers: bool) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    if lists_referrers {
        registry.list_referrers();
    }
    registry
}

/// Adds a signature as another program would.
pub(super) fn add_signature(registry: &FakeRegistry, repository: &str, model: &Manifest, bundle: &[u8]) {
    let layer = Descriptor {
        media_type: MediaType::new(Bundle::MEDIA_TYPE),
        digest: registry.add_blob(bundle),
        size: bundle.len() as u64,
    };
    add_signature_layer(registry, repository, model, &layer);
}

fn add_signature_layer(registry: &FakeRegistry, repository: &str, model: &Manifest, layer: &Descriptor) {
    let raw = json!({
        "schemaVersion": 2,
        "mediaType": MediaType::OCI_MANIFEST,
        "artifactType": Bundle::MEDIA_TYPE,
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::of(b"{}"), "size": 2 },
        "layers": [{ "mediaType": layer.media_type, "digest": layer.digest, "size": layer.size }],
        "subject": { "mediaType": MediaType::DOCKER_MANIFEST, "digest": model.digest(), "size": model.raw().len() },
    });
    let raw = raw.to_string();
    registry.add_manifest(&format!("{repository}:signature"), raw.as_bytes());
    let artifact = Descriptor {
        media_type: MediaType::new(MediaType::OCI_MANIFEST),
        digest: Digest::of(raw.as_bytes()),
        size: raw.len() as u64,
    };
    let tag = Referrers::fallback_tag(model.digest());
    let earlier = registry.manifest(&format!("/v2/{repository}/manifests/{tag}"));
    let list = Referrers::with_artifact(earlier.as_deref(), &SignatureArtifact::KIND, &artifact);
    if let Some(list) = list.unwrap() {
        registry.add_manifest(&format!("{repository}:{tag}"), &list);
    }
}

/// Signs a model, and returns the bundle.
pub(super) fn bundle_of(site: &Site, name: &str, key: &KeyFiles) -> String {
    let path = site.daemon.scratch().join(format!("{}.sig", name.replace(['/', ':'], "-")));
    let sign = ["sign", name, "--key", text(&key.private), "-f", "-o", text(&path)];
    site.daemon.command().run(sign).succeeds();
    fs::read_to_string(path).unwrap()
}

pub(super) fn manifest_at(registry: &FakeRegistry, repository: &str, tag: &str) -> Manifest {
    let raw = registry.manifest(&format!("/v2/{repository}/manifests/{tag}"));
    Manifest::parse(raw.expect("it was pushed")).unwrap()
}

/// Pulls a model that is refused. Nothing of its files may have been requested, and nothing may be left of it.
fn refused_pull(site: &Site, registry: &FakeRegistry, model: &str, reason: &str) {
    let (repository, tag) = model.split_once(':').unwrap();
    let before = registry.requests().len();
    for more in [&[][..], &["--dry-run"]] {
        let run = site.daemon.command().run([&["pull", &registry.name(model), "--json"], more].concat());
        let error = run.exits_with(7).error();
        assert_eq!(error.code, ErrorCode::DeniedByPolicy, "{error}");
        assert!(error.to_string().contains(reason), "{reason}: {error}");
        assert!(error.to_string().contains("[[trust]] demands"), "{error}");
    }
    let manifest = manifest_at(registry, repository, tag);
    let files: Vec<String> = manifest.files().map(|file| file.digest.to_string()).collect();
    let requests = registry.requests().split_off(before);
    let moved = requests.iter().filter(|request| files.iter().any(|file| request.path.contains(file)));
    assert_eq!(moved.count(), 0, "{requests:?}");
    assert_nothing_stored(site);
}

pub(super) fn assert_nothing_stored(site: &Site) {
    assert!(site.daemon.client().models().unwrap().models.is_empty());
    let blobs = site.daemon.root().join("blobs");
    assert_eq!(fs::read_dir(blobs).map_or(0, Iterator::count), 0);
    let signatures = site.daemon.root().join("signatures");
    assert_eq!(fs::read_dir(signatures).map_or(0, Iterator::count), 0);
}

/// The bundle with another signature.
pub(super) fn damaged(bundle: &str) -> String {
    let mut document: Json = serde_json::from_str(bundle).unwrap();
    document["dsseEnvelope"]["signatures"][0]["sig"] = json!("MAA=");
    document.to_string()
}

#[test]
fn pull_refuses_what_is_not_signed_as_demanded_before_a_layer_moves() {
    for lists_referrers in [true, false] {
        let registry = registry(lists_referrers);
        let publisher = Site::start("");
        let site = Site::start(ALL);
        let push = |name: &str| {
            let destination = registry.name(&format!("team/{name}:1"));
            let pushed = publisher.daemon.command().run(["push", name, &destination, "--json"]).succeeds();
            (manifest_at(&registry, &format!("team/{name}"), "1"), pushed.json_lines().pop().unwrap())
        };
        for (seed, name) in [(1, "unsigned"), (2, "other"), (3, "altered"), (4, "damaged"), (5, "right")] {
            publisher.import(seed, name);
        }
        push("unsigned");
        refused_pull(&site, &registry, "team/unsigned:1", "team/unsigned:1: not signed");
        publisher.sign("other", &publisher.other);
        assert_eq!(push("other").1["signatures"][0]["delivery"], "sent");
        refused_pull(&site, &registry, "team/other:1", "expected one by site.pub, found one by another key");
        let right = bundle_of(&publisher, "right", &publisher.site);
        // The right signature of another model.
        let (altered, _) = push("altered");
        add_signature(&registry, "team/altered", &altered, right.as_bytes());
        refused_pull(&site, &registry, "team/altered:1", "wrong signature: file ");
        let (model, _) = push("damaged");
        let bundle = damaged(&bundle_of(&publisher, "damaged", &publisher.site));
        add_signature(&registry, "team/damaged", &model, bundle.as_bytes());
        refused_pull(
            &site,
            &registry,
            "team/damaged:1",
            "it names the key site.pub, which did not sign this",
        );
        publisher.sign("right", &publisher.other);
        let (_, pushed) = push("right");
        assert_eq!(pushed["signatures"][0]["delivery"], "sent", "{pushed}");
        assert_eq!(push("right").1["signatures"][1]["delivery"], "present");
        let text =
            publisher.daemon.command().run(["push", "right", &registry.name("again/right:1")]).succeeds();
        assert!(text.text().contains("\n  with 2 signatures\n"), "{}", text.text());
        site.daemon.command().run(["pull", &registry.name("team/right:1")]).succeeds();
        let name = registry.name("team/right:1");
        assert_eq!(state(&site.daemon.command(), &name, &[]).0, "signed");
        assert_eq!(site.refusal(&name), None);
        // The signatures go on with the model, through this machine too.
        let moved = ["transfer", &name, &registry.name("moved/right:1"), "--json"];
        let moved = site.daemon.command().run(moved).succeeds().json_lines().pop().unwrap();
        assert_eq!(moved["signatures"].as_array().map(Vec::len), Some(2), "{moved}");
        let other = Site::start(ALL);
        other.daemon.command().run(["pull", &registry.name("moved/right:1")]).succeeds();
        site.daemon.command().run(["push", &name, &registry.name("mirror/right:1")]).succeeds();
        let next = Site::start(ALL);
        next.daemon.command().run(["pull", &registry.name("mirror/right:1")]).succeeds();
        let report =
            next.daemon.command().run(["verify", &name.replace("team", "mirror"), "--signatures", "--json"]);
        let report = report.succeeds().json();
        assert_eq!(report["models"][0]["signatures"].as_array().map(Vec::len), Some(2), "{report}");
    }
}

#[test]
fn rule_that_warns_is_obeyed_once_and_without_a_rule_nothing_is_asked() {
    let registry = registry(true);
    let publisher = Site::start("");
    publisher.import(1, "m");
    publisher.daemon.command().run(["push", "m", &registry.name("team/m:1")]).succeeds();
    let asked = || {
        let asks = |path: &str| path.contains("/referrers/") || path.contains("/manifests/sha256-");
        registry.requests().iter().filter(|request| asks(&request.path)).count()
    };
    let name = registry.name("team/m:1");
    for rules in ["".to_owned(), ALL.replace("\"*\"", "\"*/other/*\""), ALL.replace("enforce", "off")] {
        Site::start(&rules).daemon.command().run(["pull", &name]).succeeds();
    }
    assert_eq!(asked(), 0);
    let site = Site::start(&ALL.replace("enforce", "warn"));
    let pulled = site.daemon.command().run(["pull", &name, "--json"]).succeeds().json_lines().pop().unwrap();
    let notes = pulled["notes"].to_string();
    assert!(notes.contains("not signed; ") && notes.contains("[[trust]] demands"), "{pulled}");
    assert_eq!(asked(), 1);
    assert_eq!(site.refusal(&name), None);
    assert_eq!(site.daemon.log().matches("team/m:1: not signed").count(), 1, "{}", site.daemon.log());
    // A registry that fails is no reason to refuse, and to enforce is.
    registry.add_fault("/referrers/", 100, Fault::Status(500));
    registry.add_fault("/manifests/sha256-", 100, Fault::Status(500));
    let warned = Site::start(&ALL.replace("enforce", "warn"));
    warned.daemon.command().run(["pull", &name]).succeeds();
    let enforced = Site::start(ALL);
    let run = enforced.daemon.command().run(["pull", &name, "--json"]);
    assert_ne!(run.code, 0);
    let error = run.error();
    assert!(error.message.contains("500"), "{error}");
    assert_nothing_stored(&enforced);
}

#[test]
fn signature_of_the_site_counts_where_the_publisher_has_none() {
    let registry = registry(false);
    let publisher = Site::start("");
    publisher.import(1, "m");
    let name = registry.name("team/m:1");
    publisher.daemon.command().run(["push", "m", &name]).succeeds();
    let site = Site::start("");
    site.daemon.command().run(["pull", &name]).succeeds();
    site.sign(&name, &site.site);
    site.reload(ALL);
    assert_eq!(site.refusal(&name), None);
    site.daemon.command().run(["pull", &name]).succeeds();
    let asks = |path: &str| path.contains("/manifests/sha256-");
    assert_eq!(registry.requests().iter().filter(|request| asks(&request.path)).count(), 0);
}

#[test]
fn hostile_registry_makes_a_pull_fetch_few_signatures_and_short_ones() {
    let registry = registry(false);
    let publisher = Site::start("");
    publisher.import(1, "m");
    let name = registry.name("team/m:1");
    publisher.daemon.command().run(["push", "m", &name]).succeeds();
    let model = manifest_at(&registry, "team/m", "1");
    let site = Site::start(ALL);
    let fetched = |path: &str| {
        let before = registry.requests().len();
        site.daemon.command().run(["pull", &name]).exits_with(7);
        assert_nothing_stored(&site);
        let requests = registry.requests().split_off(before);
        requests.iter().filter(|request| request.path.contains(path)).count()
    };
    let long = Descriptor {
        media_type: MediaType::new(Bundle::MEDIA_TYPE),
        digest: Digest::of(b"long"),
        size: Bundle::MAX_BYTES as u64 + 1,
    };
    add_signature_layer(&registry, "team/m", &model, &long);
    assert_eq!(fetched(&long.digest.to_string()), 0);
    // One that is another content than its digest.
    let other = Descriptor { size: 4, digest: registry.add_blob("null"), ..long };
    add_signature_layer(&registry, "team/m", &model, &other);
    assert_eq!(fetched("/manifests/sha256:"), 2);
    for number in 0..100 {
        let bundle = format!("{{\"{number}\":0}}");
        add_signature(&registry, "team/m", &model, bundle.as_bytes());
    }
    assert_eq!(fetched("/manifests/sha256:"), 16);
    let valid = bundle_of(&publisher, "m", &publisher.other);
    let tag = Referrers::fallback_tag(model.digest());
    registry.remove_manifest(&format!("/v2/team/m/manifests/{tag}"));
    for number in 1..20 {
        add_signature(&registry, "team/m", &model, format!("{valid}{}", " ".repeat(number)).as_bytes());
    }
    assert_eq!(fetched("/manifests/sha256:"), 8);
    let list = json!({ "schemaVersion": 2, "manifests": [], "x": "x".repeat(1 << 20) }).to_string();
    registry.add_manifest(&format!("team/m:{tag}"), list.as_bytes());
    let error = site.daemon.command().run(["pull", &name, "--json"]).exits_with(1).error();
    assert!(error.message.contains("list of referrers"), "{error}");
}

#[test]
fn model_of_a_hub_is_compared_with_its_signature_before_its_weights_move() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let registry = FakeRegistry::start().unwrap();
    let publisher = Site::start("");
    let folder = publish(publisher.daemon.scratch());
    import(&publisher.daemon.command(), &folder);
    let right = bundle_of(&publisher, "acme", &publisher.site);
    let by_other = bundle_of(&publisher, "acme", &publisher.other);
    let read = |path: &str| fs::read(folder.join(path)).unwrap();
    let paths = ["config.json", "extra/generation_config.json", "model.safetensors", "tokenizer.json"];
    let contents: Vec<Vec<u8>> = paths.iter().map(|path| read(path)).collect();
    let rules = format!("{ALL}[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url());
    let site = Site::start(&rules);
    let add = |repository: &str, altered: Option<usize>, signature: Option<&str>| {
        let mut contents = contents.clone();
        altered.into_iter().for_each(|number| *contents[number].last_mut().unwrap() ^= 1);
        if altered.is_some_and(|number| number != 2) {
            contents[altered.unwrap()] = b"{ }".to_vec();
        }
        let files: Vec<_> = paths.iter().copied().zip(contents.iter().map(Vec::as_slice)).collect();
        let files = match signature {
            Some(signature) => [&files[..], &[("model.sig", signature.as_bytes())]].concat(),
            None => files,
        };
        registry.add_folder(repository, COMMIT, &files);
        Digest::of(&contents[2])
    };
    let refused = |repository: &str, weights: Digest, reason: &str| {
        let before = registry.requests().len();
        let name = format!("hf.co/{repository}");
        let error = site.daemon.command().run(["pull", &name, "--json"]).exits_with(7).error();
        assert!(error.to_string().contains(reason), "{reason}: {error}");
        let requests = registry.requests().split_off(before);
        let weights = [format!("{repository}/resolve/{COMMIT}/model.safetensors"), weights.to_string()];
        let moved = requests.iter().filter(|request| weights.iter().any(|path| request.path.contains(path)));
        assert_eq!(moved.count(), 0, "{requests:?}");
        assert_nothing_stored(&site);
        requests.len()
    };
    let unsigned = refused("org/unsigned", add("org/unsigned", None, None), "model.sig of org/unsigned");
    let by_other = add("org/other", None, Some(&by_other));
    assert_eq!(refused("org/other", by_other, "found one by another key"), unsigned);
    let weights = add("org/weights", Some(2), Some(&right));
    assert_eq!(refused("org/weights", weights, "file model.safetensors: not the signed content"), unsigned);
    let signature = damaged(&right);
    let weights = add("org/signature", None, Some(&signature));
    assert_eq!(refused("org/signature", weights, "which did not sign this"), unsigned);
    // Git says no SHA-256 of a short file, so it is received first.
    let weights = add("org/config", Some(0), Some(&right));
    assert!(refused("org/config", weights, "file config.json: not the signed content") > unsigned);
    add("org/right", None, Some(&right));
    site.daemon.command().line("pull hf.co/org/right").succeeds();
    assert_eq!(state(&site.daemon.command(), "hf.co/org/right", &[]).0, "signed");
    site.daemon.client().open(&"hf.co/org/right".parse().unwrap()).unwrap();
}

#[test]
fn template_that_the_hubs_registry_adds_is_not_signed_and_the_file_at_its_address_is_pulled_without_it() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let hub = FakeRegistry::start().unwrap();
    let publisher = Site::start("");
    let weights = ModelFile::dense(1).bytes();
    let folder = publisher.daemon.scratch().join("x");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("x-Q8_0.gguf"), &weights).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    publisher.daemon.command().run(["import", text(&folder), "--name", "x"]).succeeds();
    let signature = bundle_of(&publisher, "x", &publisher.site);
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.sig", signature.as_bytes()), ("x-Q8_0.gguf", &weights)];
    hub.add_folder("me/x-GGUF", COMMIT, &files);
    hub.add_page("/me/x-GGUF/resolve/main/model.sig", signature.as_bytes(), &[]);
    let layers: [(&str, &[u8]); 2] = [
        ("application/vnd.ollama.image.model", &weights),
        ("application/vnd.ollama.image.template", b"{{ .Prompt }}"),
    ];
    hub.add_model("me/x-GGUF:Q8_0", b"{}", &layers).unwrap();
    // It has the weights only.
    let rules = ALL.replace("mode =", "partial = true\nmode =");
    let site = Site::start(&format!("{rules}[mirrors]\n\"hf.co\" = \"{}\"\n", hub.url()));
    let error = site.daemon.command().line("pull hf.co/me/x-GGUF:Q8_0 --json").exits_with(7).error();
    assert!(error.to_string().contains("wrong signature: file "), "{error}");
    let digest = Digest::of(&weights).to_string();
    assert!(!hub.requests().iter().any(|request| request.path.contains(&digest)), "{:?}", hub.requests());
    assert_nothing_stored(&site);
    site.daemon.command().line("pull hf.co/me/x-GGUF/blob/main/x-Q8_0.gguf").succeeds();
    assert_eq!(site.refusal("hf.co/me/x-GGUF:Q8_0"), None);
}

#[test]
fn served_model_has_its_signatures_as_artifacts_and_in_a_file() {
    let site = Site::start(&format!("{ALL}[serve]\nlisten = \"127.0.0.1:0\"\nhub = true\n"));
    site.import(1, "org/m:1");
    site.import(2, "org/unsigned:1");
    let address = address_of(&site.daemon);
    let bundle = bundle_of(&site, "org/m:1", &site.site);
    let next = Site::start(ALL);
    next.daemon.command().run(["pull", &format!("http://{address}/org/m:1")]).succeeds();
    assert_eq!(state(&next.daemon.command(), &format!("http://{address}/org/m:1"), &[]).0, "signed");
    // What is not signed is not shown.
    next.daemon.command().run(["pull", &format!("http://{address}/org/unsigned:1")]).exits_with(3);
    assert_eq!(ask(address, "GET", "/org/m/resolve/main/model.sig", "").body, bundle.as_bytes());
    let tree = ask(address, "GET", "/api/models/org/m/tree/main?recursive=true", "").json();
    let signature = tree.as_array().unwrap().iter().find(|file| file["path"] == "model.sig").unwrap();
    assert_eq!(signature["lfs"]["oid"], Digest::of(bundle.as_bytes()).to_hex());
    assert_eq!(tree.as_array().unwrap().len(), 2, "{tree}");
}

#[test]
fn files_at_urls_have_no_signature() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_page("/m.gguf", &ModelFile::dense(1).bytes(), &[]);
    let site = Site::start(ALL);
    let url = format!("{}/m.gguf", registry.url());
    let error = site.daemon.command().run(["pull", &url, "--json"]).exits_with(7).error();
    assert!(error.to_string().contains("a file at a URL has no signature"), "{error}");
    assert_nothing_stored(&site);
    assert!(
        registry
            .requests()
            .iter()
            .all(|request| request.method == "HEAD" || request.header("range").is_some())
    );
}
