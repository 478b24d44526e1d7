//! Every right, through the socket, as users and groups that have it and that do not.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
pub(super) use blobd_tests::routes::documented_table;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub(super) use super::multi_user::can_be_others;

/// A user without a name, and its groups: the primary one first.
#[derive(Clone, Copy)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) groups: &'static [u32],
}

const READERS: u32 = 64100;
const ADMINS: u32 = 64200;
pub(super) const STRANGER: User = User { uid: 64001, groups: &[64001] };
/// By a supplementary group.
pub(super) const READER: User = User { uid: 64002, groups: &[64002, READERS, 64150] };
/// By its number.
pub(super) const PULLER: User = User { uid: 64003, groups: &[64003] };
/// By its primary group.
pub(super) const ADMIN: User = User { uid: 64004, groups: &[ADMINS] };
pub(super) const CONFIG: &str =
    "socket_mode = \"0666\"\n[access]\nread = [\"@64100\"]\npull = [64003]\nadmin = [\"@64200\"]\n";

impl User {
    fn wrapper(self) -> Vec<String> {
        let groups: Vec<String> = self.groups.iter().map(ToString::to_string).collect();
        let words = [
            "setpriv".to_owned(),
            format!("--reuid={}", self.uid),
            format!("--regid={}", groups[0]),
            format!("--groups={}", groups.join(",")),
            "--".to_owned(),
        ];
        words.into()
    }

    fn program(self, program: PathBuf) -> Command {
        let wrapper = self.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(program);
        command
    }
}

/// A daemon that every user can connect to.
pub(super) struct Shared {
    pub(super) daemon: TestDaemon,
    pub(super) config: PathBuf,
    pub(super) folder: TempDir,
}

impl Shared {
    pub(super) fn start(config: &str) -> Self {
        let folder = tmpfs_directory();
        let path = folder.path().join("config.toml");
        fs::write(&path, config).unwrap();
        let daemon = TestDaemon::start_at_under(&[], &folder.path().join("store"), Some(&path));
        let open = |path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        open(daemon.scratch());
        open(folder.path());
        Self { daemon, config: path, folder }
    }

    /// Replaces the configuration, and waits until the daemon uses it.
    pub(super) fn reload(&self, config: &str) {
        let before = self.daemon.log().matches("SIGHUP: ").count();
        fs::write(&self.config, config).unwrap();
        let pid = Pid::from_raw(self.daemon.pid().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        eventually("the configuration is read", || self.daemon.log().matches("SIGHUP: ").count() > before);
    }

    /// The responses to requests of a user, each `METHOD PATH BODY`.
    pub(super) fn requests(&self, user: User, requests: &[String]) -> Vec<(u64, Json)> {
        let mut command = user.program(programs::test_client());
        command.arg("--requests").arg(self.daemon.socket());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(requests.join("\n").as_bytes()).unwrap();
        let mut output = String::new();
        child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(child.wait().unwrap().success());
        let parse = |line: &str| {
            let answer: Json = serde_json::from_str(line).unwrap();
            // Of several events the last one counts.
            let mut lines = answer["body"].as_str().unwrap().lines().filter(|line| line.starts_with('{'));
            let last = lines.next_back().unwrap_or("null");
            (answer["status"].as_u64().unwrap(), serde_json::from_str(last).unwrap())
        };
        output.lines().map(parse).collect()
    }

    pub(super) fn request(&self, user: User, request: &str) -> (u64, Json) {
        self.requests(user, &[request.to_owned()]).remove(0)
    }

    pub(super) fn run(&self, user: User, line: &str) -> Run {
        command::run(&mut self.command(user, line))
    }

    pub(super) fn command(&self, user: User, line: &str) -> Command {
        let mut command = user.program(programs::blobd().to_path_buf());
        command.args(line.split_whitespace());
        self.daemon.command().prepare(&mut command);
        command
    }

    /// A small model named `m`.
    pub(super) fn import(&self) {
        let path = ModelFile::dense(1).write_to(self.folder.path(), "m.gguf");
        self.daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    }
}

fn is_denied((status, body): &(u64, Json)) -> bool {
    let is_denied = body["error"]["code"] == "denied";
    assert_eq!(is_denied, *status == 403, "{body}");
    is_denied
}

/// All requests and their rights. A test of the daemon compares the table with the requests that exist.
pub(super) fn documented_requests() -> BTreeMap<String, String> {
    documented_table("2.2 Rights")
}

/// A request with a body that is harmless if it is executed, and is refused as invalid if it needs parameters.
pub(super) fn harmless(request: &str) -> String {
    let request = request.replace("{reference}", "no-such-model");
    if request.starts_with("GET ") { request } else { format!("{request} {{}}") }
}

#[test]
fn every_request_obeys_the_rights_of_user_and_group() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    let table = documented_requests();
    assert!(table.len() > 30, "{table:?}");
    let rights = ["none", "read", "pull", "admin"];
    let requests: Vec<String> = table.keys().map(|request| harmless(request)).collect();
    for (user, has) in [(STRANGER, "none"), (READER, "read"), (PULLER, "pull"), (ADMIN, "admin")] {
        let rank = |right: &str| rights.iter().position(|known| *known == right).unwrap();
        let responses = shared.requests(user, &requests);
        assert_eq!(responses.len(), table.len());
        for ((request, needed), response) in table.iter().zip(&responses) {
            let may = rank(has) >= rank(needed);
            assert_eq!(!is_denied(response), may, "{request} as a user with {has}: {response:?}");
            let error = &response.1["error"];
            let (message, hint) = (error["message"].as_str(), error["hint"].as_str());
            if !may {
                let message = message.unwrap();
                assert!(!message.contains("/v1/"), "{message}");
                let found = if has == "none" { has.to_owned() } else { format!("\"{has}\"") };
                let reason = format!(
                    "not permitted for uid {}: expected the right \"{needed}\", found {found}",
                    user.uid
                );
                assert!(message.ends_with(&reason), "{message}");
                let key = format!("access.{needed} in {}", shared.config.display());
                assert!(hint.unwrap().contains(&key), "{hint:?}");
            }
        }
    }
}

