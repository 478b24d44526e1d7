//! Sources of an import that are not model files, not readable, or change meanwhile.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::ImportParams;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::file_source::import_file;
use blobd_tests::model::{End, ModelFile};
use blobd_tests::store_dir::check_empty;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs as _};
use rustix::fs::{CWD, FileType, Mode, mknodat};

fn import(daemon: &TestDaemon, path: &Path) -> Run {
    daemon.command().run([
        "import".as_ref(),
        path.as_os_str(),
        "--name".as_ref(),
        "m".as_ref(),
        "--json".as_ref(),
    ])
}

#[test]
fn irregular_files_are_refused_without_waiting() {
    let daemon = TestDaemon::start();
    let pipe = daemon.scratch().join("pipe.gguf");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (path, what) in [
        (pipe.as_path(), "a pipe"),
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
fn files_of_the_kernel_are_refused_as_invalid_models() {
    let daemon = TestDaemon::start();
    // `stat` reports them as regular files; the second is endless.
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

/// The daemon runs as root here and can read files that its client cannot.
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
fn other_users_may_list_and_import_but_not_remove_what_they_have_not_added() {
    if !rustix::process::geteuid().is_root() {
        skipped("needs root to become another user");
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
    daemon.command().line(&format!("import {} --name m", path.display())).succeeds();
    as_nobody(&format!("import {} --name own", path.display())).succeeds();
    assert_eq!(as_nobody("ls --json").succeeds().json()["models"][0]["name"], "m:latest");
    for line in ["rm m --json", "rename m n --json", "gc --json"] {
        as_nobody(line).exits_with(7);
    }
    as_nobody("rm own").succeeds();
    daemon.command().line("show m").succeeds();
}

/// Gives all users access to the socket, the binary, and the test's files.
pub(super) fn open_to_all(daemon: &TestDaemon) {
    fs::set_permissions(daemon.scratch(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(daemon.socket(), Permissions::from_mode(0o666)).unwrap();
}

#[test]
fn file_that_changes_while_it_is_imported_is_refused() {
    for (what, change, words) in [
        (
            "shrinks",
            (|file: &File, size| file.set_len(size / 2).unwrap()) as fn(&File, u64),
            "too short: expected",
        ),
        ("grows", |file, size| file.set_len(size + 1).unwrap(), "changed while it was imported"),
        ("is rewritten", |file, _| file.write_all_at(&[1], 5000).unwrap(), "changed while it was imported"),
    ] {
        let folder = tmpfs_directory();
        let verbs = InProcess::open(&folder.path().join("store"));
        let path = ModelFile { end: End::Bare, ..ModelFile::dense(1) }.write_to(folder.path(), "m.gguf");
        let file = File::options().read(true).write(true).open(path).unwrap();
        // Longer than the read-ahead; all but the start is a hole.
        file.set_len(48 << 20).unwrap();
        // An old modification time: on older kernels, two changes within one tick give the same time.
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let mut change = Some(change);
        let mut at_first_progress = |_, size| {
            if let Some(change) = change.take() {
                change(&file, size);
            }
        };
        let params = ImportParams::new("m.gguf");
        let never = AtomicBool::new(false);
        let done = import_file(&verbs.store, &params, &file, &never, &mut at_first_progress);
        let error = done.unwrap_err().body();
        assert_eq!(error.code, ErrorCode::InvalidInput, "{what}: {error}");
        assert!(error.message.contains(words), "{what}: {error}");
        check_empty(verbs.root());
    }
}

#[test]
fn import_that_is_cancelled_leaves_nothing() {
    let folder = tmpfs_directory();
    let verbs = InProcess::open(&folder.path().join("store"));
    let path = ModelFile { end: End::Bare, ..ModelFile::dense(1) }.write_to(folder.path(), "m.gguf");
    let file = File::options().read(true).write(true).open(path).unwrap();
    file.set_len(48 << 20).unwrap();
    let cancelled = AtomicBool::new(false);
    let params = ImportParams::new("m.gguf");
    let mut cancel = |_, _| cancelled.store(true, Ordering::Relaxed);
    let done = import_file(&verbs.store, &params, &file, &cancelled, &mut cancel);
    assert!(done.unwrap_err().to_string().contains("has disconnected"));
    check_empty(verbs.root());
}

#[test]
fn holes_of_a_file_are_exported_as_zeros() {
    let daemon = TestDaemon::start();
    let path = ModelFile { end: End::Bare, ..ModelFile::dense(1) }.write_to(daemon.scratch(), "sparse.gguf");
    File::options().write(true).open(&path).unwrap().set_len(8 << 20).unwrap();
    import(&daemon, &path).succeeds();
    let exported = daemon.command().line("export m -o -").succeeds();
    assert!(exported.stdout == fs::read(&path).unwrap());
}

#[test]
fn several_files_are_imported_although_one_is_refused() {
    let daemon = TestDaemon::start();
    let good = ModelFile::dense(1).write_to(daemon.scratch(), "good.gguf");
    let bad = daemon.scratch().join("bad.gguf");
    fs::write(&bad, "no model").unwrap();
    let other = ModelFile::dense(2).write_to(daemon.scratch(), "other.gguf");
    let run = daemon.command().run(["import".as_ref(), good.as_os_str(), bad.as_os_str(), other.as_os_str()]);
    assert!(run.exits_with(1).stderr.contains("bad.gguf"));
    let listed = daemon.command().line("ls --json").json();
    let names: Vec<_> = listed["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["good:latest", "other:latest"]);
}
