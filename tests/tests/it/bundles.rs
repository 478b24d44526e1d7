//! `blobd save` and `blobd load`: models as an OCI image layout.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use blobd_store_format::archive::{TarReader, tar_header};
use blobd_store_format::digest::Digest;
use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::names;
use serde_json::{Value as Json, json};

/// A daemon with two models that share most tensors.
fn daemon_with_two() -> (TestDaemon, [ModelFile; 2]) {
    let daemon = TestDaemon::start();
    let models = [ModelFile::dense(1), ModelFile::dense_of(1, 3, 512)];
    for (model, name) in models.iter().zip(["team/one:q4", "two:Q8_0"]) {
        let path = model.write_to(daemon.scratch(), "m.gguf");
        daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
    }
    (daemon, models)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn has_model(blobd: &Blobd, name: &str, model: &ModelFile, scratch: &Path) {
    let file = scratch.join("exported.gguf");
    blobd.run(["export", name, "--force", "-o", text(&file)]).succeeds();
    assert!(fs::read(&file).unwrap() == model.bytes(), "{name}");
}

fn digest_of(blobd: &Blobd, name: &str) -> Json {
    blobd.run(["show", name, "--json"]).succeeds().json()["digest"].clone()
}

#[test]
fn models_come_back_from_an_archive_and_a_folder_with_their_names_and_digests() {
    let (daemon, models) = daemon_with_two();
    let (archive, folder) = (daemon.scratch().join("all.tar"), daemon.scratch().join("all/"));
    for output in [format!("{}", archive.display()), format!("{}/", folder.display())] {
        let saved = daemon.command().run(["save", "*", "-o", &output, "--json"]).succeeds().json();
        assert_eq!(saved["saved"].as_array().unwrap().len(), 2, "{saved}");
    }
    // The same models always give the same bytes.
    let again = daemon.scratch().join("again.tar");
    daemon.command().run(["save", "*", "-o", text(&again)]).succeeds();
    assert!(fs::read(&archive).unwrap() == fs::read(&again).unwrap());
    for source in [&archive, &folder] {
        let other = TestDaemon::start();
        let listed = other.command().run(["load", text(source), "--list", "--json"]).succeeds().json();
        let listed: Vec<_> =
            listed["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
        assert_eq!(listed, ["team/one:q4", "two:Q8_0"]);
        other.command().run(["load", text(source)]).succeeds();
        for (model, name) in models.iter().zip(["team/one:q4", "two:Q8_0"]) {
            has_model(&other.command(), name, model, other.scratch());
            assert_eq!(digest_of(&other.command(), name), digest_of(&daemon.command(), name));
        }
        let physical = |daemon: &TestDaemon| {
            daemon.command().run(["df", "--json"]).succeeds().json()["physical_bytes"].clone()
        };
        assert_eq!(physical(&other), physical(&daemon), "what they share is stored once");
    }
}

#[test]
fn archive_is_loaded_from_a_pipe() {
    let (daemon, models) = daemon_with_two();
    let other = TestDaemon::start();
    let mut save = daemon.command().command();
    let mut save = save.args(["save", "two:Q8_0", "-o", "-"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut load = other.command().command();
    load.args(["load", "-", "--name", "copy:q8"]).stdin(save.stdout.take().unwrap());
    command::run(&mut load).succeeds();
    assert!(save.wait().unwrap().success());
    has_model(&other.command(), "copy:q8", &models[1], other.scratch());
}

/// Runs `load -` with these bytes in a pipe, which is closed afterwards.
fn load_piped(daemon: &TestDaemon, bytes: &[u8], more: &[&str]) -> command::Run {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut load = daemon.command().command();
    load.args(["load", "-"]).args(more).stdin(Stdio::from(reader));
    // No temporary file can be made.
    load.env("TMPDIR", daemon.scratch().join("absent"));
    std::thread::scope(|scope| {
        // Fails if the rest is not read.
        scope.spawn(move || writer.write_all(bytes));
        let run = command::run(&mut load);
        // It has the reading end.
        drop(load);
        run
    })
}

#[test]
fn archive_from_a_pipe_is_stored_as_it_comes_without_a_temporary_file() {
    let (daemon, models) = daemon_with_two();
    let archive = daemon.scratch().join("all.tar");
    daemon.command().run(["save", "*", "-o", text(&archive)]).succeeds();
    let bytes = fs::read(&archive).unwrap();
    let other = TestDaemon::start();
    let listed = load_piped(&other, &bytes, &["--list", "--json"]).succeeds().json();
    assert_eq!(listed["models"].as_array().unwrap().len(), 2);
    let loaded = load_piped(&other, &bytes, &["--json"]).succeeds().json();
    assert_eq!(loaded["loaded"].as_array().unwrap().len(), 2, "{loaded}");
    for (model, name) in models.iter().zip(["team/one:q4", "two:Q8_0"]) {
        has_model(&other.command(), name, model, other.scratch());
        assert_eq!(digest_of(&other.command(), name), digest_of(&daemon.command(), name));
    }
    let physical = |daemon: &TestDaemon| {
        daemon.command().run(["df", "--json"]).succeeds().json()["physical_bytes"].clone()
    };
    assert_eq!(physical(&other), physical(&daemon), "what they share is stored once");
    // One that is there already, and a model whose name another one has.
    load_piped(&other, &bytes, &[]).succeeds();
    other.command().run(["rm", "two:Q8_0"]).succeeds();
    other.command().run(["tag", "team/one:q4", "two:Q8_0"]).succeeds();
    let run = load_piped(&other, &bytes, &["--json"]);
    assert_eq!((run.code, run.json()["failed"].as_array().unwrap().len()), (4, 1), "{}", run.stderr);
}

#[test]
fn file_of_several_models_and_an_index_at_the_end_are_loaded_from_a_pipe() {
    let (daemon, models) = daemon_with_two();
    daemon.command().run(["edit", "two:Q8_0", "three:y", "--template-layer", "{{ .Prompt }}"]).succeeds();
    let folder = daemon.scratch().join("layout");
    daemon.command().run(["save", "*", "-o", &format!("{}/", folder.display())]).succeeds();
    let archive = daemon.scratch().join("all.tar");
    daemon.command().run(["save", "*", "-o", text(&archive)]).succeeds();
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for entry in fs::read_dir(folder.join("blobs/sha256")).unwrap() {
        let entry = entry.unwrap();
        let name = format!("blobs/sha256/{}", entry.file_name().into_string().unwrap());
        files.push((name, fs::read(entry.path()).unwrap()));
    }
    files.sort();
    files.push(("index.json".to_owned(), fs::read(folder.join("index.json")).unwrap()));
    let index_last = daemon.scratch().join("index-last.tar");
    let listed: Vec<_> = files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    self::archive(&index_last, &listed);
    for source in [&archive, &index_last] {
        let other = TestDaemon::start();
        let mut load = other.command().command();
        let mut cat = std::process::Command::new("cat").arg(source).stdout(Stdio::piped()).spawn().unwrap();
        load.args(["load", "-"]).stdin(cat.stdout.take().unwrap());
        let run = command::run(&mut load).succeeds();
        cat.wait().unwrap();
        assert_eq!(
            run.stderr.contains("its index does not come first"),
            source == &index_last,
            "{}",
            run.stderr
        );
        for (name, model) in [("team/one:q4", &models[0]), ("two:Q8_0", &models[1]), ("three:y", &models[1])]
        {
            has_model(&other.command(), name, model, other.scratch());
        }
    }
}

#[test]
fn pipe_that_ends_early_or_has_wrong_bytes_leaves_nothing() {
    let (daemon, _) = daemon_with_two();
    let whole = daemon.scratch().join("whole.tar");
    daemon.command().run(["save", "two:Q8_0", "-o", text(&whole)]).succeeds();
    let bytes = fs::read(&whole).unwrap();
    let other = TestDaemon::start();
    let refused = |bytes: &[u8], what: &str| {
        let run = load_piped(&other, bytes, &[]);
        assert_ne!(run.code, 0, "{what}");
        assert!(run.stderr.contains("blobd: ") && !run.stderr.contains("panic"), "{what}: {}", run.stderr);
        let listed = other.command().run(["ls", "--json"]).succeeds().json();
        assert_eq!(listed["models"], json!([]), "{what}");
        run
    };
    // Just before the end, and then at every fraction.
    // One block of zeros is an end.
    let ends = [513, 1023, 1024, 1025].map(|missing| bytes.len() - missing);
    for length in (0..20).map(|twentieth| bytes.len() / 20 * twentieth).chain(ends) {
        let run = refused(&bytes[..length], &format!("the first {length} bytes"));
        assert!(run.stderr.contains("its end is missing"), "{length}: {}", run.stderr);
    }
    let mut reader = TarReader::new(bytes.len() as u64);
    while let Some(wanted) = reader.wanted() {
        let range = usize::try_from(wanted.start).unwrap()..usize::try_from(wanted.end).unwrap();
        reader.push(&bytes[range]).unwrap();
    }
    for file in reader.files().iter().filter(|file| file.path != "oci-layout") {
        for place in [file.offset - 512, file.offset + file.size / 2, file.offset + file.size - 1] {
            let mut changed = bytes.clone();
            changed[usize::try_from(place).unwrap()] ^= 1;
            refused(&changed, &format!("{} at {place}", file.path));
        }
    }
    let blobs = fs::read_dir(other.root().join("blobs")).map_or(0, Iterator::count);
    assert_eq!(blobs, 0, "nothing is left of what was refused");
    assert!(names(&other.root().join("staging")).is_empty());
}

#[test]
fn load_that_is_killed_while_it_reads_a_pipe_leaves_nothing() {
    let (daemon, models) = daemon_with_two();
    let whole = daemon.scratch().join("whole.tar");
    daemon.command().run(["save", "two:Q8_0", "-o", text(&whole)]).succeeds();
    let bytes = fs::read(&whole).unwrap();
    let other = TestDaemon::start();
    for tenth in 1..10 {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut load = other.command().command();
        let load =
            load.args(["load", "-"]).stdin(Stdio::from(reader)).stdout(Stdio::null()).stderr(Stdio::null());
        let mut load = load.spawn().unwrap();
        writer.write_all(&bytes[..bytes.len() / 10 * tenth]).unwrap();
        load.kill().unwrap();
        load.wait().unwrap();
    }
    load_piped(&other, &bytes, &[]).succeeds();
    has_model(&other.command(), "two:Q8_0", &models[1], other.scratch());
    other.command().run(["rm", "two:Q8_0"]).succeeds();
    other.command().run(["gc"]).succeeds();
    assert_eq!(fs::read_dir(other.root().join("blobs")).map_or(0, Iterator::count), 0);
    assert!(names(&other.root().join("staging")).is_empty());
}

#[test]
fn folder_of_a_model_keeps_its_paths() {
    let daemon = TestDaemon::start();
    let folder = daemon.scratch().join("folder");
    fs::create_dir(&folder).unwrap();
    let _ = ModelFile::dense(3).write_to(&folder, "weights.gguf");
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("empty.txt"), "").unwrap();
    daemon.command().run(["import", text(&folder), "--name", "f:1"]).succeeds();
    let archive = daemon.scratch().join("f.tar");
    daemon.command().run(["save", "f:1", "-o", text(&archive)]).succeeds();
    let other = TestDaemon::start();
    other.command().run(["load", text(&archive)]).succeeds();
    assert_eq!(digest_of(&other.command(), "f:1"), digest_of(&daemon.command(), "f:1"));
}

#[test]
fn files_that_exist_and_names_of_other_models_are_kept_unless_forced() {
    let (daemon, models) = daemon_with_two();
    let archive = daemon.scratch().join("one.tar");
    fs::write(&archive, "other").unwrap();
    let error =
        daemon.command().run(["--json", "save", "team/one:q4", "-o", text(&archive)]).exits_with(4).error();
    assert!(error.message.contains("exists already"), "{}", error.message);
    assert_eq!(fs::read(&archive).unwrap(), b"other");
    daemon.command().run(["save", "team/one:q4", "-o", text(&archive), "--force"]).succeeds();
    daemon.command().run(["rm", "team/one:q4"]).succeeds();
    daemon.command().run(["tag", "two:Q8_0", "team/one:q4"]).succeeds();
    let load = |more: &[&str]| daemon.command().run([&["load", text(&archive)], more].concat());
    let refused = load(&[]);
    assert_ne!(refused.code, 0);
    has_model(&daemon.command(), "team/one:q4", &models[1], daemon.scratch());
    load(&["--force"]).succeeds();
    has_model(&daemon.command(), "team/one:q4", &models[0], daemon.scratch());
}

#[test]
fn model_with_a_fault_does_not_stop_the_others() {
    let (daemon, models) = daemon_with_two();
    let folder = format!("{}/", daemon.scratch().join("layout").display());
    daemon.command().run(["save", "*", "-o", &folder]).succeeds();
    let weights = Digest::of(&models[0].bytes()).to_hex();
    fs::remove_file(Path::new(&folder).join("blobs/sha256").join(weights)).unwrap();
    let other = TestDaemon::start();
    for (key, more) in [("models", Some("--list")), ("loaded", None)] {
        let run = other.command().run(["--json", "load", &folder].into_iter().chain(more));
        assert_eq!(run.code, 1);
        let document = run.json();
        assert_eq!(document[key][0]["name"], "two:Q8_0", "{document}");
        let error = document["failed"][0]["error"]["message"].as_str().unwrap();
        assert!(error.contains("is missing"), "{error}");
    }
    has_model(&other.command(), "two:Q8_0", &models[1], other.scratch());
}

#[test]
fn model_that_is_not_stored_leaves_no_archive() {
    let (daemon, _) = daemon_with_two();
    let out = daemon.scratch().join("out");
    fs::create_dir(&out).unwrap();
    let archive = out.join("x.tar");
    daemon.command().run(["save", "two:Q8_0", "absent:q4", "-o", text(&archive)]).exits_with(3);
    assert!(names(&out).is_empty());
}

/// An archive with these files.
fn archive(path: &Path, files: &[(&str, &[u8])]) {
    let mut out = File::create(path).unwrap();
    for (name, content) in files {
        out.write_all(&tar_header(name, content.len() as u64).unwrap()).unwrap();
        out.write_all(content).unwrap();
        let padding = content.len().next_multiple_of(512) - content.len();
        out.write_all(&vec![0; padding]).unwrap();
    }
    out.write_all(&[0; 1024]).unwrap();
}

#[test]
fn truncated_or_changed_archives_are_refused_and_leave_nothing() {
    let (daemon, _) = daemon_with_two();
    let (whole, broken) = (daemon.scratch().join("whole.tar"), daemon.scratch().join("broken.tar"));
    daemon.command().run(["save", "two:Q8_0", "-o", text(&whole)]).succeeds();
    let bytes = fs::read(&whole).unwrap();
    let other = TestDaemon::start();
    let refused = |bytes: &[u8], what: &str| {
        fs::write(&broken, bytes).unwrap();
        let run = other.command().run(["load", text(&broken)]);
        assert_ne!(run.code, 0, "{what}");
        assert!(run.stderr.contains("blobd: ") && !run.stderr.contains("panic"), "{what}: {}", run.stderr);
        let listed = other.command().run(["ls", "--json"]).succeeds().json();
        assert_eq!(listed["models"], json!([]), "{what}");
    };
    for length in [0, 1, 511, 512, 700, 1536, 4000, bytes.len() / 2, bytes.len() - 1024, bytes.len() - 1025] {
        refused(&bytes[..length], &format!("the first {length} bytes"));
    }
    // In the content of each file, up to the weights, which are the last one.
    let mut reader = TarReader::new(bytes.len() as u64);
    while let Some(wanted) = reader.wanted() {
        let range = usize::try_from(wanted.start).unwrap()..usize::try_from(wanted.end).unwrap();
        reader.push(&bytes[range]).unwrap();
    }
    for file in reader.files().iter().filter(|file| file.path != "oci-layout") {
        let middle = usize::try_from(file.offset + file.size / 2).unwrap();
        let mut changed = bytes.clone();
        changed[middle] ^= 1;
        refused(&changed, &file.path);
    }
    let blobs = fs::read_dir(other.root().join("blobs")).map_or(0, Iterator::count);
    assert_eq!(blobs, 0, "nothing is left of what was refused");
}

#[test]
fn hostile_layouts_are_refused_with_the_reason() {
    let daemon = TestDaemon::start();
    let path = daemon.scratch().join("hostile.tar");
    let refused = |files: &[(&str, &[u8])], reason: &str| {
        archive(&path, files);
        let error = daemon.command().run(["--json", "load", text(&path)]).exits_with(1).error();
        assert!(error.message.contains(reason), "{reason}: {}", error.message);
    };
    let index = |digest: Digest, size: u64| {
        let entry = json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size,
            "annotations": { "org.opencontainers.image.ref.name": "x:1" } });
        json!({ "schemaVersion": 2, "manifests": [entry] }).to_string().into_bytes()
    };
    refused(&[("other", b"x")], "expected a file index.json");
    refused(&[("index.json", b"{")], "index");
    refused(&[("../index.json", b"{}")], "wrong file name");
    refused(&[("index.json", b"{}"), ("index.json", b"{}")], "two files");
    refused(&[("index.json", &vec![b' '; 2 << 20])], "too long");
    let manifest = b"{}";
    let digest = Digest::of(manifest);
    let at = format!("blobs/sha256/{}", digest.to_hex());
    refused(&[("index.json", &index(digest, 2))], "is missing");
    refused(&[("index.json", &index(digest, 3)), (&at, manifest)], "wrong size");
    refused(&[("index.json", &index(digest, 2)), (&at, b"[]")], "wrong digest");
    refused(&[("index.json", &index(digest, 2)), (&at, manifest)], "manifest");
    refused(&[("index.json", &index(digest, 1 << 40))], "too long");
    let config = Digest::of(b"config");
    let of_files = json!({ "schemaVersion": 2, "config": { "mediaType": "application/json", "digest": config, "size": 6 },
        "layers": [] });
    let of_files = of_files.to_string().into_bytes();
    let digest = Digest::of(&of_files);
    let at = format!("blobs/sha256/{}", digest.to_hex());
    refused(&[("index.json", &index(digest, of_files.len() as u64)), (&at, &of_files)], "is missing");
    archive(&path, &[]);
    daemon.command().run(["load", text(&path)]).exits_with(1);
    daemon.command().run(["load", text(daemon.scratch())]).exits_with(1);
}
