//! Peers of other namespaces: what root of a container may do, and how `ps` and the audit log show its processes.

use std::fs;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::access::{Shared, can_be_others};

/// Namespaces as `unshare` makes them, which stand for a container with and without a user namespace of its own.
const NAMESPACES: [&[&str]; 2] = [
    &["unshare", "--pid", "--fork", "--kill-child"],
    &["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"],
];

fn can_unshare() -> bool {
    let can = |words: &&[&str]| Command::new(words[0]).args(&words[1..]).arg("true").status();
    let may =
        can_be_others() && NAMESPACES.iter().all(|words| can(words).is_ok_and(|status| status.success()));
    if !may {
        skipped("namespaces cannot be made here");
    }
    may
}

/// Whether the kernel says which process has connected (`SO_PEERPIDFD`).
fn has_peer_pidfd() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(5))
}

/// The exit code of a command that only administrators may use.
fn code_of_gc(shared: &Shared, wrapper: &[&str]) -> i32 {
    let mut command = Command::new("env");
    command.args(wrapper).arg(programs::blobd()).arg("gc");
    shared.daemon.command().prepare(&mut command);
    blobd_tests::command::run(&mut command).code
}

#[test]
fn root_of_another_namespace_administers_only_by_default() {
    if !can_unshare() {
        return;
    }
    let shared = Shared::start("socket_mode = \"0666\"\n");
    let codes = || {
        let of = |wrapper| code_of_gc(&shared, wrapper);
        (of(&[]), NAMESPACES.map(of))
    };
    assert_eq!(codes(), (0, [0, 0]));
    shared.reload("socket_mode = \"0666\"\n[access]\nroot = \"host\"\n");
    assert_eq!(codes(), (if has_peer_pidfd() { 0 } else { 7 }, [7, 7]));
    shared.reload("socket_mode = \"0666\"\n[access]\nroot = \"user\"\n");
    assert_eq!(codes(), (7, [7, 7]));
    shared.reload("socket_mode = \"0666\"\n[access]\nroot = \"user\"\nadmin = [0]\n");
    assert_eq!(codes(), (0, [0, 0]), "a list names root as any user");
}

#[test]
fn process_of_another_pid_namespace_is_shown_with_its_group_and_recorded() {
    if !can_unshare() {
        return;
    }
    let shared = Shared::start("socket_mode = \"0666\"\n");
    shared.import();
    let reader = Reader::try_open(NAMESPACES[0], &shared.daemon.socket(), &["m"]).unwrap();
    let session = shared.daemon.client().sessions().unwrap().sessions.remove(0);
    assert!(session.pid > 0 && session.command.is_some(), "{session:?}");
    let container = session.container.unwrap();
    let table = shared.daemon.command().line("ps").succeeds().text();
    assert!(table.contains(&format!(" in {container}")), "{table}");
    let record = || -> Option<Json> {
        let log = shared.daemon.command().line("log --verb open --json").succeeds().text();
        log.lines().next().map(|line| serde_json::from_str(line).unwrap())
    };
    drop(reader);
    eventually("the open has a record", || record().is_some());
    assert_eq!(record().unwrap()["details"]["container"], container);
}
