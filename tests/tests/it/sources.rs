//! What can be named as the source of an import, and need not be a model at all.

use std::fs::{self, File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;

use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{End, ModelFile};
use blobd_tests::store_dir::{check_empty, staged};
use rustix::fs::{CWD, FileType, Mode, mknodat};

fn import(daemon: &TestDaemon, path: &Path) -> Run {
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), "m".as_ref(), "--json".as_ref()])
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting() {
    let daemon = TestDaemon::start();
    let pipe = daemon.scratch().join("pipe.gguf");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (path, what) in [
        (pipe.as_path(), "a pipe"),
        (daemon.scratch(), "a directory"),
        (Path::new("/dev/zero"), "a device"),
        (Path::new("/dev/null"), "a device"),
    ] {
        let error = import(&daemon, path).exits_with(2).error();
        assert!(error.message.contains(what), "{error}");
    }
    let listener = daemon.scratch().join("socket.gguf");
    let _listener = UnixListener::bind(&listener).unwrap();
    assert_ne!(import(&daemon, &listener).code, 0);
    check_empty(daemon.root());
}

#[test]
fn files_of_the_kernel_are_refused_like_any_file_that_is_no_model() {
    let daemon = TestDaemon::start();
    // Both say that they are regular files; the second has no end.
    for path in ["/proc/self/status", "/proc/self/pagemap", "/proc/self/mem"] {
        let run = import(&daemon, Path::new(path));
        assert!([1, 7].contains(&run.code), "{path}: {} {}", run.code, run.stderr);
    }
    check_empty(daemon.root());
}

#[test]
fn file_that_is_not_there_is_not_found() {
    let daemon = TestDaemon::start();
    let error = import(&daemon, &daemon.scratch().join("nothing.gguf")).exits_with(3).error();
    assert!(error.message.contains("nothing.gguf"), "{error}");
    symlink("loop.gguf", daemon.scratch().join("loop.gguf")).unwrap();
    assert_ne!(import(&daemon, &daemon.scratch().join("loop.gguf")).code, 0);
    check_empty(daemon.root());
}

#[test]
fn symbolic_link_is_followed_with_the_callers_rights() {
    let daemon = TestDaemon::start();
    let target = ModelFile::dense(1).write_to(daemon.scratch(), "target.gguf");
    let link = daemon.scratch().join("link.gguf");
    symlink(&target, &link).unwrap();
    import(&daemon, &link).succeeds();
    assert!(target.is_file(), "the caller's file is left alone");
}

/// The daemon runs as root here: what it can read is not what its caller can.
#[test]
fn file_that_the_caller_may_not_read_is_denied() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "secret.gguf");
    fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    let mut import = daemon.command().command();
    import.arg("import").arg(&path).args(["--name", "m"]);
    if rustix::process::geteuid().is_root() {
        open_to_all(&daemon);
        import.uid(65_534).gid(65_534);
    }
    let run = command::run(&mut import).exits_with(7);
    assert!(run.stderr.contains("secret.gguf"), "{}", run.stderr);
    check_empty(daemon.root());
}

#[test]
fn other_users_may_list_and_import_but_not_remove() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root to become another user");
        return;
    }
    let daemon = TestDaemon::start();
    open_to_all(&daemon);
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "open.gguf");
    let as_nobody = |line: &str| {
        let mut command = daemon.command().command();
        command.args(line.split(' ')).uid(65_534).gid(65_534);
        command::run(&mut command)
    };
    as_nobody(&format!("import {} --name m", path.display())).succeeds();
    assert_eq!(as_nobody("ls --json").succeeds().json()["models"][0]["name"], "m:latest");
    for line in ["rm m --json", "tag m n --json", "gc --json"] {
        let error = as_nobody(line).exits_with(7).error();
        assert!(error.message.contains("65534"), "{line}: {error}");
    }
    daemon.command().line("show m").succeeds();
}

/// Lets everybody reach the socket, the binary, and the test's files.
fn open_to_all(daemon: &TestDaemon) {
    fs::set_permissions(daemon.scratch(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(daemon.socket(), Permissions::from_mode(0o666)).unwrap();
}

#[test]
fn file_that_shrinks_while_it_is_imported_is_refused() {
    let daemon = TestDaemon::start();
    let path = large_file(daemon.scratch());
    let size = path.metadata().unwrap().len();
    let file = File::options().write(true).open(&path).unwrap();
    check_changed(&daemon, &path, || file.set_len(size / 2).unwrap(), &["ends at byte", "changed"]);
}

#[test]
fn file_that_grows_while_it_is_imported_is_refused() {
    let daemon = TestDaemon::start();
    let path = large_file(daemon.scratch());
    let mut file = File::options().append(true).open(&path).unwrap();
    check_changed(&daemon, &path, || file.write_all(&[0; 4096]).unwrap(), &["changed"]);
}

/// A valid file that takes a while: 512 MiB, nearly all of it a hole.
fn large_file(folder: &Path) -> std::path::PathBuf {
    let path = ModelFile { end: End::Bare, ..ModelFile::dense(1) }.write_to(folder, "large.gguf");
    File::options().write(true).open(&path).unwrap().set_len(512 << 20).unwrap();
    path
}

/// Changes the file in the middle of its import.
fn check_changed(daemon: &TestDaemon, path: &Path, change: impl FnOnce(), words: &[&str]) {
    let mut import = daemon.command().command();
    let import = import.arg("import").arg(path).spawn().unwrap();
    blobd_tests::wait::eventually("the import has begun", || !staged(daemon.root()).is_empty());
    change();
    let output = import.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(words.iter().any(|words| stderr.contains(words)), "{stderr}");
    check_empty(daemon.root());
}

#[test]
fn file_with_holes_comes_back_as_zeros() {
    let daemon = TestDaemon::start();
    let path = ModelFile { end: End::Bare, ..ModelFile::dense(1) }.write_to(daemon.scratch(), "sparse.gguf");
    File::options().write(true).open(&path).unwrap().set_len(8 << 20).unwrap();
    import(&daemon, &path).succeeds();
    let exported = daemon.command().line("export m -o -").succeeds();
    assert!(exported.stdout == fs::read(&path).unwrap());
}

#[test]
fn several_files_are_imported_until_one_is_refused() {
    let daemon = TestDaemon::start();
    let good = ModelFile::dense(1).write_to(daemon.scratch(), "good.gguf");
    let bad = daemon.scratch().join("bad.gguf");
    fs::write(&bad, "no model").unwrap();
    let other = ModelFile::dense(2).write_to(daemon.scratch(), "other.gguf");
    let run = daemon.command().run(["import".as_ref(), good.as_os_str(), bad.as_os_str(), other.as_os_str()]);
    assert!(run.exits_with(1).stderr.contains("bad.gguf"));
    let listed = daemon.command().line("ls --json").json();
    assert_eq!(listed["models"].as_array().unwrap().len(), 1);
    assert_eq!(listed["models"][0]["name"], "good:latest");
}
