//! Imports of the models in the cache of Hugging Face's libraries.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

use blobd_store_format::git_id::GitId;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, check_empty, flip_byte};
use serde_json::{Value as Json, json};

mod cache;
mod names;

use cache::{COMMIT, Cache};

fn names(list: &Json) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect()
}

/// A safetensors file with one tensor of four bytes.
fn safetensors() -> Vec<u8> {
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    [&(header.len() as u64).to_le_bytes(), &header[..], &1_f32.to_le_bytes()].concat()
}

#[test]
fn gguf_models_are_imported_by_tag_and_safetensors_as_a_folder() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let (q8, q4) = (ModelFile::dense(1), ModelFile::dense(1).with_changed("output.weight"));
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &q8.bytes());
    cache.add("ann/tiny", "tiny-Q4_K_M.gguf", &q4.bytes());
    cache.add("ann/tiny", "README.md", b"# Tiny");
    cache.add("ben/folder", "config.json", b"{}");
    cache.add("ben/folder", "model.safetensors", &safetensors());
    cache.add("ben/folder", "tokenizer/vocab.txt", b"a b c");
    let listed = cache.import(&daemon, &["--list"]).succeeds().json();
    let expected = ["hf.co/ann/tiny:Q4_K_M", "hf.co/ann/tiny:Q8_0", "hf.co/ben/folder:latest"];
    assert_eq!(names(&listed["models"]), expected);
    cache.import(&daemon, &[]).succeeds();
    let blobd = daemon.command();
    assert!(blobd.line("export hf.co/ann/tiny:Q4_K_M -o -").succeeds().stdout == q4.bytes());
    let out = daemon.scratch().join("out");
    blobd.run(["export", "hf.co/ben/folder", "-o", &format!("{}/", out.display())]).succeeds();
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), safetensors());
    assert_eq!(fs::read(out.join("tokenizer/vocab.txt")).unwrap(), b"a b c");
    check_blobs(daemon.root());
    let again = cache.import(&daemon, &["--list"]).succeeds().json();
    assert!(again["models"].as_array().unwrap().iter().all(|model| model["state"] == "stored"), "{again}");
}

#[test]
fn snapshot_with_regular_files_is_imported() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let model = ModelFile::dense(1).bytes();
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &model);
    let place = cache.snapshot("ann/tiny").join("tiny-Q8_0.gguf");
    fs::remove_file(&place).unwrap();
    fs::write(&place, &model).unwrap();
    fs::remove_dir_all(cache.repository("ann/tiny").join("blobs")).unwrap();
    cache.import(&daemon, &[]).succeeds();
    assert!(daemon.command().line("export hf.co/ann/tiny:Q8_0 -o -").succeeds().stdout == model);
}

#[test]
fn changed_file_of_the_same_size_is_imported_again() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/folder", "model.safetensors", &safetensors());
    cache.add("ann/folder", "config.json", b"{\"a\":1}");
    // Without links, no file has a digest.
    for path in ["config.json", "model.safetensors"] {
        let place = cache.snapshot("ann/folder").join(path);
        let bytes = fs::read(&place).unwrap();
        fs::remove_file(&place).unwrap();
        fs::write(&place, bytes).unwrap();
    }
    cache.import(&daemon, &[]).succeeds();
    let state = || cache.import(&daemon, &["--list"]).succeeds().json()["models"][0]["state"].clone();
    assert_eq!(state(), "stored");
    fs::write(cache.snapshot("ann/folder").join("config.json"), b"{\"a\":2}").unwrap();
    assert_eq!(state(), "new");
    cache.import(&daemon, &["--force"]).succeeds();
    assert_eq!(state(), "stored");
}

