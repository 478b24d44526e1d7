//! Disks that fill during an operation, and the bytes that `rm` reports compared with those of the file
//! system. On tmpfs, and on ext4 on a loop device if that is available.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blobd_fixtures::skipped::skipped;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::filler::{Filler, free_bytes};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{allocated_bytes, check_blobs, check_empty, names, staged};
use blobd_tests::temp_dirs::disk_directory;
use blobd_tests::wait::eventually;

use super::no_space::small_daemon;

const MODEL: &str = "application/vnd.ollama.image.model";
const MIB: u64 = 48;

/// A daemon on each available kind of small file system, with the kind's name and the store's path in this
/// process's namespace.
fn small_daemons() -> Vec<(&'static str, TestDaemon, PathBuf)> {
    let tmpfs = small_daemon(MIB).map(|(daemon, root)| ("tmpfs", daemon, root));
    let ext4 = ext4_daemon().map(|(daemon, root)| ("ext4", daemon, root));
    tmpfs.into_iter().chain(ext4).collect()
}

/// The mount is in the daemon's own namespace, and disappears with it and its loop device.
fn ext4_daemon() -> Option<(TestDaemon, PathBuf)> {
    let folder = disk_directory();
    let (image, root) = (folder.path().join("image"), folder.path().join("store"));
    File::create(&image).unwrap().set_len(MIB << 20).unwrap();
    fs::create_dir(&root).unwrap();
    let (image, root_text) = (image.to_str().unwrap(), root.to_str().unwrap());
    let script = format!("mount -o loop {image} \"$0\" && rmdir \"$0/lost+found\" && exec \"$@\"");
    let wrapper = ["unshare", "--mount", "sh", "-c", &script, root_text];
    let made = run("mkfs.ext4", &["-q", "-m", "0", "-b", "4096", image]);
    if !made || !run(wrapper[0], &[&wrapper[1..], &["true"]].concat()) {
        skipped("ext4 on a loop device is not available here");
        return None;
    }
    // The first mount has removed `lost+found`.
    let wrapper = wrapper.map(|word| word.replace("rmdir", "true"));
    let daemon = TestDaemon::start_under(&wrapper.each_ref().map(String::as_str), folder);
    let seen = PathBuf::from(format!("/proc/{}/root{}", daemon.pid(), daemon.root().display()));
    assert!(seen.join("store.json").is_file(), "the daemon's store is seen through its process");
    Some((daemon, seen))
}

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// About so many MiB in a few dozen tensors.
fn model(seed: u64, mib: u64) -> ModelFile {
    ModelFile::dense_of(seed, mib, 192)
}

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) -> blobd_tests::command::Run {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    let run = daemon.command().run(["import", "--json", "--name", name, path.to_str().unwrap()]);
    fs::remove_file(path).unwrap();
    run
}

#[test]
fn disk_that_fills_during_an_import_fails_only_the_import() {
    for (kind, daemon, root) in small_daemons() {
        import(&daemon, &model(1, 4), "kept").succeeds();
        let before = check_blobs(&root);
        let filler = Filler::leaving_free(&root, 6 << 20);
        let error = import(&daemon, &model(2, 16), "large").exits_with(6).error();
        assert!(error.hint.is_some_and(|hint| hint.contains("blobd rm")), "{kind}: {}", error.message);
        assert_eq!(staged(&root), [""; 0], "{kind}");
        assert_eq!(check_blobs(&root), before, "{kind}");
        assert_eq!(daemon.client().models().unwrap().models.len(), 1, "{kind}");
        let exported = daemon.command().line("export kept -o -").succeeds().stdout;
        assert!(exported == model(1, 4).bytes(), "{kind}");
        drop(filler);
        import(&daemon, &model(2, 16), "large").succeeds();
    }
}

