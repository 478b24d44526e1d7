//! The needs and effects of a user's first commands.

use std::fs;
use std::path::Path;
use std::process::Command;

use blobd_client::sockets::{SYSTEM_SOCKET, default_sockets, evidence_of_service};
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};

#[test]
fn commands_that_read_an_absent_store_allocate_nothing_large() {
    let folder = disk_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    for line in ["ls", "df", "ps", "doctor", "gc --dry-run", "ls --trash"] {
        blobd.line(line).succeeds();
    }
    assert!(!root.join("reserve").exists());
    let reserve = |blobd: &Blobd| {
        let report = blobd.line("doctor --json").succeeds().json();
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == "reserve").unwrap()["status"].clone()
    };
    assert_eq!(reserve(&blobd), "ok", "an empty store needs none");
    let model = ModelFile::dense_of(1, 2, 128).write_to(folder.path(), "m.gguf");
    blobd.run(["import".as_ref(), model.as_os_str()]).succeeds();
    assert!(root.join("reserve").exists(), "there is something to remove now");
    assert_eq!(reserve(&blobd), "ok");
}

#[test]
fn removal_and_collection_in_an_empty_store_allocate_nothing_large() {
    let folder = disk_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    blobd.line("gc").succeeds();
    blobd.line("rm llama3:8b").exits_with(3);
    blobd.line("partial rm --all").succeeds();
    assert!(!root.join("reserve").exists());
}

#[test]
fn option_that_names_no_store_is_refused_and_creates_nothing() {
    let folder = tmpfs_directory();
    let (absent, empty) = (folder.path().join("a/mistyped"), folder.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    for (root, found) in [(&absent, "no such directory"), (&empty, "the directory is empty")] {
        for line in ["ls", "df", "show m", "ps", "rm m", "gc", "verify", "export m", "pin m", "partial ls"] {
            let root = root.to_str().unwrap();
            let words: Vec<_> = line.split(' ').chain(["--root", root, "--json"]).collect();
            let error = blobd.run(words).exits_with(3).error();
            assert_eq!(error.message, format!("{root}: contains no store: {found}"), "{line}");
            assert!(error.hint.unwrap().contains("`blobd import`"), "{line}");
        }
    }
    assert!(!absent.parent().unwrap().exists());
    assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
    let model = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    for root in [&absent, &empty] {
        let root = root.to_str().unwrap();
        blobd.run(["import", model.to_str().unwrap(), "--root", root]).succeeds();
        assert!(blobd.run(["ls", "--root", root]).succeeds().text().contains("m:latest"));
    }
}

#[test]
fn doctor_does_not_warn_of_a_limit_that_serve_raises() {
    let folder = tmpfs_directory();
    Blobd::at_root(&folder.path().join("store")).line("ls").succeeds();
    let mut doctor = Command::new("sh");
    doctor.args(["-c", "ulimit -Sn 256; exec \"$@\"", "sh"]).arg(blobd_tests::programs::blobd());
    Blobd::at_root(&folder.path().join("store")).prepare(&mut doctor);
    let report = command::run(doctor.args(["doctor", "--json"])).succeeds().json();
    let checks = report["checks"].as_array().unwrap();
    let descriptors = checks.iter().find(|check| check["name"] == "descriptors").unwrap();
    assert!(!descriptors["detail"].as_str().unwrap().contains("256"), "{descriptors}");
}

/// Runs a command as a user other than root without a home directory.
fn without_home(home: Option<&str>, folder: &Path, words: &[&str]) -> Option<Run> {
    let mut command = match rustix::process::geteuid().is_root() {
        false => Command::new("env"),
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", "env"]);
            command
        }
    };
    Blobd::at_root(folder).prepare(&mut command);
    for variable in ["HOME", "BLOBD_ROOT", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"] {
        command.env_remove(variable);
    }
    if let Some(home) = home {
        command.env("HOME", home);
    }
    command.arg(blobd_tests::programs::blobd()).args(words).current_dir(folder);
    match Command::new("setpriv").arg("--version").output() {
        Ok(_) => Some(command::run(&mut command)),
        Err(_) => {
            skipped("there is no `setpriv`");
            None
        }
    }
}

#[test]
fn without_a_home_directory_no_store_is_created_in_the_current_one() {
    let folder = tmpfs_directory();
    let own = || default_sockets().into_iter().find(|socket| socket.exists());
    if let Some(file) = evidence_of_service(Path::new(SYSTEM_SOCKET)).or_else(own) {
        skipped(format_args!("commands would not use the default store, because of {}", file.display()));
        return;
    }
    for home in [None, Some(""), Some("relative")] {
        let Some(run) = without_home(home, folder.path(), &["ls"]) else { return };
        let run = run.exits_with(2);
        assert!(run.stderr.contains("HOME: ") && run.stderr.contains("give --root"), "{}", run.stderr);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let root = folder.path().join("store");
    fs::create_dir(&root).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(&root, open).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(folder.path(), open).unwrap();
    let store = root.join("s");
    fs::write(root.join("not-a-model"), "").unwrap();
    let words = ["import", "not-a-model", "--root", store.to_str().unwrap()];
    without_home(None, &root, &words).unwrap().exits_with(1);
    without_home(None, folder.path(), &["ls", "--root", store.to_str().unwrap()]).unwrap().succeeds();
}