#[test]
fn parameters_that_need_a_higher_right_obey_it() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    shared.import();
    let repair = "POST /v1/verify {\"repair\":true}";
    let release = "POST /v1/release {\"reference\":\"m\"}";
    let wrapper = READER.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let _reader = Reader::try_open(&wrapper, &shared.daemon.socket(), &["m"]).unwrap();
    for (user, request, may) in
        [(READER, repair, false), (PULLER, repair, true), (PULLER, release, false), (ADMIN, release, true)]
    {
        let response = shared.request(user, request);
        assert_eq!(!is_denied(&response), may, "{request} as {}: {response:?}", user.uid);
    }
    shared.run(ADMIN, "pin m").succeeds();
    let error = shared.run(PULLER, "edit m m --set a=b --force --json").exits_with(7).error();
    assert!(error.message.contains("is pinned") && error.hint.unwrap().contains("administrator"));
    shared.run(ADMIN, "unpin m").succeeds();
    let error = shared.run(PULLER, "rm m --json").exits_with(7).error();
    let owner = rustix::process::geteuid().as_raw();
    let reason =
        format!("was added by another user: expected uid {owner} or an administrator, found uid 64003");
    assert!(error.message.ends_with(&reason), "{error}");
    shared.run(STRANGER, "ls").exits_with(7);
    assert!(shared.run(READER, "ls").succeeds().text().contains('m'));
    shared.run(ADMIN, "rm m").succeeds();
}

#[test]
fn caller_sees_its_groups_and_rights() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    for (user, rights) in [
        (STRANGER, json!([])),
        (READER, json!(["read"])),
        (PULLER, json!(["read", "pull"])),
        (ADMIN, json!(["read", "pull", "admin"])),
    ] {
        let (_, access) = shared.request(user, "GET /v1/access");
        assert_eq!((&access["uid"], &access["rights"]), (&json!(user.uid), &rights));
        assert_eq!((&access["user"], &access["groups"]), (&Json::Null, &json!(user.groups)));
    }
}

#[test]
fn rights_change_without_a_restart_and_open_models_stay_open() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    shared.import();
    let wrapper = READER.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let mut reader = Reader::try_open(&wrapper, &shared.daemon.socket(), &["m"]).unwrap();
    let digest = reader.touch();
    shared.reload("socket_mode = \"0666\"\n[access]\nread = [64001]\nadmin = []\n");
    assert!(!is_denied(&shared.request(STRANGER, "GET /v1/models")));
    assert!(!is_denied(&shared.request(STRANGER, "POST /v1/resolve {}")), "pull is as read by default");
    assert!(is_denied(&shared.request(READER, "GET /v1/models")));
    assert!(is_denied(&shared.request(ADMIN, "POST /v1/gc {}")));
    assert_eq!(reader.touch(), digest);
    assert_eq!(shared.daemon.client().sessions().unwrap().sessions.len(), 1);
    // An error changes nothing.
    shared.reload("[access]\nread = [\"nobody-has-this-name\"]\n");
    let log = shared.daemon.log();
    assert!(log.contains("config.toml:2:9: access.read: no such user: "), "{log}");
    assert!(is_denied(&shared.request(READER, "GET /v1/models")));
}

#[test]
fn by_default_every_user_may_pull_and_few_may_administer() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("socket_mode = \"0666\"\n");
    let (_, access) = shared.request(STRANGER, "GET /v1/access");
    assert_eq!(access["rights"], json!(["read", "pull"]));
    assert!(is_denied(&shared.request(STRANGER, "POST /v1/gc {}")));
}

/// The only user of a store needs no list: the files are its own.
#[test]
fn owner_of_the_store_has_all_rights() {
    let shared = Shared::start("[access]\nread = []\npull = []\nadmin = []\n");
    let access = shared.daemon.client().access().unwrap();
    assert_eq!(access.uid, rustix::process::geteuid().as_raw());
    assert_eq!(access.rights, ["read", "pull", "admin"]);
    shared.import();
    shared.daemon.command().line("rm m").succeeds();
}

#[test]
fn mistyped_user_is_an_error_with_its_line_and_the_nearest_name() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "[access]\nread = [\"*\"]\nadmin = [\n  7,\n  \"@roott\",\n]\n").unwrap();
    let blobd = command::Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let run = blobd.line("config show").exits_with(2);
    let expected = "config.toml:5:3: access.admin: no such group: expected a group that `getent group` finds, found \"@roott\"\nhint: did you mean \"@root\"?";
    assert!(run.stderr.contains(expected), "{}", run.stderr);
}