#[test]
fn disk_that_fills_during_a_pull_fails_only_the_pull() {
    for (kind, daemon, root) in small_daemons() {
        let registry = FakeRegistry::start().unwrap();
        registry.add_model("library/m:latest", b"{}", &[(MODEL, &model(1, 8).bytes())]).unwrap();
        registry.add_fault("/cdn/", usize::MAX, Fault::Slow(1 << 13, Duration::from_millis(10)));
        let name = registry.name("library/m");
        let mut command = daemon.command().command();
        let pull = command.args(["pull", "--json", &name]).spawn().unwrap();
        eventually("the pull is under way", || registry.bytes_served() > 1 << 20);
        let filler = Filler::leaving_free(&root, 0);
        let output = pull.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{kind}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(staged(&root), [""; 0], "{kind}");
        assert_eq!(daemon.client().models().unwrap().models.len(), 0, "{kind}");
        drop(filler);
        registry.clear_faults();
        daemon.command().run(["pull", &name]).succeeds();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model(1, 8).bytes(), "{kind}");
    }
}

/// The disk is full before the collection starts, which must not need space.
#[test]
fn collection_works_on_a_full_disk() {
    for (kind, daemon, root) in small_daemons() {
        for (seed, name) in [(1, "kept"), (2, "removed"), (3, "other")] {
            import(&daemon, &model(seed, 6), name).succeeds();
        }
        daemon.command().line("rm removed --keep 0s").succeeds();
        let planned = daemon.command().line("gc --dry-run --json").succeeds().json();
        let _filler = Filler::leaving_free(&root, 0);
        let done = daemon.command().line("gc --json").succeeds().json();
        assert_eq!((&done["deleted"], &done["freed_bytes"]), (&planned["deleted"], &planned["freed_bytes"]));
        assert!(done["freed_bytes"].as_u64().unwrap() > 4 << 20, "{kind}");
        check_blobs(&root);
        for (seed, name) in [(1, "kept"), (3, "other")] {
            let exported = daemon.command().run(["export", name, "-o", "-"]).succeeds().stdout;
            assert!(exported == model(seed, 6).bytes(), "{kind}: {name}");
        }
    }
}

/// The free space plus the size of the index, which the daemon may write at any time and which does not count
/// as freed.
fn free_but_for_the_index(root: &Path) -> u64 {
    let index = || allocated_bytes(&root.join("index"));
    loop {
        let (before, free, after) = (index(), free_bytes(root), index());
        if before == after {
            return free + after;
        }
    }
}

/// Asserts that the free space has grown by the bytes that a command reports as freed, within one percent.
fn check_freed(kind: &str, said: u64, before: u64, after: u64) {
    let seen = after.saturating_sub(before);
    assert!(said.abs_diff(seen) <= said / 100, "{kind}: {said} bytes freed, {seen} seen");
}

#[test]
fn free_space_grows_by_the_bytes_that_rm_and_gc_report() {
    for (kind, daemon, root) in small_daemons() {
        import(&daemon, &model(1, 10), "a").succeeds();
        import(&daemon, &model(2, 10), "b").succeeds();
        daemon.command().line("rm b --keep 0s").succeeds();
        import(&daemon, &model(3, 10), "b").succeeds();
        for line in ["gc --json", "rm a --json", "rm b --json"] {
            let before = free_but_for_the_index(&root);
            let said = daemon.command().line(line).succeeds().json()["freed_bytes"].as_u64().unwrap();
            assert!(said > 8 << 20, "{kind}: {line}: {said}");
            check_freed(kind, said, before, free_but_for_the_index(&root));
        }
        check_empty(&root);
    }
}

#[test]
fn rm_on_a_full_disk_frees_the_reported_bytes() {
    for (kind, daemon, root) in small_daemons() {
        import(&daemon, &model(1, 10), "a").succeeds();
        let _filler = Filler::leaving_free(&root, 0);
        import(&daemon, &model(2, 2), "b").exits_with(6);
        let before = free_but_for_the_index(&root);
        let said = daemon.command().line("rm a --json").succeeds().json()["freed_bytes"].as_u64().unwrap();
        check_freed(kind, said, before, free_but_for_the_index(&root));
        import(&daemon, &model(2, 2), "b").succeeds();
    }
}

fn doctor_on(daemon: &TestDaemon, name: &str) -> String {
    let report = daemon.command().line("doctor --json").json();
    let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name);
    check.unwrap_or_else(|| panic!("{name}: {report}"))["status"].as_str().unwrap().to_owned()
}

