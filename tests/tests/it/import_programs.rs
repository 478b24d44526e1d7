//! Imports of the models of programs that keep them in folders, or as registries serve them.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_tests::command::{Blobd, Run, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::{Value as Json, json};

mod claims;
mod places;

/// A folder in which programs keep their models.
struct Home(PathBuf);

impl Home {
    fn new(scratch: &Path) -> Self {
        Self(scratch.join("home"))
    }

    fn add(&self, path: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let place = self.0.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(&place, bytes).unwrap();
        place
    }

    fn add_model(&self, path: &str, seed: u64) -> PathBuf {
        self.add(path, ModelFile::dense(seed).bytes())
    }

    /// Imports as a user with this home.
    fn import(&self, blobd: &Blobd, words: &[&str]) -> Run {
        let mut command = blobd.command();
        command.env("HOME", &self.0).env_remove("XDG_DATA_HOME").args(["import", "--json"]).args(words);
        run(&mut command)
    }

    fn listed(&self, blobd: &Blobd, words: &[&str]) -> Json {
        self.import(blobd, &[&["--list"], words].concat()).succeeds().json()
    }
}

fn names(models: &Json) -> Vec<&str> {
    models.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect()
}

fn export(blobd: &Blobd, name: &str) -> Vec<u8> {
    blobd.run(["export", name, "--component", "model", "-o", "-"]).succeeds().stdout
}

fn states(listed: &Json) -> Vec<(&str, &str)> {
    let models = listed["models"].as_array().unwrap().iter();
    models.map(|model| (model["name"].as_str().unwrap(), model["state"].as_str().unwrap())).collect()
}

/// Long enough ago that a record of the files is reliable.
fn settled() {
    std::thread::sleep(Duration::from_millis(200));
}

#[test]
fn models_of_lm_studio_are_imported_with_their_projectors() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    home.add_model(".lmstudio/models/ann/see-GGUF/see-Q4_K_M.gguf", 1);
    home.add_model(".lmstudio/models/ann/see-GGUF/see-Q8_0.gguf", 2);
    home.add_model(".lmstudio/models/ann/see-GGUF/mmproj-see-F16.gguf", 3);
    home.add(".lmstudio/models/ben/mlx/config.json", "{}");
    home.add(".lmstudio/models/ben/mlx/model.safetensors", safetensors(&[(1, "t")]));
    home.add_model(".lmstudio/models/ann/see-GGUF/downloading_see-Q2_K.gguf", 4);
    home.add_model(".lmstudio/models/not-two-levels.gguf", 5);
    home.add(".lmstudio/hub/models/ann/virtual/model.yaml", "base: x");
    let expected = ["lmstudio/ann/see-GGUF:Q4_K_M", "lmstudio/ann/see-GGUF:Q8_0", "lmstudio/ben/mlx:latest"];
    let blobd = daemon.command();
    let listed = home.listed(&blobd, &["--from-lmstudio"]);
    assert_eq!(states(&listed), expected.map(|name| (name, "new")));
    settled();
    let imported = home.import(&blobd, &["--from", "lmstudio"]).succeeds().json();
    assert_eq!(names(&imported["imported"]), expected);
    assert!(export(&blobd, expected[0]) == ModelFile::dense(1).bytes());
    let projector =
        blobd.run(["export", expected[1], "--component", "projector", "-o", "-"]).succeeds().stdout;
    assert!(projector == ModelFile::dense(3).bytes());
    assert_eq!(blobd.line(&format!("ls {} --json", expected[0])).json()["models"][0]["follows"], Json::Null);
    check_blobs(daemon.root());
    assert_eq!(states(&home.listed(&blobd, &["--from-lmstudio"])), expected.map(|name| (name, "stored")));
}

#[test]
fn links_out_of_a_folder_are_followed_only_on_request() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let outside = home.add_model("elsewhere/m-Q8_0.gguf", 1);
    home.add_model("models/ann/good/good-Q8_0.gguf", 2);
    let place = home.0.join("models/ann/linked");
    fs::create_dir_all(&place).unwrap();
    symlink(&outside, place.join("linked-Q8_0.gguf")).unwrap();
    let from = format!("--from-lmstudio={}/models", home.0.display());
    let blobd = daemon.command();
    let run = home.import(&blobd, &[&from]).exits_with(1).json();
    assert_eq!(names(&run["imported"]), ["lmstudio/ann/good:Q8_0"]);
    let failed = run["failed"][0].to_string();
    assert!(failed.contains("leads out of the folder") && failed.contains("--follow"), "{failed}");
    let run = home.import(&blobd, &[&from, "--follow"]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["lmstudio/ann/linked:Q8_0"]);
    assert!(export(&blobd, "lmstudio/ann/linked:Q8_0") == ModelFile::dense(1).bytes());
}