#[test]
fn links_out_of_the_cache_and_dangling_links_are_named_and_not_followed() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let secret = daemon.scratch().join("secret.gguf");
    fs::write(&secret, ModelFile::dense(9).bytes()).unwrap();
    cache.add("ann/leading", "README.md", b"#");
    symlink(&secret, cache.snapshot("ann/leading").join("m-Q8_0.gguf")).unwrap();
    cache.add("ben/dangling", "m-Q8_0.gguf", b"GGUF");
    fs::remove_dir_all(cache.repository("ben/dangling").join("blobs")).unwrap();
    let imported = cache.import(&daemon, &[]).exits_with(1).json();
    let failed = imported["failed"].to_string();
    for text in ["found a link to a file outside of it", "--follow", "is missing", "download the model again"]
    {
        assert!(failed.contains(text), "{text}: {failed}");
    }
    check_empty(daemon.root());
}

const OTHER: &str = "abcdef0123456789012345678901234567890123";

#[test]
fn each_reference_gives_the_models_of_its_commit_a_name() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &ModelFile::dense(1).bytes());
    cache.add_to(("ann/tiny", OTHER), "tiny-Q8_0.gguf", &ModelFile::dense(2).bytes());
    let third = "1".repeat(40);
    cache.add_to(("ann/tiny", &third), "model.safetensors", &safetensors());
    let reference = cache.repository("ann/tiny").join("refs/refs/pr/1");
    fs::create_dir_all(reference.parent().unwrap()).unwrap();
    fs::write(reference, OTHER).unwrap();
    fs::write(cache.repository("ann/tiny").join("refs/v1"), OTHER).unwrap();
    fs::write(cache.repository("ann/tiny").join("refs/v2"), COMMIT).unwrap();
    // The only commit has the repository's own name too, whatever its reference.
    cache.add_to(("ben/one", OTHER), "one-Q8_0.gguf", &ModelFile::dense(3).bytes());
    fs::write(cache.repository("ben/one").join("refs/v1.0"), OTHER).unwrap();
    let imported = cache.import(&daemon, &[]).succeeds().json();
    let expected = [
        "hf.co/ann/tiny:111111111111",
        "hf.co/ann/tiny:Q8_0",
        "hf.co/ann/tiny:Q8_0-refs-pr-1",
        "hf.co/ann/tiny:Q8_0-v1",
        "hf.co/ann/tiny:Q8_0-v2",
        "hf.co/ben/one:Q8_0",
        "hf.co/ben/one:Q8_0-v1.0",
    ];
    assert_eq!(names(&imported["imported"]), expected);
    let digest = |number: usize| &imported["imported"][number]["digest"];
    assert!(digest(2) == digest(3) && digest(1) == digest(4) && digest(5) == digest(6), "{imported}");
    assert!(digest(1) != digest(2), "{imported}");
    let blobd = daemon.command();
    assert!(
        blobd.line(&format!("export {} -o -", expected[1])).succeeds().stdout == ModelFile::dense(1).bytes()
    );
    assert!(
        blobd.line(&format!("export {} -o -", expected[2])).succeeds().stdout == ModelFile::dense(2).bytes()
    );
    let origin = |name: &str| blobd.line(&format!("show {name} --json")).succeeds().json()["origin"].clone();
    // The commit, because a pull of the name would fetch the content of `main`.
    for (name, commit) in [(expected[1], COMMIT), (expected[2], OTHER), (expected[3], OTHER)] {
        let source = format!("copy https://huggingface.co/ann/tiny/resolve/{commit}/tiny-Q8_0.gguf in hf");
        assert_eq!(origin(name), source);
    }
    let again = cache.import(&daemon, &[]).succeeds().json();
    assert_eq!(again["imported"], json!([]), "{again}");
    check_blobs(daemon.root());
}

#[test]
fn files_beside_gguf_files_are_named_as_left_out() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/tiny", "tiny-Q4_K_M.gguf", &ModelFile::dense(1).bytes());
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &ModelFile::dense(2).bytes());
    for path in ["config.json", "README.md", ".gitattributes"] {
        cache.add("ann/tiny", path, b"{}");
    }
    let imported = cache.import(&daemon, &[]).succeeds().json()["imported"].clone();
    let note = "left out: README.md and 1 more file: of a repository of GGUF files only these are imported; \
                `--include '*'` also makes a folder of all files";
    assert_eq!(imported[0]["notes"], json!([note]), "once: {imported}");
    assert!(imported[1]["notes"].as_array().is_none_or(Vec::is_empty), "{imported}");
}

