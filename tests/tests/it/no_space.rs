//! Full disks: a small tmpfs that only the daemon sees.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use blobd_fixtures::skipped::skipped;
use blobd_tests::command;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::filler::Filler;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, check_empty, staged};
use blobd_tests::temp_dirs::tmpfs_directory;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A daemon whose store is on a file system of so many MiB, and the store's path in this process's namespace.
/// `None` if mounting is not allowed.
pub(super) fn small_daemon(mib: u64) -> Option<(TestDaemon, PathBuf)> {
    let in_namespace = |script| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", script]);
        command.output().is_ok_and(|output| output.status.success())
    };
    if !in_namespace("mount -t tmpfs none /tmp") {
        skipped("a user namespace with a file system of its own cannot be had here");
        return None;
    }
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    fs::create_dir(&root).unwrap();
    let script = format!("mount -t tmpfs -o mode=700,size={mib}m none \"$0\" && exec \"$@\"");
    let root_text = root.to_str().unwrap();
    let wrapper = ["unshare", "--map-root-user", "--mount", "sh", "-c", &script, root_text];
    let daemon = TestDaemon::start_under(&wrapper, folder);
    let seen = PathBuf::from(format!("/proc/{}/root{root_text}", daemon.pid()));
    assert!(seen.join("store.json").is_file(), "the daemon's store is seen through its process");
    Some((daemon, seen))
}

/// About 3 MiB.
fn large_model() -> ModelFile {
    ModelFile::dense_of(1, 2, 256)
}

#[test]
fn import_that_does_not_fit_leaves_nothing() {
    let Some((daemon, root)) = small_daemon(1) else { return };
    let path = large_model().write_to(daemon.scratch(), "large.gguf");
    let run = daemon.command().run(["import".as_ref(), path.as_os_str(), "--json".as_ref()]);
    let error = run.exits_with(6).error();
    assert!(error.hint.is_some_and(|hint| hint.contains("blobd rm")), "{}", error.message);
    check_empty(&root);
    let usage = daemon.client().disk_usage().unwrap();
    assert_eq!((usage.physical_bytes, usage.partial_bytes), (0, 0));
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "small.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    check_blobs(&root);
}

