//! `blobd import` of folders.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::{ModelFolder, safetensors};
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_blobs, check_empty};
use blobd_tests::temp_dirs::tmpfs_directory;
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::{Value as Json, json};

fn import(blobd: &Blobd, path: &Path, more: &[&str]) -> Json {
    let run = blobd.run(["import", path.to_str().unwrap(), "--json"].iter().chain(more)).succeeds();
    run.json()["imported"][0].clone()
}

fn exported(blobd: &Blobd, name: &str, to: &Path) -> ModelFolder {
    blobd.run(["export", name, "-o", &format!("{}/", to.display())]).succeeds();
    ModelFolder::read(to)
}

fn round_trip(blobd: &Blobd, scratch: &Path) {
    let mut files = ModelFolder::transformers(1);
    files.add("tokenizer/vocab.txt", "a\nb\n");
    let folder = files.write_to(scratch.join("Tiny-Llama"));
    // Neither is a file of the model.
    fs::write(folder.join(".gitattributes"), "*.safetensors filter=lfs").unwrap();
    fs::write(folder.join("pytorch_model.bin"), "a pickle").unwrap();
    let imported = import(blobd, &folder, &[]);
    assert_eq!((&imported["name"], &imported["file_count"]), (&json!("Tiny-Llama:latest"), &json!(7)));
    assert!(exported(blobd, "tiny-llama", &scratch.join("out")) == files);
    blobd.line("verify").succeeds();
    let again = import(blobd, &folder, &[]);
    assert_eq!((&again["unchanged"], &again["new_bytes"]), (&json!(true), &json!(0)));
    assert_eq!(again["digest"], imported["digest"]);
}

#[test]
fn folder_is_one_model_and_is_exported_bit_for_bit() {
    let daemon = TestDaemon::start();
    round_trip(&daemon.command(), daemon.scratch());
    check_blobs(daemon.root());
    let place = tmpfs_directory();
    round_trip(&Blobd::at_root(&place.path().join("store")), place.path());
    check_blobs(&place.path().join("store"));
}

#[test]
fn folders_that_share_tensors_store_them_once() {
    let daemon = TestDaemon::start();
    let folder =
        |seed: u64| ModelFolder::transformers(seed).write_to(daemon.scratch().join(format!("m{seed}")));
    let (first, second) = (folder(1), folder(2));
    import(&daemon.command(), &first, &[]);
    let imported = import(&daemon.command(), &second, &[]);
    // The tensor `shared.weight`, the configuration and the README.
    assert!(imported["reused_bytes"].as_u64().unwrap() > 2 * 128 * 64, "{imported}");
    // The same tensors in one file instead of shards.
    let mut whole = ModelFolder::default();
    let names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"];
    whole.add("model.safetensors", safetensors(&names.map(|name| (1, name))));
    whole.add("config.json", "{}");
    let imported = import(&daemon.command(), &whole.write_to(daemon.scratch().join("whole")), &[]);
    assert!(imported["new_bytes"].as_u64().unwrap() < 2 * 128 * 64, "{imported}");
}

/// Flux's files have the extension `.sft`.
#[test]
fn files_of_safetensors_with_the_other_extension_are_split_and_are_a_model_alone() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let (mut usual, mut flux) = (ModelFolder::default(), ModelFolder::default());
    usual.add("ae.safetensors", safetensors(&[(1, "decoder.weight"), (1, "encoder.weight")]));
    flux.add("ae.sft", safetensors(&[(2, "decoder.weight"), (1, "encoder.weight")]));
    flux.add("notes.txt", "a note");
    let _ = import(&blobd, &usual.write_to(daemon.scratch().join("usual")), &[]);
    let folder = flux.write_to(daemon.scratch().join("flux"));
    let listed = blobd.run(["import", folder.to_str().unwrap(), "--list"]).succeeds().text();
    assert!(listed.contains("split into tensors"), "{listed}");
    let imported = import(&blobd, &folder, &[]);
    assert!(imported["reused_bytes"].as_u64().unwrap() >= 128 * 64 * 2, "{imported}");
    assert!(exported(&blobd, "flux", &daemon.scratch().join("out")) == flux);
    let shown = blobd.run(["show", "flux", "--tensors"]).succeeds().text();
    assert!(shown.contains("encoder.weight"), "{shown}");
}