#[test]
fn patterns_that_take_files_beside_gguf_files_make_a_folder_and_leave_the_models_as_they_are() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let (q4, q8) = (ModelFile::dense(1).bytes(), ModelFile::dense(2).bytes());
    let files = [
        ("config.json", &b"{}"[..]),
        ("README.md", b"#"),
        ("Q4/tiny-Q4_K_M.gguf", &q4),
        ("tiny-Q8_0.gguf", &q8),
    ];
    for (path, bytes) in files {
        cache.add("ann/tiny", path, bytes);
    }
    let imported = cache.import(&daemon, &[]).succeeds().json()["imported"].clone();
    let all = cache.import(&daemon, &["--include", "*"]).succeeds().json();
    assert_eq!(names(&all["imported"]), ["hf.co/ann/tiny:latest"], "{all}");
    let new_bytes = all["imported"][0]["new_bytes"].as_u64().unwrap();
    assert!(new_bytes < 4096, "the weights are shared: {all}");
    let blobd = daemon.command();
    let out = daemon.scratch().join("out");
    blobd.run(["export", "hf.co/ann/tiny", "-o", &format!("{}/", out.display())]).succeeds();
    for (path, bytes) in files {
        assert!(fs::read(out.join(path)).unwrap() == bytes, "{path}");
    }
    for (name, model) in
        ["hf.co/ann/tiny:Q4_K_M", "hf.co/ann/tiny:Q8_0"].iter().zip(imported.as_array().unwrap())
    {
        assert_eq!(blobd.line(&format!("show {name} --json")).succeeds().json()["digest"], model["digest"]);
    }
    let run =
        cache.import(&daemon, &["--include", "*.json", "--include", "*Q8*", "--list"]).succeeds().json();
    assert_eq!(names(&run["models"]), ["hf.co/ann/tiny:Q8_0", "hf.co/ann/tiny:latest"]);
    let run =
        cache.import(&daemon, &["--include", "*.gguf", "--include", "*.md", "--list"]).succeeds().json();
    assert_eq!(
        names(&run["models"]),
        ["hf.co/ann/tiny:Q4_K_M", "hf.co/ann/tiny:Q8_0"],
        "no program needs a folder"
    );
}

#[test]
fn tree_of_a_commit_says_what_is_stored_and_what_is_missing() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let weights = safetensors();
    cache.add("ann/folder", "model.safetensors", &weights);
    cache.add("ann/folder", "config.json", b"{}");
    let listed = |cache: &Cache| cache.import(&daemon, &["--list"]).succeeds().json()["models"][0].clone();
    let files = [
        ("model.safetensors", weights.len() as u64, sha256(&weights)),
        ("config.json", 2, sha256(b"{}")),
        ("tokenizer.json", 7, "0".repeat(64)),
        ("vocab.txt", 7, "0".repeat(64)),
        ("pytorch_model.bin", 7, "0".repeat(64)),
    ];
    let files: Vec<_> = files.iter().map(|(path, size, digest)| (*path, *size, digest.as_str())).collect();
    cache.add_tree("ann/folder", 1, &files);
    assert_eq!(listed(&cache)["notes"], json!(["partial: 2 files of the repository are not here"]));
    let imported = cache.import(&daemon, &[]).succeeds().json();
    assert!(imported["imported"][0]["notes"].to_string().contains("partial: 2 files"), "{imported}");
    assert_eq!(listed(&cache)["state"], "stored");
    // Another version of the listing is not read.
    cache.add_tree("ann/folder", 2, &files);
    assert_eq!(listed(&cache)["notes"], Json::Null);
    // Weights that the index names are needed.
    let index = json!({ "weight_map": { "t": "model.safetensors", "u": "absent.safetensors" } });
    cache.add("ann/folder", "model.safetensors.index.json", index.to_string().as_bytes());
    assert_eq!(listed(&cache)["state"], "unusable");
    assert!(listed(&cache)["reason"].to_string().contains("absent.safetensors"), "{}", listed(&cache));
}

