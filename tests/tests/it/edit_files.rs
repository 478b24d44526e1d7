//! `blobd edit --file` and `--remove-file`: the small files of models that are folders.

use std::fs;
use std::path::Path;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

fn import(blobd: &Blobd, folder: &Path, name: &str) -> Json {
    let run = blobd.run(["import", folder.to_str().unwrap(), "--name", name, "--json"]).succeeds();
    run.json()["imported"][0].clone()
}

fn edit(blobd: &Blobd, words: &[&str]) -> Json {
    blobd.run(["edit", "--json"].iter().chain(words)).succeeds().json()
}

fn exported(blobd: &Blobd, name: &str, to: &Path) -> ModelFolder {
    blobd.run(["export", name, "-o", &format!("{}/", to.display())]).succeeds();
    ModelFolder::read(to)
}

fn digest(content: &[u8]) -> Json {
    json!(format!("sha256:{}", sha256(content)))
}

/// A binary file and one that is longer than other requests may be are among the edited ones.
fn edited_folder(blobd: &Blobd, scratch: &Path) {
    let mut files = ModelFolder::transformers(1);
    import(blobd, &files.write_to(scratch.join("m")), "m");
    let tokenizer = format!("{{\"text\": \"{}\"}}\n", "é\\n".repeat(1 << 19));
    let (local, binary) = (scratch.join("tokenizer"), scratch.join("binary"));
    fs::write(&local, &tokenizer).unwrap();
    fs::write(&binary, [0, 0xff, b'"']).unwrap();
    let from = |path: &str, local: &Path| format!("--file={path}=@{}", local.display());
    let words = [
        &from("tokenizer.json", &local),
        &from("tokenizer.model", &binary),
        "--file",
        "chat_template.jinja={{ a=b }}",
    ];
    let run = edit(blobd, &[&["m", "n", "--remove-file", "README.md"][..], &words].concat());
    let changed = |path: &str, from: Json, to: Json, size: usize| json!({"path": path, "from": from, "to": to, "size": size});
    let expected = [
        changed(
            "tokenizer.json",
            digest(&files.0["tokenizer.json"]),
            digest(tokenizer.as_bytes()),
            tokenizer.len(),
        ),
        changed("tokenizer.model", Json::Null, digest(&[0, 0xff, b'"']), 3),
        changed("chat_template.jinja", Json::Null, digest(b"{{ a=b }}"), 9),
        changed("README.md", digest(&files.0["README.md"]), Json::Null, 0),
    ];
    assert_eq!((&run["changed_files"], &run["changed"]), (&json!(expected), &json!([])));
    files.add("tokenizer.json", tokenizer);
    files.add("tokenizer.model", [0, 0xff, b'"']);
    files.add("chat_template.jinja", "{{ a=b }}");
    files.0.remove("README.md");
    assert!(exported(blobd, "n", &scratch.join("out")) == files);
    // The same folder from the disk is the same model.
    let imported = import(blobd, &files.write_to(scratch.join("same")), "same");
    assert_eq!((&imported["digest"], &imported["new_bytes"]), (&run["digest"], &json!(0)));
    blobd.line("rm m").succeeds();
    blobd.line("verify").succeeds();
    assert!(exported(blobd, "n", &scratch.join("again")) == files);
    let listed = blobd.line("ls n --json").succeeds().json();
    assert!(listed["models"][0]["origin"].as_str().unwrap().starts_with("edit m:latest@sha256:"), "{listed}");
}

#[test]
fn edited_files_are_those_of_the_folder_and_everything_else_is_shared() {
    let daemon = TestDaemon::start();
    edited_folder(&daemon.command(), daemon.scratch());
    check_blobs(daemon.root());
    let place = tmpfs_directory();
    edited_folder(&Blobd::at_root(&place.path().join("store")), place.path());
    check_blobs(&place.path().join("store"));
}

