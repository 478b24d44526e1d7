//! Quotas of users, through the socket as other users, and the sum of what is charged to all.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::protocol::space::{ChargedUser, QuotaState, UserUsage};
use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, du};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::multi_user::can_be_others;

mod commands;
mod unpaid;

const MODEL: &str = "application/vnd.ollama.image.model";
const ANN: u32 = 64301;
const BOB: u32 = 64302;
/// A group that only [`Shared::run_in_group`] uses.
const GROUP: u32 = 64390;
const OPEN: &str = "socket_mode = \"0666\"\n[access]\nadmin = []\n";

/// A daemon that every user can connect to.
struct Shared {
    daemon: TestDaemon,
    config: PathBuf,
    _folder: TempDir,
}

impl Shared {
    fn start(quotas: &str) -> Self {
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        fs::write(&config, format!("{OPEN}{quotas}")).unwrap();
        let daemon = TestDaemon::start_at_under(&[], &folder.path().join("store"), Some(&config));
        let open = |path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        open(daemon.scratch());
        open(folder.path());
        Self { daemon, config, _folder: folder }
    }

    /// Replaces the quotas, and waits until the daemon uses them.
    fn set_quotas(&self, quotas: &str) {
        let before = self.daemon.log().matches("SIGHUP: ").count();
        fs::write(&self.config, format!("{OPEN}{quotas}")).unwrap();
        let pid = Pid::from_raw(self.daemon.pid().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        eventually("the configuration is read", || self.daemon.log().matches("SIGHUP: ").count() > before);
        assert!(!self.daemon.log().contains("stays as it is"), "{}", self.daemon.log());
    }

    fn run(&self, uid: u32, words: &[&str]) -> Run {
        self.run_in_group(uid, uid, words)
    }

    fn run_in_group(&self, uid: u32, gid: u32, words: &[&str]) -> Run {
        command::run(&mut self.command_in_group(uid, gid, words))
    }

    fn command_in_group(&self, uid: u32, gid: u32, words: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={uid}")).arg(format!("--regid={uid}"));
        command.arg(format!("--groups={uid},{gid}")).arg("--");
        command.arg(programs::blobd()).args(words);
        self.daemon.command().prepare(&mut command);
        command
    }

    /// A file that every user can read. It is written once.
    fn file(&self, seed: u64) -> String {
        let file = format!("{seed}.gguf");
        let mut path = self.daemon.scratch().join(&file);
        if !path.exists() {
            path = ModelFile::dense_of(seed, 2, 128).write_to(self.daemon.scratch(), &file);
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        path.to_str().unwrap().to_owned()
    }

    fn import(&self, uid: u32, seed: u64, name: &str) -> Run {
        self.run(uid, &["import", &self.file(seed), "--name", name, "--force", "--json"])
    }

    /// As the user sees it.
    fn own(&self, uid: u32) -> ChargedUser {
        let json = self.run(uid, &["df", "--users", "--json"]).succeeds().json();
        let mut usage: UserUsage = serde_json::from_value(json).unwrap();
        assert_eq!((usage.users.len(), usage.disk_bytes), (1, None), "{usage:?}");
        assert_eq!(usage.users[0].uid, Some(uid));
        usage.users.remove(0)
    }

    /// As an administrator sees it, when nothing is in progress.
    fn all(&self) -> UserUsage {
        let usage = || self.daemon.client().user_usage().unwrap();
        let sum = |usage: &UserUsage| usage.users.iter().map(|user| user.charged_bytes).sum::<u64>();
        // The copy of the index is written a moment later.
        eventually("the charges add up to the disk usage", || sum(&usage()) == du(self.daemon.root()));
        let usage = usage();
        assert_eq!(usage.disk_bytes, Some(sum(&usage)));
        usage
    }
}

fn hard(uid: u32, bytes: u64) -> String {
    format!("[quotas.users.{uid}]\nhard = \"{bytes} B\"\n")
}

/// Asserts that the quota has refused it.
fn is_over_quota(run: Run) {
    let error = run.exits_with(6).error();
    assert_eq!(error.code.name(), "over_quota", "{error}");
    assert!(
        error.message.starts_with("your quota is ") || error.message.contains(": your quota is "),
        "{error}"
    );
    assert!(
        error.message.contains(" are used; this needs ") && error.message.ends_with(" are left"),
        "{error}"
    );
    assert!(error.hint.unwrap().contains("`blobd df --users`"));
}

#[test]
fn hard_quota_refuses_imports_and_pulls_before_they_store_anything() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.import(ANN, 1, "a1").succeeds();
    let before = shared.own(ANN);
    assert!(before.charged_bytes > 0 && before.quota.is_none(), "{before:?}");
    shared.set_quotas(&hard(ANN, before.charged_bytes * 3 / 2));
    is_over_quota(shared.import(ANN, 2, "a2"));
    let registry = FakeRegistry::start().unwrap();
    let bytes = ModelFile::dense_of(2, 2, 128).bytes();
    registry.add_model("library/m:latest", b"{}", &[(MODEL, &bytes)]).unwrap();
    is_over_quota(shared.run(ANN, &["pull", &registry.name("library/m"), "--json"]));
    let after = shared.own(ANN);
    assert_eq!((after.charged_bytes, after.models), (before.charged_bytes, 1));
    assert_eq!(after.state, QuotaState::Ok);
    // What is stored already costs nothing, and other users are not limited.
    shared.import(ANN, 1, "again").succeeds();
    shared.import(BOB, 2, "b2").succeeds();
    shared.run(ANN, &["pull", &registry.name("library/m"), "--json"]).succeeds();
    assert_eq!(shared.own(ANN).models, 3);
    // Bob removes his name, and Ann, who keeps the data, pays for it. She may not add more until she removes some.
    shared.run(BOB, &["rm", "b2"]).succeeds();
    let after = shared.own(ANN);
    assert!(after.charged_bytes > before.charged_bytes * 3 / 2, "{after:?}");
    assert_eq!(after.state, QuotaState::Full);
    is_over_quota(shared.import(ANN, 3, "a3"));
    let names = ["a1", "again", &registry.name("library/m")];
    names.iter().for_each(|name| drop(shared.run(ANN, &["rm", name]).succeeds()));
    assert_eq!(shared.own(ANN).charged_bytes, 0);
    shared.import(ANN, 3, "a3").succeeds();
    shared.all();
    check_blobs(shared.daemon.root());
}

#[test]
fn soft_quota_adds_a_note_and_a_line_of_the_log() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(&format!("[quotas.users.{ANN}]\nsoft = '1000 B'\nhard = \"1 GiB\"\n"));
    let imported = shared.import(ANN, 1, "a1").succeeds().json();
    let notes = imported["imported"][0]["notes"].to_string();
    assert!(notes.contains("soft quota: ") && notes.contains("1 GiB"), "{imported}");
    let run = shared.run(ANN, &["import", &shared.file(2), "--name", "a2"]).succeeds();
    assert!(run.text().contains("note: soft quota: "), "{}", run.text());
    let line = format!("uid={ANN}");
    assert!(shared.daemon.log().lines().any(|log| log.contains("over soft quota") && log.contains(&line)));
    assert_eq!(shared.own(ANN).state, QuotaState::OverSoft);
    let bob = shared.import(BOB, 3, "b").succeeds().json();
    assert!(bob["imported"][0].get("notes").is_none(), "{bob}");
}