#[test]
fn files_of_the_shared_store_are_read_and_a_copied_folder_says_which_are_missing() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let model = ModelFile::dense(1).bytes();
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &model);
    let (blob, hash) = (cache.repository("ann/tiny").join("blobs").join(sha256(&model)), "a9".repeat(32));
    let shared = cache.0.join("blobs/a9").join(&hash);
    fs::create_dir_all(shared.parent().unwrap()).unwrap();
    fs::write(cache.0.join("blobs/.huggingface-shared-blobs"), "1\n").unwrap();
    fs::rename(&blob, &shared).unwrap();
    fs::write(shared.with_extension("refs"), "not to be trusted").unwrap();
    symlink(format!("../../blobs/a9/{hash}"), &blob).unwrap();
    // A copy of the folder of this repository only.
    let copy = Cache(daemon.scratch().join("copy"));
    copy.add("ann/tiny", "tiny-Q8_0.gguf", &model);
    copy.add("ann/tiny", "tiny-Q4_0.gguf", &ModelFile::dense(2).bytes());
    let copied = copy.repository("ann/tiny").join("blobs").join(sha256(&model));
    fs::remove_file(&copied).unwrap();
    symlink(format!("../../blobs/a9/{hash}"), &copied).unwrap();
    let run = copy.import(&daemon, &[]).exits_with(1).json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/tiny:Q4_0"]);
    let missing = copy.0.join("blobs/a9").join(&hash);
    let failed = run["failed"][0].to_string();
    assert!(failed.contains(missing.to_str().unwrap()) && failed.contains("copied from a cache"), "{failed}");
    let run = cache.import(&daemon, &[]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/tiny:Q8_0"]);
    assert!(daemon.command().line("export hf.co/ann/tiny:Q8_0 -o -").succeeds().stdout == model);
}

#[test]
fn newer_commit_of_the_same_repository_replaces_the_name_unless_it_is_pinned() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let reference = cache.repository("ann/tiny").join("refs/main");
    let files = [ModelFile::dense(1).bytes(), ModelFile::dense(2).bytes(), ModelFile::dense(3).bytes()];
    let set = |number: usize, commit: char| {
        let commit = commit.to_string().repeat(40);
        cache.add_to(("ann/tiny", &commit), "tiny-Q8_0.gguf", &files[number]);
        fs::write(&reference, &commit).unwrap();
    };
    let name = "hf.co/ann/tiny:Q8_0";
    let has = |number: usize| {
        daemon.command().line(&format!("export {name} -o -")).succeeds().stdout == files[number]
    };
    set(0, 'a');
    cache.import(&daemon, &[name]).succeeds();
    set(1, 'b');
    let imported = cache.import(&daemon, &[name]).succeeds().json();
    assert!(has(1) && imported["imported"][0]["displaced"] != Json::Null, "{imported}");
    daemon.command().line(&format!("pin {name}")).succeeds();
    set(2, 'c');
    // The model gets a name of its own.
    let imported = cache.import(&daemon, &[name]).succeeds().json();
    assert!(has(1) && names(&imported["imported"])[0].starts_with(&format!("{name}-")), "{imported}");
    daemon.command().run(["rm", names(&imported["imported"])[0]]).succeeds();
    daemon.command().line(&format!("unpin {name}")).succeeds();
    // Neither does it replace what has come from elsewhere.
    daemon.command().line(&format!("rm {name}")).succeeds();
    let own = ModelFile::dense(4).write_to(daemon.scratch(), "own.gguf");
    daemon.command().run(["import", own.to_str().unwrap(), "--name", name]).succeeds();
    let imported = cache.import(&daemon, &[name]).succeeds().json()["imported"][0].clone();
    assert!(imported["name"].as_str().unwrap().starts_with(&format!("{name}-")), "{imported}");
    assert!(imported["notes"][0].as_str().unwrap().contains("is another model"), "{imported}");
    let again = cache.import(&daemon, &[name]).succeeds().json();
    assert_eq!(again["imported"], json!([]), "{again}");
    assert!(
        daemon.command().line(&format!("export {name} -o -")).succeeds().stdout
            == ModelFile::dense(4).bytes()
    );
    daemon.command().run(["rm", imported["name"].as_str().unwrap()]).succeeds();
    cache.import(&daemon, &[name, "--force"]).succeeds();
    assert!(has(2));
}

