//! Models without a manifest: files at Hugging Face and on web servers.

use std::fs;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, check_empty, remove_downloads};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const ALWAYS: usize = usize::MAX;

/// Commands with their own store and configuration.
pub(super) struct Commands {
    pub(super) folder: TempDir,
    config: String,
}

impl Commands {
    pub(super) fn with(config: &str) -> Self {
        let folder = tmpfs_directory();
        let path = folder.path().join("config.toml");
        fs::write(&path, config).unwrap();
        Self { config: path.to_str().unwrap().to_owned(), folder }
    }

    /// Commands for which the test's registry replaces Hugging Face.
    pub(super) fn with_hub(registry: &FakeRegistry) -> Self {
        Self::with(&format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url()))
    }

    pub(super) fn run(&self, arguments: &[&str]) -> Run {
        let blobd = Blobd::at_root(&self.root());
        blobd.run(arguments.iter().copied().chain(["--config", &self.config, "--json"]))
    }

    pub(super) fn config(&self) -> &str {
        &self.config
    }

    pub(super) fn root(&self) -> std::path::PathBuf {
        self.folder.path().join("store")
    }

    pub(super) fn export(&self, name: &str) -> Vec<u8> {
        Blobd::at_root(&self.root()).run(["export", name, "-o", "-"]).succeeds().stdout
    }

    pub(super) fn models(&self) -> Json {
        self.run(&["ls"]).succeeds().json()["models"].clone()
    }
}

#[test]
fn file_at_hugging_face_is_pulled_at_its_commit_and_known_by_its_digest() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_repository(
        "me/tiny-GGUF",
        COMMIT,
        &[("tiny-Q4_K_M.gguf", &weights), ("other.gguf", b"GGUF")],
    );
    let commands = Commands::with_hub(&registry);
    commands.run(&["pull", "hf.co/me/tiny-GGUF/tiny-Q4_K_M.gguf"]).succeeds();
    assert!(commands.export("hf.co/me/tiny-GGUF:Q4_K_M") == weights);
    let models = commands.models();
    let origin = format!("https://huggingface.co/me/tiny-GGUF/resolve/{COMMIT}/tiny-Q4_K_M.gguf");
    assert_eq!((models.as_array().unwrap().len(), &models[0]["origin"]), (1, &Json::from(origin.clone())));
    assert!(!registry.credentials_leaked());
    // The link on its web page gives the same file, which is already stored.
    let served = registry.bytes_served();
    let link = "https://huggingface.co/me/tiny-GGUF/blob/main/tiny-Q4_K_M.gguf";
    commands.run(&["pull", link, "--name", "mine"]).succeeds();
    assert_eq!(registry.bytes_served() - served, 0);
    assert!(commands.export("mine") == weights);
    commands.run(&["pull", &origin]).succeeds();
    check_blobs(&commands.root());
}

#[test]
fn same_file_makes_the_same_model_from_every_source() {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense(1);
    registry.add_repository("me/tiny", COMMIT, &[("x.gguf", &model.bytes())]);
    registry.add_page("/files/x.gguf", &model.bytes(), &[("ETag", "\"1\"")]);
    let commands = Commands::with_hub(&registry);
    commands.run(&["pull", "hf.co/me/tiny/x.gguf"]).succeeds();
    commands.run(&["pull", &format!("{}/files/x.gguf", registry.url())]).succeeds();
    let path = model.write_to(commands.folder.path(), "imported.gguf");
    commands.run(&["import", path.to_str().unwrap()]).succeeds();
    let models = commands.models();
    let digests: std::collections::BTreeSet<_> =
        models.as_array().unwrap().iter().map(|model| model["digest"].to_string()).collect();
    assert_eq!((models.as_array().unwrap().len(), digests.len()), (3, 1), "{models}");
}

