//! Which files of a repository at Hugging Face are pulled, and what is said about them.

use std::fs;

use blobd_store_format::descriptor::MediaType;
use blobd_tests::command::Run;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, check_empty};
use serde_json::{Value as Json, json};

use super::files::{COMMIT, Commands};
use super::{CONFIG, TEMPLATE};

/// Different files with these paths.
fn files(paths: &[&str]) -> Vec<(String, Vec<u8>)> {
    let file = |(seed, path): (u64, &&str)| ((*path).to_owned(), ModelFile::dense(seed).bytes());
    (1..).zip(paths).map(file).collect()
}

fn publish(registry: &FakeRegistry, repository: &str, files: &[(String, Vec<u8>)]) {
    let files: Vec<_> = files.iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice())).collect();
    registry.add_repository(repository, COMMIT, &files);
}

fn repository(paths: &[&str]) -> (FakeRegistry, Commands, Vec<(String, Vec<u8>)>) {
    let registry = FakeRegistry::start().unwrap();
    let files = files(paths);
    publish(&registry, "me/x-GGUF", &files);
    let commands = Commands::with_hub(&registry);
    (registry, commands, files)
}

/// The components and paths in a result.
fn chosen(result: &Json) -> Vec<(String, String)> {
    let files = result["chosen"]["files"].as_array().unwrap();
    let text = |value: &Json| value.as_str().unwrap().to_owned();
    files.iter().map(|file| (text(&file["component"]), text(&file["path"]))).collect()
}

fn last_line(run: Run) -> Json {
    run.succeeds().json_lines().pop().unwrap()
}

fn components(commands: &Commands, name: &str) -> Vec<String> {
    let shown = commands.run(&["show", name]).succeeds().json();
    // The first is the configuration.
    let layers = &shown["layers"].as_array().unwrap()[1..];
    layers
        .iter()
        .map(|layer| layer["media_type"].as_str().unwrap().rsplit('.').next().unwrap().to_owned())
        .collect()
}

#[test]
fn sidecars_are_never_chosen_as_the_model() {
    let (_registry, commands, files) =
        repository(&["imatrix_made.gguf", "mtp-zeta.gguf", "zeta-UD-IQ1_S.gguf"]);
    let done = last_line(commands.run(&["pull", "hf.co/me/x-GGUF", "--no-draft"]));
    assert_eq!(chosen(&done), [("model".into(), "zeta-UD-IQ1_S.gguf".into())]);
    assert!(commands.export("hf.co/me/x-GGUF") == files[2].1);
}