#[test]
fn fewer_files_of_the_same_commit_do_not_replace_a_model() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/folder", "model.safetensors", &safetensors());
    cache.add("ann/folder", "config.json", b"{}");
    cache.add("ann/folder", "tokenizer.json", br#"{"t": 1}"#);
    cache.import(&daemon, &[]).succeeds();
    let model = || daemon.command().line("show hf.co/ann/folder --json").succeeds().json();
    let complete = model();
    // A program has fetched only some files again.
    fs::remove_dir_all(cache.repository("ann/folder")).unwrap();
    cache.add("ann/folder", "model.safetensors", &safetensors());
    cache.add("ann/folder", "config.json", b"{}");
    let imported = cache.import(&daemon, &[]).succeeds().json();
    assert!(names(&imported["imported"])[0].starts_with("hf.co/ann/folder:latest-"), "{imported}");
    assert_eq!(model()["digest"], complete["digest"]);
    cache.import(&daemon, &["--move"]).succeeds();
    assert_eq!(model()["digest"], complete["digest"]);
    // More files of it do.
    cache.add("ann/folder", "model.safetensors", &safetensors());
    for (path, bytes) in [("config.json", "{}"), ("tokenizer.json", r#"{"t": 1}"#), ("new.json", "{}")] {
        cache.add("ann/folder", path, bytes.as_bytes());
    }
    cache.import(&daemon, &[]).succeeds();
    assert_ne!(model()["digest"], complete["digest"]);
}

#[test]
fn damaged_file_is_named_and_nothing_of_its_model_is_kept() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let model = ModelFile::dense(1).bytes();
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &model);
    let blob = cache.repository("ann/tiny").join("blobs").join(sha256(&model));
    flip_byte(&blob, model.len() as u64 - 1);
    let error = cache.import(&daemon, &[]).exits_with(1).error();
    let expected = format!("hf.co/ann/tiny:Q8_0: tiny-Q8_0.gguf ({}): wrong digest", blob.display());
    assert!(error.message.contains(&expected), "{error}");
    check_empty(daemon.root());
}

fn git_id(bytes: &[u8]) -> String {
    GitId::of(bytes).to_string()
}

/// The errors of an import of several models, by their names.
fn failures(run: &Json) -> BTreeMap<String, String> {
    let text = |value: &Json| value.as_str().unwrap().to_owned();
    let failed = run["failed"].as_array().unwrap().iter();
    failed.map(|one| (text(&one["name"]), text(&one["error"]["message"]))).collect()
}

#[test]
fn small_file_must_be_the_git_object_that_its_name_says() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    for (name, config) in [("ann/good", b"{\"a\":1}"), ("ann/damaged", b"{\"a\":2}")] {
        cache.add(name, "model.safetensors", &safetensors());
        cache.add_blob((name, COMMIT), "config.json", (config, &git_id(b"{\"a\":1}")));
    }
    let run = cache.import(&daemon, &[]).exits_with(1).json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/good:latest"]);
    let error = &failures(&run)["hf.co/ann/damaged:latest"];
    let blob = cache.repository("ann/damaged").join("blobs").join(git_id(b"{\"a\":1}"));
    let expected = format!("hf.co/ann/damaged:latest: config.json ({}): wrong digest", blob.display());
    assert!(error.starts_with(&expected) && error.contains(&git_id(b"{\"a\":2}")), "{error}");
    check_blobs(daemon.root());
    // The folder itself claims nothing.
    let folder = cache.snapshot("ann/damaged").display().to_string();
    daemon.command().run(["import", &folder, "--name", "as-it-is"]).succeeds();
}