#[test]
fn archive_from_a_pipe_that_does_not_fit_leaves_nothing() {
    let Some((daemon, root)) = small_daemon(1) else { return };
    let source = TestDaemon::start();
    let path = large_model().write_to(source.scratch(), "large.gguf");
    source.command().run(["import", path.to_str().unwrap(), "--name", "large"]).succeeds();
    let mut save = source.command().command();
    let mut save = save.args(["save", "large", "-o", "-"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut load = daemon.command().command();
    load.args(["load", "-"]).stdin(save.stdout.take().unwrap());
    let run = command::run(&mut load);
    // It has the reading end of the pipe.
    drop(load);
    save.wait().unwrap();
    run.exits_with(6);
    check_empty(&root);
}

#[test]
fn folder_that_does_not_fit_is_refused_as_a_whole_before_it_is_read() {
    let Some((daemon, root)) = small_daemon(2) else { return };
    let mut folder = ModelFolder::default();
    let bytes = 600 << 10;
    for shard in 1..=4_u8 {
        let header =
            format!(r#"{{"t{shard}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
        let data = vec![shard; bytes];
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
        folder.add(&format!("model-0000{shard}-of-00004.safetensors"), file);
    }
    let path = folder.write_to(daemon.scratch().join("large"));
    let error =
        daemon.command().run(["import".as_ref(), path.as_os_str(), "--json".as_ref()]).exits_with(6).error();
    assert!(error.message.contains("2.36 MiB needed"), "{error}");
    check_empty(&root);
}

#[test]
fn pull_that_does_not_fit_leaves_nothing() {
    let Some((daemon, root)) = small_daemon(1) else { return };
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/large:latest", b"{}", &[(MODEL, &large_model().bytes())]).unwrap();
    registry.add_model("library/small:latest", b"{}", &[(MODEL, &ModelFile::dense(1).bytes())]).unwrap();
    daemon.command().run(["pull", &registry.name("library/large")]).exits_with(6);
    check_empty(&root);
    daemon.command().run(["pull", &registry.name("library/small")]).succeeds();
}

#[test]
fn model_that_is_stored_already_is_imported_on_a_full_disk() {
    let Some((daemon, root)) = small_daemon(8) else { return };
    let path = large_model().write_to(daemon.scratch(), "large.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let before = check_blobs(&root);
    // Some of it is kept free by the store.
    let _filler = Filler::leaving_free(&root, 256 << 10);
    let again = ["import".as_ref(), path.as_os_str(), "--name".as_ref(), "again".as_ref()];
    daemon.command().run(again).succeeds();
    assert_eq!((check_blobs(&root), staged(&root)), (before, Vec::new()));
}

/// A manifest may declare any size, and a body may be endless.
#[test]
fn file_of_any_declared_size_does_not_fill_the_disk() {
    let Some((daemon, root)) = small_daemon(8) else { return };
    let registry = FakeRegistry::start().unwrap();
    let digest = registry.add_blob(*b"not so long");
    let config = registry.add_blob(*b"{}");
    let manifest = format!(
        r#"{{"schemaVersion":2,"config":{{"mediaType":"c","digest":"{config}","size":2}},
        "layers":[{{"mediaType":"application/vnd.ollama.image.license","digest":"{digest}","size":{}}}]}}"#,
        1_u64 << 62
    );
    registry.add_manifest("library/evil:latest", manifest.as_bytes());
    registry.add_fault("/cdn/", usize::MAX, Fault::Endless);
    daemon.command().run(["pull", &registry.name("library/evil")]).exits_with(6);
    assert_eq!(registry.bytes_served(), 0, "refused before the first byte is requested");
    check_empty(&root);
}

/// Whichever write fails first, nothing is left over and no stored model is lost.
#[test]
fn failure_of_any_write_leaves_nothing_and_loses_nothing() {
    let Some((daemon, root)) = small_daemon(1) else { return };
    let import = |model: &ModelFile, name: &str| {
        let path = model.write_to(daemon.scratch(), "m.gguf");
        daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()])
    };
    import(&ModelFile::dense(1), "kept").succeeds();
    let kept = check_blobs(&root);
    let mut failures = 0;
    for free_pages in 0..60 {
        let filler = Filler::leaving_free(&root, free_pages * 4096);
        let run = import(&ModelFile::dense(2), "new");
        assert!([0, 6].contains(&run.code), "{free_pages} pages: {} {}", run.code, run.stderr);
        drop(filler);
        assert_eq!(staged(&root), [""; 0], "{free_pages} pages");
        if run.code == 0 {
            daemon.command().line("rm new").succeeds();
        } else {
            failures += 1;
        }
        assert_eq!(check_blobs(&root), kept, "{free_pages} pages");
    }
    assert!((10..60).contains(&failures), "{failures} of 60 failed");
    assert!(daemon.command().line("export kept -o -").succeeds().stdout == ModelFile::dense(1).bytes());
}

#[test]
fn rm_and_gc_free_space_on_a_full_disk() {
    let Some((daemon, root)) = small_daemon(1) else { return };
    for name in ["a", "b"] {
        let path = ModelFile::dense(name.len() as u64).write_to(daemon.scratch(), "m.gguf");
        daemon
            .command()
            .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()])
            .succeeds();
    }
    let filler = Filler::leaving_free(&root, 0);
    daemon.command().line("rm a").succeeds();
    daemon.command().line("gc").succeeds();
    let freed = daemon.command().line("rm b --json").succeeds().json()["freed_bytes"].as_u64().unwrap();
    assert!(freed > 0);
    drop(filler);
    check_empty(&root);
}