#[test]
fn old_folder_of_llama_cpp_is_read_by_its_manifests_and_records() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let cache = ".cache/llama.cpp";
    let model = ModelFile::dense(1).bytes();
    home.add(&format!("{cache}/ann_see_me-GGUF_sub_see-Q4_K_M.gguf"), &model);
    home.add(&format!("{cache}/ann_see_me-GGUF_sub_see-Q4_K_M.gguf.etag"), "\"x\"");
    home.add_model(&format!("{cache}/ann_see_me-GGUF_mmproj-F16.gguf"), 2);
    let manifest = json!({
        "ggufFile": { "rfilename": "sub/see-Q4_K_M.gguf", "lfs": { "sha256": sha256(&model), "size": model.len() } },
        "mmprojFile": { "rfilename": "mmproj-F16.gguf" },
    });
    home.add(&format!("{cache}/manifest=ann=see_me-GGUF=Q4_K_M.json"), manifest.to_string());
    for (number, shard) in (1..).zip(ModelFile::dense(3).shards(2)) {
        home.add(&format!("{cache}/ben_big_big-Q8_0-{number:05}-of-00002.gguf"), shard.bytes());
    }
    let manifest = json!({ "ggufFile": { "rfilename": "big-Q8_0-00001-of-00002.gguf" } });
    home.add(&format!("{cache}/manifest=ben=big=latest.json"), manifest.to_string());
    home.add_model(&format!("{cache}/cat_tiny_tiny-Q8_0.gguf"), 4);
    let record = json!({ "url": "https://huggingface.co/cat/tiny/resolve/main/tiny-Q8_0.gguf", "etag": "x" });
    home.add(&format!("{cache}/cat_tiny_tiny-Q8_0.gguf.json"), record.to_string());
    home.add_model(&format!("{cache}/dan_own_own-Q8_0.gguf"), 5);
    home.add(&format!("{cache}/gone_gone_x.gguf.downloadInProgress"), "GGUF");
    home.add(&format!("{cache}/manifest=gone=gone=latest.json"), r#"{"ggufFile":{"rfilename":"x.gguf"}}"#);
    let blobd = daemon.command();
    let run = home.import(&blobd, &["--from-llama.cpp"]).exits_with(1).json();
    let mut found = names(&run["imported"]);
    found.sort_unstable();
    let expected = [
        "hf.co/ann/see_me-GGUF:Q4_K_M",
        "hf.co/ben/big:latest",
        "hf.co/cat/tiny:Q8_0",
        "llamacpp/dan_own_own:Q8_0",
    ];
    assert_eq!(found, expected);
    assert!(run["failed"].to_string().contains("gone_gone_x.gguf"), "{}", run["failed"]);
    assert!(export(&blobd, expected[0]) == model);
    let shown = blobd.line("show hf.co/ben/big --json").succeeds().json();
    assert_eq!(shown["origin"], "copy hf.co/ben/big:latest in llama.cpp");
    assert_eq!(shown["layers"][1]["name"], "big-Q8_0-00001-of-00002.gguf", "as in the repository: {shown}");
    check_blobs(daemon.root());
}

