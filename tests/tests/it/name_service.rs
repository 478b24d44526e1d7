//! Users and groups that are not in `/etc/passwd` and `/etc/group`. Stand-ins for a directory service are preloaded into
//! the daemon: `nss_wrapper`, which has names from other files, and a library that hangs or fails.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::compiler::compile;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, getegid, geteuid, kill_process};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// A name as Active Directory has them.
const ANN: &str = "DOMAIN\\ann lee@example.com";

/// A daemon for which this user and group have the names of a folder's files.
struct Directory {
    daemon: TestDaemon,
    folder: TempDir,
    variables: Vec<String>,
}

fn nss_wrapper() -> Option<PathBuf> {
    let folders =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib"];
    let found = folders.iter().map(|folder| Path::new(folder).join("libnss_wrapper.so"));
    let found = found.into_iter().find(|library| library.exists());
    if found.is_none() {
        skipped("no libnss_wrapper.so (Debian: libnss-wrapper)");
    }
    found
}

fn write_names(folder: &Path, user: &str) {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    fs::write(folder.join("passwd"), format!("{user}:x:{uid}:{gid}::/:/bin/sh\n")).unwrap();
    fs::write(folder.join("group"), format!("domain users:x:{gid}:\nlab:x:64321:{user}\n")).unwrap();
}

fn write_config(folder: &Path, user: &str) {
    let config = format!(
        "socket_group = \"domain users\"\nsocket_mode = \"0660\"\n[access]\nread = [\"@domain users\"]\n\
         admin = ['{user}', \"@lab\"]\n[quotas.users.'{user}']\nhard = \"1 GiB\"\n"
    );
    fs::write(folder.join("config.toml"), config).unwrap();
}

impl Directory {
    fn start() -> Option<Self> {
        let library = nss_wrapper()?;
        let folder = tmpfs_directory();
        write_names(folder.path(), ANN);
        write_config(folder.path(), ANN);
        let of = |name: &str| folder.path().join(name).display().to_string();
        let variables = vec![
            format!("LD_PRELOAD={}", library.display()),
            format!("NSS_WRAPPER_PASSWD={}", of("passwd")),
            format!("NSS_WRAPPER_GROUP={}", of("group")),
        ];
        let wrapper: Vec<&str> = std::iter::once("env").chain(variables.iter().map(String::as_str)).collect();
        let config = folder.path().join("config.toml");
        let daemon = TestDaemon::start_at_under(&wrapper, &folder.path().join("store"), Some(&config));
        Some(Self { daemon, folder, variables })
    }

    /// Runs a command for which the names are the same.
    fn run(&self, words: &[&str]) -> Run {
        let mut command = Command::new("env");
        command.args(&self.variables).arg(blobd_tests::programs::blobd()).args(words);
        self.daemon.command().prepare(&mut command);
        command::run(&mut command)
    }
}

