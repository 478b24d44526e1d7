//! The paths of exported files: those of the manifest, made safe, and all or none of them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs::blobd;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{blob_path, flip_byte, names};
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};

const RAW: &str = "application/vnd.cncf.model.weight.v1.raw";
const MODEL: &str = "application/vnd.ollama.image.model";
const PROJECTOR: &str = "application/vnd.ollama.image.projector";
const TITLE: &str = "org.opencontainers.image.title";

/// A layer: media type, content, and where it has which name.
type Layer<'l> = (&'l str, &'l [u8], Option<(&'l str, &'l str)>);

/// Pulls a model with these layers as `plain:1`.
fn pulled(layers: &[Layer<'_>]) -> TestDaemon {
    let (daemon, registry) = (TestDaemon::start_on_disk(), FakeRegistry::start().unwrap());
    let entry = |(media_type, bytes, name): &Layer<'_>| {
        registry.add_blob(*bytes);
        let digest = format!("sha256:{}", sha256(bytes));
        let mut entry = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
        match name {
            Some((key @ ("name" | "from"), name)) => entry[*key] = (*name).into(),
            Some((annotation, name)) => entry["annotations"] = json!({ *annotation: name }),
            None => {}
        }
        entry
    };
    let config = entry(&("application/vnd.docker.container.image.v1+json", b"{}", None));
    let layers: Vec<Json> = layers.iter().map(entry).collect();
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
    registry.add_manifest("me/plain:1", manifest.to_string().as_bytes());
    daemon.command().run(["pull", &registry.name("me/plain:1"), "--name", "plain:1"]).succeeds();
    daemon
}