#[test]
fn reserve_is_released_on_a_full_disk_and_allocated_again() {
    for (kind, daemon, root) in small_daemons() {
        let reserve = root.join("reserve");
        let size = fs::metadata(&reserve).unwrap().len();
        assert!(size >= 100 << 10, "{kind}: {size}");
        assert_eq!(doctor_on(&daemon, "reserve"), "ok", "{kind}");
        import(&daemon, &ModelFile::dense(1), "small").succeeds();
        let filler = Filler::leaving_free(&root, 0);
        assert_eq!(doctor_on(&daemon, "space"), "warning", "{kind}");
        // It frees less than the reserve needs.
        daemon.command().line("rm small").succeeds();
        assert!(!reserve.exists(), "{kind}: it was released");
        assert_eq!(doctor_on(&daemon, "reserve"), "warning", "{kind}");
        drop(filler);
        daemon.command().line("gc").succeeds();
        assert_eq!(fs::metadata(&reserve).unwrap().len(), size, "{kind}: it is allocated again");
        assert_eq!(doctor_on(&daemon, "reserve"), "ok", "{kind}");
    }
}

/// Every verb that sets a name without storing data.
#[test]
fn names_can_be_set_on_a_full_disk() {
    for (kind, daemon, root) in small_daemons() {
        import(&daemon, &model(1, 4), "m").succeeds();
        import(&daemon, &ModelFile::dense(2), "gone").succeeds();
        daemon.command().line("rm --keep 1h gone").succeeds();
        for line in ["tag m n", "rename n o", "undelete gone", "tag m gone --force"] {
            let filler = Filler::leaving_free(&root, 0);
            daemon.command().line(line).succeeds();
            assert!(!root.join("reserve").exists(), "{kind}: {line}: the reserve was released");
            drop(filler);
            daemon.command().line("gc").succeeds();
            assert!(root.join("reserve").exists(), "{kind}: {line}: it is there again");
        }
        let named: Vec<_> =
            daemon.client().models().unwrap().models.into_iter().map(|row| row.name).collect();
        assert_eq!(named, ["gone:latest", "m:latest", "o:latest"], "{kind}");
    }
}

#[test]
fn model_can_be_moved_to_the_trash_on_a_full_disk() {
    for (kind, daemon, root) in small_daemons() {
        import(&daemon, &model(1, 4), "m").succeeds();
        let before = check_blobs(&root);
        let _filler = Filler::leaving_free(&root, 0);
        daemon.command().line("rm --keep 1h m").succeeds();
        assert_eq!(names(&root.join("trash")).len(), 1, "{kind}");
        daemon.command().line("gc").succeeds();
        assert_eq!(check_blobs(&root), before, "{kind}");
        daemon.command().line("undelete m").succeeds();
        daemon.command().line("pin m").succeeds();
        assert!(daemon.command().line("export m -o -").succeeds().stdout == model(1, 4).bytes(), "{kind}");
    }
}

/// Concurrent imports must not rely on the same free bytes.
#[test]
fn concurrent_imports_share_a_small_disk() {
    for (kind, daemon, root) in small_daemons() {
        let _filler = Filler::leaving_free(&root, 14 << 20);
        let codes: Vec<i32> = std::thread::scope(|scope| {
            let start = |seed: u64| {
                let daemon = &daemon;
                scope.spawn(move || import(daemon, &model(seed, 6), &format!("m{seed}")).code)
            };
            let imports: Vec<_> = (1..=4).map(start).collect();
            imports.into_iter().map(|import| import.join().unwrap()).collect()
        });
        assert!(codes.iter().all(|code| [0, 6].contains(code)), "{kind}: {codes:?}");
        assert!(codes.contains(&6), "{kind}: four do not fit");
        assert_eq!(staged(&root), [""; 0], "{kind}");
        check_blobs(&root);
        for (seed, _) in (1..).zip(&codes).filter(|(_, code)| **code == 0) {
            let exported = daemon.command().run(["export", &format!("m{seed}"), "-o", "-"]).succeeds();
            assert!(exported.stdout == model(seed, 6).bytes(), "{kind}: m{seed}");
        }
    }
}