#[test]
fn programs_with_folders_of_models_are_all_found() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    home.add_model(".local/share/Jan/data/llamacpp/models/ann/jan-model/model.gguf", 1);
    home.add(".local/share/Jan/data/llamacpp/models/ann/jan-model/model.yml", "name: x");
    home.add_model(".local/share/nomic.ai/GPT4All/Llama-3-8B.Q4_0.gguf", 2);
    home.add_model(".local/share/nomic.ai/GPT4All/incomplete-x.gguf", 3);
    home.add(
        ".cache/modelscope/models/qwen--Qwen2___5/snapshots/v1/model.safetensors",
        safetensors(&[(1, "t")]),
    );
    home.add(".cache/modelscope/models/qwen--Qwen2___5/snapshots/v1/.msc", "a pickle");
    home.add_model(".cache/modelscope/hub/models/ben/old/old-Q8_0.gguf", 4);
    home.add(".local/share/exo/models/mlx--tiny/model.safetensors", safetensors(&[(2, "t")]));
    home.add_model("text-generation-webui/user_data/models/flat-Q4_K_M.gguf", 5);
    let blobd = daemon.command();
    let listed = home.listed(&blobd, &["--from", "all"]);
    let expected = [
        "jan/ann/jan-model:latest",
        "gpt4all/Llama-3-8B:Q4_0",
        "modelscope/ben/old:Q8_0",
        "modelscope/qwen/Qwen2.5:latest",
        "exo/mlx/tiny:latest",
        "text-generation-webui/flat:Q4_K_M",
    ];
    assert_eq!(states(&listed), expected.map(|name| (name, "new")));
    let imported = home.import(&blobd, &["--from", "all"]).succeeds().json();
    assert_eq!(imported["imported"].as_array().unwrap().len(), expected.len());
    let from = format!("jan={}/.local/share/Jan/data/llamacpp/models", home.0.display());
    assert_eq!(home.listed(&blobd, &["--from", &from])["models"].as_array().unwrap().len(), 1);
    let error = home.import(&blobd, &["--from", "gpt4all=/absent"]).exits_with(3).error();
    assert!(error.message.contains("/absent"), "{error}");
    check_blobs(daemon.root());
}

