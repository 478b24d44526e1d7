//! The interface for scripts: the output of `--json`, exit codes, standard output and standard error.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::process::Stdio;

use blobd_tests::command;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::check_empty;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value as Json;

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = ModelFile::stacked_experts(1, 4).write_to(daemon.scratch(), "moe-F16.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon
}

fn keys(json: &Json) -> BTreeSet<&str> {
    json.as_object().unwrap_or_else(|| panic!("{json}")).keys().map(String::as_str).collect()
}

/// Asserts that every documented key exists.
fn check_keys(json: &Json, promised: &[&str]) {
    let missing: Vec<_> = promised.iter().filter(|key| !keys(json).contains(*key)).collect();
    assert!(missing.is_empty(), "{missing:?} in {json}");
}

#[test]
fn json_of_every_command_has_the_promised_keys() {
    let daemon = daemon();
    let _reader = Reader::open(&daemon.socket(), "moe:F16");
    let json = |line: &str| daemon.command().line(line).succeeds().json();
    check_keys(&json("ls --json")["models"][0], &["name", "digest", "size", "modified", "pinned", "origin"]);
    let shown = json("show moe:F16 --json");
    let promised =
        ["name", "digest", "architecture", "parameters", "quantization", "metadata", "layers", "tensors"];
    check_keys(&shown, &promised);
    check_keys(&shown["layers"][0], &["media_type", "digest", "size", "stored"]);
    let tensors = shown["tensors"].as_array().unwrap();
    for tensor in tensors {
        check_keys(tensor, &["name", "type", "shape", "digest", "offset", "size"]);
    }
    let stack = tensors.iter().find(|tensor| tensor["name"] == "blk.0.ffn_up_exps.weight").unwrap();
    assert_eq!(stack["experts"], serde_json::json!({ "count": 4, "stride": 1024 }));
    assert_eq!(stack["shape"], serde_json::json!([32, 16, 4]), "the fastest dimension first");
    let usage = json("df --json");
    let sums = [
        "logical_bytes",
        "physical_bytes",
        "saved_bytes",
        "reclaimable_bytes",
        "partial_bytes",
        "free_bytes",
        "models",
    ];
    check_keys(&usage, &sums);
    check_keys(
        &usage["models"][0],
        &["name", "logical_bytes", "unique_bytes", "shared_bytes", "last_opened"],
    );
    assert!(usage["models"][0]["last_opened"].is_string());
    let session = &json("ps --json")["sessions"][0];
    check_keys(session, &["pid", "uid", "user", "command", "model", "since", "bytes_mapped"]);
    let dry_run = json("gc --dry-run --json");
    check_keys(&dry_run, &["dry_run", "deleted", "freed_bytes"]);
    let removed = json("rm moe:F16 --json");
    check_keys(&removed, &["removed", "freed_bytes", "kept"]);
    check_keys(&removed["kept"][0], &["bytes", "by"]);
}

#[test]
fn json_of_a_collection_names_deleted_items_with_reasons() {
    let daemon = daemon();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon
        .command()
        .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), "removed".as_ref()])
        .succeeds();
    daemon.command().line("rm removed --keep 0s").succeeds();
    let report = daemon.command().line("gc --json").succeeds().json();
    let deleted = report["deleted"].as_array().unwrap();
    assert!(!deleted.is_empty());
    for item in deleted {
        check_keys(item, &["digest", "size", "reason"]);
        assert!(item["digest"].as_str().unwrap().starts_with("sha256:"));
    }
    let sum: u64 = deleted.iter().map(|item| item["size"].as_u64().unwrap()).sum();
    assert_eq!(report["freed_bytes"], sum);
}

#[test]
fn errors_are_json_on_standard_error_and_nothing_is_on_standard_output() {
    let daemon = daemon();
    for (line, code, name) in [
        ("show nobody --stored --json", 3, "not_found"),
        ("show http://127.0.0.1:1/a/b --json", 3, "not_found"),
        ("rm nobody --json", 3, "not_found"),
        ("tag nobody x --json", 3, "not_found"),
        ("export nobody --json", 3, "not_found"),
        ("export moe:F16 --component projector --json", 3, "not_found"),
        ("import /nonexistent.gguf --json", 3, "not_found"),
        ("import /etc/passwd --json", 1, "invalid_input"),
        ("import /dev/null --json", 2, "invalid_request"),
        ("pull http://127.0.0.1:1/a/b --json", 1, "upstream"),
    ] {
        let run = daemon.command().line(line).exits_with(code);
        let error: Json =
            serde_json::from_str(run.stderr.trim()).unwrap_or_else(|e| panic!("{line}: {e}: {}", run.stderr));
        assert_eq!(error["error"]["code"], name, "{line}");
        assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{line}");
        let documents = run.text();
        assert!(!documents.contains("error") || line.starts_with("pull"), "{line}: {documents}");
    }
}

#[test]
fn names_that_could_escape_the_store_directory_are_usage_errors() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let import = ["import", path.to_str().unwrap(), "--name"];
    let long = "x".repeat(256);
    for name in [
        "..",
        "../x",
        "a/../b",
        "a/b/../c",
        "../../../../etc/passwd",
        "/etc/passwd",
        ".hidden",
        "a:..",
        "a:.x",
        "a:b/c",
        "",
        ":",
        "a:",
        "-a",
        "a b",
        "a\nb",
        "a\u{1b}[31m",
        "ä",
        "a/b/c/d/e/f/..",
        "http://../a/b",
        "a@sha256:00",
        "a@md5:d41d8cd98f00b204e9800998ecf8427e",
        long.as_str(),
        "registry/ns/m\u{0}del",
        "a%2fb",
        "a\\b",
    ] {
        if name.contains('\0') {
            continue; // no argument can have it
        }
        let run = daemon.command().run(import.iter().chain(&[name]));
        assert_eq!(run.code, 2, "{name:?}: {}", run.stderr);
        let run = daemon.command().run(["pull", "--", name]);
        assert_eq!(run.code, 2, "{name:?}: {}", run.stderr);
    }
    check_empty(daemon.root());
    let beside: Vec<_> = blobd_tests::store_dir::names(daemon.scratch());
    assert_eq!(beside, ["blobd.sock", "daemon.toml", "log", "m.gguf", "store"]);
}