/// The data of a model must be gone or charged to somebody when its name means another one.
#[test]
fn new_versions_of_one_name_cannot_exceed_the_quota() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.import(ANN, 1, "m").succeeds();
    let one = shared.own(ANN).charged_bytes;
    shared.set_quotas(&hard(ANN, one * 5 / 2));
    for seed in 2..6 {
        let imported = shared.import(ANN, seed, "m").succeeds().json();
        assert!(imported["imported"][0]["displaced"][0]["kept_until"].is_string(), "{imported}");
        let usage = shared.daemon.client().disk_usage().unwrap();
        let charged = shared.own(ANN).charged_bytes;
        assert!(usage.reclaimable_bytes == 0 && charged > one && charged <= one * 5 / 2, "{charged}");
    }
    // What is open cannot be deleted, and stays charged.
    let reader = Reader::open(&shared.daemon.socket(), "m");
    shared.import(ANN, 6, "m").succeeds();
    assert!(shared.own(ANN).charged_bytes > one * 3 / 2, "{:?}", shared.own(ANN));
    is_over_quota(shared.import(ANN, 7, "m"));
    assert!(
        shared.own(ANN).charged_bytes > one * 3 / 2,
        "nothing is deleted for an import that does not fit"
    );
    drop(reader);
    eventually("the version that was open can be deleted", || shared.import(ANN, 7, "m").code == 0);
    assert!(shared.own(ANN).charged_bytes <= one * 5 / 2);
    shared.all();
}