#[test]
fn same_name_in_two_programs_is_made_distinct_once() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let (first, second) = (ModelFile::dense(1), ModelFile::dense(2));
    let blob = |bytes: &[u8]| {
        home.add(&format!(".ollama/models/blobs/sha256-{}", sha256(bytes)), bytes);
        json!({ "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
    };
    let (mut weights, mut config) = (blob(&first.bytes()), blob(b"{}"));
    weights["mediaType"] = "application/vnd.ollama.image.model".into();
    config["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [weights] });
    home.add(".ollama/models/manifests/hf.co/ann/tiny/Q4_K_M", manifest.to_string());
    let commit = "0".repeat(40);
    let cache = ".cache/huggingface/hub/models--ann--tiny";
    home.add(&format!("{cache}/snapshots/{commit}/tiny-Q4_K_M.gguf"), second.bytes());
    std::thread::sleep(Duration::from_millis(20));
    let blobd = daemon.command();
    let stored = || {
        let listed = blobd.run(["ls", "--json"]).succeeds().json();
        let models = listed["models"].as_array().unwrap().iter();
        models.map(|model| (model["name"].clone(), model["digest"].clone())).collect::<Vec<_>>()
    };
    // Also when the reference of the cache is newer than what Ollama's model was imported.
    home.import(&blobd, &["--from", "ollama"]).succeeds();
    std::thread::sleep(Duration::from_millis(20));
    home.add(&format!("{cache}/refs/main"), &commit);
    let run = home.import(&blobd, &["--from", "all"]).succeeds().json();
    let name = run["imported"][0]["name"].as_str().unwrap();
    assert!(name.starts_with("hf.co/ann/tiny:Q4_K_M-"), "{run}");
    assert!(run["imported"][0]["notes"][0].as_str().unwrap().contains(" in ollama; "), "{run}");
    let before = stored();
    for _ in 0..2 {
        let run = home.import(&blobd, &["--from", "all"]).succeeds().json();
        assert_eq!(run["imported"], json!([]), "{run}");
    }
    assert!(before.len() == 2 && before == stored(), "{before:?} {:?}", stored());
    assert!(
        export(&blobd, "hf.co/ann/tiny:Q4_K_M") == first.bytes() && export(&blobd, name) == second.bytes()
    );
    check_blobs(daemon.root());
}

/// Writes a model as a registry serves it, and returns the digest of the manifest.
fn add_published(home: &Home, blobs: &str, manifests: &str, seed: u64) -> String {
    let (weights, config) = (ModelFile::dense(seed).bytes(), b"{}".to_vec());
    for bytes in [&weights, &config] {
        home.add(&format!("{blobs}/{}", sha256(bytes)), bytes);
    }
    let file = |media_type: &str, bytes: &[u8]| json!({ "mediaType": media_type, "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": file("application/vnd.docker.ai.model.config.v0.1+json", &config),
        "layers": [file("application/vnd.docker.ai.gguf.v3", &weights)],
    });
    let manifest = manifest.to_string();
    home.add(&format!("{manifests}/{}", sha256(manifest.as_bytes())), &manifest);
    format!("sha256:{}", sha256(manifest.as_bytes()))
}

#[test]
fn models_of_docker_and_llmman_keep_their_manifests() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let docker = ".docker/models";
    let id =
        add_published(&home, &format!("{docker}/blobs/sha256"), &format!("{docker}/manifests/sha256"), 1);
    let tags = ["docker.io/ai/smollm2:latest", "ai/short:1", "mine:1"];
    let untagged = json!({ "id": id, "tags": null, "files": null });
    let index = json!({ "models": [{ "id": id, "tags": tags, "files": [] }, untagged, { "id": "sha256:0", "tags": ["bad"] }] });
    home.add(&format!("{docker}/models.json"), index.to_string());
    let llmman = ".local/share/llmman";
    let other = add_published(&home, &format!("{llmman}/blobs/sha256"), &format!("{llmman}/blobs/sha256"), 2);
    home.add(&format!("{llmman}/manifests-v2/docker.io/ai/other/1b"), other);
    let blobd = daemon.command();
    let run = home.import(&blobd, &["--from", "docker-model-runner"]).exits_with(1).json();
    assert_eq!(
        names(&run["imported"]),
        ["docker.io/ai/short:1", "docker.io/ai/smollm2:latest", "mine:1"],
        "{run}"
    );
    assert!(run["failed"].to_string().contains("sha256:0"), "{run}");
    let shown = blobd.line("show docker.io/ai/smollm2 --json").succeeds().json();
    assert_eq!(
        (&shown["digest"], &shown["origin"]),
        (&json!(id), &json!("copy docker.io/ai/smollm2:latest in docker-model-runner"))
    );
    home.import(&blobd, &["--from", "llmman"]).succeeds();
    assert!(export(&blobd, "docker.io/ai/other:1b") == ModelFile::dense(2).bytes());
    check_blobs(daemon.root());
}

#[test]
fn references_of_ramalama_are_read_in_both_forms() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let store = ".local/share/ramalama/store";
    let (new, old) = (format!("{store}/huggingface/ann/tiny"), format!("{store}/ollama/library/old"));
    let weights = ModelFile::dense(1).bytes();
    let hash = format!("sha256-{}", sha256(&weights));
    let blob = home.add(&format!("{new}/blobs/{hash}"), &weights);
    home.add(&format!("{new}/snapshots/sha256-77/README.md"), "#");
    symlink(&blob, home.0.join(format!("{new}/snapshots/sha256-77/tiny.gguf"))).unwrap();
    let reference = json!({
        "hash": "sha256-77", "path": "x", "version": "v1.0.1",
        "files": [{ "hash": hash, "name": "tiny.gguf", "type": "gguf" }],
    });
    home.add(&format!("{new}/refs/main.json"), reference.to_string());
    home.add_model(&format!("{old}/snapshots/sha256-88/old.gguf"), 2);
    home.add(&format!("{old}/refs/7b"), "sha256-88\nold.gguf---model\n");
    home.add(&format!("{old}/refs/bad.json"), "{");
    // One blob is damaged, the other has the digest of a name.
    let others = format!("{store}/huggingface/ben/others");
    let of_name = format!("sha256-{}", sha256(b"late.gguf"));
    home.add(&format!("{others}/snapshots/sha256-99/README.md"), "#");
    for (hash, name, tag) in [(&hash, "bad.gguf", "bad"), (&of_name, "late.gguf", "late")] {
        home.add_model(&format!("{others}/blobs/{hash}"), 3);
        let file = json!({ "hash": hash, "name": name, "type": "gguf" });
        home.add(
            &format!("{others}/refs/{tag}.json"),
            json!({ "hash": "sha256-99", "files": [file] }).to_string(),
        );
    }
    let blobd = daemon.command();
    let run = home.import(&blobd, &["--from", "ramalama"]).exits_with(1).json();
    assert_eq!(
        names(&run["imported"]),
        [
            "ramalama/huggingface/ann/tiny:main",
            "ramalama/huggingface/ben/others:late",
            "ramalama/ollama/library/old:7b"
        ]
    );
    let failed = run["failed"].to_string();
    assert!(failed.contains("bad.json") && failed.contains("ben/others/blobs"), "{run}");
    assert!(export(&blobd, "ramalama/ollama/library/old:7b") == ModelFile::dense(2).bytes());
}

