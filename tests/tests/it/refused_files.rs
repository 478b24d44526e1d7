//! Files that blobd cannot split: the error for each, from every verb that reads one.

use std::fs;

use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::ImportParams;
use blobd_fixtures::skipped::skipped;
use blobd_tests::archives::{gzip, tar};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::hanging::{Hang, HangingFiles};
use blobd_tests::model::ModelFile;
use blobd_tests::raw_gguf::RawGguf;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use rustix::fs::{Mode, OFlags};

/// A file, what is wrong with it, and the hint if it is a local file or a downloaded one.
type Refused = (Vec<u8>, &'static str, &'static str, &'static str);

fn refused_files() -> Vec<Refused> {
    let gguf = ModelFile::dense(1).bytes();
    let version = |version| RawGguf { version, ..RawGguf::new() }.bytes();
    let header = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes(), &header[..], b"1"].concat();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 4661211424\n";
    let denied = b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>";
    let index = br#"{"metadata":{"total_size":9},"weight_map":{"a":"model-00001-of-00002.safetensors"}}"#;
    let pytorch = [b"PK\x03\x04", &[0; 26][..], b"archive/data.pkl"].concat();
    let html = b"<!DOCTYPE html><title>Log in</title>".to_vec();
    let at_source = "only its publisher can correct this";
    vec![
        (vec![0; 100_000], "found a file that starts with zeros only", "download it again", "incomplete"),
        (safetensors, "tensor \"a\": wrong size", "it is incomplete or damaged", at_source),
        (
            index.to_vec(),
            "found the index of a sharded safetensors model",
            "names the files with the weights: import those",
            "use their addresses",
        ),
        (gzip(&gguf), "found a file compressed with gzip", "`gunzip`", "unpack it"),
        (b"\x28\xb5\x2f\xfd0000".to_vec(), "found a file compressed with zstd", "`unzstd`", "unpack it"),
        (tar(&[("m.gguf", &gguf)]), "found a tar archive", "`tar -xf`", "unpack it"),
        (pytorch, "found a PyTorch checkpoint", "convert_hf_to_gguf.py", "GGUF file of the model"),
        (pointer.to_vec(), "found a Git LFS pointer", "`git lfs pull`", "/resolve/"),
        (html, "found a web page", "from the link of the file itself", "address of the file itself"),
        (denied.to_vec(), "found an XML document that says \"AccessDenied\"", "error message", "expired"),
        (
            b"tjgg\x03\0\0\0".to_vec(),
            "found an old ggml file",
            "convert the original model",
            "look for a GGUF",
        ),
        (b"\x7fELF\x02\x01\x01\0".to_vec(), "found a program", "llamafile", "llamafile"),
        (b"buy milk".to_vec(), "found a text", "it has no weights", "it has no weights"),
        (
            b"\x01\x02\x03\x04\x05".to_vec(),
            "starts with \"\\x01\\x02\\x03\\x04\"",
            "blobd imports GGUF",
            "blobd pulls GGUF",
        ),
        (version(1), "expected 2 or 3, found 1", "convert the original model", "convert the original model"),
        (version(0x0100_0000), "expected 2 or 3, found 1", "convert the original model", "convert"),
        (version(4), "expected 2 or 3, found 4", "upgrade blobd", "upgrade blobd"),
        (version(0), "expected 2 or 3, found 0", "it is damaged", at_source),
        (gguf[..100].to_vec(), "ends at byte 100", "it is incomplete: copy or download it again", at_source),
    ]
}

#[test]
fn reason_and_hint_are_the_same_for_every_verb_that_reads_the_file() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let registry = FakeRegistry::start().unwrap();
    for (number, (content, found, advice, for_downloads)) in refused_files().into_iter().enumerate() {
        let name = format!("file-{number}.gguf");
        let path = folder.path().join(&name);
        fs::write(&path, &content).unwrap();
        let path = path.to_str().unwrap();
        registry.add_page(&format!("/{name}"), &content, &[]);
        let url = format!("{}/{name}", registry.url());
        for (words, hint) in [
            (["import", path].as_slice(), advice),
            (&["show", path], advice),
            (&["fit", path], advice),
            (&["pull", &url], for_downloads),
        ] {
            let run = blobd.run([words, &["--json"]].concat()).exits_with(1);
            let error = run.error();
            assert!(error.message.contains(&name), "{words:?}: {error}");
            assert!(error.message.contains(found), "{words:?}: {error}");
            assert!(error.hint.as_ref().is_some_and(|given| given.contains(hint)), "{words:?}: {error:?}");
        }
    }
}

