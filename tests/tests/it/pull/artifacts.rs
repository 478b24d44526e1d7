//! Models in the forms of other publishers: Docker Model Runner, CNCF ModelPack, shards, indexes,
//! and Ollama's manifests with a layer for each tensor.

use blobd_client::protocol::request::OpenParams;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, check_empty};
use serde_json::{Value as Json, json};

use super::{CONFIG, MODEL};

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub(super) fn layer(registry: &FakeRegistry, media_type: &str, bytes: &[u8], name: Option<&str>) -> Json {
    registry.add_blob(bytes);
    let digest = format!("sha256:{}", sha256(bytes));
    let mut layer = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
    if let Some(name) = name {
        layer["annotations"] = json!({ "org.cncf.model.filepath": name });
    }
    layer
}

pub(super) fn publish(registry: &FakeRegistry, model: &str, config_type: &str, layers: &[Json]) -> Vec<u8> {
    let config = layer(registry, config_type, CONFIG, None);
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers });
    let raw = manifest.to_string().into_bytes();
    registry.add_manifest(model, &raw);
    raw
}

fn components(daemon: &TestDaemon, name: &str) -> Vec<String> {
    let open = daemon.client().open(&name.parse().unwrap()).unwrap();
    open.layers().iter().map(|layer| layer.media_type.component().to_owned()).collect()
}

#[test]
fn models_of_docker_model_runner_are_split_and_named_like_all_others() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let weights = ModelFile::dense(1).bytes();
    for (config, gguf) in [
        ("model.config.v0.1+json", "gguf.v3"),
        ("model.config.v0.2+json", "gguf.v3"),
        ("model.config.v1+json", "model.file.v1+gguf"),
    ] {
        let of = |kind: &str, bytes: &[u8]| {
            layer(&registry, &format!("application/vnd.docker.ai.{kind}"), bytes, None)
        };
        let layers =
            [of(gguf, &weights), of("license", b"free"), of("chat.template.jinja", b"{{ messages }}")];
        let raw =
            publish(&registry, "ai/tiny:latest", &format!("application/vnd.docker.ai.{config}"), &layers);
        let name = registry.name("ai/tiny");
        daemon.command().run(["pull", &name]).succeeds();
        assert_eq!(components(&daemon, &name), ["config", "model", "license", "template"], "{config}");
        let open = daemon.client().open(&name.parse().unwrap()).unwrap();
        assert!(open.tensor("output.weight").is_some());
        assert_eq!(open.text("template").unwrap().as_deref(), Some("{{ messages }}"));
        assert_eq!(
            open.digest().to_string(),
            format!("sha256:{}", sha256(&raw)),
            "the registry's own bytes are kept"
        );
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights);
    }
    check_blobs(daemon.root());
}

#[test]
fn model_pack_artifacts_are_split_and_keep_their_file_names() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let weights = ModelFile::dense(1).bytes();
    for prefix in ["application/vnd.cncf.model", "application/vnd.cnai.model"] {
        for kind in ["weight.v1.raw", "weight.v1.gguf"] {
            let layers = [
                layer(&registry, &format!("{prefix}.{kind}"), &weights, Some("tiny.gguf")),
                layer(&registry, &format!("{prefix}.doc.v1.tar"), b"not looked into", Some("README.md")),
                layer(&registry, &format!("{prefix}.code.v1.raw"), b"x", Some("../../etc/passwd")),
            ];
            publish(&registry, "pack/tiny:latest", &format!("{prefix}.config.v1+json"), &layers);
            let name = registry.name("pack/tiny");
            daemon.command().run(["pull", &name]).succeeds();
            assert_eq!(components(&daemon, &name), ["config", "model", "doc", "code"]);
            let shown = daemon.command().run(["show", &name, "--json"]).json();
            let names: Vec<_> =
                shown["layers"].as_array().unwrap().iter().map(|layer| layer["name"].clone()).collect();
            assert_eq!(names, [Json::Null, "tiny.gguf".into(), "README.md".into(), Json::Null]);
            assert_eq!(shown["layers"][1]["stored"], "recipe");
        }
    }
}

#[test]
fn weights_in_unknown_archives_and_container_images_are_refused_before_they_are_fetched() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    for (media_type, what) in [
        ("application/vnd.cncf.model.weight.v1.tar+xz", "tiny.tar"),
        ("application/vnd.cnai.model.weight.v1.tar+lz4", "tar+lz4"),
        ("application/vnd.kitops.modelkit.model.v1.tar.br", "blobd import"),
        ("application/vnd.oci.image.layer.v1.tar+gzip", "container image"),
    ] {
        let layers = [layer(&registry, media_type, b"packed", Some("tiny.tar"))];
        publish(&registry, "pack/tiny:latest", "application/vnd.cncf.model.config.v1+json", &layers);
        let run = daemon.command().run(["pull", &registry.name("pack/tiny"), "--json"]).exits_with(1);
        assert!(run.error().message.contains(what), "{}", run.stderr);
        assert_eq!(registry.bytes_served(), 0);
        check_empty(daemon.root());
    }
}