#[test]
fn shards_are_pulled_together_by_file_and_by_quantisation() {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense(1);
    let shards: Vec<Vec<u8>> = model.shards(2).iter().map(ModelFile::bytes).collect();
    let files: [(&str, &[u8]); 2] = [
        ("Q4_K_M/big-Q4_K_M-00001-of-00002.gguf", &shards[0]),
        ("Q4_K_M/big-Q4_K_M-00002-of-00002.gguf", &shards[1]),
    ];
    registry.add_repository("me/big-GGUF", COMMIT, &files);
    for source in [
        "hf.co/me/big-GGUF/Q4_K_M/big-Q4_K_M-00001-of-00002.gguf",
        "hf.co/me/big-GGUF:Q4_K_M",
        "hf.co/me/big-GGUF:q4_k_m",
    ] {
        let commands = Commands::with_hub(&registry);
        // The shards as Hugging Face reports them.
        registry.add_fault("/v2/me/big-GGUF/manifests/", 1, Fault::Status(400));
        commands.run(&["pull", source]).succeeds();
        let shown = commands.run(&["show", "hf.co/me/big-GGUF:Q4_K_M"]).succeeds().json();
        assert_eq!(shown["tensors"].as_array().unwrap().len(), model.tensors.len(), "{source}");
        assert_eq!(shown["layers"][2]["name"], "big-Q4_K_M-00002-of-00002.gguf");
        let folder = commands.folder.path().join("out");
        fs::create_dir(&folder).unwrap();
        commands.run(&["export", "hf.co/me/big-GGUF:Q4_K_M", "-o", folder.to_str().unwrap()]).succeeds();
        assert!(fs::read(folder.join("big-Q4_K_M-00001-of-00002.gguf")).unwrap() == shards[0]);
    }
    registry.add_repository("me/big-GGUF", COMMIT, &files[..1]);
    let commands = Commands::with_hub(&registry);
    let error = commands.run(&["pull", &format!("hf.co/me/big-GGUF/{}", files[0].0)]).exits_with(3).error();
    assert!(error.message.contains("00002-of-00002.gguf"), "{error}");
}

#[test]
fn missing_quantisation_is_reported_with_the_available_ones() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_repository("me/x", COMMIT, &[("x-Q4_K_M.gguf", b"GGUF"), ("x-Q8_0.gguf", b"GGUF")]);
    let commands = Commands::with_hub(&registry);
    registry.add_fault("/v2/", 1, Fault::Status(400));
    let error = commands.run(&["pull", "hf.co/me/x:Q4_K_S"]).exits_with(3).error();
    assert!(error.message.ends_with("the nearest names are Q4_K_M, Q8_0"), "{error}");
    let error = commands.run(&["pull", "hf.co/me/x/x-Q4_K_X.gguf"]).exits_with(3).error();
    assert!(error.message.contains("the nearest names are x-Q4_K_M.gguf"), "{error}");
    let error = commands.run(&["pull", "hf.co/me/absent/x.gguf"]).exits_with(3).error();
    assert!(error.message.starts_with("hf.co/me/absent: not found"), "{error}");
    registry.add_fault("/api/", ALWAYS, Fault::Status(401));
    let error = commands.run(&["pull", "hf.co/me/x/x-Q8_0.gguf"]).exits_with(7).error();
    assert!(error.message.starts_with("hf.co/me/x: denied by"), "{error}");
}

#[test]
fn file_at_hugging_face_that_is_not_what_was_listed_is_refused() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_repository("me/x", COMMIT, &[("x.gguf", &weights)]);
    let commands = Commands::with_hub(&registry);
    for fault in
        [Fault::FlipByte(5000), Fault::ShortBy(1), Fault::ExtraBytes(1), Fault::WebPage, Fault::CutAfter(9)]
    {
        registry.clear_faults();
        registry.add_fault("/cdn/", ALWAYS, fault.clone());
        let run = commands.run(&["pull", "hf.co/me/x/x.gguf"]).exits_with(1);
        assert_eq!(
            run.stderr.contains("login page"),
            matches!(fault, Fault::WebPage),
            "{fault:?}: {}",
            run.stderr
        );
        remove_downloads(&commands.root());
        check_empty(&commands.root());
    }
}