#[test]
fn files_must_be_those_in_the_list_of_the_commit() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let (weights, config) = (safetensors(), b"{}");
    let size = weights.len() as u64;
    let (weights_id, config_id) = (sha256(&weights), git_id(config));
    let (other_digest, other_id) = ("a".repeat(64), "a".repeat(40));
    let cases = [
        ("ann/good", (size, &weights_id), (2, &config_id), None),
        ("ann/short", (size + 1, &weights_id), (2, &config_id), Some("wrong size")),
        ("ann/weights", (size, &other_digest), (2, &config_id), Some("wrong digest")),
        ("ann/config", (size, &weights_id), (2, &other_id), Some("wrong digest")),
        ("ann/long", (size, &weights_id), (1, &config_id), Some("wrong size")),
        ("ann/linked", (size, &other_digest), (2, &config_id), Some("found a link to")),
        ("ann/named", (size, &weights_id), (2, &other_id), Some("found a link to")),
    ];
    for (name, (size, digest), (config_size, id), error) in &cases {
        cache.add(name, "model.safetensors", &weights);
        cache.add_blob((name, COMMIT), "config.json", (config, &config_id));
        if *error != Some("found a link to") {
            cache.unlink(name, "model.safetensors");
            cache.unlink(name, "config.json");
        }
        cache.add_tree(name, 1, &[("model.safetensors", *size, digest), ("config.json", *config_size, id)]);
    }
    let run = cache.import(&daemon, &[]).exits_with(1).json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/good:latest"]);
    let failures = failures(&run);
    for (name, .., error) in &cases[1..] {
        let found = &failures[&format!("hf.co/{name}:latest")];
        assert!(
            found.contains(error.unwrap()) && found.contains(cache.0.to_str().unwrap()),
            "{name}: {found}"
        );
    }
    assert_eq!(failures.len(), cases.len() - 1);
}

#[test]
fn repository_of_pickles_is_left_out_unless_a_pattern_includes_them() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/pickle", "config.json", b"{}");
    cache.add("ann/pickle", "pytorch_model.bin", b"not read");
    cache.add("ben/both", "model.safetensors", &safetensors());
    cache.add("ben/both", "pytorch_model.bin", b"not read");
    cache.add("ben/both", "both-Q8_0.gguf", &ModelFile::dense(1).bytes());
    let listed = cache.import(&daemon, &["--list"]).succeeds().json();
    let models = &listed["models"];
    assert_eq!(names(models), ["hf.co/ann/pickle:latest", "hf.co/ben/both:Q8_0", "hf.co/ben/both:latest"]);
    assert_eq!((&models[0]["state"], &models[0]["max_new_bytes"]), (&json!("left_out"), &Json::Null));
    assert!(models[0]["reason"].as_str().unwrap().contains("pytorch_model.bin: a pickle"), "{listed}");
    let run = cache.import(&daemon, &["hf.co/ben/*", "hf.co/ann/*"]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["hf.co/ben/both:Q8_0", "hf.co/ben/both:latest"]);
    assert_eq!(run["left_out"][0]["name"], "hf.co/ann/pickle:latest");
    let error = cache.import(&daemon, &["hf.co/ann/pickle"]).exits_with(1).error();
    assert!(error.hint.is_some_and(|hint| hint.contains("--include")), "{}", error.message);
    let whole = "stored whole, as a pattern includes it: no tensor of it is shared";
    let included = ["hf.co/ann/pickle", "--include", "*"];
    let listed = cache.import(&daemon, &[&included[..], &["--list"]].concat()).succeeds().json();
    assert!(listed["models"][0]["notes"][0].as_str().unwrap().ends_with(whole), "{listed}");
    let run = cache.import(&daemon, &included).succeeds().json();
    assert!(run["imported"][0]["notes"].to_string().contains(whole), "{run}");
    assert_eq!(run["imported"][0]["file_count"], 2);
    // Patterns choose among the GGUF files too.
    let listed = cache.import(&daemon, &["hf.co/ben/*", "--exclude", "*.gguf", "--list"]).succeeds().json();
    assert_eq!(names(&listed["models"]), ["hf.co/ben/both:latest"]);
    let listed = cache.import(&daemon, &["hf.co/ben/*", "--include", "*.gguf", "--list"]).succeeds().json();
    assert_eq!(names(&listed["models"]), ["hf.co/ben/both:Q8_0"]);
}

