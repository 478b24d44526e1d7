//! Models pushed as ordinary container images (`push --as image`): what is in them, what a second version costs, what is
//! refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use blobd_store_format::archive::TarReader;
use blobd_store_format::digest::Digest;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

use super::{MODEL, push, with_model};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image at the registry, each of its layers unpacked.
struct Image {
    manifest: Json,
    config: Json,
    layers: Vec<BTreeMap<String, Vec<u8>>>,
}

impl Image {
    fn of(registry: &FakeRegistry, repository: &str, tag: &str) -> Self {
        let raw = registry.manifest(&format!("/v2/{repository}/manifests/{tag}")).unwrap();
        let manifest: Json = serde_json::from_slice(&raw).unwrap();
        let blob = |file: &Json| {
            let digest: Digest = file["digest"].as_str().unwrap().parse().unwrap();
            let bytes = registry.blob(digest).unwrap();
            assert_eq!((Digest::of(&bytes), file["size"].as_u64()), (digest, Some(bytes.len() as u64)));
            bytes
        };
        let config = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        let layers = manifest["layers"].as_array().unwrap().iter().map(|layer| unpacked(&blob(layer)));
        Self { layers: layers.collect(), config, manifest }
    }

    /// The files of all layers.
    fn files(&self) -> BTreeMap<&str, &[u8]> {
        let files = self.layers.iter().flatten();
        files.map(|(path, content)| (path.as_str(), content.as_slice())).collect()
    }
}

fn unpacked(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let slice =
        |start: u64, end: u64| &archive[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()];
    let mut reader = TarReader::new(archive.len() as u64);
    while let Some(wanted) = reader.wanted() {
        reader.push(slice(wanted.start, wanted.end)).unwrap();
    }
    assert!(archive.len().is_multiple_of(512) && archive.ends_with(&[0; 1024]));
    let files = reader.into_files().into_iter();
    files.map(|file| (file.path, slice(file.offset, file.offset + file.size).to_vec())).collect()
}

#[test]
fn image_has_the_weights_and_is_made_again_with_the_same_bytes() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 4, 128));
    let name = registry.name("img/tiny:1");
    let planned = push(&daemon, "tiny", &name, &["--as", "image", "--dry-run"]);
    assert_eq!(registry.bytes_uploaded(), 0);
    let pushed = push(&daemon, "tiny", &name, &["--as", "image"]);
    for key in ["digest", "form", "size", "sent_bytes", "files"] {
        assert_eq!(planned[key], pushed[key], "{key}");
    }
    // The layers of an image are not the files of the model, so a tensor index is useless.
    assert!(weights.len() > 1 << 20 && pushed.get("index").is_none(), "{pushed}");
    assert_eq!(
        (&pushed["form"], registry.bytes_uploaded()),
        (&"image".into(), pushed["size"].as_u64().unwrap())
    );
    assert_eq!(pushed["files"][0]["name"], "models/model.gguf");
    let image = Image::of(&registry, "img/tiny", "1");
    assert_eq!(image.files(), BTreeMap::from([("models/model.gguf", weights.as_slice())]));
    let (manifest, config) = (&image.manifest, &image.config);
    let model = daemon.client().models().unwrap().models.remove(0).digest.to_string();
    assert_eq!(manifest["annotations"], json!({ "vnd.blobd.model.digest": model }));
    assert_eq!(manifest["mediaType"], "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    assert_eq!(manifest["layers"][0]["mediaType"], LAYER);
    assert_eq!((&config["os"], &config["architecture"]), (&"linux".into(), &"amd64".into()));
    let digests = json!([manifest["layers"][0]["digest"]]);
    assert_eq!(config["rootfs"], json!({ "type": "layers", "diff_ids": digests }));
    let again = push(&daemon, "tiny", &name, &["--as", "image"]);
    assert_eq!((&again["unchanged"], &again["sent_bytes"]), (&true.into(), &0.into()));
    let text = daemon.command().run(["push", "tiny", &name, "--as", "image"]).succeeds().text();
    assert!(text.contains(" as image: "), "{text}");
    // Its files are read before anything is sent.
    let mut phases =
        daemon.command().run(["push", "tiny", &name, "--as", "image", "--json"]).succeeds().json_lines();
    phases.retain(|line| line["phase"] == "hashing" && line["completed"] == line["total"]);
    assert_eq!(phases.len(), 1, "{phases:?}");
}