#[test]
fn list_says_what_would_be_imported_and_imports_nothing() {
    let place = tmpfs_directory();
    let blobd = Blobd::at_root(&place.path().join("store"));
    let folder = ModelFolder::transformers(1).write_to(place.path().join("tiny"));
    fs::write(folder.join("pytorch_model.bin"), "a pickle").unwrap();
    let list = |more: &[&str]| {
        let words = ["import", folder.to_str().unwrap(), "--list", "--json"];
        blobd.run(words.iter().chain(more)).succeeds().json()["models"][0].clone()
    };
    let listed = list(&[]);
    let paths = |listed: &Json, key: &str| -> Vec<String> {
        let files = listed[key].as_array().into_iter().flatten();
        files.map(|file| file["path"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((&listed["kind"], paths(&listed, "files").len()), (&json!("transformers"), 6));
    assert_eq!(paths(&listed, "left_out"), ["pytorch_model.bin"]);
    assert!(listed["left_out"][0]["reason"].as_str().unwrap().contains("pickle"));
    let without = list(&["--exclude", "README.md"]);
    assert_eq!(paths(&without, "left_out"), ["README.md", "pytorch_model.bin"]);
    let only = list(&["--include", "*.safetensors", "--include", "*.bin"]);
    let expected =
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"];
    assert_eq!(paths(&only, "files"), expected);
    let whole = "pytorch_model.bin: stored whole, as a pattern includes it: no tensor of it is shared";
    assert_eq!(only["faults"].as_array().unwrap().last(), Some(&json!({ "message": whole, "fatal": false })));
    let note =
        "pytorch_model.bin: left out: pickles and weights of other formats are stored only if a pattern";
    assert!(listed["faults"].to_string().contains(note), "{listed}");
    let text = blobd.run(["import", folder.to_str().unwrap(), "--list"]).succeeds().text();
    for words in ["transformers, 6 files", "config.json", "left out: 1 file", "a pickle"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!place.path().join("store").exists());
    // What a pattern includes is stored whole.
    let imported = import(&blobd, &folder, &["--include", "*"]);
    assert!(imported["notes"].to_string().contains(whole), "{imported}");
    assert_eq!(exported(&blobd, "tiny", &place.path().join("out")).0["pytorch_model.bin"], b"a pickle");
}

#[test]
fn only_safetensors_file_of_a_model_keeps_its_name() {
    let daemon = TestDaemon::start();
    let (blobd, scratch) = (daemon.command(), daemon.scratch());
    let mut files = ModelFolder::default();
    files.add("adapter/lora-v2.safetensors", safetensors(&[(3, "t")]));
    let folder = files.write_to(scratch.join("style"));
    let _ = import(&blobd, &folder, &[]);
    assert!(exported(&blobd, "style", &scratch.join("folder")) == files);
    let _ = import(&blobd, &folder.join("adapter/lora-v2.safetensors"), &["--name", "file"]);
    blobd.run(["export", "file", "-o", &format!("{}/", scratch.join("file").display())]).succeeds();
    assert!(scratch.join("file/lora-v2.safetensors").is_file());
}

#[test]
fn list_says_the_name_of_each_model_and_what_it_would_add() {
    let place = tmpfs_directory();
    let blobd = Blobd::at_root(&place.path().join("store"));
    let first = ModelFolder::transformers(1).write_to(place.path().join("a/tiny"));
    let second = ModelFolder::transformers(2).write_to(place.path().join("b/tiny"));
    let file = ModelFile::dense(1).write_to(place.path(), "chain-Q4_0.gguf");
    let paths = [&first, &second, &file].map(|path| path.to_str().unwrap());
    let words = |more: &[&'static str]| [&["import"], &paths[..], more].concat();
    let list = || blobd.run(words(&["--list", "--json"])).succeeds().json();
    let key = |listed: &Json, key: &str| -> Vec<Json> {
        listed["models"].as_array().unwrap().iter().map(|model| model[key].clone()).collect()
    };
    let listed = list();
    assert_eq!(key(&listed, "name"), ["tiny:latest", "tiny:latest", "chain:Q4_0"]);
    assert_eq!(key(&listed, "state"), ["new", "new", "new"]);
    assert_eq!(key(&listed, "max_new_bytes"), key(&listed, "size"));
    let note = "an earlier model of this list has this name: unless both have the same content, this one gets a name \
                with its folder or its ID";
    assert_eq!(key(&listed, "notes"), [json!(null), json!([note]), json!(null)]);
    let sum = |values: Vec<Json>| values.iter().map(|value| value.as_u64().unwrap()).sum::<u64>();
    for total in ["read_bytes", "max_new_bytes"] {
        assert_eq!(listed[total].as_u64().unwrap(), sum(key(&listed, "size")), "{total}");
    }
    let text = blobd.run(words(&["--list"])).succeeds().text();
    for line in ["\nnew: becomes chain:Q4_0, adds at most ", "\n3 new models: would read "] {
        assert!(text.contains(line), "{text}");
    }
    // A copy of a file by a hard link takes no more space.
    fs::hard_link(&file, place.path().join("copy-Q4_0.gguf")).unwrap();
    let linked = place.path().join("copy-Q4_0.gguf");
    let both =
        blobd.run(["import", paths[2], linked.to_str().unwrap(), "--list", "--json"]).succeeds().json();
    assert_eq!(
        (&both["models"][1]["max_new_bytes"], &both["models"][1]["shared_bytes"]),
        (&json!(0), &both["models"][1]["size"])
    );
    assert!(!place.path().join("store").exists());
    // Files that have changed just before they are listed are read again.
    std::thread::sleep(std::time::Duration::from_millis(150));
    let imported = blobd.run(words(&["--json"])).succeeds().json();
    let names: Vec<Json> =
        imported["imported"].as_array().unwrap().iter().map(|model| model["name"].clone()).collect();
    assert_eq!(names, ["tiny:latest", "b-tiny:latest", "chain:Q4_0"]);
    let listed = list();
    assert_eq!((key(&listed, "name"), key(&listed, "state")), (names, vec![json!("stored"); 3]));
    assert_eq!((&listed["max_new_bytes"], &listed["read_bytes"]), (&json!(0), &json!(0)));
    let text = blobd.run(words(&["--list"])).succeeds().text();
    assert!(text.contains("\nstored as b-tiny:latest\n"), "{text}");
    // Other content has the name that was asked for.
    let named = blobd.run(["import", paths[2], "--name", "tiny", "--list", "--json"]).succeeds().json();
    assert!(
        named["models"][0]["notes"][0].as_str().unwrap().ends_with("is refused without --force"),
        "{named}"
    );
}

/// Imports a folder that is refused, with the error's message.
#[test]
fn folder_of_folders_has_a_model_in_each_of_them_and_in_each_gguf_file() {
    let daemon = TestDaemon::start();
    let (blobd, models) = (daemon.command(), daemon.scratch().join("all-models"));
    let files = ModelFolder::transformers(1);
    files.write_to(models.join("qwen"));
    ModelFolder::transformers(2).write_to(models.join("org/llama"));
    let _ = ModelFile::dense(1).write_to(&models, "a-Q8_0.gguf");
    fs::write(models.join("stray.safetensors"), safetensors(&[(3, "t")])).unwrap();
    let path = models.to_str().unwrap();
    let listed = blobd.run(["import", path, "--list", "--json"]).succeeds().json();
    let left_out = &listed["models"][0]["left_out"];
    assert_eq!(left_out[0]["path"], "stray.safetensors", "{listed}");
    let imported = blobd.run(["import", path, "--json"]).succeeds().json();
    let imported = imported["imported"].as_array().unwrap();
    let names: Vec<&str> = imported.iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["llama:latest", "qwen:latest", "a:Q8_0"]);
    assert!(
        imported[0]["notes"][0].as_str().unwrap().starts_with("left out: stray.safetensors: "),
        "{imported:?}"
    );
    assert!(exported(&blobd, "qwen", &daemon.scratch().join("out")) == files);
    let run = blobd.run(["import", &format!("{path}/a-Q8_0.gguf"), "--include", "*"]).exits_with(2);
    assert!(run.stderr.contains("expected a folder"), "{}", run.stderr);
    check_blobs(daemon.root());
}

#[test]
fn gguf_files_beside_a_folder_model_are_named() {
    let daemon = TestDaemon::start();
    let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join("m"));
    let _ = ModelFile::dense(1).write_to(&folder, "a-Q8_0.gguf");
    let imported = import(&daemon.command(), &folder, &[]);
    assert!(imported["notes"][0].as_str().unwrap().starts_with("left out: a-Q8_0.gguf: "), "{imported}");
}

fn refused(daemon: &TestDaemon, folder: &Path) -> String {
    let run = daemon.command().run(["import", folder.to_str().unwrap(), "--json"]);
    let message = run.exits_with(1).error().message;
    check_empty(daemon.root());
    message
}

#[test]
fn invalid_folders_are_reported_before_anything_is_read() {
    let daemon = TestDaemon::start();
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let with = |name: &str, change: &dyn Fn(&mut ModelFolder)| {
        let mut files = ModelFolder::transformers(1);
        change(&mut files);
        refused(&daemon, &files.write_to(daemon.scratch().join(name)))
    };
    let message = with("missing", &|files| drop(files.0.remove(two)));
    assert!(message.contains(&format!("{two}: missing")), "{message}");
    let message = with("elsewhere", &|files| {
        let (first, second) = (files.0[one].clone(), files.0[two].clone());
        files.add(one, second);
        files.add(two, first);
    });
    assert!(message.contains("\"lm_head.weight\": expected in") && message.contains("found in"), "{message}");
    let message = with("out", &|files| {
        let index = r#"{"weight_map":{"a":"../../etc/passwd"}}"#;
        files.add("model.safetensors.index.json", index);
    });
    assert!(message.contains("../../etc/passwd"), "{message}");
    let message = with("no weights", &|files| files.0.retain(|path, _| !path.ends_with(".safetensors")));
    assert!(message.contains("no weights"), "{message}");
    let message = with("broken", &|files| files.add(two, files.0[two][..200].to_vec()));
    assert!(message.contains(two), "{message}");
    let message = refused(&daemon, &{
        let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join("twins"));
        fs::write(folder.join("Config.json"), "{}").unwrap();
        folder
    });
    assert!(message.contains("where case does not matter"), "{message}");
}

#[test]
fn nothing_outside_of_a_folder_is_read_and_special_files_are_named() {
    let daemon = TestDaemon::start();
    let secret = daemon.scratch().join("secret.safetensors");
    fs::write(&secret, safetensors(&[(9, "secret")])).unwrap();
    let hostile = |name: &str, place: &dyn Fn(&Path)| {
        let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join(name));
        place(&folder);
        (refused(&daemon, &folder), folder)
    };
    for (name, target, found) in [
        ("out", "../secret.safetensors", "a link that leads out of the folder"),
        ("absolute", secret.to_str().unwrap(), "a link that leads out of the folder"),
        ("loop", "x.safetensors", "a link that leads back to itself"),
        ("dangling", "nowhere", "a link to a file that does not exist"),
        ("folder", ".", "a link to a folder"),
    ] {
        let (message, folder) =
            hostile(name, &|folder| symlink(target, folder.join("x.safetensors")).unwrap());
        assert!(
            message.contains("x.safetensors: wrong kind of file") && message.contains(found),
            "{message}"
        );
        daemon.command().run(["import", folder.to_str().unwrap(), "--exclude", "x.*"]).succeeds();
        daemon.command().line(&format!("rm {name}")).succeeds();
    }
    let fifo = |folder: &Path| mkfifoat(CWD, folder.join("pipe"), Mode::from_raw_mode(0o600)).unwrap();
    assert!(hostile("fifo", &fifo).0.contains("pipe: wrong kind of file"));
    let newline = |folder: &Path| fs::write(folder.join("a\nb.json"), "{}").unwrap();
    let message = hostile("newline", &newline).0;
    assert!(message.contains(r"a\nb.json") && !message.contains('\n'), "{message:?}");
    let not_utf8 = |folder: &Path| {
        fs::write(folder.join(std::ffi::OsStr::from_bytes(b"a\xff.json")), "{}").unwrap();
    };
    assert!(hostile("bytes", &not_utf8).0.contains("not UTF-8"));
    // A link inside of the folder is the file that it leads to.
    let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join("inside"));
    symlink("config.json", folder.join("same.json")).unwrap();
    import(&daemon.command(), &folder, &[]);
    let out = exported(&daemon.command(), "inside", &daemon.scratch().join("out"));
    assert_eq!(out.0["same.json"], out.0["config.json"]);
}