#[test]
fn folder_of_one_repository_is_imported_as_the_cache_with_it() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let model = ModelFile::dense(1).bytes();
    cache.add("ann/tiny", "tiny-Q8_0.gguf", &model);
    cache.add("ben/other", "other-Q8_0.gguf", &ModelFile::dense(2).bytes());
    // Its content is in the files that all repositories share.
    let blob = cache.repository("ann/tiny").join("blobs").join(sha256(&model));
    let shared = cache.0.join("blobs/a9/a9");
    fs::create_dir_all(shared.parent().unwrap()).unwrap();
    fs::rename(&blob, &shared).unwrap();
    symlink("../../blobs/a9/a9", &blob).unwrap();
    let folder = cache.repository("ann/tiny").display().to_string();
    let blobd = daemon.command();
    let listed = blobd.run(["import", &format!("--from-hf={folder}"), "--list", "--json"]).succeeds().json();
    assert_eq!(names(&listed["models"]), ["hf.co/ann/tiny:Q8_0"]);
    let run = blobd.run(["import", &folder, "--json"]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/tiny:Q8_0"]);
    // A link to another folder beside it is not followed.
    fs::remove_file(&blob).unwrap();
    fs::write(cache.0.join("secret"), &model).unwrap();
    symlink("../../secret", &blob).unwrap();
    blobd.line("rm hf.co/ann/tiny:Q8_0").succeeds();
    let error = blobd.run(["import", &folder, "--json"]).exits_with(1).error();
    assert!(error.message.contains("outside of it"), "{error}");
    let run = blobd.run(["import", &folder, "--json", "--follow"]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["hf.co/ann/tiny:Q8_0"]);
    let run = blobd.run(["import", &cache.0.display().to_string(), "--json"]).succeeds().json();
    assert_eq!(names(&run["imported"]), ["hf.co/ben/other:Q8_0"]);
    let other = daemon.scratch().join("other");
    fs::create_dir(&other).unwrap();
    let run = blobd.run(["import", &folder, other.to_str().unwrap(), "--json"]).exits_with(1).json();
    assert!(failures(&run)[&folder].contains("a cache of Hugging Face's libraries"), "{run}");
}

/// No command takes such a name.
#[test]
fn repository_whose_name_the_hub_cannot_have_is_named() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/tiny/copy", "tiny-Q8_0.gguf", &ModelFile::dense(1).bytes());
    let listed = cache.import(&daemon, &["--list"]).succeeds().json()["models"][0].clone();
    assert_eq!((&listed["name"], &listed["state"]), (&json!("hf.co/ann/tiny/copy"), &json!("unusable")));
    let error = cache.import(&daemon, &[]).exits_with(1).error();
    assert!(error.message.contains("expected OWNER/NAME"), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("--name")));
}

#[test]
fn missing_shards_and_snapshots_are_named_with_what_to_do() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let shards = ModelFile::dense(1).shards(3);
    cache.add("ann/big", "Q8_0/m-Q8_0-00001-of-00003.gguf", &shards[0].bytes());
    cache.add("ben/gone", "m-Q8_0.gguf", &ModelFile::dense(2).bytes());
    fs::write(cache.repository("ben/gone").join("refs/main"), "9".repeat(40)).unwrap();
    let run = cache.import(&daemon, &["hf.co/ann/*", "hf.co/ben/gone:latest"]).exits_with(1).json();
    let failed = &run["failed"];
    let error = failed[0]["error"]["message"].as_str().unwrap();
    let missing = "2 of 3 shards missing: Q8_0/m-Q8_0-00002-of-00003.gguf, Q8_0/m-Q8_0-00003-of-00003.gguf";
    assert!(error.contains(missing), "{error}");
    let error = failed[1]["error"]["message"].as_str().unwrap();
    assert!(error.contains(&"9".repeat(40)) && error.contains("refs/main"), "{error}");
    let has_hint =
        |one: &Json| one["error"]["hint"].as_str().is_some_and(|hint| hint.contains("pull the model again"));
    assert!(failed.as_array().unwrap().iter().all(has_hint), "{run}");
}