#[test]
fn lists_of_jan_say_what_a_file_must_be_and_which_is_elsewhere() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let models = ".local/share/Jan/data/llamacpp/models/ann";
    for (seed, name) in [(1, "good"), (2, "damaged")] {
        home.add_model(&format!("{models}/{name}/model.gguf"), seed);
        let digest = sha256(&ModelFile::dense(1).bytes());
        let list = format!("model_path: llamacpp/models/ann/{name}/model.gguf\nmodel_sha256: {digest}\n");
        home.add(&format!("{models}/{name}/model.yml"), list);
    }
    home.add(&format!("{models}/own/model.yml"), "model_path: /data/own.gguf\n");
    let blobd = daemon.command();
    let run = home.import(&blobd, &["--from", "jan"]).exits_with(1).json();
    assert_eq!(names(&run["imported"]), ["jan/ann/good:latest"]);
    let failed = run["failed"].to_string();
    assert!(failed.contains("damaged/model.gguf: wrong digest"), "{failed}");
    assert_eq!(names(&run["left_out"]), ["jan/ann/own:latest"]);
    assert!(run["left_out"][0]["reason"].as_str().unwrap().contains("/data/own.gguf"), "{run}");
}

#[test]
fn file_under_several_roots_is_read_once() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let file = home.add_model(".lmstudio/models/ann/one/one-Q8_0.gguf", 1);
    for other in [".local/share/nomic.ai/GPT4All", "text-generation-webui/models"] {
        fs::create_dir_all(home.0.join(other)).unwrap();
        fs::hard_link(&file, home.0.join(other).join("one-Q8_0.gguf")).unwrap();
    }
    let blobd = daemon.command();
    let listed = home.listed(&blobd, &["--from", "all"]);
    assert_eq!(listed["read_bytes"], ModelFile::dense(1).bytes().len());
    let run = home.import(&blobd, &["--from", "all"]).succeeds().json();
    let imported = run["imported"].as_array().unwrap();
    assert_eq!(
        names(&run["imported"]),
        ["lmstudio/ann/one:Q8_0", "gpt4all/one:Q8_0", "text-generation-webui/one:Q8_0"]
    );
    assert!(imported.iter().all(|model| model["digest"] == imported[0]["digest"]));
    let log = daemon.log();
    assert_eq!(log.matches("}: import ").count(), 1, "{log}");
}

#[test]
fn second_import_reads_no_file_again_until_one_changes() {
    let place = tmpfs_directory();
    let blobd = Blobd::at_root(&place.path().join("store"));
    let home = Home::new(place.path());
    // Larger than what a scan would read for its digest.
    let weights = ModelFile::dense(1).bytes();
    let file = home.add("models/ann/m/m-Q8_0.gguf", &weights);
    let from = format!("--from-lmstudio={}/models", home.0.display());
    settled();
    home.import(&blobd, &[&from]).succeeds();
    let record = home.0.join(".local/state/blobd/imported-models.json");
    let written = fs::read_to_string(&record).unwrap();
    assert_eq!(home.import(&blobd, &[&from]).succeeds().json(), json!({ "imported": [] }));
    assert_eq!(fs::read_to_string(&record).unwrap(), written);
    // What is recorded says nothing about another file of the same size.
    let changed = ModelFile::dense(1).with_changed("output.weight").bytes();
    assert_eq!(changed.len(), weights.len());
    fs::write(&file, &changed).unwrap();
    assert_eq!(states(&home.listed(&blobd, &[&from])), [("lmstudio/ann/m:Q8_0", "new")]);
    let imported = home.import(&blobd, &[&from]).succeeds().json();
    assert!(imported["imported"][0]["displaced"] != Json::Null, "{imported}");
    assert!(export(&blobd, "lmstudio/ann/m:Q8_0") == changed);
    // A record that is damaged, or says what is not so, changes nothing.
    fs::write(&record, "{").unwrap();
    assert_eq!(states(&home.listed(&blobd, &[&from])), [("lmstudio/ann/m:Q8_0", "stored")]);
    blobd.line("rm lmstudio/ann/m:Q8_0").succeeds();
    fs::write(&record, &written).unwrap();
    assert_eq!(states(&home.listed(&blobd, &[&from])), [("lmstudio/ann/m:Q8_0", "new")]);
}

