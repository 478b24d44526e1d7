//! Pulls of repositories at Hugging Face whose model is a folder: safetensors with its small files.

use std::fs;
use std::path::Path;

use blobd_store_format::git_id::GitId;
use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, check_empty};
use serde_json::{Value as Json, json};

use super::files::{COMMIT, Commands};

const REPOSITORY: &str = "org/folder";
const NAME: &str = "hf.co/org/folder";

/// A safetensors file of two tensors, the second of which has `last` in each byte.
fn safetensors(last: u8) -> Vec<u8> {
    const LENGTH: usize = 600_000;
    let header = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{LENGTH}],"data_offsets":[0,{LENGTH}]}},"b":{{"dtype":"U8","shape":[{LENGTH}],"data_offsets":[{LENGTH},{}]}}}}"#,
        2 * LENGTH
    );
    let first: Vec<u8> = (0..251).cycle().take(LENGTH).collect();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &first, &vec![last; LENGTH]].concat()
}

/// A model in two files, with the small files that such models have, and files that are not part of it.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let vocabulary = "word ".repeat(80_000).into_bytes();
    vec![
        (".gitattributes", b"*.safetensors filter=lfs".to_vec()),
        ("README.md", b"# A model".to_vec()),
        ("config.json", br#"{"architectures":["BertModel"],"model_type":"bert"}"#.to_vec()),
        ("model-00001-of-00002.safetensors", safetensors(1)),
        ("model-00002-of-00002.safetensors", safetensors(2)),
        ("onnx/model.onnx", b"onnx".to_vec()),
        ("pytorch_model.bin", b"\x80\x02pickle".to_vec()),
        ("tokenizer/vocab.txt", vocabulary),
    ]
}

const TAKEN: [&str; 5] = [
    "README.md",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer/vocab.txt",
];

fn publish(registry: &FakeRegistry, files: &[(&str, Vec<u8>)]) {
    let files: Vec<_> = files.iter().map(|(path, bytes)| (*path, bytes.as_slice())).collect();
    registry.add_folder(REPOSITORY, COMMIT, &files);
}

fn hub(files: &[(&str, Vec<u8>)]) -> (FakeRegistry, Commands) {
    let registry = FakeRegistry::start().unwrap();
    publish(&registry, files);
    let commands = Commands::with_hub(&registry);
    (registry, commands)
}

fn last_line(run: Run) -> Json {
    run.succeeds().json_lines().pop().unwrap()
}