#[test]
fn image_index_with_one_model_is_followed() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let weights = ModelFile::dense(1).bytes();
    let raw = publish(
        &registry,
        "ai/tiny:inner",
        "application/vnd.docker.ai.model.config.v0.1+json",
        &[layer(&registry, "application/vnd.docker.ai.gguf.v3", &weights, None)],
    );
    let entry = |raw: &[u8], more: Json| {
        let mut entry = json!({ "mediaType": OCI_MANIFEST, "digest": format!("sha256:{}", sha256(raw)), "size": raw.len() });
        entry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        entry
    };
    let offer = |entries: &[Json]| {
        let index = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries });
        registry.add_manifest("ai/tiny:latest", index.to_string().as_bytes());
    };
    let (name, pull) =
        (registry.name("ai/tiny"), || daemon.command().run(["pull", &registry.name("ai/tiny"), "--json"]));
    let artifact = json!({ "artifactType": "application/vnd.docker.ai.model.config.v0.1+json" });
    let linux = json!({ "platform": { "os": "linux", "architecture": "amd64" } });
    offer(&[entry(b"another", linux.clone()), entry(b"third", linux.clone())]);
    let error = pull().exits_with(1).error();
    assert!(error.message.contains("linux/amd64") && error.message.contains(&sha256(b"third")), "{error}");
    offer(&[entry(b"another", linux), entry(&raw, artifact)]);
    pull().succeeds();
    assert_eq!(
        daemon.client().open(&name.parse().unwrap()).unwrap().digest().to_string(),
        format!("sha256:{}", sha256(&raw))
    );
    // The registry does not have the manifest that the index names.
    offer(&[entry(b"not there", json!({}))]);
    pull().exits_with(1);
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights);
}

#[test]
fn shards_make_one_model_with_one_table_of_tensors() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let model = ModelFile::dense(1);
    let shards: Vec<Vec<u8>> = model.shards(3).iter().map(ModelFile::bytes).collect();
    let offer = |shards: &[&[u8]]| {
        let layers: Vec<_> = shards
            .iter()
            .map(|shard| layer(&registry, "application/vnd.docker.ai.gguf.v3", shard, None))
            .collect();
        publish(&registry, "ai/big:latest", "application/vnd.docker.ai.model.config.v0.1+json", &layers);
    };
    let (name, pull) =
        (registry.name("ai/big"), || daemon.command().run(["pull", &registry.name("ai/big"), "--json"]));
    for (shards, what) in [
        (&[&shards[0][..], &shards[2]][..], "shard 2 of 3 is missing"),
        (&[&shards[0], &shards[1], &shards[2], &ModelFile::dense(1).shards(2)[0].bytes()], "another says 2"),
    ] {
        offer(shards);
        let error = pull().exits_with(1).error();
        assert!(error.message.contains(what), "{error}");
        check_empty(daemon.root());
    }
    offer(&[&shards[0], &shards[1], &shards[2]]);
    pull().succeeds();
    pull().succeeds();
    let open = daemon.client().open(&name.parse().unwrap()).unwrap();
    assert_eq!(open.tensors().len(), model.tensors.len());
    for tensor in &model.tensors {
        assert_eq!(&*open.map(&tensor.name).unwrap(), &tensor.bytes()[..], "{}", tensor.name);
    }
    let whole = FakeRegistry::start().unwrap();
    super::offer(&whole, "library/whole:latest", &model.bytes());
    daemon.command().run(["pull", &whole.name("library/whole")]).succeeds();
    let parameters = |name: &str| daemon.command().run(["show", name, "--json"]).json()["parameters"].clone();
    assert_eq!(parameters(&name), parameters(&whole.name("library/whole")));
    let folder = daemon.scratch().join("shards");
    std::fs::create_dir(&folder).unwrap();
    daemon.command().run(["export", &name, "-o", folder.to_str().unwrap()]).succeeds();
    for (number, shard) in shards.iter().enumerate() {
        let path = folder.join(format!("big-latest-{:05}-of-00003.gguf", number + 1));
        assert!(&std::fs::read(&path).unwrap() == shard, "{}", path.display());
    }
}

#[test]
fn manifest_with_a_layer_for_each_of_a_thousand_tensors_is_pulled_and_opened() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let tensor = |number: usize| format!("tensor {}", number / 2).into_bytes();
    let layers: Vec<Json> = (0..1200)
        .map(|number| {
            let mut layer = layer(&registry, "application/vnd.ollama.image.tensor", &tensor(number), None);
            layer["name"] = format!("model.layers.{number}.mlp.experts").into();
            layer
        })
        .collect();
    publish(&registry, "library/many:latest", "application/vnd.docker.container.image.v1+json", &layers);
    let name = registry.name("library/many");
    daemon.command().run(["pull", &name]).succeeds();
    assert_eq!(check_blobs(daemon.root()).len(), 601, "equal tensors are one blob");
    let open = daemon.client().open_with(&OpenParams::new(name.parse().unwrap())).unwrap();
    assert_eq!(open.layers().len(), 1201);
    assert_eq!(open.layers()[7].name.as_deref(), Some("model.layers.6.mlp.experts"));
    assert_eq!(open.layers()[7].media_type.component(), "tensor");
    assert_eq!(&*open.layer_bytes(1200).unwrap(), &tensor(1199)[..]);
    let served = registry.bytes_served();
    daemon.command().run(["pull", &name]).succeeds();
    assert_eq!(registry.bytes_served(), served, "the digests decide");
}

#[test]
fn ollamas_media_types_keep_their_components() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let weights = ModelFile::dense(1).bytes();
    registry.add_model("library/tiny:latest", CONFIG, &[(MODEL, &weights)]).unwrap();
    daemon.command().run(["pull", &registry.name("library/tiny")]).succeeds();
    assert_eq!(components(&daemon, &registry.name("library/tiny")), ["config", "model"]);
}
