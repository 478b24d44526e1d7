//! `import --move`: the imported files are deleted when, and only when, their models are stored.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_blobs, flip_byte};
use blobd_tests::temp_dirs::disk_directory;

mod stores;

/// A safetensors file with one tensor of four bytes.
fn safetensors() -> Vec<u8> {
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    [&(header.len() as u64).to_le_bytes(), &header[..], &1_f32.to_le_bytes()].concat()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn moved_files_are_deleted_and_their_models_are_whole() {
    let daemon = TestDaemon::start();
    let (blobd, scratch) = (daemon.command(), daemon.scratch());
    let (file, folder) = (scratch.join("one.gguf"), scratch.join("model"));
    write(&file, &ModelFile::dense(1).bytes());
    write(&folder.join("config.json"), b"{}");
    write(&folder.join("sub/model.safetensors"), &safetensors());
    write(&folder.join("pytorch_model.bin"), b"pickle");
    let paths = [file.to_str().unwrap(), folder.to_str().unwrap()];
    let run = blobd.run(["import", "--move", "--json", paths[0], paths[1]]).succeeds();
    let notes = run.json()["imported"][1]["notes"].to_string();
    assert!(notes.contains("2 imported files deleted"), "{notes}");
    assert!(!file.exists() && !folder.join("config.json").exists() && !folder.join("sub").exists());
    assert!(folder.join("pytorch_model.bin").exists(), "what is not imported stays");
    assert!(blobd.line("export one -o -").succeeds().stdout == ModelFile::dense(1).bytes());
    check_blobs(daemon.root());
    // A folder that has nothing else goes too.
    write(&scratch.join("whole/model.safetensors"), &safetensors());
    blobd.run(["import", "--move", scratch.join("whole").to_str().unwrap()]).succeeds();
    assert!(!scratch.join("whole").exists());
}

#[test]
fn files_that_are_not_imported_stay() {
    let daemon = TestDaemon::start();
    let (blobd, scratch) = (daemon.command(), daemon.scratch());
    let (good, bad, link) = (scratch.join("good.gguf"), scratch.join("bad.gguf"), scratch.join("link.gguf"));
    write(&good, &ModelFile::dense(1).bytes());
    write(&bad, b"GGUF, but no header follows");
    symlink(&good, &link).unwrap();
    let paths = [&bad, &good].map(|path| path.to_str().unwrap());
    blobd.run(["import", "--move"].into_iter().chain(paths)).exits_with(1);
    assert!(bad.exists() && !good.exists());
    write(&good, &ModelFile::dense(1).bytes());
    let error = blobd.run(["import", "--move", "--json", link.to_str().unwrap()]).exits_with(1).error();
    assert!(error.message.contains("found a link"), "{}", error.message);
    assert!(good.exists() && link.exists());
    // The name of another model is taken: nothing is imported, and nothing is deleted.
    write(&bad, &ModelFile::dense(2).bytes());
    let path = bad.to_str().unwrap();
    assert_ne!(blobd.run(["import", "--move", path, "--name", "good"]).code, 0);
    assert!(bad.exists());
}

/// What is stored is read before the last other copy is deleted.
#[test]
fn files_stay_if_what_was_stored_before_is_damaged() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let blobd = daemon.command();
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    let largest = fs::read_dir(daemon.root().join("blobs")).unwrap().map(|entry| entry.unwrap().path());
    let largest = largest.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    flip_byte(&largest, 9);
    let error = blobd.run(["import", "--move", "--json", path.to_str().unwrap()]).exits_with(5).error();
    assert!(error.message.contains("were not deleted"), "{}", error.message);
    assert!(path.exists());
    blobd.line("verify m").exits_with(5);
    blobd.run(["import", "--move", path.to_str().unwrap()]).succeeds();
    assert!(!path.exists());
    assert!(blobd.line("export m -o -").succeeds().stdout == ModelFile::dense(1).bytes());
}

#[test]
fn file_that_a_program_has_open_is_not_moved() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "used.gguf");
    let mut reader = Command::new("sleep").arg("60").stdin(File::open(&path).unwrap()).spawn().unwrap();
    let run = daemon.command().run(["import", "--move", "--json", path.to_str().unwrap()]);
    reader.kill().unwrap();
    reader.wait().unwrap();
    let error = run.exits_with(4).error();
    assert!(error.message.contains("used.gguf: in use by "), "{}", error.message);
    assert!(path.exists());
    daemon.command().run(["import", "--move", path.to_str().unwrap()]).succeeds();
    assert!(!path.exists());
}

/// Without a daemon, so that the process that is killed also writes the store.
#[test]
fn killed_move_loses_no_model_and_the_same_command_finishes_it() {
    const ROUNDS: u64 = 12;
    let folder = disk_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    let files: Vec<(PathBuf, Vec<u8>)> = (0..6)
        .map(|seed| (folder.path().join(format!("m{seed}.gguf")), ModelFile::dense(seed).bytes()))
        .collect();
    for round in 0..ROUNDS {
        for (path, bytes) in &files {
            write(path, bytes);
        }
        let arguments =
            ["import", "--move"].into_iter().chain(files.iter().map(|(path, _)| path.to_str().unwrap()));
        let arguments: Vec<&str> = arguments.collect();
        let mut command = blobd.command();
        command.args(&arguments).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(5 + round * 9));
        child.kill().unwrap();
        child.wait().unwrap();
        for (path, bytes) in &files {
            let is_at_source = fs::read(path).is_ok_and(|found| found == *bytes);
            let name = path.file_stem().unwrap().to_str().unwrap();
            let is_stored = || blobd.run(["export", name, "-o", "-"]).succeeds().stdout == *bytes;
            assert!(is_at_source || is_stored(), "round {round}: {name}");
        }
        let left =
            files.iter().map(|(path, _)| path.to_str().unwrap()).filter(|path| Path::new(path).exists());
        let left: Vec<&str> = left.collect();
        if !left.is_empty() {
            blobd.run(["import", "--move"].into_iter().chain(left)).succeeds();
        }
        assert!(files.iter().all(|(path, _)| !path.exists()));
        for (path, bytes) in &files {
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(
                blobd.run(["export", name, "-o", "-"]).succeeds().stdout == *bytes,
                "round {round}: {name}"
            );
            blobd.run(["rm", name]).succeeds();
        }
    }
    check_blobs(&root);
}