#[test]
fn dry_run_writes_nothing_and_a_replaced_model_can_be_restored() {
    let daemon = TestDaemon::start();
    let (blobd, blobs) = (daemon.command(), daemon.root().join("blobs"));
    let first = import(&blobd, &ModelFolder::transformers(1).write_to(daemon.scratch().join("m")), "m");
    let before = names(&blobs);
    let change = ["m", "m", "--file", "generation_config.json={}"];
    let plan = edit(&blobd, &[&change[..], &["--dry-run", "--force"]].concat());
    assert_eq!(
        (&plan["digest"], &plan["new_bytes"], &plan["dry_run"]),
        (&Json::Null, &json!(2), &json!(true))
    );
    assert_eq!((names(&blobs), staged(daemon.root()).len()), (before, 0));
    let text = blobd.run(["edit"].iter().chain(&change).chain(&["--dry-run", "--force"])).succeeds().text();
    assert!(text.contains("generation_config.json  added"), "{text}");
    blobd.run(["edit"].iter().chain(&change)).exits_with(4);
    let edited = edit(&blobd, &[&change[..], &["--force"]].concat());
    assert_ne!(edited["digest"], first["digest"]);
    assert_eq!(edited["displaced"][0]["digest"], first["digest"]);
    let again = edit(&blobd, &[&change[..], &["--force"]].concat());
    assert_eq!((&again["unchanged"], &again["digest"]), (&json!(true), &edited["digest"]));
    assert!(again.get("changed_files").is_none(), "{again}");
    blobd.line("undelete m --name old").succeeds();
    let listed = blobd.line("ls old --json").succeeds().json();
    assert_eq!(listed["models"][0]["digest"], first["digest"]);
    let note = edit(&blobd, &["old", "n", "--remove-file", "absent.txt"]);
    assert!(note["notes"][0].as_str().unwrap().contains("has no file \"absent.txt\""), "{note}");
    assert_eq!(note["digest"], first["digest"]);
}

#[test]
fn weights_their_index_and_wrong_paths_are_refused() {
    let daemon = TestDaemon::start();
    let mut folder = ModelFolder::transformers(1);
    folder.add("tokenizer/vocab.txt", "a\n");
    import(&daemon.command(), &folder.write_to(daemon.scratch().join("m")), "m");
    let gguf = ModelFile::dense(1).write_to(daemon.scratch(), "one.gguf");
    daemon.command().run(["import", gguf.to_str().unwrap(), "--name", "one"]).succeeds();
    let weights = format!("--file=new.txt=@{}", gguf.display());
    for (number, shard) in ModelFile::dense(1).shards(2).iter().enumerate() {
        fs::write(daemon.scratch().join(format!("two-0000{}-of-00002.gguf", number + 1)), shard.bytes())
            .unwrap();
    }
    let first = daemon.scratch().join("two-00001-of-00002.gguf");
    daemon.command().run(["import", first.to_str().unwrap(), "--name", "two"]).succeeds();
    let long = format!("--file={}=", "x".repeat(256));
    for (words, reason) in [
        (&["m", "--file=model-00001-of-00002.safetensors="][..], "a file of weights"),
        (&["m", "--remove-file=model-00001-of-00002.safetensors"], "a file of weights"),
        (&["m", "--file=other.GGUF="], "a file of weights"),
        (&["m", "--file=pytorch_model.bin="], "a file of weights"),
        (&["m", &weights], "the new content is a file of weights"),
        (&["m", "--file=model.safetensors.index.json={}"], "describes the files of weights"),
        (&["m", "--file=../x="], "wrong path"),
        (&["m", "--file=/etc/passwd="], "wrong path"),
        (&["m", "--file=a\nb="], "wrong path"),
        (&["m", &long], "wrong path"),
        (&["m", "--file=.profile="], "no part that begins with"),
        (&["m", "--file=Config.json="], "the same where case does not matter"),
        (&["m", "--file=tokenizer="], "have one path"),
        (&["m", "--file=config.json/x="], "have one path"),
        (&["m", "--file=a=1", "--file=a=2"], "two changes of this file"),
        (&["m", "--file=a"], "expected PATH=TEXT or PATH=@FILE"),
        (&["one", "--file=config.json={}"], "have no paths"),
        (&["two", "--file=config.json={}"], "is not a folder"),
    ] {
        let run = daemon.command().run(["edit", words[0], "x"].iter().chain(&words[1..]));
        let stderr = run.exits_with(2).stderr;
        assert!(stderr.contains(reason), "{words:?}: {stderr}");
    }
    daemon.command().run(["edit", "m", "x", "--file=a=@/absent"]).exits_with(3);
    let error = daemon.command().run(["edit", "m", "x", "--template", "t"]).exits_with(1).stderr;
    assert!(error.contains("--file chat_template.jinja=@FILE"), "{error}");
    assert_eq!(names(&daemon.root().join("manifests/registry.ollama.ai/library")), ["m", "one", "two"]);
}