/// Waits until the daemon has counted this many imports: a model that is not read again is none.
fn expect_imports(daemon: &TestDaemon, expected: u64) {
    let imports = || -> u64 {
        let metrics = http::get(&daemon.socket(), "/v1/metrics").body;
        let parts = ["blobd_requests_total{", "verb=\"import\"", "result=\"ok\""];
        let line = metrics.lines().find(|line| parts.iter().all(|part| line.contains(part)));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    eventually("the imports are counted", || imports() >= expected);
    assert_eq!(imports(), expected);
}

#[test]
fn second_import_of_files_and_folders_answers_the_same_without_reading_them() {
    let daemon = TestDaemon::start();
    let (blobd, home) = (daemon.command(), Home::new(daemon.scratch()));
    for (path, seed) in [("m-Q8_0", 1), ("v-Q8_0", 2), ("mmproj-F16", 3)] {
        home.add_model(&format!("folder/{path}.gguf"), seed);
    }
    let file = home.add_model("alone/n-Q8_0.gguf", 4);
    home.add_model("alone/mmproj-F16.gguf", 3);
    home.add("st/config.json", "{}");
    let weights = home.add("st/model.safetensors", safetensors(&[(1, "a")]));
    settled();
    let folder = home.0.join("folder");
    let [file, folder, st] =
        [file.as_path(), &folder, weights.parent().unwrap()].map(|path| path.to_str().unwrap());
    let mut expected = 0;
    for words in [
        vec![folder],
        vec![file],
        vec![file, "--with-sidecars", "--name", "seeing"],
        vec![st],
        vec![st, "--exclude", "config.json", "--name", "bare"],
    ] {
        let imported = |more: &[&str]| {
            let words: Vec<&str> = words.iter().chain(more).copied().collect();
            let mut done = home.import(&blobd, &words).succeeds().json()["imported"].clone();
            // The daemon counts the configuration that it has made too.
            done.as_array_mut().unwrap().iter_mut().for_each(|model| model["reused_bytes"] = json!(0));
            done
        };
        imported(&[]);
        let again = imported(&[]);
        assert_eq!(again, imported(&["--force"]), "{words:?}");
        expected += 2 * again.as_array().unwrap().len() as u64;
        expect_imports(&daemon, expected);
    }
}

#[test]
fn import_reads_files_again_that_have_changed_or_whose_model_is_damaged_or_gone() {
    let daemon = TestDaemon::start();
    let (blobd, home) = (daemon.command(), Home::new(daemon.scratch()));
    let path = home.add_model("m-Q8_0.gguf", 1);
    settled();
    let imports = Cell::new(0);
    let reads = |expected: u64| {
        let done = home.import(&blobd, &[path.to_str().unwrap()]).succeeds().json()["imported"][0].clone();
        imports.set(imports.get() + expected);
        expect_imports(&daemon, imports.get());
        done["name"].as_str().unwrap().to_owned()
    };
    assert_eq!((reads(1), reads(0)), ("m:Q8_0".to_owned(), "m:Q8_0".to_owned()));
    blobd.line("rename m:Q8_0 other").succeeds();
    assert_eq!((reads(1), reads(0)), ("m:Q8_0".to_owned(), "m:Q8_0".to_owned()));
    blobd.line("rm other").succeeds();
    let blobs = fs::read_dir(daemon.root().join("blobs")).unwrap().map(|entry| entry.unwrap().path());
    flip_byte(&blobs.max_by_key(|path| path.metadata().unwrap().len()).unwrap(), 9);
    blobd.line("verify m:Q8_0").exits_with(5);
    reads(1);
    blobd.line("verify m:Q8_0").succeeds();
    reads(0);
    // The same size and the same time of modification.
    let modified = path.metadata().unwrap().modified().unwrap();
    let changed = ModelFile::dense(1).with_changed("output.weight").bytes();
    fs::write(&path, &changed).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    let name = reads(1);
    assert!(export(&blobd, &name) == changed);
    check_blobs(daemon.root());
}

#[test]
fn empty_store_and_doctor_name_the_models_that_the_machine_has() {
    let place = tmpfs_directory();
    let blobd = Blobd::at_root(&place.path().join("store"));
    let home = Home::new(place.path());
    home.add_model(".lmstudio/models/ann/m/m-Q8_0.gguf", 1);
    let text = |words: &str| {
        let mut command = blobd.command();
        command.env("HOME", &home.0).env_remove("XDG_DATA_HOME").args(words.split(' '));
        run(&mut command).text()
    };
    let expected = "models of LM Studio; `blobd import --from lmstudio` imports them";
    assert!(text("ls").contains(expected), "{}", text("ls"));
    assert!(text("doctor").replace('\n', " ").contains("models of LM Studio"), "{}", text("doctor"));
    home.add_model(".local/share/nomic.ai/GPT4All/m-Q8_0.gguf", 2);
    assert!(text("ls").contains("models of LM Studio and GPT4All; `blobd import --from all` imports them"));
    assert!(!text("ls llama").contains("LM Studio"));
    home.import(&blobd, &["--from", "all"]).succeeds();
    assert!(!text("ls").contains("`blobd import"), "{}", text("ls"));
}
