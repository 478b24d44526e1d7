//! What programs say about the files of their models, and where they keep them.

use std::fs::File;
use std::time::{Duration, SystemTime};

use blobd_tests::command::run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use serde_json::{Value as Json, json};

use super::{Home, add_published, export, names};

/// The errors of an import, one text.
fn failures(run: &Json) -> String {
    let failed = run["failed"].as_array().unwrap().iter();
    failed.map(|failed| failed["error"]["message"].as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn sizes_and_digests_of_exo_jan_and_llama_cpp_are_compared() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let (weights, gguf) = (safetensors(&[(1, "t")]), ModelFile::dense(1).bytes());
    for (name, etag, size) in [
        ("right", format!("\"{}\"", sha256(&weights)), weights.len()),
        ("size", sha256(&weights), 5),
        ("digest", "0".repeat(64), weights.len()),
    ] {
        let place = format!(".local/share/exo/models/me--{name}");
        home.add(&format!("{place}/model.safetensors"), &weights);
        let note = json!({ "etag": etag, "size": size }).to_string();
        home.add(&format!("{place}/.exo/download_metadata/model.safetensors.json"), note);
    }
    for (name, size) in [("right", gguf.len()), ("size", 5)] {
        let place = format!("llamacpp/models/ann/jan-{name}");
        home.add(&format!(".local/share/Jan/data/{place}/model.gguf"), &gguf);
        let list = format!("model_path: {place}/model.gguf\nsize_bytes: {size}\n");
        home.add(&format!(".local/share/Jan/data/{place}/model.yml"), list);
    }
    for (tag, size, digest) in [
        ("Q4_0", gguf.len(), sha256(&gguf)),
        ("Q5_0", gguf.len() + 1, sha256(&gguf)),
        ("Q8_0", gguf.len(), "0".repeat(64)),
    ] {
        home.add(&format!(".cache/llama.cpp/cat_tiny_tiny-{tag}.gguf"), &gguf);
        let file =
            json!({ "rfilename": format!("tiny-{tag}.gguf"), "size": size, "lfs": { "sha256": digest } });
        let manifest = json!({ "ggufFile": file }).to_string();
        home.add(&format!(".cache/llama.cpp/manifest=cat=tiny={tag}.json"), manifest);
    }
    for (program, imported, wrong) in [
        ("exo", "exo/me/right:latest", ["expected 5 bytes by", "wrong digest"]),
        ("jan", "jan/ann/jan-right:latest", ["expected 5 bytes by", "model.yml"]),
        ("llama.cpp", "hf.co/cat/tiny:Q4_0", ["manifest=cat=tiny=Q5_0.json", "wrong digest"]),
    ] {
        let run = home.import(&daemon.command(), &["--from", program]).exits_with(1).json();
        assert_eq!(names(&run["imported"]), [imported], "{run}");
        let failed = failures(&run);
        assert!(wrong.iter().all(|text| failed.contains(text)), "{failed}");
    }
}

#[test]
fn digests_of_downloaded_files_are_compared_until_a_file_is_changed() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let path = home.add("tiny/sub/model.safetensors", safetensors(&[(1, "t")]));
    home.add("tiny/config.json", "{}");
    let note = |digest: &str| {
        let text = format!("{}\n{digest}\n99999999999.0\n", "0".repeat(40));
        home.add("tiny/.cache/huggingface/download/sub/model.safetensors.metadata", text);
    };
    let folder = home.0.join("tiny");
    let import = || daemon.command().run(["import", folder.to_str().unwrap(), "--json"]);
    note(&"0".repeat(64));
    let error = import().error();
    assert!(
        error.message.contains("sub/model.safetensors") && error.message.contains("wrong digest"),
        "{error}"
    );
    note(&sha256(&safetensors(&[(1, "t")])));
    import().succeeds();
    // Its user has changed it since: the library does not take it for the downloaded file either.
    note(&"0".repeat(64));
    let later = SystemTime::UNIX_EPOCH + Duration::from_secs(99_999_999_999 + 60);
    File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    import().succeeds();
}