#[test]
fn hostile_lists_of_files_are_refused() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_repository("me/x", COMMIT, &[("x.gguf", b"GGUF")]);
    let commands = Commands::with_hub(&registry);
    let oid = sha256(b"GGUF");
    let tree = |path: &str, oid: &str| json!([{ "type": "file", "size": 4, "path": path, "lfs": { "oid": oid, "size": 4 } }]);
    let huge = format!("[\"{}\"]", "x".repeat(5 << 20));
    for (what, body, code) in [
        // Entries with such a path are skipped, and nothing else is listed.
        ("a path that climbs", tree("../x.gguf", &oid).to_string(), 3),
        ("an absolute path", tree("/etc/x.gguf", &oid).to_string(), 3),
        ("a digest that climbs", tree("x.gguf", "../../x").to_string(), 1),
        ("a short digest", tree("x.gguf", &oid[1..]).to_string(), 1),
        ("two sizes", tree("x.gguf", &oid).to_string().replacen("\"size\":4", "\"size\":5", 1), 1),
        ("no list", "{}".to_owned(), 1),
        ("too much", huge, 1),
        ("no JSON", "[[[[".to_owned(), 1),
    ] {
        registry.add_fault("/tree/", 1, Fault::Body(body.into_bytes()));
        let run = commands.run(&["pull", "hf.co/me/x/x.gguf"]).exits_with(code);
        assert!(run.error().message.len() < 500, "{what}: {}", run.stderr);
    }
    for (path, fault) in [
        ("/tree/", Fault::Endless),
        ("/tree/", Fault::WebPage),
        ("/refs", Fault::Endless),
        ("/refs", Fault::Body(br#"{"branches":[{"name":"main","targetCommit":"../../x"}]}"#.to_vec())),
    ] {
        registry.add_fault(path, 1, fault.clone());
        commands.run(&["pull", "hf.co/me/x/x.gguf"]).exits_with(1);
    }
    let tree = format!("/api/models/me/x/tree/{COMMIT}");
    registry.add_page(&tree, b"[]", &[("Link", "<https://evil.example/next>; rel=\"next\"")]);
    let error = commands.run(&["pull", "hf.co/me/x/x.gguf"]).exits_with(1).error();
    assert!(error.message.contains("another host"), "{error}");
    registry.add_page(&tree, b"[]", &[("Link", &format!("<{tree}>; rel=\"next\""))]);
    let error = commands.run(&["pull", "hf.co/me/x/x.gguf"]).exits_with(1).error();
    assert!(error.message.contains("more pages"), "{error}");
    check_empty(&commands.root());
}

#[test]
fn file_on_a_web_server_is_pulled_and_named_after_its_address() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_page("/models/tiny.gguf", &weights, &[("ETag", "\"1\"")]);
    let commands = Commands::with("");
    let url = format!("{}/models/tiny.gguf", registry.url());
    let last = commands.run(&["pull", &url]).succeeds().json_lines().pop().unwrap();
    assert_eq!(last["downloaded_bytes"], weights.len());
    let name = format!("{}/models/tiny:latest", registry.url().trim_start_matches("http://"));
    assert_eq!(last["name"], name);
    assert!(commands.export(&name) == weights);
    assert_eq!(commands.models()[0]["origin"], url);
    // A URL with a signature expires: the model counts as imported, and the URL is not stored.
    commands.run(&["pull", &format!("{url}?signature=secret"), "--name", "signed"]).succeeds();
    let text = commands.models().to_string();
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn shards_on_a_web_server_are_pulled_together() {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense(1);
    for (number, shard) in model.shards(2).iter().enumerate() {
        registry.add_page(&format!("/big-{:05}-of-00002.gguf", number + 1), &shard.bytes(), &[]);
    }
    let commands = Commands::with("");
    commands
        .run(&["pull", &format!("{}/big-00001-of-00002.gguf", registry.url()), "--name", "big"])
        .succeeds();
    let shown = commands.run(&["show", "big"]).succeeds().json();
    assert_eq!(shown["tensors"].as_array().unwrap().len(), model.tensors.len());
}

#[test]
fn faulty_responses_of_a_web_server_are_refused() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_page("/m/tiny.gguf", &weights, &[("ETag", "\"1\"")]);
    registry.add_page("/m/text.gguf", b"this is no model at all", &[]);
    let commands = Commands::with("");
    let pull = |name: &str| commands.run(&["pull", &format!("{}/m/{name}", registry.url())]);
    pull("absent.gguf").exits_with(3);
    pull("text.gguf").exits_with(1);
    for fault in [Fault::WebPage, Fault::Status(418), Fault::ExtraBytes(1)] {
        registry.add_fault("/m/", ALWAYS, fault.clone());
        let run = pull("tiny.gguf").exits_with(1);
        assert!(run.error().message.len() < 500, "{fault:?}: {}", run.stderr);
        registry.clear_faults();
        // The received bytes of a file with an ETag are kept.
        remove_downloads(&commands.root());
        check_empty(&commands.root());
    }
    let error = commands.run(&["pull", "http://models.example.invalid/m/tiny.gguf"]).exits_with(2).error();
    assert!(error.message.contains("plain HTTP"), "{error}");
    // The first bytes show that the label is untrue.
    registry.add_fault("/m/", ALWAYS, Fault::Gzip);
    pull("tiny.gguf").succeeds();
}