fn import(blobd: &Blobd, folder: &Path, name: &str) {
    let path = ModelFile::dense(1).write_to(folder, "m.gguf");
    blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

fn reload(daemon: &TestDaemon) -> String {
    let before = daemon.log().matches("SIGHUP: ").count();
    kill_process(Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap(), Signal::HUP).unwrap();
    eventually("the configuration is read", || daemon.log().matches("SIGHUP: ").count() > before);
    daemon.log().rsplit("SIGHUP: ").next().unwrap().to_owned()
}

fn log_of(directory: &Directory, user: &str) -> Vec<Json> {
    let text = directory.run(&["log", "--json", "--user", user]).succeeds().text();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn users_of_a_directory_service_are_named_in_every_report() {
    let Some(directory) = Directory::start() else { return };
    let blobd = directory.daemon.command();
    import(&blobd, directory.folder.path(), "m");
    let model = directory.daemon.client().open(&"m".parse().unwrap()).unwrap();
    let is_ann = |value: &Json| value["user"] == ANN && value["uid"] == geteuid().as_raw();
    assert!(is_ann(&blobd.line("ps --json").json()["sessions"][0]));
    let charged = blobd.line("df --users --json").json();
    assert!(is_ann(&charged["users"][0]), "{charged}");
    assert_eq!(charged["users"][0]["quota"]["hard_bytes"], 1 << 30, "by name: {charged}");
    let history = blobd.line("history m --json").json();
    assert!(is_ann(&history["changes"][0]), "{history}");
    assert!(is_ann(&blobd.line("df --json").json()["models"][0]["last_opened_by"]));
    drop(model);
    eventually("the log has the import", || !log_of(&directory, ANN).is_empty());
    assert!(log_of(&directory, ANN).iter().all(is_ann));
    let found = directory.run(&["log", "--user", "nobody at all"]).succeeds();
    assert!(found.stderr.contains("no user named nobody at all\n"), "{}", found.stderr);
}

#[test]
fn changed_name_is_used_after_a_reload_and_finds_the_older_records() {
    const BEA: &str = "bea@example.com";
    let Some(directory) = Directory::start() else { return };
    let blobd = directory.daemon.command();
    import(&blobd, directory.folder.path(), "m");
    write_names(directory.folder.path(), BEA);
    // `nss_wrapper` reads a file again when its time differs by whole seconds.
    let passwd = fs::File::options().write(true).open(directory.folder.path().join("passwd")).unwrap();
    passwd.set_modified(SystemTime::now() + Duration::from_secs(10)).unwrap();
    let refused = reload(&directory.daemon);
    assert!(refused.contains("stays as it is") && refused.contains("no such user"), "{refused}");
    write_config(directory.folder.path(), BEA);
    assert!(reload(&directory.daemon).contains("was reloaded"), "{}", directory.daemon.log());
    blobd.line("tag m n").succeeds();
    // The daemon's own records, such as of a reload, are of the same user here.
    let users = || -> Vec<Json> {
        let found = log_of(&directory, BEA);
        let of_requests = found.iter().filter(|record| record["verb"] == "import" || record["verb"] == "tag");
        of_requests.map(|record| record["user"].clone()).collect()
    };
    eventually("both are found by the new name", || users().len() == 2);
    assert_eq!(users(), [ANN, BEA]);
}

/// A daemon whose name service can be broken.
fn breakable() -> Option<(TestDaemon, TempDir)> {
    let folder = tmpfs_directory();
    let library = compile("tests/programs/broken_names.c", folder.path(), &["-shared", "-fPIC", "-ldl"])?;
    let (preload, broken) =
        (format!("LD_PRELOAD={}", library.display()), format!("BROKEN_NAMES={}", folder.path().display()));
    let config = folder.path().join("config.toml");
    fs::write(&config, "[scrub]\nrate_bytes_per_second = 0\n").unwrap();
    let wrapper = ["env", &preload, &broken];
    let daemon = TestDaemon::start_at_under(&wrapper, &folder.path().join("store"), Some(&config));
    Some((daemon, folder))
}

#[test]
fn name_service_that_hangs_delays_no_request_and_users_are_numbers() {
    let Some((mut daemon, folder)) = breakable() else { return };
    daemon.stop();
    fs::write(folder.path().join("hang"), "").unwrap();
    daemon.restart();
    let blobd = daemon.command();
    import(&blobd, folder.path(), "m");
    let _model = daemon.client().open(&"m".parse().unwrap()).unwrap();
    for line in ["ps --json", "df --users --json", "history m --json", "ls --json", "log --json"] {
        blobd.line(line).succeeds();
    }
    let session = blobd.line("ps --json").json()["sessions"][0].clone();
    assert_eq!((&session["uid"], &session["user"]), (&json!(geteuid().as_raw()), &Json::Null));
    fs::remove_file(folder.path().join("hang")).unwrap();
    eventually("the name is found when the service answers again", || {
        let session = blobd.line("ps --json").json()["sessions"][0].clone();
        !session["user"].is_null() || !has_name()
    });
}

/// Whether this user has a name here; in a container it may have none.
fn has_name() -> bool {
    Command::new("id").arg("-un").output().is_ok_and(|output| output.status.success())
}

#[test]
fn configuration_with_names_that_cannot_be_looked_up_is_not_used() {
    let Some((daemon, folder)) = breakable() else { return };
    fs::write(folder.path().join("fail"), "").unwrap();
    fs::write(folder.path().join("config.toml"), "[access]\nread = [\"root\"]\n").unwrap();
    let log = reload(&daemon);
    assert!(log.contains("stays as it is"), "{log}");
    assert!(log.contains("access.read: \"root\": the name service of the system does not answer"), "{log}");
    fs::remove_file(folder.path().join("fail")).unwrap();
    assert!(reload(&daemon).contains("was reloaded"), "{}", daemon.log());
}
