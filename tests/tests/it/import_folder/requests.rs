//! `POST /v1/import` with a list of files, without the command line.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use blobd_client::error::ClientError;
use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::frame::{Frame, FrameDecoder};
use blobd_client::protocol::request::{ImportParams, Sidecar, SidecarComponent};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, check_empty};
use blobd_tests::wait::eventually;
use serde_json::json;

use super::{import_listed, listing, opened};
use crate::protocol_violations::upgrade;

fn list_of(folder: &ModelFolder, name: &str) -> ImportParams {
    listing(name, folder.0.iter().map(|(path, content)| (path.as_str(), content.len() as u64)))
}

/// How many descriptors of this process are of files in a folder. Other tests open and close files of their own
/// meanwhile.
fn open_files_below(folder: &Path) -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    descriptors.filter(|fd| fs::read_link(fd.path()).is_ok_and(|file| file.starts_with(folder))).count()
}

fn refused(daemon: &TestDaemon, folder: &Path, params: &ImportParams) -> ErrorBody {
    match import_listed(&daemon.client(), folder, params) {
        Err(ClientError::Daemon(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn model_of_many_files_needs_few_descriptors_and_is_exported_bit_for_bit() {
    let daemon = TestDaemon::start();
    let mut files = ModelFolder::transformers(1);
    for number in 0..200 {
        files.add(&format!("voices/v{number}.txt"), format!("voice {}", number % 150));
    }
    files.add("empty.txt", "");
    files.add("large.txt", vec![b'x'; 300 << 10]);
    let folder = files.write_to(daemon.scratch().join("tiny"));
    let params = list_of(&files, "tiny");
    let (mut opens, mut most) = (Vec::new(), 0);
    let mut last = (0, 0);
    let imported = daemon.client().import_listed(
        &params,
        |number| {
            opens.push(number);
            most = most.max(open_files_below(&folder));
            opened(&folder.join(&params.files[number].path))
        },
        |progress| last = (progress.completed, progress.total),
    );
    let imported = imported.unwrap();
    assert_eq!(opens, (0..params.files.len()).collect::<Vec<_>>());
    assert!(most < 40, "{most} descriptors");
    assert_eq!((imported.file_count, imported.size), (Some(208), files.size()));
    assert_eq!((imported.tensor_count, imported.files.len()), (4, 208));
    // An import that takes a moment reports no progress.
    assert!(last == (0, 0) || last.0 <= last.1 && last.1 == files.size(), "{last:?}");
    daemon
        .command()
        .run(["export", "tiny", "-o", daemon.scratch().join("out/").to_str().unwrap()])
        .succeeds();
    assert!(ModelFolder::read(&daemon.scratch().join("out")) == files);
    daemon.command().line("verify").succeeds();
    check_blobs(daemon.root());
    let again = import_listed(&daemon.client(), &folder, &params).unwrap();
    assert!(again.unchanged && again.new_bytes == 0 && again.digest == imported.digest, "{again:?}");
}

/// The file that the client opens is not looked at, so it can have other content.
#[test]
fn file_that_was_read_before_is_not_read_again_if_it_is_stored() {
    let daemon = TestDaemon::start();
    let folder = |name: &str, seed| {
        let mut files = ModelFolder::default();
        files.add("a.gguf", ModelFile::dense(1).bytes());
        files.add("b.bin", vec![seed; 1 << 20]);
        (list_of(&files, name), files.write_to(daemon.scratch().join(name)))
    };
    let [(first, at_first), (mut second, at_second)] = [folder("first", 1), folder("second", 2)];
    let read = import_listed(&daemon.client(), &at_first, &first).unwrap();
    for (listed, read) in second.files.iter_mut().zip(&read.files) {
        (listed.digest, listed.was_read) = (Some(read.digest), true);
    }
    let imported = import_listed(&daemon.client(), &at_second, &second).unwrap();
    assert_eq!((imported.digest, imported.tensor_count), (read.digest, read.tensor_count));
    assert_eq!((imported.files, imported.new_bytes), (read.files, 0));
    // What is not stored is read.
    daemon.command().line("rm first second").succeeds();
    let error = refused(&daemon, &at_second, &second);
    assert!(error.message.starts_with("b.bin: "), "{error:?}");
    check_empty(daemon.root());
}

/// As after a kill: the command was started before the daemon had stored what the killed one had asked for.
#[test]
fn model_with_a_manifest_that_got_its_name_meanwhile_is_stored_already() {
    let daemon = TestDaemon::start();
    let (weights, config) = (ModelFile::dense(1).bytes(), br#"{"model_format":"gguf"}"#);
    let descriptor = |kind: &str, bytes: &[u8]| {
        let digest = format!("sha256:{}", sha256(bytes));
        json!({ "mediaType": format!("application/vnd.{kind}"), "digest": digest, "size": bytes.len() })
    };
    let manifest = |text: &str| {
        let config = descriptor("docker.container.image.v1+json", config);
        let layers = [descriptor("ollama.image.model", &weights)];
        json!({ "schemaVersion": 2, "config": config, "layers": layers, "annotations": { "text": text } })
    };
    let mut files = ModelFolder::default();
    files.add("model", weights.clone());
    files.add("config", config.to_vec());
    let folder = files.write_to(daemon.scratch().join("source"));
    let params = |text: &str| ImportParams {
        name: Some("one".parse().unwrap()),
        manifest: Some(manifest(text).to_string()),
        program: Some("ollama".to_owned()),
        ..listing("one", [("config", config.len() as u64), ("model", weights.len() as u64)])
    };
    let first = import_listed(&daemon.client(), &folder, &params("")).unwrap();
    assert!(!first.unchanged);
    let again = import_listed(&daemon.client(), &folder, &params("")).unwrap();
    assert!(again.unchanged && again.digest == first.digest && again.name == first.name, "{again:?}");
    let other = params("another manifest of these files");
    let other = import_listed(&daemon.client(), &folder, &other).unwrap();
    assert!(other.name.starts_with("one:latest-"), "{other:?}");
}

#[test]
fn layers_have_the_paths_and_the_types_of_their_files() {
    let daemon = TestDaemon::start();
    let mut files = ModelFolder::transformers(1);
    files.add("LICENSE", "MIT License");
    let folder = files.write_to(daemon.scratch().join("tiny"));
    import_listed(&daemon.client(), &folder, &list_of(&files, "tiny")).unwrap();
    let shown = daemon.command().line("show tiny --json").succeeds().json();
    let layer = |layer: &serde_json::Value| {
        let text = |key: &str| layer[key].as_str().unwrap().to_owned();
        (text("name"), text("media_type"), text("stored"))
    };
    let layers: Vec<_> = shown["layers"].as_array().unwrap()[1..].iter().map(layer).collect();
    let safetensors = "application/vnd.cncf.model.weight.v1.safetensors";
    let other = "application/vnd.cncf.model.weight.config.v1.raw";
    let json = "application/vnd.ollama.image.json";
    let expected = [
        ("LICENSE", "application/vnd.ollama.image.license", "blob"),
        ("README.md", other, "blob"),
        ("config.json", json, "blob"),
        ("model-00001-of-00002.safetensors", safetensors, "recipe"),
        ("model-00002-of-00002.safetensors", safetensors, "recipe"),
        ("model.safetensors.index.json", json, "blob"),
        ("tokenizer.json", json, "blob"),
    ];
    let expected = expected.map(|(name, kind, stored)| (name.to_owned(), kind.to_owned(), stored.to_owned()));
    assert_eq!(layers, expected);
}

#[test]
fn shards_of_a_gguf_file_are_one_model() {
    let daemon = TestDaemon::start();
    let mut files = ModelFolder::default();
    for (number, shard) in (1..).zip(ModelFile::dense(3).shards(3)) {
        files.add(&format!("tiny-Q4_K_M-{number:05}-of-00003.gguf"), shard.bytes());
    }
    let folder = files.write_to(daemon.scratch().join("shards"));
    let params = list_of(&files, "shards/tiny-Q4_K_M-00001-of-00003.gguf");
    let imported = import_listed(&daemon.client(), &folder, &params).unwrap();
    assert_eq!(imported.name, "tiny:Q4_K_M");
    let out = daemon.scratch().join("out/");
    daemon.command().run(["export", "tiny:Q4_K_M", "-o", out.to_str().unwrap()]).succeeds();
    assert!(ModelFolder::read(&out) == files);
    daemon.command().line("rm tiny:Q4_K_M").succeeds();
    for (left_out, expected) in [(0..2, "expected all 3 shards, found 2"), (1..3, "found 2")] {
        let mut some = params.clone();
        some.files = some.files[left_out].to_vec();
        let error = refused(&daemon, &folder, &some);
        assert!(error.message.contains(expected), "{error}");
        assert!(error.hint.unwrap().contains("all shards together"));
    }
    let mut double = params.clone();
    fs::copy(folder.join(&params.files[1].path), folder.join("again.gguf")).unwrap();
    double.files[2].path = "again.gguf".to_owned();
    double.files[2].size = params.files[1].size;
    let error = refused(&daemon, &folder, &double);
    assert!(error.message.contains("shard 2 twice"), "{error}");
    check_empty(daemon.root());
}

#[test]
fn invalid_files_are_reported_and_leave_nothing() {
    let daemon = TestDaemon::start();
    let files = ModelFolder::transformers(1);
    let folder = files.write_to(daemon.scratch().join("tiny"));
    let params = list_of(&files, "tiny");
    let with = |path: &str, content: &[u8]| {
        let mut changed = files.clone();
        changed.add(path, content);
        changed.write_to(&folder);
        (list_of(&changed, "tiny"), changed)
    };
    // The last file but one is broken.
    let (broken, _) = with("model-00002-of-00002.safetensors", b"\x10\0\0\0\0\0\0\0{\"a\":no}");
    let error = refused(&daemon, &folder, &broken);
    assert!(error.message.starts_with("model-00002-of-00002.safetensors: "), "{error}");
    assert_eq!(error.code, ErrorCode::InvalidInput);
    let (pointer, _) =
        with("model-00002-of-00002.safetensors", b"version https://git-lfs.github.com/spec/v1\n");
    let error = refused(&daemon, &folder, &pointer);
    assert!(error.message.starts_with("model-00002-of-00002.safetensors: "), "{error}");
    files.write_to(&folder);
    // One that is not as listed.
    let mut longer = params.clone();
    longer.files[1].size += 1;
    let error = refused(&daemon, &folder, &longer);
    assert!(error.message.contains("config.json: changed while it was imported"), "{error}");
    // A directory.
    let mut directory = params;
    fs::create_dir(folder.join("z")).unwrap();
    directory.files.push(listing("", [("z", 0)]).files.remove(0));
    let error = refused(&daemon, &folder, &directory);
    assert!(
        error.message.contains("z: wrong kind of file: expected a regular file, found a directory"),
        "{error}"
    );
    check_empty(daemon.root());
}

#[test]
fn lists_with_paths_that_a_model_may_not_have_are_refused() {
    let daemon = TestDaemon::start();
    let long = "x".repeat(256);
    let cases = [
        (vec!["../x"], "wrong path"),
        (vec!["/etc/passwd"], "wrong path"),
        (vec!["a\0b"], "wrong path"),
        (vec!["a\nb"], r"a\nb"),
        (vec![""], "wrong path"),
        (vec![&long], "wrong path"),
        (vec!["a", "a"], "two files have this path"),
        (vec!["a", "a/b"], "the folder of a/b"),
        (vec!["A.json", "a.json"], "where case does not matter"),
        (vec![".profile"], "begins with"),
    ];
    let folder = daemon.scratch().to_owned();
    for (paths, expected) in cases {
        let params = listing("m", paths.into_iter().map(|path| (path, 1)));
        let error = refused(&daemon, &folder, &params);
        assert!(error.message.contains(expected), "{error}");
        assert_eq!(error.code, ErrorCode::InvalidRequest);
    }
    let many: Vec<_> = (0..4001).map(|number| number.to_string()).collect();
    let error = refused(&daemon, &folder, &listing("m", many.iter().map(|path| (path.as_str(), 1))));
    assert!(error.message.contains("files: too many: expected at most 4000"), "{error}");
    let sidecar = Sidecar { component: SidecarComponent::Draft, file_name: "d.gguf".to_owned() };
    let both = ImportParams { sidecars: vec![sidecar], ..listing("m", [("a", 1)]) };
    assert!(refused(&daemon, &folder, &both).message.contains("expected no sidecars"));
    check_empty(daemon.root());
}

/// Reads frames until one of this kind.
fn read_until(stream: &mut impl std::io::Read, kind: &str) -> Frame {
    let (mut decoder, mut buffer) = (FrameDecoder::new(), [0; 1]);
    loop {
        stream.read_exact(&mut buffer).unwrap();
        decoder.push(&buffer);
        match decoder.next_frame().unwrap() {
            Some(frame) if frame.kind() == kind => return frame,
            _ => {}
        }
    }
}

#[test]
fn client_that_sends_unrequested_descriptors_is_disconnected() {
    let daemon = TestDaemon::start();
    let file = File::open("/proc/self/exe").unwrap();
    let paths: Vec<_> = (0..20).map(|number| number.to_string()).collect();
    let params = listing("m", paths.iter().map(|path| (path.as_str(), 1)));
    let body = serde_json::to_string(&params).unwrap();
    let fds = |first, count| Frame::Fds { first, count };
    let other = Frame::Ack { received: 1 };
    for (frame, attached) in
        [(fds(0, 15), 15), (fds(0, 16), 15), (fds(1, 16), 16), (fds(0, 16), 0), (other, 1)]
    {
        let mut stream = upgrade(&daemon, "/v1/import", &body);
        assert_eq!(read_until(&mut stream, "want"), Frame::Want { first: 0, count: 16 });
        let files = vec![file.as_fd(); attached];
        send_all(&stream, &frame.encode().unwrap(), &files).unwrap();
        let mut rest = Vec::new();
        // Closed, or reset because of unread bytes.
        let _ = stream.read_to_end(&mut rest);
        assert!(!String::from_utf8_lossy(&rest).contains("imported"));
    }
    // Not a frame.
    let mut stream = upgrade(&daemon, "/v1/import", &body);
    stream.write_all(&[0xff; 64]).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    eventually("the connections are closed", || daemon.connections() == 0);
    check_empty(daemon.root());
}

#[test]
fn client_that_does_not_respond_or_disconnects_leaves_nothing() {
    let daemon = TestDaemon::start();
    let files = ModelFolder::transformers(1);
    let body = serde_json::to_string(&list_of(&files, "tiny")).unwrap();
    let mut gone = upgrade(&daemon, "/v1/import", &body);
    read_until(&mut gone, "want");
    drop(gone);
    let mut silent = upgrade(&daemon, "/v1/import", &body);
    read_until(&mut silent, "want");
    let start = Instant::now();
    let _ = silent.read_to_end(&mut Vec::new());
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    eventually("the connections are closed", || daemon.connections() == 0);
    check_empty(daemon.root());
    // Neither keeps others from importing.
    let folder = files.write_to(daemon.scratch().join("tiny"));
    import_listed(&daemon.client(), &folder, &list_of(&files, "tiny")).unwrap();
}

#[test]
fn import_that_is_interrupted_between_two_batches_leaves_nothing() {
    let daemon = TestDaemon::start();
    let mut files = ModelFolder::transformers(1);
    for number in 0..20 {
        files.add(&format!("v{number}.txt"), format!("voice {number}"));
    }
    let folder = files.write_to(daemon.scratch().join("tiny"));
    let params = list_of(&files, "tiny");
    let mut stream = upgrade(&daemon, "/v1/import", &serde_json::to_string(&params).unwrap());
    read_until(&mut stream, "want");
    let first: Vec<_> =
        params.files[..16].iter().map(|file| File::open(folder.join(&file.path)).unwrap()).collect();
    let fds: Vec<_> = first.iter().map(AsFd::as_fd).collect();
    send_all(&stream, &Frame::Fds { first: 0, count: 16 }.encode().unwrap(), &fds).unwrap();
    assert_eq!(read_until(&mut stream, "want"), Frame::Want { first: 16, count: 10 });
    drop(stream);
    eventually("the import ends", || daemon.connections() == 0);
    eventually("its files are removed", || blobd_tests::store_dir::staged(daemon.root()).is_empty());
    check_empty(daemon.root());
}

#[test]
fn policy_sees_the_licenses_and_formats_of_all_files() {
    let daemon = |rules: &str| {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.toml");
        fs::write(&config, format!("[policy]\n{rules}\n")).unwrap();
        (TestDaemon::start_at(&folder.path().join("store"), Some(&config)), folder)
    };
    let mut files = ModelFolder::transformers(1);
    files.add("LICENSE", "MIT License");
    files.add("pytorch_model.bin", "a pickle");
    let source = tempfile::tempdir().unwrap();
    let folder = files.write_to(source.path().join("tiny"));
    let all = list_of(&files, "tiny");
    let (denies_other, _kept) =
        daemon("rules = [{ action = \"deny\", reason = \"no pickles\", format = [\"other\"] }]");
    let error = refused(&denies_other, &folder, &all);
    assert_eq!(error.code, ErrorCode::DeniedByPolicy, "{error}");
    assert!(error.message.contains("pytorch_model.bin"), "{error}");
    check_empty(denies_other.root());
    files.0.remove("pytorch_model.bin");
    let without = list_of(&files, "tiny");
    import_listed(&denies_other.client(), &folder, &without).unwrap();
    let allow = |license: &str| {
        format!("default = \"deny\"\nrules = [{{ action = \"allow\", license = [\"{license}\"] }}]")
    };
    let (mit, _kept) = daemon(&allow("mit"));
    import_listed(&mit.client(), &folder, &without).unwrap();
    let (apache, _kept) = daemon(&allow("apache-2.0"));
    assert_eq!(refused(&apache, &folder, &without).code, ErrorCode::DeniedByPolicy);
    check_empty(apache.root());
}