#[test]
fn names_are_charged_even_if_their_data_is_already_stored() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.import(ANN, 1, "m").succeeds();
    let one = shared.own(ANN).charged_bytes;
    shared.import(ANN, 1, "n").succeeds();
    let name = shared.own(ANN).charged_bytes - one;
    assert!((1..one / 10).contains(&name), "{name}");
    shared.set_quotas(&hard(ANN, one + 3 * name));
    let run = (2..9).map(|number| shared.import(ANN, 1, &format!("n{number}"))).find(|run| run.code != 0);
    is_over_quota(run.expect("unlimited names are accepted"));
    assert!(shared.own(ANN).charged_bytes <= one + 3 * name);
    shared.all();
}

#[test]
fn name_that_another_user_has_added_is_moved_only_by_administrators() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.import(ANN, 1, "ann/m").succeeds();
    let file = shared.file(2);
    for words in [
        &["import", &file, "--name", "ann/m", "--json"][..],
        &["import", &file, "--name", "ANN/M", "--json", "--force"],
        &["edit", "ann/m", "ann/m", "--set", "a=b", "--force", "--json"],
    ] {
        let error = shared.run(BOB, words).exits_with(7).error();
        assert_eq!(error.code.name(), "denied", "{error}");
    }
    let registry = FakeRegistry::start().unwrap();
    let publish = |seed| {
        let bytes = ModelFile::dense_of(seed, 2, 128).bytes();
        registry.add_model("library/m:latest", b"{}", &[(MODEL, &bytes)]).unwrap();
    };
    publish(3);
    let source = registry.name("library/m");
    shared.run(BOB, &["pull", &source, "--name", "ann/m", "--json"]).exits_with(7);
    // The same model, and a newer version of what a registry has under that name, take nothing away.
    shared.import(BOB, 1, "ann/m").succeeds();
    shared.run(ANN, &["pull", &source, "--json"]).succeeds();
    publish(4);
    shared.run(BOB, &["pull", &source, "--json"]).succeeds();
    shared.daemon.command().run(["import", &file, "--name", "ann/m", "--force"]).succeeds();
    shared.all();
}

#[test]
fn quotas_are_by_user_by_group_and_by_default() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    let path = shared.file(1);
    let import = |gid, name| shared.run_in_group(ANN, gid, &["import", &path, "--name", name, "--json"]);
    shared.set_quotas("[quotas]\ndefault = { hard = '1000 B' }\n");
    is_over_quota(import(ANN, "a"));
    shared.set_quotas(&format!(
        "[quotas.default]\nhard = '1000 B'\n[quotas.groups.{GROUP}]\nhard = \"1 GiB\"\n"
    ));
    is_over_quota(import(ANN, "a"));
    import(GROUP, "a").succeeds();
    shared.set_quotas(&format!("[quotas.groups.{GROUP}]\nhard = '1000 B'\n"));
    let path = shared.file(2);
    let import = |gid, name| shared.run_in_group(ANN, gid, &["import", &path, "--name", name, "--json"]);
    is_over_quota(import(GROUP, "b"));
    import(ANN, "b").succeeds();
    // An administrator has a quota only by an entry of its own.
    shared.set_quotas("[quotas.default]\nhard = '1000 B'\n");
    let as_root =
        |seed, name| shared.daemon.command().run(["import", &shared.file(seed), "--name", name, "--json"]);
    as_root(3, "c").succeeds();
    shared.set_quotas(&hard(0, 1000));
    is_over_quota(as_root(4, "d"));
}