#[test]
fn list_says_what_each_model_adds_at_most_and_what_it_shares() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    let (first, second) = (ModelFile::dense(1).bytes(), ModelFile::dense(2).bytes());
    cache.add("ann/one", "one-Q8_0.gguf", &first);
    cache.add("ben/two", "two-Q8_0.gguf", &second);
    cache.add("cat/three", "three-Q8_0.gguf", &second);
    let costs = || {
        let listed = cache.import(&daemon, &["--list"]).succeeds().json();
        let models = listed["models"].as_array().unwrap().iter();
        let of = |model: &Json| {
            (model["max_new_bytes"].as_u64().unwrap(), model["shared_bytes"].as_u64().unwrap())
        };
        (models.map(of).collect::<Vec<_>>(), listed["max_new_bytes"].as_u64().unwrap())
    };
    let [one, two] = [&first, &second].map(|bytes| bytes.len() as u64);
    assert_eq!(costs(), (vec![(one, 0), (two, 0), (0, two)], one + two));
    cache.import(&daemon, &["hf.co/ben/two:*"]).succeeds();
    assert_eq!(costs(), (vec![(one, 0), (0, two), (0, two)], one));
    let text = daemon.command().run(["import", &format!("--from-hf={}", cache.0.display()), "--list"]);
    let text = text.succeeds().text();
    assert!(text.contains("ADDS") && text.contains("at most"), "{text}");
}

/// People move a large repository to another disk, and leave a link to it.
#[test]
fn repository_behind_a_link_is_named_and_imported_on_request() {
    let daemon = TestDaemon::start();
    let cache = Cache::new(daemon.scratch());
    cache.add("ann/near", "config.json", b"{}");
    cache.add("ann/near", "model.safetensors", &safetensors());
    cache.add("ben/far", "config.json", b"[]");
    cache.add("ben/far", "model.safetensors", &safetensors());
    let elsewhere = daemon.scratch().join("disk/moved");
    fs::create_dir_all(elsewhere.parent().unwrap()).unwrap();
    fs::rename(cache.repository("ben/far"), &elsewhere).unwrap();
    symlink("../disk/moved", cache.repository("ben/far")).unwrap();
    symlink("../nowhere", cache.repository("cat/gone")).unwrap();
    // Within the cache, a link needs no permission.
    symlink("models--ann--near", cache.repository("ann/alias")).unwrap();
    let listed = cache.import(&daemon, &["--list"]).succeeds().json();
    let expected = ["hf.co/ann/alias:latest", "hf.co/ann/near:latest", "hf.co/ben/far", "hf.co/cat/gone"];
    assert_eq!(names(&listed["models"]), expected, "{listed}");
    let failed = cache.import(&daemon, &[]).exits_with(1).json()["failed"].to_string();
    for text in ["models--ben--far: wrong link", "--follow", "nowhere"] {
        assert!(failed.contains(text), "{text}: {failed}");
    }
    // Nothing outside of the cache is deleted.
    cache.import(&daemon, &["--move", "hf.co/ben/far"]).exits_with(1);
    assert!(elsewhere.join("refs/main").exists());
    cache.import(&daemon, &["--follow", "hf.co/ben/far"]).succeeds();
    let blobd = daemon.command();
    let stored = blobd.line("ls ben/far --json").succeeds().json();
    assert_eq!(names(&stored["models"]), ["hf.co/ben/far:latest"]);
    blobd.line("rm hf.co/ben/far").succeeds();
    let from = format!("--from-hf={}", cache.repository("ben/far").display());
    blobd.run(["import", &from]).succeeds();
    let stored = blobd.line("ls ben/far --json").succeeds().json();
    assert_eq!(names(&stored["models"]), ["hf.co/ben/far:latest"]);
}
