//! Invalid manifests, and layers of another kind than declared.

use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::raw_gguf::RawGguf;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::check_empty;
use serde_json::{Value as Json, json};

use super::{CONFIG, MODEL, TEMPLATE};

/// The correct descriptor of a file.
fn descriptor(media_type: &str, bytes: &[u8]) -> Json {
    json!({ "mediaType": media_type, "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
}

fn manifest(config: &Json, layers: &[Json]) -> Json {
    json!({ "schemaVersion": 2, "config": config, "layers": layers })
}

fn with(mut json: Json, pointer: &str, value: Json) -> Json {
    *json.pointer_mut(pointer).unwrap() = value;
    json
}

#[test]
fn invalid_manifests_are_refused() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_blob(weights.clone());
    registry.add_blob(CONFIG);
    let good = manifest(&descriptor(MODEL, CONFIG), &[descriptor(MODEL, &weights)]);
    let digest = |text: &str| with(good.clone(), "/layers/0/digest", text.into());
    let size = |size: Json| with(good.clone(), "/layers/0/size", size);
    let hex = sha256(&weights);
    let many = vec![descriptor(TEMPLATE, b"x"); 16_385];
    for (what, manifest) in [
        ("a digest that climbs (CVE-2024-37032)", digest("sha256:../../../../etc/passwd")),
        ("a digest that is a path", digest("../../../../etc/passwd")),
        ("a digest that is too short", digest(&format!("sha256:{}", &hex[..63]))),
        ("a digest that is too long", digest(&format!("sha256:{hex}0"))),
        ("a digest in capitals", digest(&format!("sha256:{}", hex.to_uppercase()))),
        ("another algorithm", digest(&format!("sha512:{hex}{hex}"))),
        ("no digest", digest("")),
        ("a negative size", size(json!(-1))),
        ("a size of 2^64", size(json!(1.8446744073709552e19))),
        ("a size that is a text", size(json!("5"))),
        ("sizes that overflow", with(size(json!(u64::MAX)), "/config/size", json!(u64::MAX))),
        ("a size that is too small", size(json!(weights.len() - 1))),
        ("a size that is too large", size(json!(weights.len() + 1))),
        (
            "one file with two sizes",
            manifest(
                &descriptor(MODEL, CONFIG),
                &[descriptor(MODEL, &weights), with(descriptor(MODEL, &weights), "/size", json!(1))],
            ),
        ),
        ("no layers (CVE-2025-1975)", with(good.clone(), "/layers", json!([]))),
        ("no configuration", json!({ "schemaVersion": 2, "layers": [descriptor(MODEL, &weights)] })),
        ("version 1", with(good.clone(), "/schemaVersion", json!(1))),
        ("an index", json!({ "schemaVersion": 2, "manifests": [descriptor("x", b"")] })),
        ("an index and a manifest (CVE-2021-41190)", {
            let mut both = good.clone();
            both["manifests"] = json!([]);
            both
        }),
        ("too many layers", manifest(&descriptor(MODEL, CONFIG), &many)),
        (
            "a layer that the registry lacks",
            manifest(&descriptor(MODEL, CONFIG), &[descriptor(MODEL, b"nothing")]),
        ),
    ] {
        registry.add_manifest("library/evil:latest", manifest.to_string().as_bytes());
        let run = daemon.command().run(["pull", &registry.name("library/evil"), "--json"]);
        assert_eq!(run.code, 1, "{what}: {}", run.stderr);
        assert!(run.error().message.len() < 500, "{what}: {}", run.stderr);
        check_empty(daemon.root());
    }
    registry.add_manifest("library/evil:latest", good.to_string().as_bytes());
    daemon.command().run(["pull", &registry.name("library/evil")]).succeeds();
}

#[test]
fn json_that_is_too_deep_or_too_long_is_refused() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    let deep = format!("{{\"schemaVersion\":2,\"x\":{}", "[".repeat(1_000_000));
    let long = format!("{{\"schemaVersion\":2,\"x\":\"{}\"}}", "x".repeat(5 << 20));
    let twice = r#"{"schemaVersion":2,"schemaVersion":2,"config":{},"layers":[]}"#.to_owned();
    for raw in [deep, long, twice] {
        registry.add_manifest("library/evil:latest", raw.as_bytes());
        daemon.command().run(["pull", &registry.name("library/evil")]).exits_with(1);
        check_empty(daemon.root());
    }
}

/// In ollama#15485, the configuration counted as verified if a layer had the same digest.
#[test]
fn configuration_and_layer_may_be_the_same_file() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    registry.add_blob(CONFIG);
    let twice = manifest(&descriptor("x/config", CONFIG), &[descriptor(TEMPLATE, CONFIG)]);
    registry.add_manifest("library/odd:latest", twice.to_string().as_bytes());
    daemon.command().run(["pull", &registry.name("library/odd")]).succeeds();
    let run =
        daemon.command().run(["export", &registry.name("library/odd"), "--component", "template", "-o", "-"]);
    assert_eq!(run.stdout, CONFIG);
}

#[test]
fn weights_that_are_not_gguf_are_stored_whole() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    for weights in [&b"PK\x03\x04 something else"[..], b"G", b"GGU", b"x"] {
        registry.add_model("library/odd:latest", CONFIG, &[(MODEL, weights)]).unwrap();
        let name = registry.name("library/odd");
        daemon.command().run(["pull", &name]).succeeds();
        assert_eq!(daemon.command().run(["export", &name, "-o", "-"]).stdout, weights);
        assert_eq!(daemon.command().run(["show", &name, "--json"]).json()["layers"][1]["stored"], "blob");
    }
}

#[test]
fn malformed_gguf_is_refused_although_its_digest_is_right() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    let overlap = RawGguf::new().tensor("a", 0, &[16], 0).tensor("b", 0, &[16], 32).with_data(&[0; 128]);
    for weights in [&b"GGUF"[..], &RawGguf::new().alignment(0).bytes(), &overlap] {
        registry.add_model("library/evil:latest", CONFIG, &[(MODEL, weights)]).unwrap();
        let run = daemon.command().run(["pull", &registry.name("library/evil"), "--json"]).exits_with(1);
        assert_eq!(run.error().code, blobd_client::protocol::error::ErrorCode::InvalidInput);
        check_empty(daemon.root());
    }
}

#[test]
fn empty_layers_and_several_split_layers_are_accepted() {
    let daemon = TestDaemon::start();
    let registry = FakeRegistry::start().unwrap();
    let mut projector = ModelFile::empty();
    projector.add_noise(1, "v.patch_embd.weight", GgmlType::F16, &[64, 8]);
    let (weights, projector) = (ModelFile::dense(1).bytes(), projector.bytes());
    let layers: [(&str, &[u8]); 3] =
        [(MODEL, &weights), ("application/vnd.ollama.image.projector", &projector), (TEMPLATE, b"")];
    registry.add_model("library/vision:latest", CONFIG, &layers).unwrap();
    let name = registry.name("library/vision");
    daemon.command().run(["pull", &name]).succeeds();
    for (component, bytes) in [("model", &weights[..]), ("projector", &projector), ("template", b"")] {
        let run = daemon.command().run(["export", &name, "--component", component, "-o", "-"]).succeeds();
        assert!(run.stdout == bytes, "{component}");
    }
    let open = daemon.client().open(&name.parse().unwrap()).unwrap();
    assert!(open.tensor("v.patch_embd.weight").is_some() && open.tensor("output.weight").is_some());
}
