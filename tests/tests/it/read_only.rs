//! A file system that becomes read-only under a running daemon, as ext4 does after an I/O error, or that shuts down, as XFS
//! does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;

/// Mounts an image on the first argument in a mount namespace of its own, and runs the other arguments there. The
/// kernel unmounts it after the last process of the namespace.
const EXT4: &str = "PATH=$PATH:/usr/sbin:/sbin; truncate -s 64M \"$0.img\" && mkfs.ext4 -q -F \"$0.img\" && \
     mount -o loop,errors=remount-ro \"$0.img\" \"$0\" && exec \"$@\"";
const XFS: &str = "PATH=$PATH:/usr/sbin:/sbin; truncate -s 320M \"$0.img\" && mkfs.xfs -q -f \"$0.img\" && \
     mount -o loop \"$0.img\" \"$0\" && exec \"$@\"";

/// A daemon with a model on a file system of its own; `None` if that cannot be mounted here.
fn daemon_on(script: &str, mount: &Path) -> Option<TestDaemon> {
    fs::create_dir(mount).unwrap();
    let wrapper = ["unshare", "--mount", "sh", "-c", script, mount.to_str().unwrap()];
    let tried = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        skipped("nothing can be mounted here, or the program that makes the file system is missing");
        return None;
    }
    let file = ModelFile::dense(1).write_to(mount.parent().unwrap(), "m.gguf");
    let daemon = TestDaemon::start_at_under(&wrapper, &mount.join("store"), None);
    daemon.command().run([PathBuf::from("import"), file]).succeeds();
    assert_eq!((writes(&daemon).0, &*metric(&daemon)), (true, "blobd_store_writable 1"));
    Some(daemon)
}

fn writes(daemon: &TestDaemon) -> (bool, String) {
    let health = daemon.command().line("health --json").json();
    let checks = health["checks"].as_array().unwrap();
    let writes = checks.iter().find(|check| check["name"] == "writes").unwrap();
    (writes["status"] == "ok", writes["detail"].as_str().unwrap().to_owned())
}

fn metric(daemon: &TestDaemon) -> String {
    let metrics = http::get(&daemon.socket(), "/v1/metrics").body;
    metrics.lines().find(|line| line.starts_with("blobd_store_writable")).unwrap().to_owned()
}

/// The file by which the kernel is told to report an error of a mounted ext4.
fn error_trigger(daemon: &TestDaemon, mount: &str) -> Option<PathBuf> {
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", daemon.pid())).unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(4) == Some(mount))?;
    let device = line.split(" - ").nth(1)?.split(' ').nth(1)?.rsplit('/').next()?;
    let path = PathBuf::from(format!("/sys/fs/ext4/{device}/trigger_fs_error"));
    path.exists().then_some(path)
}

#[test]
fn file_system_that_becomes_read_only_is_noticed_without_a_write() {
    let folder = tmpfs_directory();
    let mount = folder.path().join("mount");
    let Some(daemon) = daemon_on(EXT4, &mount) else { return };
    let Some(trigger) = error_trigger(&daemon, mount.to_str().unwrap()) else {
        skipped("this kernel has no ext4 whose errors can be triggered");
        return;
    };
    if let Err(error) = fs::write(&trigger, "a test of blobd") {
        skipped(format_args!("{}: {error}", trigger.display()));
        return;
    }
    let (is_ok, detail) = writes(&daemon);
    assert!(!is_ok && detail.contains("mounted read-only"), "{detail}");
    assert_eq!(metric(&daemon), "blobd_store_writable 0");
    let list = daemon.command().line("ls").succeeds();
    assert!(
        list.stderr.contains("the store is read-only") && list.text().contains("m:latest"),
        "{}",
        list.stderr
    );
    let report = daemon.command().line("doctor --json").json();
    let checks = report["checks"].as_array().unwrap();
    for name in ["writes", "mount"] {
        let found = checks.iter().find(|check| check["name"] == name).unwrap();
        assert_eq!(found["status"], "failure", "{found}");
    }
}

#[test]
fn xfs_that_has_shut_down_is_noticed_and_errors_say_what_to_do() {
    let folder = tmpfs_directory();
    let mount = folder.path().join("mount");
    let Some(daemon) = daemon_on(XFS, &mount) else { return };
    let pid = daemon.pid().to_string();
    let inside = ["nsenter", "--mount", "--target", &pid, "--", "sh", "-c"];
    let shut_down = "PATH=$PATH:/usr/sbin:/sbin; exec xfs_io -x -c shutdown \"$0\"";
    let mut command = Command::new(inside[0]);
    command.args(&inside[1..]).arg(shut_down).arg(&mount);
    if !command.output().is_ok_and(|output| output.status.success()) {
        skipped("nsenter or xfs_io is missing");
        return;
    }
    let (is_ok, detail) = writes(&daemon);
    assert!(!is_ok && detail.contains("cannot be opened"), "{detail}");
    assert_eq!(metric(&daemon), "blobd_store_writable 0");
    // Not even names can be read.
    for line in ["ls", "show m", "rm m"] {
        let run = daemon.command().line(line);
        assert!(run.code != 0 && run.stderr.contains("Input/output error"), "{line}: {}", run.stderr);
    }
    for line in ["ls", "doctor"] {
        let run = daemon.command().line(line);
        let said = format!("{}{}", run.text(), run.stderr);
        assert!(said.contains("dmesg") && said.contains("xfs_repair"), "{line}: {said}");
    }
}