#[test]
fn folder_with_too_many_files_is_refused() {
    let daemon = TestDaemon::start();
    let folder = ModelFolder::transformers(1).write_to(daemon.scratch().join("many"));
    fs::create_dir(folder.join("voices")).unwrap();
    for number in 0..4000 {
        fs::write(folder.join(format!("voices/{number}.txt")), "").unwrap();
    }
    let message = refused(&daemon, &folder);
    assert!(message.contains("too many files: expected at most 4000, found 4006"), "{message}");
    let imported = import(&daemon.command(), &folder, &["--exclude", "voices/1*"]);
    assert_eq!(imported["file_count"], 4006 - 1111);
}

#[test]
fn any_shard_finds_the_others_and_several_make_one_model() {
    let daemon = TestDaemon::start();
    let folder = daemon.scratch().join("shards");
    fs::create_dir(&folder).unwrap();
    let name = |number: usize| format!("big-Q8_0-{number:05}-of-00003.gguf");
    let shards: Vec<_> = (1..).zip(ModelFile::dense(3).shards(3)).collect();
    for (number, shard) in &shards {
        let _path = shard.write_to(&folder, &name(*number));
    }
    // Another model in the same folder.
    let _path = ModelFile::dense(4).write_to(&folder, "big-Q4_0.gguf");
    let imported = import(&daemon.command(), &folder.join(name(2)), &[]);
    assert_eq!((&imported["name"], &imported["file_count"]), (&json!("big:Q8_0"), &json!(3)));
    let out = exported(&daemon.command(), "big:Q8_0", &daemon.scratch().join("out"));
    assert!((1..=3).all(|number| out.0[&name(number)] == fs::read(folder.join(name(number))).unwrap()));
    let all = [1, 2, 3].map(|number| folder.join(name(number)).to_str().unwrap().to_owned());
    let words = ["import", "--name", "one", "--json"];
    let run = daemon.command().run(words.iter().copied().chain(all.iter().map(String::as_str))).succeeds();
    let listed = run.json()["imported"].clone();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["digest"]), (1, &imported["digest"]));
    daemon.command().line("rm one big:Q8_0").succeeds();
    fs::remove_file(folder.join(name(3))).unwrap();
    let message = refused(&daemon, &folder.join(name(1)));
    assert!(message.contains(&name(3)), "{message}");
    let _path = ModelFile::dense(5).shards(3)[1].write_to(&folder, &name(3));
    let message = refused(&daemon, &folder.join(name(1)));
    assert!(message.contains("both are shard 2"), "{message}");
}

#[test]
fn patterns_and_names_that_choose_nothing_are_noted() {
    let daemon = TestDaemon::start();
    let mut folder = ModelFolder::transformers(1);
    folder.add("-rf.json", "{}");
    folder.add("sub/x.json", "{}");
    let path = folder.write_to(daemon.scratch().join("model"));
    let import = |options: &[&str]| {
        let words = ["import", path.to_str().unwrap(), "--name", "m:1", "--json"];
        daemon.command().run(words.iter().chain(options))
    };
    let answer = import(&["--exclude", "sub"]).succeeds().json();
    let notes = answer["imported"][0]["notes"].to_string();
    assert!(notes.contains("matches no file; with a `/` at its end"), "{answer}");
    assert!(notes.contains("-rf.json") && notes.contains("rename it"), "{answer}");
    for options in [&["--include", "nothing*"][..], &["--include", "nothing*", "--list"]] {
        let error = import(options).error();
        assert_eq!(error.hint.as_deref(), Some("the patterns have to match at least one file with weights"));
    }
}
