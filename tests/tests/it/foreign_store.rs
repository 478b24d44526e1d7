//! Commands in a store of another user: what root creates belongs to the store's owner, whose own commands work
//! afterwards; another user is refused and told what to run.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_client::protocol::error::ErrorCode;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::names;
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};
use tempfile::TempDir;

use super::multi_user::can_be_others;

pub(super) const OWNER: u32 = 65534;
pub(super) const GROUP: u32 = 65533;
const STRANGER: u32 = 12345;
const MODEL: &str = "application/vnd.ollama.image.model";

/// A store of the user [`OWNER`], and a registry with the model `library/tiny`.
struct Fixture {
    registry: FakeRegistry,
    model: ModelFile,
    blobd: Blobd,
    folder: TempDir,
}

impl Fixture {
    /// `None` unless this process is root.
    fn new() -> Option<Self> {
        Self::at(tmpfs_directory())
    }

    fn at(folder: TempDir) -> Option<Self> {
        if !can_be_others() {
            return None;
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (root, home) = (folder.path().join("store"), folder.path().join("store.home"));
        for path in [&root, &home] {
            fs::create_dir(path).unwrap();
            chown(path, Some(OWNER), Some(GROUP)).unwrap();
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).unwrap();
        let (registry, model) = (FakeRegistry::start().unwrap(), ModelFile::dense(7));
        registry.add_model("library/tiny:latest", b"{}", &[(MODEL, &model.bytes())]).unwrap();
        for (name, seed) in [("a.gguf", 1), ("b.gguf", 2), ("c.gguf", 3)] {
            let _path = ModelFile::dense(seed).write_to(folder.path(), name);
        }
        Some(Self { registry, model, blobd: Blobd::at_root(&root), folder })
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Runs a command as this user with a strict umask. `DIR/` stands for the folder of the models, `REGISTRY/` for
    /// the registry.
    fn run_as(&self, uid: u32, line: &str) -> Run {
        let registry = self.registry.name("library/");
        let line = line.replace("DIR/", &format!("{}/", self.folder.path().display()));
        let line = line.replace("REGISTRY/", &registry);
        let mut command = Command::new("setpriv");
        let gid = if uid == OWNER { GROUP } else { uid };
        command.args([format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()]);
        command.args(["sh", "-c", "umask 077; exec \"$@\"", "sh"]).arg(programs::blobd());
        command.args(line.split_whitespace());
        self.blobd.prepare(&mut command);
        command::run(&mut command)
    }

    fn as_root(&self, line: &str) -> Run {
        self.run_as(0, line)
    }

    fn as_owner(&self, line: &str) -> Run {
        self.run_as(OWNER, line)
    }

    fn give_all_to(&self, uid: u32, gid: u32) {
        let run = Command::new("chown").arg("-R").arg(format!("{uid}:{gid}")).arg(self.root()).status();
        assert!(run.unwrap().success());
    }
}

/// Files and directories of the store with another owner or group.
pub(super) fn foreign(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut next = vec![root.to_path_buf()];
    while let Some(path) = next.pop() {
        // It may be removed meanwhile by a daemon.
        let Ok(status) = path.symlink_metadata() else { continue };
        if (status.uid(), status.gid()) != (OWNER, GROUP) {
            found.push(path.display().to_string());
        }
        if status.is_dir() {
            next.extend(names(&path).iter().map(|name| path.join(name)));
        }
    }
    found
}

/// Commands that change the store, in an order in which each succeeds.
const COMMANDS: [&str; 27] = [
    "ls",
    "import DIR/a.gguf --name a",
    "import DIR/b.gguf --name deep/er:one",
    "pull REGISTRY/tiny",
    "tag a copy",
    "rename copy moved",
    "edit a edited --set general.name=x",
    "pin a",
    "unpin a",
    "rm moved",
    "rm --keep 1d edited",
    "undelete edited",
    "rm edited",
    "history a",
    "export a -o DIR/exported.gguf",
    "show a",
    "df -v",
    "verify",
    "verify --repair",
    "gc --dry-run",
    "gc",
    "reindex",
    "warm a",
    "partial ls",
    "log",
    "doctor --json",
    "exec -- true",
];

#[test]
fn what_root_creates_in_a_store_of_another_user_belongs_to_that_user() {
    let Some(fixture) = Fixture::at(disk_directory()) else { return };
    // Imports of files that have just been written are not remembered.
    std::thread::sleep(std::time::Duration::from_millis(200));
    for line in COMMANDS {
        let run = fixture.as_root(line);
        assert!(run.code == 0 || line.starts_with("doctor"), "{line}: {}", run.stderr);
        assert_eq!(foreign(&fixture.root()), [""; 0], "{line}");
        assert_eq!(foreign(&fixture.folder.path().join("store.home")), [""; 0], "{line}");
    }
    for line in
        ["import DIR/c.gguf --name c", "rm a", "pull REGISTRY/tiny --name again", "gc", "doctor --json"]
    {
        let run = fixture.as_owner(line);
        assert!(run.code == 0 || line.starts_with("doctor"), "{line}: {}", run.stderr);
    }
    assert!(!fixture.as_root("doctor").stdout.is_empty());
}

#[test]
fn command_of_root_that_is_killed_or_fails_leaves_no_file_of_root() {
    let Some(fixture) = Fixture::new() else { return };
    let weights = format!("/cdn/sha256:{}", sha256(&fixture.model.bytes()));
    fixture.registry.add_fault(&weights, 1, Fault::CutAfter(fixture.model.bytes().len() / 2));
    fixture.registry.add_fault(&weights, usize::MAX, Fault::Status(404));
    fixture.as_root("pull REGISTRY/tiny").exits_with(1);
    fixture.registry.clear_faults();
    assert!(!names(&fixture.root().join("partial")).is_empty(), "an unfinished download");
    assert_eq!(foreign(&fixture.root()), [""; 0]);
    fixture.as_owner("pull REGISTRY/tiny").succeeds();
    let mut holds = Command::new(programs::blobd());
    fixture.blobd.prepare(&mut holds);
    let mut holds = holds.args(["exec", "--", "sleep", "600"]).spawn().unwrap();
    blobd_tests::wait::eventually("the command has the store open", || {
        fs::read_to_string(fixture.root().join("lock"))
            .is_ok_and(|lock| lock.contains(&holds.id().to_string()))
    });
    assert_eq!(foreign(&fixture.root()), [""; 0], "while it serves other commands");
    holds.kill().unwrap();
    holds.wait().unwrap();
    assert_eq!(foreign(&fixture.root()), [""; 0]);
    fixture.as_owner("rm REGISTRY/tiny").succeeds();
}

#[test]
fn daemon_that_root_runs_leaves_the_store_to_its_owner() {
    let Some(fixture) = Fixture::new() else { return };
    let mut daemon =
        TestDaemon::start_at_under(&["sh", "-c", "umask 077; exec \"$@\"", "sh"], &fixture.root(), None);
    let blobd = daemon.command();
    for path in ["a.gguf", "b.gguf"] {
        blobd.run(["import".as_ref(), fixture.folder.path().join(path).as_os_str()]).succeeds();
    }
    blobd.line("reindex").succeeds();
    blobd.line("rm a").succeeds();
    assert!(daemon.stop().success());
    assert!(fixture.root().join("index/CLEAN").exists(), "the index was written: {}", daemon.log());
    assert_eq!(foreign(&fixture.root()), [""; 0]);
    fixture.as_owner("rm b").succeeds();
}

#[test]
fn new_store_of_root_in_the_folder_of_another_user_belongs_to_that_user() {
    let Some(fixture) = Fixture::new() else { return };
    let inner = fixture.folder.path().join("store.home/share/blobd");
    Blobd::at_root(&inner).line("ls").succeeds();
    assert_eq!(foreign(&fixture.folder.path().join("store.home")), [""; 0]);
}

#[test]
fn user_who_is_not_the_owner_is_refused_with_the_command_to_run() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    let error = fixture.run_as(STRANGER, "ls --json").exits_with(7).error();
    assert_eq!(error.code, ErrorCode::Denied);
    assert!(error.message.contains("belongs to uid 65534"), "{error}");
    let hint = error.hint.unwrap();
    assert!(
        hint.contains("sudo -u '#65534' blobd") && hint.contains("chown -R --no-dereference 12345:12345"),
        "{hint}"
    );
    // Whoever may read it can do so, even where the modes would permit changes.
    for name in ["", "lock", "manifests", "history", "trash", "staging", "blobs", "recipes", "audit"] {
        fs::set_permissions(fixture.root().join(name), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let list = fixture.run_as(STRANGER, "ls --json").succeeds().json();
    assert_eq!(list["models"].as_array().unwrap().len(), 1);
    let reason = list["read_only"].as_str().unwrap();
    assert!(reason.contains("sudo -u '#65534' blobd"), "{reason}");
    for line in ["import DIR/b.gguf --json", "rm a --json", "pin a --json", "tag a b --json"] {
        let error = fixture.run_as(STRANGER, line).exits_with(1).error();
        assert_eq!(error.code, ErrorCode::ReadOnly, "{line}: {error}");
        assert!(error.message.contains("sudo -u '#65534' blobd"), "{line}: {error}");
    }
    assert_eq!(foreign(&fixture.root()), [""; 0]);
}

/// The check of `doctor` with this name.
fn check(run: &Run, name: &str) -> serde_json::Value {
    let report = run.json();
    report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap().clone()
}

#[test]
fn doctor_finds_each_file_of_another_user_and_its_command_corrects_them() {
    let Some(fixture) = Fixture::new() else { return };
    for line in ["import DIR/a.gguf --name a", "pin a", "import DIR/b.gguf --name b", "rm --keep 1d b"] {
        fixture.as_owner(line).succeeds();
    }
    for path in [
        "blobs",
        "recipes",
        "manifests/registry.ollama.ai/library/a/latest",
        "history",
        "pins",
        "trash",
        "lock",
    ] {
        let path = fixture.root().join(path);
        let first = || names(&path).first().map(|name| path.join(name));
        let path = if path.is_dir() { first().unwrap() } else { path };
        chown(&path, Some(0), Some(0)).unwrap();
        let found = check(&fixture.as_root("doctor --json"), "ownership");
        assert_eq!(found["status"], "failure", "{}: {found}", path.display());
        let name = path.strip_prefix(fixture.root()).unwrap().to_str().unwrap();
        assert!(found["detail"].as_str().unwrap().contains(&format!("{name} to uid 0")), "{found}");
        let command = found["command"].as_str().unwrap().trim_start_matches("sudo ").to_owned();
        assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
        assert_eq!(check(&fixture.as_root("doctor --json"), "ownership")["status"], "ok");
    }
    fixture.as_owner("undelete b").succeeds();
}

/// What a command has said, without the line breaks of a narrow terminal.
fn in_one_line(run: &Run) -> String {
    format!("{} {}", run.text(), run.stderr).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Runs a command as another user in a user namespace of its own, as in a rootless container; `None` where that is not
/// possible.
fn in_user_namespace(fixture: &Fixture, options: &[&str], line: &str) -> Option<Run> {
    let stranger = STRANGER.to_string();
    let as_stranger = ["--reuid", &stranger, "--regid", &stranger, "--clear-groups", "unshare", "--user"];
    let command = |program: &Path| {
        let mut command = Command::new("setpriv");
        command.args(as_stranger).args(options).arg(program);
        command
    };
    if !command(Path::new("true")).output().is_ok_and(|output| output.status.success()) {
        skipped("user namespaces cannot be made here");
        return None;
    }
    let mut blobd = command(programs::blobd());
    blobd.args(line.split(' '));
    fixture.blobd.prepare(&mut blobd);
    Some(command::run(&mut blobd))
}

#[test]
fn error_in_a_user_namespace_without_the_owner_names_the_namespace_and_no_uid() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    for (mode, options) in
        [(0o755, &["--map-root-user"][..]), (0o755, &[]), (0o700, &["--map-root-user"]), (0o700, &[])]
    {
        fs::set_permissions(fixture.root(), fs::Permissions::from_mode(mode)).unwrap();
        for line in ["rm a", "doctor"] {
            let Some(run) = in_user_namespace(&fixture, options, line) else { return };
            let said = in_one_line(&run);
            let context = format!("{mode:o} {options:?} {line}: {said}");
            assert!(run.code != 0 && said.contains("outside of"), "{context}");
            assert!(!said.contains("sudo -u") && !said.contains("chown"), "{context}");
        }
    }
    fs::set_permissions(fixture.root(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(foreign(&fixture.root()), [""; 0]);
    fixture.as_owner("rm a").succeeds();
}

/// As on NFS with `root_squash`, where root has no rights to files of other users.
#[test]
fn root_without_rights_to_the_store_is_told_to_run_as_its_owner() {
    const SQUASHED: [&str; 2] = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"];
    let Some(fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    for line in ["ls", "rm a", "gc", "doctor"] {
        let mut squashed = Command::new(SQUASHED[0]);
        squashed.arg(SQUASHED[1]).arg(programs::blobd()).args(line.split(' '));
        fixture.blobd.prepare(&mut squashed);
        let run = command::run(&mut squashed);
        let said = in_one_line(&run);
        assert!(run.code != 0 && said.contains("root_squash"), "{line}: {said}");
        assert!(said.contains("sudo -u '#65534' blobd") && !said.contains("chown"), "{line}: {said}");
    }
    assert_eq!(foreign(&fixture.root()), [""; 0]);
    fixture.as_owner("rm a").succeeds();
}

#[test]
fn doctor_finds_files_with_a_wrong_group_and_its_command_corrects_them() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    let blobs = fixture.root().join("blobs");
    let blob = blobs.join(&names(&blobs)[0]);
    for (path, mode, status) in [(&blob, 0o444, "warning"), (&blobs, 0o775, "failure")] {
        chown(path, None, Some(0)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let found = check(&fixture.as_root("doctor --json"), "ownership");
        assert_eq!(found["status"], status, "{found}");
        let name = path.strip_prefix(fixture.root()).unwrap().display().to_string();
        assert!(found["detail"].as_str().unwrap().contains(&format!("{name}: gid 0")), "{found}");
        let command = found["command"].as_str().unwrap().trim_start_matches("sudo ").to_owned();
        assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
        assert_eq!(check(&fixture.as_root("doctor --json"), "ownership")["status"], "ok");
    }
}

#[test]
fn daemon_on_a_store_with_a_wrong_owner_says_why_it_is_read_only() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    chown(fixture.root().join("lock"), Some(0), Some(0)).unwrap();
    let home = fixture.folder.path().join("daemon");
    fs::create_dir(&home).unwrap();
    chown(&home, Some(OWNER), Some(GROUP)).unwrap();
    let socket = home.join("s");
    let mut daemon = Command::new("setpriv");
    daemon
        .args(["--pdeathsig=KILL", "--reuid=65534", "--regid=65533", "--clear-groups"])
        .arg(programs::blobd());
    fixture.blobd.prepare(&mut daemon);
    let log = fs::File::create(fixture.folder.path().join("log")).unwrap();
    daemon.args(["serve", "--socket"]).arg(&socket).stdout(log.try_clone().unwrap()).stderr(log);
    let mut daemon = daemon.spawn().unwrap();
    let blobd = Blobd::at_socket(&socket);
    blobd_tests::wait::eventually("the daemon responds", || blobd.line("ls").code == 0);
    let reason = "its lock file belongs to uid 0, and the store to uid 65534";
    let log = fs::read_to_string(fixture.folder.path().join("log")).unwrap();
    assert!(log.lines().any(|line| line.contains("WARN") && line.contains(reason)), "{log}");
    assert!(blobd.line("ls").stderr.contains(reason));
    let health = blobd.line("health --json");
    assert!(health.code != 0 && health.text().contains(reason), "{}", health.text());
    let metrics = http::get(&socket, "/v1/metrics").body;
    assert!(metrics.lines().any(|line| line == "blobd_store_writable 0"), "{metrics}");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    fixture.give_all_to(OWNER, GROUP);
    fixture.as_owner("rm a").succeeds();
}

#[test]
fn new_files_have_the_group_of_a_shared_store() {
    const SHARED: u32 = 54321;
    let Some(fixture) = Fixture::new() else { return };
    chown(fixture.root(), None, Some(SHARED)).unwrap();
    fs::set_permissions(fixture.root(), fs::Permissions::from_mode(0o2750)).unwrap();
    fixture.as_root("import DIR/a.gguf --name a").succeeds();
    fixture.as_root("tag a deep/er:one").succeeds();
    let mut next = vec![fixture.root()];
    while let Some(path) = next.pop() {
        let status = path.symlink_metadata().unwrap();
        assert_eq!((status.uid(), status.gid()), (OWNER, SHARED), "{}", path.display());
        if status.is_dir() {
            next.extend(names(&path).iter().map(|name| path.join(name)));
        }
    }
}

/// A configuration whose log is in this directory of the folder.
fn audited_in(fixture: &mut Fixture, name: &str) -> PathBuf {
    let directory = fixture.folder.path().join(name);
    let config = fixture.folder.path().join("config.toml");
    fs::write(&config, format!("[audit]\ndirectory = \"{}\"\n", directory.display())).unwrap();
    fixture.blobd = Blobd::at_root(&fixture.root()).configured_by(&config);
    directory
}

#[test]
fn changes_of_root_are_recorded_in_a_log_directory_of_the_owner() {
    let Some(mut fixture) = Fixture::new() else { return };
    let directory = audited_in(&mut fixture, "store.home/log");
    for line in ["import DIR/a.gguf --name a", "tag a copy"] {
        let run = fixture.as_root(line).succeeds();
        assert!(!run.stderr.contains("audit"), "{}", run.stderr);
    }
    fixture.as_owner("tag a another").succeeds();
    assert_eq!(foreign(&directory), [""; 0]);
    let tags = fixture.as_root("log --verb tag --json").succeeds().text();
    let uids: Vec<_> = tags.lines().filter(|line| line.contains("\"verb\":\"tag\"")).collect();
    assert!(
        uids.len() == 2 && uids[0].contains("\"uid\":0,") && uids[1].contains("\"uid\":65534,"),
        "{uids:?}"
    );
    assert_eq!(check(&fixture.as_root("doctor --json"), "audit log")["status"], "ok");
    fixture.as_owner("rm copy").succeeds();
}

#[test]
fn change_that_cannot_be_recorded_in_a_named_directory_is_refused() {
    let Some(mut fixture) = Fixture::new() else { return };
    fixture.as_owner("import DIR/a.gguf --name a").succeeds();
    for (name, uid, mode) in
        [("of-root", 0, 0o755), ("of-stranger", STRANGER, 0o755), ("writable", OWNER, 0o777)]
    {
        let directory = audited_in(&mut fixture, name);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
        chown(&directory, Some(uid), Some(uid)).unwrap();
        for user in [0, OWNER] {
            fixture.run_as(user, "ls").succeeds();
            let error = fixture.run_as(user, "tag a copy --json").exits_with(7).error();
            let key = format!("config.toml:2: audit.directory: {}: ", directory.display());
            assert!(error.message.contains(&key), "{name} of {user}: {error}");
            let found = check(&fixture.run_as(user, "doctor --json"), "audit log");
            assert_eq!(found["status"], "failure", "{name} of {user}: {found}");
        }
        assert!(names(&directory).is_empty(), "nothing of root is left for the owner to find");
        assert!(!fixture.as_owner("ls").text().contains("copy"));
    }
}