#[test]
fn tags_of_both_folders_of_llmman_are_found() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let llmman = ".local/share/llmman";
    let blobs = format!("{llmman}/blobs/sha256");
    let [new, old, both] = [1, 2, 3].map(|seed| add_published(&home, &blobs, &blobs, seed));
    home.add(&format!("{llmman}/manifests-v2/docker.io/ai/new/1b"), new);
    home.add(&format!("{llmman}/manifests/docker.io/ai/old/1b"), &old);
    home.add(&format!("{llmman}/manifests-v2/docker.io/ai/both/1b"), both);
    home.add(&format!("{llmman}/manifests/docker.io/ai/both/1b"), old);
    let run = home.import(&daemon.command(), &["--from", "llmman"]).succeeds().json();
    let expected = ["docker.io/ai/both:1b", "docker.io/ai/new:1b", "docker.io/ai/old:1b"];
    assert_eq!(names(&run["imported"]), expected);
    for (name, seed) in expected.into_iter().zip([3, 1, 2]) {
        assert!(export(&daemon.command(), name) == ModelFile::dense(seed).bytes(), "{name}");
    }
}

#[test]
fn variables_of_the_hubs_libraries_are_expanded() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let hub = "x/hub/models--ann--tiny";
    home.add_model(&format!("{hub}/snapshots/{}/tiny-Q8_0.gguf", "0".repeat(40)), 1);
    home.add(&format!("{hub}/refs/main"), "0".repeat(40));
    for (variable, value) in [
        ("HF_HUB_CACHE", "$FOO/hub"),
        ("HUGGINGFACE_HUB_CACHE", "${FOO}/hub"),
        ("HF_HUB_CACHE", "~/x/hub"),
        ("HF_HOME", "$FOO"),
    ] {
        let mut command = daemon.command().command();
        for unset in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"] {
            command.env_remove(unset);
        }
        command.env("HOME", &home.0).env("FOO", home.0.join("x")).env(variable, value);
        let listed = run(command.args(["import", "--from-hf", "--list", "--json"])).succeeds().json();
        assert_eq!(names(&listed["models"]), ["hf.co/ann/tiny:Q8_0"], "{variable}={value}");
    }
}

#[test]
fn first_model_of_the_list_gets_a_name_that_two_programs_have() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    // The first takes the longest.
    let tensors: Vec<String> = (0..100).map(|number| format!("t{number}")).collect();
    let large: Vec<_> = tensors.iter().map(|tensor| (1, tensor.as_str())).collect();
    home.add(".cache/modelscope/models/ann--tiny/snapshots/master/model.safetensors", safetensors(&large));
    let lemonade = ".cache/huggingface/hub/modelscope--models--ann--tiny";
    home.add(&format!("{lemonade}/snapshots/abcdef/model.safetensors"), safetensors(&[(2, "t")]));
    home.add(&format!("{lemonade}/refs/main"), "abcdef");
    let name = "modelscope/ann/tiny:latest";
    let blobd = daemon.command();
    let listed = home.listed(&blobd, &["--from", "all"])["models"].clone();
    assert_eq!(names(&listed), [name, name]);
    let note = listed[1]["notes"][0].as_str().unwrap();
    assert!(note.starts_with("an earlier model of this list has this name"), "{listed}");
    let run = home.import(&blobd, &["--from", "all"]).succeeds().json();
    let imported = names(&run["imported"]);
    assert!(imported[0] == name && imported[1].starts_with(&format!("{name}-")), "{run}");
    assert_eq!(run["imported"][0]["tensor_count"], 100);
    let listed = home.listed(&blobd, &["--from", "all"])["models"].clone();
    assert_eq!(names(&listed), imported, "stored under these names");
    // What is there is kept: the other program's model, which is older, does not replace it.
    let run = home.import(&blobd, &["--from", "all"]).succeeds().json();
    assert_eq!(run["imported"], json!([]), "{run}");
}

#[test]
fn stores_and_models_that_cannot_be_imported_are_called_what_they_are() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    home.add(".ollama/models/manifests/registry.ollama.ai/library/tiny/latest", "{}");
    home.add_model(&format!(".ollama/models/blobs/sha256-{}", "0".repeat(64)), 1);
    let store = home.0.join(".ollama/models");
    let error = daemon.command().run(["import", store.to_str().unwrap(), "--json"]).error();
    let hint = format!("--from ollama={}", store.display());
    assert!(error.message.contains("the store of Ollama") && error.hint.unwrap().contains(&hint));
    home.add(&format!("hub/models--ann--old/snapshots/{}/pytorch_model.bin", "0".repeat(40)), "pickle");
    let mut command = daemon.command().command();
    command.args(["import", &format!("--from-hf={}", home.0.join("hub").display())]);
    let text = run(&mut command).succeeds().text();
    assert!(text.contains("hf.co/ann/old") && !text.contains("stored already"), "{text}");
}