#[test]
fn files_that_are_not_gguf_are_refused_with_what_they_are() {
    let (registry, commands, files) = repository(&["mmproj-F16.gguf"]);
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    for (start, what) in [
        (&pointer[..], "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\x1f\x8b\x08\x00\x00", "a file compressed with gzip"),
        (b"PK\x03\x04\x00\x00", "a zip archive"),
        (br#"{"a": 1}"#, "a JSON document"),
        (b"tjgg\x03\x00\x00\x00", "an old ggml file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{]", "safetensors: wrong header"),
        (b"", "an empty file"),
    ] {
        let repository = [("x-Q8_0.gguf".to_owned(), start.to_vec())];
        publish(&registry, "me/x-GGUF", &repository);
        for source in ["hf.co/me/x-GGUF", "hf.co/me/x-GGUF/x-Q8_0.gguf"] {
            let error = commands.run(&["pull", source]).exits_with(1).error();
            assert!(error.message.contains(what), "{source}: {error}");
        }
        if !start.is_empty() {
            registry.add_model("me/x-GGUF:Q8_0", CONFIG, &[(MediaType::OLLAMA_MODEL, start)]).unwrap();
            let error = commands.run(&["pull", "hf.co/me/x-GGUF:Q8_0"]).exits_with(1).error();
            assert!(error.message.contains(what), "{error}");
        }
    }
    let components =
        [("x-Q8_0.gguf".to_owned(), files[0].1.clone()), ("mmproj-F16.gguf".to_owned(), pointer.to_vec())];
    publish(&registry, "me/x-GGUF", &components);
    let error = commands.run(&["pull", "hf.co/me/x-GGUF/x-Q8_0.gguf"]).exits_with(1).error();
    assert!(
        error.message.contains("mmproj-F16.gguf") && error.message.contains("a Git LFS pointer"),
        "{error}"
    );
    check_empty(&commands.root());
}

/// The hub's registry chooses by other rules.
#[test]
fn list_of_files_takes_precedence_over_the_registry() {
    let (registry, commands, files) =
        repository(&["Step-I-Compact.gguf", "Step-Compact.gguf", "imatrix.gguf"]);
    for (tag, wrong) in [("Compact", 0), ("latest", 2)] {
        let layers = [(MediaType::OLLAMA_MODEL, files[wrong].1.as_slice())];
        registry.add_model(&format!("me/x-GGUF:{tag}"), CONFIG, &layers).unwrap();
    }
    commands.run(&["pull", "hf.co/me/x-GGUF:Compact"]).succeeds();
    assert!(commands.export("hf.co/me/x-GGUF:Compact") == files[1].1);
    let error = commands.run(&["pull", "hf.co/me/x-GGUF"]).exits_with(2).error();
    assert!(error.message.contains("Step-I-Compact.gguf, Step-Compact.gguf"), "{error}");
}

#[test]
fn manifest_of_the_chosen_file_is_used_and_completed() {
    let paths = ["x-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-x.gguf", "mmproj-BF16.gguf"];
    let (registry, commands, files) = repository(&paths);
    let layers = [
        (MediaType::OLLAMA_MODEL, files[0].1.as_slice()),
        (MediaType::OLLAMA_PROJECTOR, files[3].1.as_slice()),
        (TEMPLATE, b"{{ .Prompt }}"),
    ];
    let manifest = registry.add_model("me/x-GGUF:Q4_K_M", CONFIG, &layers).unwrap();
    let pull = |options: &[&str]| {
        let command = ["pull", "hf.co/me/x-GGUF:Q4_K_M"];
        last_line(commands.run(&[&command, options].concat()))
    };
    let done = pull(&[]);
    let expected = [("model", paths[0]), ("projector", paths[1]), ("draft", paths[2])];
    assert_eq!(chosen(&done), expected.map(|(component, path)| (component.to_owned(), path.to_owned())));
    assert_eq!(done["chosen"]["listed"], 4);
    let name = "hf.co/me/x-GGUF:Q4_K_M";
    assert_eq!(components(&commands, name), ["model", "template", "projector", "draft"]);
    assert!(commands.export(name) == files[0].1);
    check_blobs(&commands.root());
    // What the registry has is what is wanted: its manifest is taken as it is.
    let done = pull(&["--projector", "BF16", "--no-draft"]);
    assert_eq!(done["digest"], manifest.digest().to_string());
    let done = pull(&["--no-projector", "--no-draft"]);
    assert_eq!(chosen(&done).len(), 1);
    assert_eq!(components(&commands, name), ["model", "template"]);
}

#[test]
fn ambiguous_tag_is_refused_with_the_candidates_and_a_way_to_name_one() {
    let paths = ["gemma-E2B-Q8_0.gguf", "gemma-E4B-Q8_0.gguf", "gemma-E2B-Q4_K_M.gguf"];
    let (registry, commands, files) = repository(&paths);
    registry.add_model("me/x-GGUF:Q8_0", CONFIG, &[(MediaType::OLLAMA_MODEL, &files[0].1)]).unwrap();
    let error = commands.run(&["pull", "hf.co/me/x-GGUF:Q8_0"]).exits_with(2).error();
    assert_eq!(
        error.message,
        "model hf.co/me/x-GGUF:Q8_0: means several models at hf.co: gemma-E2B-Q8_0.gguf, gemma-E4B-Q8_0.gguf"
    );
    assert!(error.hint.unwrap().contains("hf.co/me/x-GGUF/gemma-E2B-Q8_0.gguf"));
    check_empty(&commands.root());
    commands.run(&["pull", "hf.co/me/x-GGUF:E4B-Q8_0"]).succeeds();
    assert!(commands.export("hf.co/me/x-GGUF:E4B-Q8_0") == files[1].1);
    commands.run(&["pull", "hf.co/me/x-GGUF/gemma-E2B-Q8_0.gguf", "--name", "e2b"]).succeeds();
    assert!(commands.export("e2b") == files[0].1);
}

#[test]
fn folder_that_names_the_quantization_is_found() {
    let (_registry, commands, files) = repository(&["Q4_K_M/model.gguf", "Q8_0/model.gguf"]);
    commands.run(&["pull", "hf.co/me/x-GGUF:q8_0"]).succeeds();
    assert!(commands.export("hf.co/me/x-GGUF:q8_0") == files[1].1);
    let error = commands.run(&["pull", "hf.co/me/x-GGUF:Q6_K"]).exits_with(3).error();
    assert!(error.message.ends_with("the nearest names are Q8_0, Q4_K_M"), "{error}");
}

#[test]
fn one_projector_of_several_is_pulled_by_tag_and_by_link() {
    let paths = ["x-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"];
    let (_registry, commands, _files) = repository(&paths);
    for (source, name) in [
        ("hf.co/me/x-GGUF:Q4_K_M", "by-tag"),
        ("hf.co/me/x-GGUF/x-Q4_K_M.gguf", "by-link"),
        ("https://huggingface.co/me/x-GGUF/resolve/main/x-Q4_K_M.gguf?download=true", "by-url"),
    ] {
        let plan = commands.run(&["pull", source, "--name", name, "--dry-run"]).succeeds().json();
        let done = last_line(commands.run(&["pull", source, "--name", name]));
        let expected =
            [("model".to_owned(), paths[0].to_owned()), ("projector".to_owned(), paths[2].to_owned())];
        assert_eq!((chosen(&plan), chosen(&done)), (expected.to_vec(), expected.to_vec()), "{source}");
        assert_eq!(plan["files"].as_array().unwrap().len(), 2, "{plan}");
        assert_eq!(components(&commands, name), ["model", "projector"], "{source}");
    }
    let text = blobd_tests::command::Blobd::at_root(&commands.root())
        .run(["pull", "hf.co/me/x-GGUF:Q4_K_M", "--config", commands.config()])
        .succeeds()
        .text();
    assert!(text.contains("chose x-Q4_K_M.gguf with mmproj-F16.gguf of 4 GGUF files\n"), "{text}");
    let error = commands.run(&["pull", "hf.co/me/x-GGUF", "--projector", "Q8_0"]).exits_with(3).error();
    assert!(error.message.contains("mmproj-BF16.gguf, mmproj-F16.gguf, mmproj-F32.gguf"), "{error}");
}

#[test]
fn updates_choose_the_components_that_were_chosen_first() {
    let (registry, commands, mut files) =
        repository(&["x-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"]);
    for (name, options) in [
        ("none", &["--no-projector", "--no-draft"][..]),
        ("named", &["--projector", "mmproj-BF16.gguf"]),
        ("nearest", &[]),
    ] {
        let command = ["pull", "hf.co/me/x-GGUF/x-Q4_K_M.gguf", "--name", name];
        commands.run(&[&command, options].concat()).succeeds();
    }
    let origin = |number: usize| commands.models()[number]["origin"].as_str().unwrap().to_owned();
    assert!(origin(0).ends_with("/x-Q4_K_M.gguf --projector mmproj-BF16.gguf"), "{}", origin(0));
    assert!(origin(2).ends_with("/x-Q4_K_M.gguf --no-projector --no-draft"), "{}", origin(2));
    // Only what follows a projector is outdated by a new one, and an update changes nothing else.
    files[1].1 = ModelFile::dense(9).bytes();
    publish(&registry, "me/x-GGUF", &files);
    let report = commands.run(&["outdated"]).exits_with(1).json();
    let status: Vec<_> =
        report["models"].as_array().unwrap().iter().map(|model| (&model["name"], &model["status"])).collect();
    let expected = [("named:latest", "current"), ("nearest:latest", "outdated"), ("none:latest", "current")];
    assert_eq!(json!(status), json!(expected));
    commands.run(&["pull", "--all"]).succeeds();
    assert_eq!(components(&commands, "none"), ["model"]);
    assert_eq!(components(&commands, "named"), ["model", "projector"]);
    assert_eq!(commands.run(&["outdated"]).succeeds().json()["models"][2]["status"], "current");
}

#[test]
fn damaged_component_is_fetched_again_from_the_repository() {
    let (registry, commands, files) = repository(&["x-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-x.gguf"]);
    registry.add_model("me/x-GGUF:Q4_K_M", CONFIG, &[(MediaType::OLLAMA_MODEL, &files[0].1)]).unwrap();
    for source in ["hf.co/me/x-GGUF:Q4_K_M", "hf.co/me/x-GGUF/x-Q4_K_M.gguf"] {
        commands.run(&["pull", source, "--name", "m", "--force"]).succeeds();
        for (number, component) in [(1, "projector"), (2, "draft")] {
            let shown = commands.run(&["show", "m"]).succeeds().json();
            let tensors = shown["tensors"].as_array().unwrap().iter();
            // Each of the files has one of this name.
            let tensor = tensors.filter(|tensor| tensor["name"] == "output.weight").nth(number).unwrap();
            let blob =
                commands.root().join("blobs").join(tensor["digest"].as_str().unwrap().replace(':', "-"));
            let bytes = fs::read(&blob).unwrap();
            fs::remove_file(&blob).unwrap();
            fs::write(&blob, vec![0; bytes.len()]).unwrap();
            commands.run(&["verify", "m", "--repair"]);
            assert!(fs::read(&blob).unwrap() == bytes, "{source}: {component}");
        }
    }
}

#[test]
fn links_with_percent_escapes_lead_to_their_files() {
    let paths = ["my dir/a-Q4_K_M.gguf", "100%25/é[1]#+.gguf"];
    let (_registry, commands, files) = repository(&paths);
    for (link, number) in [
        ("https://huggingface.co/me/x-GGUF/resolve/main/my%20dir/a-Q4_K_M.gguf", 0),
        ("https://huggingface.co/me/x-GGUF/blob/main/my%20dir%2Fa-Q4_K_M.gguf", 0),
        ("hf.co/me/x-GGUF/my dir/a-Q4_K_M.gguf", 0),
        ("https://huggingface.co/me/x-GGUF/resolve/main/100%2525/%C3%A9%5B1%5D%23%2B.gguf", 1),
        ("hf.co/me/x-GGUF/100%2525/é[1]%23+.gguf", 1),
    ] {
        commands.run(&["pull", link, "--name", "m", "--force"]).succeeds();
        assert!(commands.export("m") == files[number].1, "{link}");
        // The origin that is recorded leads there too.
        let origin = commands.models()[0]["origin"].as_str().unwrap().to_owned();
        commands.run(&["pull", &origin, "--name", "m"]).succeeds();
    }
    let error = commands.run(&["pull", "hf.co/me/x-GGUF/%2e%2e/a.gguf"]).exits_with(2).error();
    assert!(error.message.contains("../a.gguf"), "{error}");
}

#[test]
fn missing_shards_are_named_by_their_numbers() {
    let (registry, commands, files) =
        repository(&["m-Q4_K_M-00001-of-00003.gguf", "m-Q4_K_M-00003-of-00003.gguf"]);
    for (path, bytes) in &files {
        registry.add_page(&format!("/files/{path}"), bytes, &[]);
    }
    let url = |number: usize| format!("{}/files/m-Q4_K_M-{number:05}-of-00003.gguf", registry.url());
    for source in [
        "hf.co/me/x-GGUF:Q4_K_M".to_owned(),
        "hf.co/me/x-GGUF".to_owned(),
        "hf.co/me/x-GGUF/m-Q4_K_M-00001-of-00003.gguf".to_owned(),
        "hf.co/me/x-GGUF/m-Q4_K_M-00002-of-00003.gguf".to_owned(),
        url(1),
        url(2),
        url(3),
    ] {
        let error = commands.run(&["pull", &source]).exits_with(3).error();
        let expected = "shard 2 of 3 is missing at ";
        assert!(
            error.message.contains(expected) && error.message.ends_with("m-Q4_K_M-00002-of-00003.gguf"),
            "{error}"
        );
    }
    let absent = format!("{}/files/absent-00001-of-00002.gguf", registry.url());
    let error = commands.run(&["pull", &absent]).exits_with(3).error();
    assert!(error.message.contains("absent-00002-of-00002.gguf: not found"), "{error}");
    check_empty(&commands.root());
}

#[test]
fn components_are_chosen_from_repositories_only() {
    let registry = FakeRegistry::start().unwrap();
    let commands = Commands::with("");
    for option in [&["--no-projector"][..], &["--no-draft"], &["--projector", "F16"]] {
        let source = registry.name("me/x:1");
        let error = commands.run(&[&["pull", source.as_str()], option].concat()).exits_with(2).error();
        assert!(error.message.contains("only from repositories at Hugging Face"), "{error}");
    }
    commands.run(&["pull", "hf.co/me/x", "--no-projector", "--projector", "F16"]).exits_with(2);
}

/// Nothing but the registry's own API is there, as at a mirror of it.
#[test]
fn model_of_a_registry_without_lists_is_pulled_as_it_is() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(1).bytes();
    let manifest = registry.add_model("me/x:Q4_K_M", CONFIG, &[(MediaType::OLLAMA_MODEL, &weights)]).unwrap();
    let commands = Commands::with_hub(&registry);
    let done = last_line(commands.run(&["pull", "hf.co/me/x:Q4_K_M"]));
    assert_eq!((&done["digest"], &done["chosen"]), (&json!(manifest.digest()), &Json::Null));
    commands.run(&["pull", "hf.co/me/x:Q4_K_M", "--no-draft"]).exits_with(2);
}