#[test]
fn versions_of_a_folder_share_the_layers_of_large_files() {
    let (registry, daemon) = (FakeRegistry::start().unwrap(), TestDaemon::start());
    let long = format!("{}/notes.txt", "folder-".repeat(30));
    let mut folder = ModelFolder::transformers(1);
    folder.add("tokenizer/vocab.txt", "a\nb\n");
    folder.add(&long, "a long path");
    folder.add("empty.txt", "");
    // Two paths of one content.
    folder.add("first.json", "[1]");
    folder.add("second.json", "[1]");
    folder.add("merges.txt", "large".repeat(300_000));
    let version = |folder: &ModelFolder, name: &str| {
        let path = folder.write_to(daemon.scratch().join(name));
        daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        push(&daemon, name, &registry.name(&format!("img/folder:{name}")), &["--as", "image"]);
        let out = daemon.scratch().join(format!("{name}-exported"));
        fs::create_dir(&out).unwrap();
        daemon.command().run(["export", name, "-o", out.to_str().unwrap()]).succeeds();
        let image = Image::of(&registry, "img/folder", name);
        check_files(&image, &out);
        image
    };
    let first = version(&folder, "first");
    assert!(first.files().contains_key(format!("models/{long}").as_str()));
    assert_eq!(first.files()["models/second.json"], b"[1]");
    let before = registry.bytes_uploaded();
    folder.add("tokenizer/vocab.txt", "a\nb\nc\n");
    let second = version(&folder, "second");
    // The layer of the small files, the configuration and the manifest.
    assert!(registry.bytes_uploaded() - before < 1 << 20, "{}", registry.bytes_uploaded() - before);
    let [first, second] = [first, second].map(|image| image.manifest["layers"].as_array().unwrap().clone());
    let (last, large) = first.split_last().unwrap();
    assert!(!large.is_empty() && second.starts_with(large) && second.last() != Some(last));
}

/// Every file of a folder that has content is in the image, with the same content.
fn check_files(image: &Image, folder: &Path) {
    let (files, mut folders, mut count) = (image.files(), vec![folder.to_owned()], 0);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
                continue;
            }
            let content = fs::read(&entry).unwrap();
            // The reader of archives skips files without content.
            if !content.is_empty() {
                let path = format!("models/{}", entry.strip_prefix(folder).unwrap().to_str().unwrap());
                assert!(files[path.as_str()] == content, "{path}");
                count += 1;
            }
        }
    }
    assert_eq!(files.len(), count);
}

#[test]
fn upload_of_a_layer_that_breaks_anywhere_ends_in_the_exact_image() {
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    for keeps in [true, false] {
        for tenth in [0, 1, 5, 9] {
            let registry = FakeRegistry::start().unwrap();
            registry.keep_broken_uploads(keeps);
            registry.break_uploads([weights.len() as u64 * tenth / 10 + 700]);
            push(&daemon, "tiny", &registry.name("img/tiny:1"), &["--as", "image"]);
            let image = Image::of(&registry, "img/tiny", "1");
            assert!(image.files()["models/model.gguf"] == weights, "{tenth}");
        }
    }
}

#[test]
fn many_large_files_share_layers_because_runtimes_limit_their_number() {
    let (registry, daemon) = (FakeRegistry::start().unwrap(), TestDaemon::start());
    let contents: Vec<Vec<u8>> =
        (0..103_u8).map(|number| vec![number; (1 << 20) + usize::from(number)]).collect();
    let layers: Vec<(&str, &[u8])> = contents.iter().map(|content| (MODEL, content.as_slice())).collect();
    registry.add_model("me/many:1", b"{}", &layers).unwrap();
    daemon.command().run(["pull", &registry.name("me/many:1"), "--name", "many"]).succeeds();
    push(&daemon, "many", &registry.name("img/many:1"), &["--as", "image"]);
    let image = Image::of(&registry, "img/many", "1");
    assert_eq!((image.layers.len(), image.files().len()), (52, 103));
    let mut found: Vec<&[u8]> = image.files().into_values().collect();
    found.sort_unstable();
    assert!(found == contents);
}

#[test]
fn archives_are_refused_and_an_image_is_not_pulled_as_a_model() {
    let registry = FakeRegistry::start().unwrap();
    let (daemon, _) = with_model(&ModelFile::dense(1));
    let name = registry.name("img/tiny:1");
    push(&daemon, "tiny", &name, &["--as", "image"]);
    push(&daemon, "tiny", &registry.name("img/tiny:model"), &[]);
    let other = TestDaemon::start();
    let error = other.command().run(["pull", &name, "--json"]).exits_with(1).error();
    assert!(error.message.contains("made by `blobd push --as image`"), "{error}");
    // What it names in its place can be pulled.
    let instead = error.message.rsplit(' ').next().unwrap().to_owned();
    other.command().run(["pull", &instead, "--name", "copy"]).succeeds();
    let archive = blobd_tests::archives::tar(&[("model.gguf", &ModelFile::dense(2).bytes())]);
    let packed = "application/vnd.cncf.model.weight.v1.tar";
    registry.add_model("me/packed:1", b"{}", &[(packed, &archive)]).unwrap();
    let packed = registry.name("me/packed:1");
    daemon.command().run(["pull", &packed]).succeeds();
    let arguments = ["push", &packed, &registry.name("img/packed:1"), "--as", "image", "--json"];
    let error = daemon.command().run(arguments).exits_with(2).error();
    assert!(error.message.contains("archive"), "{error}");
}

#[test]
fn example_of_a_volume_in_the_documents_has_the_path_of_the_file() {
    const DOCUMENT: &str = include_str!("../../../../docs/SITES.md");
    let example =
        DOCUMENT.split("<!-- test: image -->\n```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let pod: Json = serde_norway::from_str(example).unwrap();
    let (container, volume) = (&pod["spec"]["containers"][0], &pod["spec"]["volumes"][0]);
    assert_eq!(container["volumeMounts"][0]["name"], volume["name"]);
    let folder = container["volumeMounts"][0]["mountPath"].as_str().unwrap();
    assert_eq!(container["args"], json!(["--model", format!("{folder}/models/model.gguf")]));
    assert_eq!(volume["image"]["reference"], "registry.example/img/tiny:q4");
}