fn params() -> ImportParams {
    ImportParams::new("file.gguf")
}

/// The error after passing a descriptor to the daemon.
fn import_error(daemon: &TestDaemon, file: &fs::File) -> ErrorBody {
    match daemon.client().import(&params(), file, |_, _| ()).unwrap_err() {
        ClientError::Daemon(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn descriptors_that_cannot_be_read_are_the_clients_fault() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "file.gguf");
    let open = |flags| rustix::fs::open(&path, flags, Mode::empty()).map(fs::File::from);
    for (flags, found) in
        [(OFlags::PATH, "O_PATH"), (OFlags::WRONLY, "O_WRONLY"), (OFlags::DIRECT, "O_DIRECT")]
    {
        let Ok(file) = open(flags) else {
            skipped(format_args!("{found} is not possible on this file system"));
            continue;
        };
        let error = import_error(&daemon, &file);
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{error}");
        let sentence =
            "file.gguf: wrong kind of descriptor: expected one that is open for reading, found one";
        assert!(error.message.starts_with(sentence) && error.message.contains(found), "{error}");
        assert!(error.hint.unwrap().contains("O_RDONLY"));
    }
    daemon.client().import(&params(), open(OFlags::RDWR).unwrap(), |_, _| ()).unwrap();
}

#[test]
fn file_whose_file_system_fails_or_interrupts_its_reads_is_the_clients_fault() {
    let daemon = TestDaemon::start();
    let content = ModelFile::dense_of(1, 2, 128).bytes();
    let Some(files) = HangingFiles::mount(&daemon.scratch().join("fuse"), content) else { return };
    for (hang, found) in
        [(Hang::Interrupted, "Interrupted system call"), (Hang::Failing, "Input/output error")]
    {
        let error = import_error(&daemon, &fs::File::open(files.path(hang)).unwrap());
        assert_eq!(error.code, ErrorCode::InvalidInput, "{error}");
        assert!(error.message.contains(&format!("file.gguf: cannot be read: {found}")), "{error}");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("copy the file")), "{error:?}");
    }
}

#[test]
fn incomplete_file_is_reported_with_its_sizes() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let path = folder.path().join("half.gguf");
    let bytes = ModelFile::dense(1).bytes();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = blobd.run(["import", path.to_str().unwrap(), "--json"]).exits_with(1).error();
    assert!(error.message.contains("the file is incomplete: expected at least"), "{error}");
    assert_eq!(error.hint.as_deref(), Some("it is incomplete: copy or download it again"));
}

#[test]
fn shard_and_directory_are_refused_with_a_hint() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let shard = ModelFile::dense(1).shards(2).swap_remove(0);
    let path = shard.write_to(folder.path(), "m-00001-of-00002.gguf");
    let error = blobd.run(["import", path.to_str().unwrap(), "--json"]).exits_with(1).error();
    assert!(error.message.contains("missing are \"m-00002-of-00002.gguf\""), "{error}");
    assert!(error.hint.unwrap().contains("download the missing shards"));
    let error = blobd.run(["show", folder.path().to_str().unwrap(), "--json"]).exits_with(3).error();
    assert!(error.message.contains("m-00002-of-00002.gguf"), "{error}");
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    let empty = folder.path().join("empty");
    let error = blobd.run(["show", empty.to_str().unwrap(), "--json"]).exits_with(2).error();
    assert!(
        error.message.contains("expected a file, or the folder of a model, found another folder"),
        "{error}"
    );
    assert!(error.hint.unwrap().contains("name a GGUF or safetensors file"));
    let error = blobd.run(["import", folder.path().to_str().unwrap(), "--json"]).exits_with(1).error();
    assert!(error.message.contains("missing are \"m-00002-of-00002.gguf\""), "{error}");
}