/// Otherwise the bytes of two versions of the file would be mixed.
#[test]
fn changed_file_is_downloaded_from_the_start() {
    let registry = FakeRegistry::start().unwrap();
    let [before, after] = [1, 2].map(|seed| ModelFile::dense_of(seed, 2, 256).bytes());
    assert_eq!(before.len(), after.len());
    let versions: [[&[(&'static str, &str)]; 2]; 2] =
        [[&[("ETag", "\"1\"")], &[("ETag", "\"2\"")]], [&[], &[]]];
    for [old, new] in versions {
        let commands = Commands::with("");
        let url = format!("{}/m/x.gguf", registry.url());
        let pull = || commands.run(&["pull", &url, "--name", "m"]);
        registry.add_page("/m/x.gguf", &before, old);
        registry.add_fault("/m/x.gguf", 4, Fault::CutAfter(300_000));
        registry.add_fault("/m/x.gguf", ALWAYS, Fault::Status(410));
        pull().exits_with(1);
        registry.clear_faults();
        registry.add_page("/m/x.gguf", &after, new);
        pull().succeeds();
        assert!(commands.export("m") == after, "{new:?}");
    }
}

#[test]
fn damaged_tensor_is_fetched_again_from_where_the_file_was() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    registry.add_repository("me/x", COMMIT, &[("x.gguf", &weights)]);
    registry.add_page("/m/y.gguf", &ModelFile::dense(2).bytes(), &[("ETag", "\"1\"")]);
    let commands = Commands::with_hub(&registry);
    for source in ["hf.co/me/x/x.gguf".to_owned(), format!("{}/m/y.gguf", registry.url())] {
        commands.run(&["pull", &source, "--name", "m", "--force"]).succeeds();
        let shown = commands.run(&["show", "m"]).json();
        let tensor = shown["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .find(|tensor| tensor["name"] == "output.weight")
            .unwrap();
        let blob = commands.root().join("blobs").join(tensor["digest"].as_str().unwrap().replace(':', "-"));
        let bytes = fs::read(&blob).unwrap();
        fs::remove_file(&blob).unwrap();
        fs::write(&blob, vec![0; bytes.len()]).unwrap();
        let before = registry.bytes_served();
        commands.run(&["verify", "m", "--repair"]);
        assert!(fs::read(&blob).unwrap() == bytes, "{source}");
        assert!(registry.bytes_served() - before < 8192, "only the tensor is fetched");
    }
}

/// Without a digest nothing could verify that the tensors of a related model are those of the file.
#[test]
fn file_without_a_digest_reuses_no_unverified_tensor() {
    let registry = FakeRegistry::start().unwrap();
    let commands = Commands::with("");
    let first = ModelFile::dense_of(1, 2, 256);
    let mut second = ModelFile::dense_of(1, 2, 256);
    second.tensors.iter_mut().for_each(ModelTensor::flip_last_bit);
    for (name, model) in [("first", &first), ("second", &second)] {
        registry.add_page(&format!("/{name}.gguf"), &model.bytes(), &[]);
        let url = format!("{}/{name}.gguf", registry.url());
        commands.run(&["pull", &url, "--name", name]).succeeds();
        assert!(commands.export(name) == model.bytes(), "{name}");
    }
}