#[test]
fn tables_are_readable_and_have_sizes_in_binary_units() {
    let daemon = daemon();
    let listed = daemon.command().line("ls").succeeds().text();
    assert!(listed.starts_with("NAME ") && listed.contains("moe:F16") && listed.contains("KiB"), "{listed}");
    assert_eq!(daemon.command().line("ls nothing-like-this").text(), "no model matches\n");
    let shown = daemon.command().line("show moe:F16 --tensors").succeeds().text();
    assert!(shown.contains("blk.0.ffn_up_exps.weight") && shown.contains("32×16×4"), "{shown}");
    let usage = daemon.command().line("df -v").succeeds().text();
    assert!(usage.contains("\ntotal ") && usage.contains("UNIQUE"), "{usage}");
    assert!(daemon.command().line("gc").text().contains("nothing to delete"));
    let removed = daemon.command().line("rm moe:F16").succeeds();
    assert!(removed.text().starts_with("removed moe:F16 "), "{}", removed.text());
    assert!(removed.stderr.is_empty(), "no progress where there is no terminal: {}", removed.stderr);
}

#[test]
fn export_writes_to_the_requested_path() {
    let daemon = daemon();
    let folder = daemon.scratch().join("out");
    fs::create_dir(&folder).unwrap();
    let bytes = ModelFile::stacked_experts(1, 4).bytes();
    let export = |target: &str, directory: &std::path::Path| {
        let mut command = daemon.command().command();
        command.args(["export", "moe:F16", "--json"]).current_dir(directory);
        if !target.is_empty() {
            command.args(["-o", target]);
        }
        command::run(&mut command).succeeds().json()["exported"][0].clone()
    };
    for (target, path) in
        [("", "moe-F16.gguf"), ("named.bin", "named.bin"), (folder.to_str().unwrap(), "moe-F16.gguf")]
    {
        let exported = export(target, &folder);
        assert!(fs::read(folder.join(path)).unwrap() == bytes, "{target}");
        assert_eq!(exported["size"], bytes.len());
        fs::remove_file(folder.join(path)).unwrap();
    }
    assert!(blobd_tests::store_dir::names(&folder).is_empty(), "no temporary file stays");
}

#[test]
fn export_into_a_pipe_does_not_replace_the_pipe() {
    let daemon = daemon();
    let pipe = daemon.scratch().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let mut export = daemon.command().command();
    let export = export.args(["export", "moe:F16", "-o"]).arg(&pipe).spawn().unwrap();
    let mut bytes = Vec::new();
    File::open(&pipe).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(export.wait_with_output().unwrap().status.success());
    assert!(bytes == ModelFile::stacked_experts(1, 4).bytes());
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fs::metadata(&pipe).unwrap().file_type()));
}

#[test]
fn export_through_a_link_keeps_the_link() {
    let daemon = daemon();
    let (file, link) = (daemon.scratch().join("file"), daemon.scratch().join("link"));
    fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink("file", &link).unwrap();
    daemon.command().run(["export", "moe:F16", "--force", "-o", link.to_str().unwrap()]).succeeds();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read(&file).unwrap() == ModelFile::stacked_experts(1, 4).bytes());
}

#[test]
fn export_of_damaged_data_fails_and_leaves_the_old_file() {
    let daemon = daemon();
    let target = daemon.scratch().join("out.gguf");
    fs::write(&target, "the good old file").unwrap();
    let tensor = daemon.client().model(&"moe:F16".parse().unwrap()).unwrap().tensors[2].clone();
    let blob = blobd_tests::store_dir::blob_path(daemon.root(), &tensor.digest.to_string());
    let mut bytes = fs::read(&blob).unwrap();
    bytes[100] ^= 1;
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, bytes).unwrap();
    let words = ["export", "moe:F16", "--force", "--json", "-o", target.to_str().unwrap()];
    let run = daemon.command().run(words).exits_with(5);
    assert!(run.error().message.contains("damaged"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(&target).unwrap(), "the good old file");
    let run = daemon.command().run(["export", "moe:F16", "-o", "/nonexistent/out.gguf"]);
    assert_eq!(run.code, 3, "{}", run.stderr);
}

#[test]
fn closed_output_pipe_is_not_a_failure() {
    let daemon = daemon();
    let mut list = daemon.command().command();
    let mut child = list.arg("ls").stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn invalid_configuration_files_are_usage_errors() {
    let daemon = TestDaemon::start();
    let config = daemon.scratch().join("config.toml");
    let line = format!("ls --config {}", config.display());
    let blobd = command::Blobd::at_root(&daemon.scratch().join("other"));
    for content in ["rooot = \"/x\"", "root = 5", "[mirrors", "\u{0}", "[mirrors]\n\"x\" = \"ftp://y\""] {
        fs::write(&config, content).unwrap();
        let run = blobd.line(&line);
        assert_eq!(run.code, 2, "{content:?}: {}", run.stderr);
    }
    assert_eq!(blobd.line("ls --config /nonexistent.toml").code, 2);
}