/// The quota that the members of a group share, whether the system lists them or only their processes have the group.
#[test]
fn shared_quota_of_a_group_counts_members_who_are_not_connected() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.set_quotas(&format!("[quotas.groups.{GROUP}]\ntogether = \"1 GiB\"\n"));
    let import = |uid, gid, seed| {
        let (file, name) = (shared.file(seed), format!("m:{uid}-{seed}"));
        shared.run_in_group(uid, gid, &["import", &file, "--name", &name, "--json"])
    };
    import(ANN, GROUP, 1).succeeds();
    let one = shared.own(ANN).charged_bytes;
    let limit = one * 5 / 2;
    shared
        .set_quotas(&format!("[quotas.groups.{GROUP}]\ntogether = {{ soft = '1 B', hard = '{limit} B' }}\n"));
    let imported = import(BOB, GROUP, 2).succeeds().json();
    assert!(imported["imported"][0]["notes"].to_string().contains("group 64390"), "{imported}");
    let error = import(BOB, GROUP, 3).exits_with(6).error();
    assert_eq!(error.code.name(), "over_quota", "{error}");
    assert!(error.message.contains("the quota of group 64390 is "), "{error}");
    // A process without the group stays in it, and others are not in it.
    import(ANN, ANN, 3).exits_with(6);
    import(BOB + 1, BOB + 1, 3).succeeds();
    let usage = shared.all();
    let charged = |uid| usage.users.iter().find(|user| user.uid == Some(uid)).unwrap().charged_bytes;
    let group = &usage.groups[0];
    assert_eq!((group.group.as_str(), group.members), ("64390", 2));
    assert_eq!(group.charged_bytes, charged(ANN) + charged(BOB));
    assert_eq!((group.quota.soft_bytes, group.quota.hard_bytes), (Some(1), Some(limit)));
    let charged_bytes = format!("\nblobd_group_charged_bytes{{group=\"64390\"}} {}\n", group.charged_bytes);
    let metrics = || http::get(&shared.daemon.socket(), "/v1/metrics").body;
    eventually("the metrics have the sum of the group", || metrics().contains(&charged_bytes));
    let table = shared.run(ANN, &["df", "--users"]).succeeds();
    assert!(table.text().contains("GROUP") && table.text().contains("over soft"), "{}", table.text());
    let other = shared.run(BOB + 1, &["df", "--users", "--json"]).succeeds().json();
    assert!(other.get("groups").is_none(), "{other}");
    // What a member removes is there for all.
    shared.run(BOB, &["rm", &format!("m:{BOB}-2")]).succeeds();
    import(ANN, ANN, 4).succeeds();
    shared.all();
}

const USERS: u64 = 10;
/// Quiet moments in the suite. `just quotas` runs for minutes.
const ROUNDS: u32 = 3;

/// The seeds of models that several users import.
const COMMON: std::ops::Range<u64> = 10..14;

/// One user's part of a round: an import of a model of its own, one that others import too, and a pull.
fn work(shared: &Shared, user: u64, round: u64, names: &[String]) {
    let uid = ANN + u32::try_from(user).unwrap();
    // A new version of the same name every other round.
    let own = shared.import(uid, 1000 + round * USERS + user, &format!("own{user}-{}", round / 2));
    let common = shared.import(uid, COMMON.start + (user + round) % 4, &format!("common{user}-{round}"));
    let pulled = shared.run(uid, &["pull", &names[usize::try_from((user + round) % 3).unwrap()], "--json"]);
    for run in [own, common, pulled] {
        if run.code != 0 {
            is_over_quota(run);
        }
    }
}

#[test]
fn charges_of_ten_concurrent_users_add_up_to_the_disk_usage() {
    if !can_be_others() {
        return;
    }
    let size = ModelFile::dense_of(1, 2, 128).bytes().len() as u64;
    let quotas = (0..USERS).map(|user| hard(ANN + u32::try_from(user).unwrap(), size * (2 + user % 4)));
    let shared = Shared::start(&quotas.collect::<String>());
    let registry = FakeRegistry::start().unwrap();
    let names: Vec<String> = (0..3)
        .map(|model| {
            let (name, bytes) =
                (format!("library/m{model}"), ModelFile::dense_of(500 + model, 2, 128).bytes());
            registry.add_model(&format!("{name}:latest"), b"{}", &[(MODEL, &bytes)]).unwrap();
            registry.name(&name)
        })
        .collect();
    let seconds = std::env::var("BLOBD_QUOTA_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let (start, time) = (Instant::now(), seconds.map(Duration::from_secs));
    let mut refused = false;
    // Before several users import them at the same time.
    COMMON.for_each(|seed| drop(shared.file(seed)));
    for round in 0.. {
        if round >= ROUNDS && time.is_none_or(|time| start.elapsed() > time) {
            break;
        }
        thread::scope(|scope| {
            for user in 0..USERS {
                let (shared, names) = (&shared, &names);
                scope.spawn(move || work(shared, user, round.into(), names));
            }
        });
        for user in shared.all().users.iter().filter(|user| user.uid.is_some()) {
            let hard = user.quota.and_then(|quota| quota.hard_bytes).unwrap_or(u64::MAX);
            // What others have kept may have moved to this user when names were removed.
            assert!(round > 0 || user.charged_bytes <= hard, "{user:?}");
            refused |= user.state == QuotaState::Full || user.charged_bytes > hard.saturating_sub(size);
        }
        check_blobs(shared.daemon.root());
        // Every third name goes, so that its data moves to others or is freed.
        let models = shared.daemon.client().models().unwrap().models;
        let removed: Vec<_> = models.into_iter().map(|model| model.name).step_by(3).collect();
        shared.daemon.command().run([&["rm".to_owned()], &*removed].concat()).succeeds();
        shared.all();
    }
    assert!(refused, "the quotas are too large for this test");
}