/// All files below a folder with their contents, and all folders with a slash.
fn tree(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(prefix) = open.pop() {
        for name in names(&folder.join(&prefix)) {
            let path = folder.join(&prefix).join(&name);
            if path.is_dir() {
                open.push(format!("{prefix}{name}/"));
                found.push((format!("{prefix}{name}/"), Vec::new()));
            } else {
                found.push((format!("{prefix}{name}"), fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

fn paths(folder: &Path) -> Vec<String> {
    tree(folder).into_iter().map(|(path, _)| path).collect()
}

fn text(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

#[test]
fn every_file_has_its_own_path_wherever_the_manifest_gives_it() {
    let gguf = ModelFile::dense(1).bytes();
    for (layers, expected) in [
        (
            vec![(RAW, &b"one"[..], Some(("org.cncf.model.filepath", "plain.safetensors")))],
            vec!["plain.safetensors"],
        ),
        (
            vec![
                (RAW, b"one", Some(("org.cncf.model.filepath", "unet/model.safetensors"))),
                (RAW, b"two", Some(("org.cnai.model.filepath", "vae/model.safetensors"))),
            ],
            vec!["unet/", "unet/model.safetensors", "vae/", "vae/model.safetensors"],
        ),
        (vec![(MODEL, b"weights", Some((TITLE, "model.bin")))], vec!["model.bin"]),
        (vec![(MODEL, &gguf, Some(("from", "tiny.gguf")))], vec!["tiny.gguf"]),
        (vec![(MODEL, &gguf, Some(("from", "llama2:latest")))], vec!["plain-1.gguf"]),
        (vec![(MODEL, &gguf, Some(("name", "q4/tiny.gguf")))], vec!["q4/", "q4/tiny.gguf"]),
        (vec![(MODEL, &gguf, Some((TITLE, "../../etc/passwd")))], vec!["plain-1.gguf"]),
        (vec![(MODEL, &gguf, Some((TITLE, "/etc/passwd")))], vec!["plain-1.gguf"]),
        (vec![(RAW, b"key", Some((TITLE, ".ssh/id")))], vec!["_.ssh/", "_.ssh/id"]),
        (vec![(RAW, b"PK\x05\x06", None)], vec!["plain-1.zip"]),
        (vec![("application/vnd.docker.ai.safetensors", b"x", None)], vec!["plain-1.txt"]),
    ] {
        let daemon = pulled(&layers);
        let folder = tmpfs_directory();
        let run = daemon.command().run(["export", "plain:1", "-o", text(folder.path()), "--json"]).succeeds();
        assert_eq!(paths(folder.path()), expected);
        let written = run.json()["exported"].as_array().unwrap().clone();
        let contents: Vec<_> =
            tree(folder.path()).into_iter().filter(|(path, _)| !path.ends_with('/')).collect();
        assert_eq!(written.len(), contents.len());
        for file in written {
            let path = file["path"].as_str().unwrap();
            assert_eq!(file["digest"], format!("sha256:{}", sha256(&fs::read(path).unwrap())));
        }
        for (_, bytes, _) in &layers {
            assert!(contents.iter().any(|(_, found)| found == bytes));
        }
        // Again: all of it is there.
        let again =
            daemon.command().run(["export", "plain:1", "-o", text(folder.path()), "--json"]).succeeds();
        assert!(
            again.json()["exported"].as_array().unwrap().iter().all(|file| file["already_there"] == true)
        );
    }
}

#[test]
fn file_that_the_manifest_names_several_times_is_exported_once_for_each_path() {
    let gguf = ModelFile::dense(1).bytes();
    for (layers, expected) in [
        (vec![(MODEL, &gguf[..], None), (MODEL, &gguf, None)], vec!["plain-1.gguf"]),
        (
            vec![(MODEL, &gguf, Some((TITLE, "a.gguf"))), (MODEL, &gguf, Some((TITLE, "a.gguf")))],
            vec!["a.gguf"],
        ),
        (
            vec![(MODEL, &gguf, Some((TITLE, "a.gguf"))), (MODEL, &gguf, Some((TITLE, "b.gguf")))],
            vec!["a.gguf", "b.gguf"],
        ),
        (vec![(MODEL, &gguf, None), (PROJECTOR, &gguf, None)], vec!["mmproj-plain-1.gguf", "plain-1.gguf"]),
        (
            vec![(PROJECTOR, &gguf, None), (MODEL, &gguf, None), (MODEL, b"{}", Some((TITLE, "c.json")))],
            vec!["c.json", "mmproj-plain-1.gguf", "plain-1.gguf"],
        ),
    ] {
        let daemon = pulled(&layers);
        let folder = tmpfs_directory();
        daemon.command().run(["export", "plain:1", "-o", text(folder.path())]).succeeds();
        let found = tree(folder.path());
        assert_eq!(found.iter().map(|(path, _)| path).collect::<Vec<_>>(), expected);
        for (path, content) in &found {
            assert!(path == "c.json" || *content == gguf, "{path}");
        }
    }
}

#[test]
fn every_command_works_on_a_model_that_names_a_file_twice() {
    let gguf = ModelFile::dense(1).bytes();
    let daemon = pulled(&[(MODEL, &gguf, None), (MODEL, &gguf, None), (PROJECTOR, &gguf, None)]);
    let folder = tmpfs_directory();
    for (number, words) in [
        "export plain:1 --alignment 64",
        "export plain:1 --endian big",
        "export plain:1 --component projector",
    ]
    .iter()
    .enumerate()
    {
        let target = folder.path().join(number.to_string());
        let words = words.split(' ').chain(["-o", text(&target)]);
        daemon.command().run(words).succeeds();
        assert!(fs::metadata(&target).unwrap().len() >= gguf.len() as u64 / 2);
    }
    assert!(daemon.command().line("export plain:1 -o -").succeeds().stdout == gguf);
    let path = folder.path().join("single.gguf");
    fs::write(&path, &gguf).unwrap();
    daemon.command().run(["import", text(&path), "--name", "single"]).succeeds();
    let shown = |name: &str| daemon.command().run(["show", name, "--json"]).succeeds().json();
    let (twice, once) = (shown("plain:1"), shown("single"));
    assert_eq!(twice["parameters"], once["parameters"]);
    assert_eq!(twice["tensors"].as_array().unwrap().len(), once["tensors"].as_array().unwrap().len());
    for line in [
        "show plain:1",
        "show plain:1 --tensors",
        "show plain:1 --hash",
        "tensor plain:1 output_norm.weight",
        "diff plain:1 plain:1",
        "fit plain:1",
        "df",
        "ls",
        "verify",
        "warm plain:1",
        "exec -- cat /blobd/plain:1.gguf",
        "edit plain:1 edited --set general.name=x",
        "export edited -o -",
        "tag plain:1 other",
        "rm plain:1",
        "gc",
    ] {
        let run = daemon.command().line(line);
        assert_eq!(run.code, 0, "{line}: {}", run.stderr);
    }
    assert!(daemon.command().line("export other -o -").succeeds().stdout == gguf);
    let open = daemon.client().open(&"other".parse().unwrap()).unwrap();
    open.contiguous().unwrap();
    open.contiguous_component("projector").unwrap();
    let headers = [1, 2, 3].map(|layer| open.layer_header(layer).unwrap().to_vec());
    assert!(headers[0] == headers[1] && headers[0] == headers[2]);
}

#[test]
fn clashing_paths_are_refused_before_anything_is_written_even_with_force() {
    for layers in [
        [(RAW, &b"one"[..], Some((TITLE, "model.bin"))), (RAW, b"two", Some((TITLE, "model.bin")))],
        [(RAW, b"one", Some((TITLE, "a"))), (RAW, b"two", Some((TITLE, "a/b")))],
        [(RAW, b"one", Some((TITLE, ".a"))), (RAW, b"two", Some((TITLE, "_.a")))],
    ] {
        let daemon = pulled(&layers);
        let folder = tmpfs_directory();
        for force in [&[][..], &["--force"]] {
            let words = [&["export", "plain:1", "--json", "-o", text(folder.path())], force].concat();
            let error = daemon.command().run(words).exits_with(1).error();
            assert!(error.message.contains("have") || error.message.contains("have this path"), "{error}");
            assert_eq!(paths(folder.path()), [""; 0], "{error}");
        }
    }
}

#[test]
fn links_in_the_target_folder_are_not_followed() {
    let two = [(RAW, &b"one"[..], Some((TITLE, "unet/m.bin"))), (RAW, b"two", Some((TITLE, "z.bin")))];
    let daemon = pulled(&two);
    let outside = disk_directory();
    let export = |folder: &Path, force: bool| {
        let force = if force { &["--force"][..] } else { &[] };
        daemon.command().run([&["export", "plain:1", "--json", "-o", text(folder)], force].concat())
    };
    for force in [false, true] {
        // A folder that is a link.
        let folder = disk_directory();
        symlink(outside.path(), folder.path().join("unet")).unwrap();
        assert!(export(folder.path(), force).exits_with(4).error().message.contains("found a link"));
        assert_eq!(names(folder.path()), ["unet"]);
        // A file where a folder is needed, and a folder where a file is.
        let folder = disk_directory();
        fs::write(folder.path().join("unet"), "mine").unwrap();
        export(folder.path(), force).exits_with(4);
        let folder = disk_directory();
        fs::create_dir(folder.path().join("z.bin")).unwrap();
        export(folder.path(), force).exits_with(4);
        assert_eq!(names(folder.path()), ["z.bin"]);
    }
    // A file that is a link: it is replaced by force, and what it leads to stays.
    let (folder, target) = (disk_directory(), outside.path().join("target"));
    fs::write(&target, "mine").unwrap();
    symlink(&target, folder.path().join("z.bin")).unwrap();
    export(folder.path(), false).exits_with(4);
    assert_eq!(names(folder.path()), ["z.bin"]);
    export(folder.path(), true).succeeds();
    assert_eq!(fs::read(folder.path().join("z.bin")).unwrap(), b"two");
    assert!(!folder.path().join("z.bin").is_symlink());
    assert_eq!(fs::read(&target).unwrap(), b"mine");
    assert_eq!(names(outside.path()), ["target"]);
}

#[test]
fn export_whose_second_file_fails_leaves_nothing() {
    let noise = blobd_tests::model::noise(1, "second", 3 << 20);
    let files = [(RAW, &b"one"[..], Some((TITLE, "a/one.bin"))), (RAW, &noise, Some((TITLE, "b/two.bin")))];
    let daemon = pulled(&files);
    flip_byte(&blob_path(daemon.root(), &format!("sha256:{}", sha256(&noise))), 2 << 20);
    let folder = disk_directory();
    for output in [folder.path().to_path_buf(), folder.path().join("new/")] {
        for force in [&[][..], &["--force"]] {
            let words = [&["export", "plain:1", "--json", "-o", text(&output)], force].concat();
            daemon.command().run(words).exits_with(5);
            assert_eq!(paths(folder.path()), [""; 0]);
        }
    }
}

#[test]
fn export_that_cannot_rename_a_file_removes_the_others() {
    let files = [(RAW, &b"one"[..], Some((TITLE, "a/one.bin"))), (RAW, b"two", Some((TITLE, "b/two.bin")))];
    let daemon = pulled(&files);
    let folder = disk_directory();
    fs::create_dir(folder.path().join("b")).unwrap();
    fs::set_permissions(folder.path().join("b"), Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.path().join("b/probe"), "").is_ok() {
        fs::remove_file(folder.path().join("b/probe")).unwrap();
        return skipped("root may write everywhere");
    }
    daemon.command().run(["export", "plain:1", "-o", text(folder.path())]).exits_with(7);
    assert_eq!(paths(folder.path()), ["b/"]);
}

#[test]
fn folder_is_made_if_its_name_ends_in_a_slash() {
    let files = [(RAW, &b"one"[..], Some((TITLE, "one.bin"))), (RAW, b"two", Some((TITLE, "two.bin")))];
    let daemon = pulled(&files);
    let folder = disk_directory();
    let new = folder.path().join("new");
    let error = daemon.command().run(["export", "plain:1", "-o", text(&new), "--json"]).exits_with(2).error();
    assert!(error.hint.unwrap().contains("new/`"));
    daemon.command().run(["export", "plain:1", "-o", text(&folder.path().join("new/"))]).succeeds();
    assert_eq!(paths(folder.path()), ["new/", "new/one.bin", "new/two.bin"]);
    let absent = folder.path().join("no/such/");
    daemon.command().run(["export", "plain:1", "-o", text(&absent)]).exits_with(3);
    assert_eq!(names(folder.path()), ["new"]);
    // Without -o, into the current directory.
    let here = disk_directory();
    let mut command = daemon.command().command();
    run(command.args(["export", "plain:1"]).current_dir(here.path())).succeeds();
    assert_eq!(paths(here.path()), ["one.bin", "two.bin"]);
}

#[test]
fn more_files_than_the_soft_limit_of_descriptors_are_exported() {
    let contents: Vec<Vec<u8>> = (0..200).map(|number: usize| format!("{number}").into_bytes()).collect();
    let names: Vec<String> = (0..200).map(|number| format!("{}/{number}.bin", number % 7)).collect();
    let layers: Vec<Layer<'_>> = contents
        .iter()
        .zip(&names)
        .map(|(bytes, name)| (RAW, &bytes[..], Some((TITLE, &name[..]))))
        .collect();
    let daemon = pulled(&layers);
    let folder = tmpfs_directory();
    let mut export = Command::new("sh");
    export.args(["-c", "ulimit -Sn 100; exec \"$0\" \"$@\""]).arg(blobd());
    daemon.command().prepare(&mut export);
    run(export.args(["export", "plain:1", "-o", text(folder.path())])).succeeds();
    assert_eq!(tree(folder.path()).len(), 207);
}

#[test]
fn signal_during_an_export_of_several_files_leaves_all_or_nothing_and_a_kill_only_whole_files() {
    let noise: Vec<Vec<u8>> = (0..3).map(|seed| blobd_tests::model::noise(seed, "big", 24 << 20)).collect();
    let files: Vec<Layer<'_>> = noise
        .iter()
        .zip(["a/one.bin", "a/two.bin", "b/three.bin"])
        .map(|(bytes, path)| (RAW, &bytes[..], Some((TITLE, path))))
        .collect();
    let daemon = pulled(&files);
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        for millis in [5, 40, 120, 300] {
            let folder = disk_directory();
            let mut export = daemon.command().command();
            let mut export = export.args(["export", "plain:1", "-o", text(folder.path())]).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(millis));
            // It may have ended already.
            let _ = kill_process(Pid::from_child(&export), signal);
            export.wait().unwrap();
            let found = paths(folder.path());
            let all = ["a/", "a/one.bin", "a/two.bin", "b/", "b/three.bin"];
            let context = format!("{signal:?} after {millis} ms: {found:?}");
            // Nothing can be undone after a kill between the names of two files.
            let is_killed = signal == Signal::KILL && found.iter().all(|path| all.contains(&path.as_str()));
            assert!(found.is_empty() || found == all || is_killed, "{context}");
            for (path, bytes) in all.iter().filter(|path| path.ends_with(".bin")).zip(&noise) {
                let written = fs::read(folder.path().join(path)).ok();
                assert!(written.is_none_or(|written| written == *bytes), "{path}: {context}");
            }
        }
    }
}