fn paths(commands: &Commands, name: &str) -> Vec<String> {
    let shown = commands.run(&["show", name]).succeeds().json();
    let layers = &shown["layers"].as_array().unwrap()[1..];
    layers.iter().map(|layer| layer["name"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Exports a model as a folder and compares it with what the repository has.
fn check_export(commands: &Commands, name: &str, taken: &[&str], files: &[(&str, Vec<u8>)]) {
    let out = commands.root().with_file_name("exported");
    let _ = fs::remove_dir_all(&out);
    commands.run(&["export", name, "-o", &format!("{}/", out.display())]).succeeds();
    for (path, bytes) in files.iter().filter(|(path, _)| taken.contains(path)) {
        assert!(fs::read(out.join(path)).unwrap() == *bytes, "{path}");
    }
}

#[test]
fn repository_without_gguf_is_pulled_as_a_folder() {
    let (registry, commands) = hub(&files());
    let plan = commands.run(&["pull", NAME, "--dry-run"]).succeeds().json();
    let done = last_line(commands.run(&["pull", NAME]));
    for result in [&plan, &done] {
        assert_eq!(result["chosen"]["beside"], 3, "{result}");
        assert_eq!(result["chosen"]["files"].as_array().unwrap().len(), 2, "{result}");
        let note = result["chosen"]["notes"][0].as_str().unwrap();
        assert!(note.starts_with("onnx/model.onnx, pytorch_model.bin: left out: pickles"), "{result}");
    }
    assert_eq!(paths(&commands, NAME), TAKEN);
    check_export(&commands, NAME, &TAKEN, &files());
    assert_eq!(done["downloaded_bytes"], done["size"], "{done}");
    let before = registry.requests().len();
    let again = last_line(commands.run(&["pull", NAME]));
    assert_eq!((&again["unchanged"], &again["downloaded_bytes"]), (&json!(true), &json!(0)), "{again}");
    let requests = registry.requests();
    let files = requests[before..].iter().filter(|request| request.path.contains("/resolve/"));
    assert_eq!(files.count(), 0, "a second pull requests no file");
    check_blobs(&commands.root());
}

/// The files with an index in which this file has the tensors.
fn with_index(holder: &str, total_size: u64) -> Vec<(&'static str, Vec<u8>)> {
    let index =
        json!({ "metadata": { "total_size": total_size }, "weight_map": { "a": holder, "b": holder } });
    let mut files = files();
    files.retain(|(path, _)| *path != "model-00002-of-00002.safetensors");
    files[3].0 = "model.safetensors";
    files.push(("model.safetensors.index.json", index.to_string().into_bytes()));
    files
}

#[test]
fn index_that_contradicts_the_files_is_refused_as_in_an_import() {
    let (_registry, commands) = hub(&with_index("other.safetensors", 1_200_000));
    let error = commands.run(&["pull", NAME]).exits_with(1).error();
    assert!(error.message.contains("other.safetensors: missing"), "{}", error.message);
    check_empty(&commands.root());
    let (_registry, commands) = hub(&with_index("model.safetensors", 7));
    let done = last_line(commands.run(&["pull", NAME]));
    let notes = done["notes"].to_string();
    assert!(notes.contains("wrong total_size: expected 1200000 bytes"), "{notes}");
}

#[test]
fn repository_of_pickles_is_refused_with_the_option_that_stores_them() {
    let pickles = vec![("config.json", b"{}".to_vec()), ("pytorch_model.bin", b"\x80\x02pickle".to_vec())];
    let (_registry, commands) = hub(&pickles);
    let error = commands.run(&["pull", NAME]).exits_with(3).error();
    assert!(error.hint.unwrap().contains("`--include '*'` stores all its files whole"));
    let note = "pytorch_model.bin: stored whole, as a pattern includes it: no tensor of it is shared";
    let blobd = Blobd::at_root(&commands.root());
    let plan = ["pull", NAME, "--include", "*", "--dry-run", "--config", commands.config()];
    let plan = blobd.run(plan).succeeds().text();
    assert!(plan.contains(&format!("note: {note}\n")), "{plan}");
    let done = last_line(commands.run(&["pull", NAME, "--include", "*"]));
    assert_eq!((&done["status"], &done["chosen"]["notes"]), (&json!("success"), &json!([note])));
}

#[test]
fn changed_small_file_is_pulled_alone() {
    let (registry, commands) = hub(&files());
    commands.run(&["pull", NAME]).succeeds();
    let mut changed = files();
    changed[2].1 = br#"{"architectures":["BertModel"],"model_type":"new!"}"#.to_vec();
    assert_eq!(commands.run(&["outdated"]).succeeds().json()["models"][0]["status"], "current");
    publish(&registry, &changed);
    assert_eq!(commands.run(&["outdated"]).exits_with(1).json()["models"][0]["status"], "outdated");
    let done = last_line(commands.run(&["pull", NAME]));
    assert_eq!(done["downloaded_bytes"], changed[2].1.len() as u64, "{done}");
    check_export(&commands, NAME, &TAKEN, &changed);
    // Of a changed file of weights, the tensor that is stored is not downloaded again.
    changed[4].1 = safetensors(3);
    publish(&registry, &changed);
    let done = last_line(commands.run(&["pull", NAME]));
    assert!(done["reused_bytes"].as_u64().unwrap() >= 500_000, "{done}");
    check_export(&commands, NAME, &TAKEN, &changed);
}

#[test]
fn pulled_folder_is_the_model_that_an_import_of_the_files_makes() {
    let (_registry, commands) = hub(&files());
    let pulled = last_line(commands.run(&["pull", NAME]));
    let folder = commands.root().with_file_name("folder");
    for (path, bytes) in files() {
        let place = folder.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, bytes).unwrap();
    }
    let imported =
        commands.run(&["import", folder.to_str().unwrap(), "--name", "imported"]).succeeds().json();
    assert_eq!(imported["imported"][0]["digest"], pulled["digest"], "{imported}");
}

fn write(folder: &Path, files: &[(&str, Vec<u8>)]) {
    for (path, bytes) in files {
        let place = folder.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, bytes).unwrap();
    }
}

#[test]
fn files_of_another_model_are_not_downloaded_again() {
    let (registry, commands) = hub(&files());
    let folder = commands.root().with_file_name("folder");
    let mut own = files();
    own[2].1 = br#"{"architectures":["BertModel"],"model_type":"BERT"}"#.to_vec();
    write(&folder, &own);
    commands.run(&["import", folder.to_str().unwrap()]).succeeds();
    let done = last_line(commands.run(&["pull", NAME]));
    // The configuration has the size of the one that is stored, and another content.
    assert_eq!(done["downloaded_bytes"], files()[2].1.len() as u64, "{done}");
    let requests = registry.requests();
    assert_eq!(requests.iter().filter(|request| request.path.contains("/resolve/")).count(), 1);
    check_export(&commands, NAME, &TAKEN, &files());
}

#[test]
fn pull_updates_what_was_imported_from_the_hubs_cache() {
    let (registry, commands) = hub(&files());
    let cache = commands.root().with_file_name("hub");
    let repository = cache.join("models--org--folder");
    write(&repository.join("snapshots").join(COMMIT), &files());
    write(&repository, &[("refs/main", COMMIT.as_bytes().to_vec())]);
    commands.run(&["import", &format!("--from-hf={}", cache.display())]).succeeds();
    let mut changed = files();
    changed[2].1 = br#"{"architectures":["BertModel"],"model_type":"new!"}"#.to_vec();
    publish(&registry, &changed);
    let done = last_line(commands.run(&["pull", NAME]));
    assert!(done["displaced"] != Json::Null, "{done}");
    assert_eq!(done["downloaded_bytes"], changed[2].1.len() as u64, "{done}");
    check_export(&commands, NAME, &TAKEN, &changed);
    commands.run(&["undelete", NAME, "--force"]).succeeds();
    check_export(&commands, NAME, &TAKEN, &files());
}

#[test]
fn file_with_a_path_that_is_too_long_is_named() {
    let long = format!("{}/z.json", "d".repeat(255));
    let mut files: Vec<(&str, Vec<u8>)> = files();
    files.push((&long, b"{}".to_vec()));
    let (_registry, commands) = hub(&files);
    let error = commands.run(&["pull", NAME]).error();
    assert!(error.message.contains("/z.json"), "{error}");
    commands.run(&["pull", NAME, "--exclude", "ddd*/"]).succeeds();
}

#[test]
fn patterns_select_exactly_the_matching_files() {
    let (_registry, commands) = hub(&files());
    let done = last_line(commands.run(&[
        "pull",
        NAME,
        "--include",
        "*.onnx",
        "--include",
        "*.md",
        "--name",
        "onnx",
    ]));
    assert_eq!(done["chosen"]["beside"], 2, "{done}");
    assert_eq!(paths(&commands, "onnx"), ["README.md", "onnx/model.onnx"]);
    commands.run(&["pull", NAME, "--exclude", "tokenizer/", "--name", "short"]).succeeds();
    assert_eq!(paths(&commands, "short"), &TAKEN[..4]);
    let error = commands.run(&["pull", NAME, "--include", "*.txt", "--name", "none"]).exits_with(1).error();
    assert!(error.message.contains("no weights"), "{}", error.message);
    // What was chosen is followed.
    let again = commands.run(&["pull", "--all"]).succeeds();
    assert_eq!(paths(&commands, "onnx"), ["README.md", "onnx/model.onnx"], "{}", again.text());
}

#[test]
fn patterns_take_a_gguf_file_with_its_configuration_as_a_folder() {
    let files = [
        ("README.md", b"# A model".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("tiny-Q4_K_M.gguf", ModelFile::dense(1).bytes()),
        ("tiny-Q8_0.gguf", ModelFile::dense(2).bytes()),
    ];
    let (_registry, commands) = hub(&files);
    commands.run(&["pull", NAME, "--include", "*.json", "--include", "*Q4_K_M.gguf"]).succeeds();
    assert_eq!(paths(&commands, NAME), ["config.json", "tiny-Q4_K_M.gguf"]);
    let one = last_line(commands.run(&["pull", "hf.co/org/folder:Q4_K_M"]));
    assert_eq!(one["downloaded_bytes"], 0, "the same file: {one}");
    assert_eq!(one["chosen"]["files"].as_array().unwrap().len(), 1, "a tag means the file alone: {one}");
}

#[test]
fn revision_is_pulled_under_its_name() {
    let (registry, commands) = hub(&files());
    let earlier = "e".repeat(40);
    let old = [("config.json", b"{}".to_vec()), ("model.safetensors", safetensors(9))];
    let slices: Vec<_> = old.iter().map(|(path, bytes)| (*path, bytes.as_slice())).collect();
    registry.add_folder(REPOSITORY, &earlier, &slices);
    let refs = json!({
        "branches": [{ "name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT }],
        "tags": [{ "name": "v1.0", "ref": "refs/tags/v1.0", "targetCommit": earlier }],
        "pullRequests": [{ "name": "1", "ref": "refs/pr/1", "targetCommit": earlier }],
    });
    registry.add_page(&format!("/api/models/{REPOSITORY}/refs"), refs.to_string().as_bytes(), &[]);
    let done = last_line(commands.run(&["pull", NAME, "--revision", "refs/pr/1"]));
    assert_eq!(done["name"], "hf.co/org/folder:refs-pr-1");
    let requests = registry.requests();
    let lists_requests = requests.iter().any(|request| request.path.ends_with("/refs?include_prs=1"));
    assert!(lists_requests, "the hub lists pull requests only on request");
    let done = last_line(commands.run(&["pull", NAME, "--revision", "v1.0"]));
    assert_eq!(done["name"], "hf.co/org/folder:v1.0");
    assert_eq!(paths(&commands, "hf.co/org/folder:v1.0"), ["config.json", "model.safetensors"]);
    commands.run(&["pull", NAME]).succeeds();
    assert_eq!(paths(&commands, NAME), TAKEN);
    let error = commands.run(&["pull", NAME, "--revision", "v2"]).exits_with(3).error();
    assert!(error.message.contains("revision v2"), "{}", error.message);
}

/// The name of a repository that has both is the folder; a tag of a quantization is the GGUF file.
#[test]
fn tag_chooses_gguf_and_the_plain_name_the_folder() {
    let gguf = ModelFile::dense(1).bytes();
    let both = [files(), vec![("folder-Q4_K_M.gguf", gguf.clone())]].concat();
    let (_registry, commands) = hub(&both);
    let run = commands.run(&["pull", NAME, "--dry-run"]).succeeds();
    assert_eq!(run.json()["chosen"]["listed"], 3);
    commands.run(&["pull", NAME]).succeeds();
    assert_eq!(paths(&commands, NAME), TAKEN);
    let done = last_line(commands.run(&["pull", &format!("{NAME}:Q4_K_M")]));
    assert_eq!(done["chosen"]["files"][0]["path"], "folder-Q4_K_M.gguf", "{done}");
    assert!(commands.export("hf.co/org/folder:Q4_K_M") == gguf);
}

/// A repository with adapters or other loose weights beside GGUF models stays one of GGUF models.
#[test]
fn safetensors_beside_gguf_files_are_not_part_of_the_model() {
    let gguf = ModelFile::dense(1).bytes();
    let (_registry, commands) = hub(&[("a.safetensors", safetensors(1)), ("x-Q8_0.gguf", gguf)]);
    let done = last_line(commands.run(&["pull", NAME]));
    assert_eq!(done["chosen"]["files"][0]["path"], "x-Q8_0.gguf", "{done}");
}

#[test]
fn file_with_a_wrong_git_object_name_is_refused_and_nothing_is_kept() {
    let (registry, commands) = hub(&files());
    registry.add_fault("/config.json", 9, Fault::FlipByte(3));
    let error = commands.run(&["pull", NAME]).exits_with(1).error();
    assert!(
        error.message.contains("config.json: wrong content: expected the git object "),
        "{}",
        error.message
    );
    registry.clear_faults();
    // A single wrong transfer is repeated.
    registry.add_fault("/config.json", 1, Fault::FlipByte(3));
    commands.run(&["pull", NAME]).succeeds();
    check_export(&commands, NAME, &TAKEN, &files());
    commands.run(&["rm", NAME]).succeeds();
    check_empty(&commands.root());
}

/// Small repositories have weights in git itself.
#[test]
fn weights_in_git_are_verified_by_their_object_name_and_not_requested_again() {
    let weights = safetensors(1);
    let (registry, commands) = hub(&[("config.json", b"{}".to_vec())]);
    let entry = |path: &str, bytes: &[u8]| json!({ "type": "file", "oid": GitId::of(bytes).to_string(), "size": bytes.len(), "path": path });
    let tree = json!([entry("config.json", b"{}"), entry("model.safetensors", &weights)]).to_string();
    registry.add_page(&format!("/api/models/{REPOSITORY}/tree/{COMMIT}"), tree.as_bytes(), &[]);
    registry.add_page(&format!("/{REPOSITORY}/resolve/{COMMIT}/model.safetensors"), &weights, &[]);
    registry.add_fault("/model.safetensors", 9, Fault::FlipByte(1_000));
    let error = commands.run(&["pull", NAME]).exits_with(1).error();
    assert!(error.message.contains("expected the git object "), "{}", error.message);
    registry.clear_faults();
    commands.run(&["pull", NAME]).succeeds();
    check_export(&commands, NAME, &["config.json", "model.safetensors"], &[("model.safetensors", weights)]);
    let before = registry.requests().len();
    commands.run(&["pull", NAME]).succeeds();
    let requests = registry.requests();
    assert!(!requests[before..].iter().any(|request| request.path.contains("/resolve/")));
}

/// Part of a model is not a newer version of the model, whoever pulls it.
#[test]
fn part_of_a_model_does_not_replace_the_whole_model_unless_forced() {
    let (_registry, commands) = hub(&files());
    commands.run(&["pull", NAME]).succeeds();
    commands.run(&["pull", NAME, "--exclude", "*.md"]).exits_with(4);
    assert_eq!(paths(&commands, NAME), TAKEN);
    commands.run(&["pull", NAME, "--exclude", "*.md", "--force"]).succeeds();
    assert_eq!(paths(&commands, NAME), &TAKEN[1..]);
    for arguments in [
        ["pull", "hf.co/org/folder:Q4_K_M", "--include", "*"],
        ["pull", "hf.co/org/folder/a.gguf", "--revision", "v1"],
    ] {
        let error = commands.run(&arguments).exits_with(2).error();
        assert!(error.message.contains("only for the name of one without a tag"), "{}", error.message);
    }
}

#[test]
fn invalid_paths_in_a_repository_are_reported() {
    let twins = [
        ("model.safetensors", safetensors(1)),
        ("README.md", b"# A".to_vec()),
        ("readme.md", b"# B".to_vec()),
    ];
    let (_registry, commands) = hub(&twins);
    let error = commands.run(&["pull", NAME]).exits_with(1).error();
    assert!(error.message.contains("README.md and readme.md"), "{}", error.message);
    assert!(error.hint.unwrap().contains("--exclude"));
    commands.run(&["pull", NAME, "--exclude", "readme.*", "--name", "one"]).succeeds();
}

#[test]
fn missing_shard_is_named_before_anything_is_downloaded() {
    let mut files = files();
    files.remove(4);
    let (registry, commands) = hub(&files);
    let error = commands.run(&["pull", NAME]).exits_with(1).error();
    assert!(error.message.contains("model-00002-of-00002.safetensors"), "{}", error.message);
    assert_eq!(registry.bytes_served(), 0);
}
