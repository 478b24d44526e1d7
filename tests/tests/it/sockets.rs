//! Where the daemon listens, who may connect, and what refused users are told.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::temp_dirs::tmpfs_directory;

use super::multi_user::can_be_others;

/// The user of the daemon, and a group that it is a member of.
pub(super) const OWNER: u32 = 65534;
const GROUP: u32 = 43210;
/// Another user.
const OTHER: u32 = 12345;

/// The words before a command that is to run as this user and in this group.
fn as_user(uid: u32, group: Option<u32>) -> Vec<String> {
    let groups = group.map_or_else(|| "--clear-groups".to_owned(), |gid| format!("--groups={gid}"));
    ["setpriv".to_owned(), format!("--reuid={uid}"), format!("--regid={uid}"), groups, "--".to_owned()].into()
}

/// A daemon of [`OWNER`] with this configuration, in a directory that everybody can enter.
fn daemon(config: &str) -> TestDaemon {
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    fs::write(&path, config).unwrap();
    chown(folder.path(), Some(OWNER), Some(OWNER)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut words = as_user(OWNER, Some(GROUP));
    words.extend(["env".to_owned(), format!("BLOBD_CONFIG={}", path.display())]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    TestDaemon::start_under(&words, folder)
}

fn run_as(uid: u32, group: Option<u32>, daemon: &TestDaemon, words: &[&str]) -> Run {
    let start = as_user(uid, group);
    let mut command = Command::new(&start[0]);
    command.args(&start[1..]).arg(programs::blobd()).args(words);
    daemon.command().prepare(&mut command);
    // The usual one is in a directory that a test closes.
    command.envs(["HOME", "XDG_CONFIG_HOME"].map(|variable| (variable, "/nonexistent")));
    command::run(&mut command)
}

/// Mode and group of the daemon's socket.
fn permissions(daemon: &TestDaemon) -> (u32, u32) {
    let socket = fs::metadata(daemon.socket()).unwrap();
    (socket.mode() & 0o7777, socket.gid())
}

#[test]
fn members_of_the_configured_group_may_read_and_pull() {
    if !can_be_others() {
        return;
    }
    let daemon = daemon(&format!("socket_group = {GROUP}\n"));
    assert_eq!(permissions(&daemon), (0o660, GROUP));
    let model = ModelFile::dense_of(1, 2, 128).write_to(daemon.scratch(), "m.gguf");
    fs::set_permissions(&model, fs::Permissions::from_mode(0o644)).unwrap();
    let member = |words: &[&str]| run_as(OTHER, Some(GROUP), &daemon, words);
    member(&["import", model.to_str().unwrap(), "--name", "m"]).succeeds();
    member(&["ls"]).succeeds();
    member(&["gc"]).exits_with(7);
    // Other users' clients are expected, so nothing needs to be configured for that. This opens the model.
    run_as(OWNER, None, &daemon, &["show", "m", "--residency"]).succeeds();
    member(&["rm", "m"]).succeeds();
    let refused = run_as(OTHER, None, &daemon, &["ls"]).exits_with(7);
    let hint = format!("hint: join the group {GROUP} and log in again");
    assert!(refused.stderr.contains(&hint), "{}", refused.stderr);
    assert!(daemon.log().contains("owns the blobs"), "{}", daemon.log());
}

#[test]
fn socket_mode_0666_admits_every_user() {
    if !can_be_others() {
        return;
    }
    let daemon = daemon("socket_mode = \"0666\"\n");
    assert_eq!(permissions(&daemon).0, 0o666);
    run_as(OTHER, None, &daemon, &["ls"]).succeeds();
}

#[test]
fn refused_user_of_a_private_daemon_is_sent_to_its_owner() {
    if !can_be_others() {
        return;
    }
    let daemon = daemon("");
    let refused = run_as(OTHER, None, &daemon, &["ls"]).exits_with(7);
    let hint = format!("hint: only uid {OWNER} may connect; the daemon's owner can set socket_group");
    assert!(refused.stderr.contains(&hint), "{}", refused.stderr);
    // As an administrator might do by hand: nobody should join the group of root.
    chown(daemon.socket(), None, Some(0)).unwrap();
    fs::set_permissions(daemon.socket(), fs::Permissions::from_mode(0o660)).unwrap();
    let refused = run_as(OTHER, None, &daemon, &["ls"]).exits_with(7);
    assert!(refused.stderr.contains(&hint), "{}", refused.stderr);
    fs::set_permissions(daemon.scratch(), fs::Permissions::from_mode(0o700)).unwrap();
    let refused = run_as(OTHER, None, &daemon, &["ls", "--json"]).exits_with(7);
    let hint = refused.error().hint.unwrap();
    assert!(
        hint.contains(&format!("{} (uid {OWNER}) does not admit you", daemon.scratch().display())),
        "{hint}"
    );
}

/// Runs `serve` as [`OWNER`] with this configuration; it must fail.
fn serve_with(config: &str) -> Run {
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    fs::write(&path, config).unwrap();
    chown(folder.path(), Some(OWNER), Some(OWNER)).unwrap();
    let start = as_user(OWNER, None);
    let mut serve = Command::new(&start[0]);
    serve.args(&start[1..]).arg(programs::blobd()).arg("serve").arg("--socket").arg(folder.path().join("s"));
    Blobd::at_root(&folder.path().join("store")).configured_by(&path).prepare(&mut serve);
    command::run(&mut serve)
}

#[test]
fn group_that_the_daemon_cannot_give_is_an_error_with_a_hint() {
    if !can_be_others() {
        return;
    }
    let run = serve_with(&format!("socket_group = {GROUP}\n")).exits_with(7);
    assert!(
        run.stderr.contains(&format!("uid {OWNER} cannot give the socket to group {GROUP}")),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("hint: add the daemon's user to the group"), "{}", run.stderr);
    let run = serve_with("socket_group = \"no-such-group\"\n").exits_with(2);
    assert!(run.stderr.contains("hint: create it with `groupadd no-such-group`"), "{}", run.stderr);
}

#[test]
fn directory_that_members_of_the_group_cannot_enter_is_reported() {
    if !can_be_others() {
        return;
    }
    let mut daemon = daemon(&format!("socket_group = {GROUP}\n"));
    assert!(!daemon.log().contains("does not admit"), "{}", daemon.log());
    fs::set_permissions(daemon.scratch(), fs::Permissions::from_mode(0o700)).unwrap();
    daemon.stop();
    daemon.restart();
    let line = format!("{}: does not admit those who may connect", daemon.scratch().display());
    assert!(daemon.log().contains(&line), "{}", daemon.log());
}

#[test]
fn socket_that_cannot_be_made_is_an_error_with_a_hint() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let long = folder.path().join("x".repeat(120));
    let run = blobd.run(["serve".as_ref(), "--socket".as_ref(), long.as_os_str()]).exits_with(2);
    assert!(
        run.stderr.contains("expected at most 107 bytes") && run.stderr.contains("hint: "),
        "{}",
        run.stderr
    );
    let run = blobd.line("serve --socket /proc/blobd.sock");
    assert!(run.code != 0 && run.stderr.contains("hint: choose another --socket"), "{}", run.stderr);
}

/// Runs a script in which `/tmp` and `/run` are empty, `/etc` is a copy, no blobd is installed, `$blobd` is the binary,
/// and `as_owner` runs a command as [`OWNER`] without any variable but `HOME`. All its processes end with it.
/// `wait_for_daemon` returns when the daemon answers: only a daemon takes a limit.
pub(super) fn in_empty_machine(script: &str) -> Option<Run> {
    if !can_be_others() {
        return None;
    }
    if programs::blobd().starts_with("/tmp") {
        skipped("the checkout is in /tmp, which is empty for the daemon");
        return None;
    }
    let setup = format!(
        "set -eu; mount -t tmpfs -o mode=1777 none /tmp; mount -t tmpfs -o mode=755 none /run
        cp -a /etc /tmp/etc; mount --bind /tmp/etc /etc; rm -rf /etc/blobd /etc/systemd/system/blobd.*
        for directory in /usr/lib/systemd/system /usr/local/lib; do
            if test -d $directory; then mount -t tmpfs -o mode=755 none $directory; fi; done
        as_owner() {{ setpriv --reuid={OWNER} --regid={OWNER} --clear-groups -- env -i PATH=\"$PATH\" HOME=/tmp/home \"$@\"; }}
        as_owner mkdir /tmp/home
        wait_for_daemon() {{ n=0; until test -S /tmp/blobd-{OWNER}/blobd.sock && as_owner \"$blobd\" limit off >/tmp/out 2>&1; do
            n=$((n + 1)); test $n -lt 600 || {{ cat /tmp/log; exit 9; }}; sleep 0.1; done; }}
        {script}"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", &setup]);
    command.env("blobd", programs::blobd()).current_dir("/");
    command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("../client/python/src"));
    Blobd::at_root(Path::new("/nonexistent")).prepare(&mut command);
    let probe = Command::new("unshare").args(["--mount", "--pid", "--fork", "--mount-proc", "true"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        skipped("private namespaces are not allowed here");
        return None;
    }
    Some(command::run(&mut command))
}

#[test]
fn daemon_without_a_runtime_directory_is_found_by_all_clients() {
    let script = "
        as_owner \"$blobd\" serve 2>/tmp/log &
        wait_for_daemon
        stat -c '%a %u' /tmp/blobd-65534 /tmp/blobd-65534/blobd.sock
        as_owner env XDG_RUNTIME_DIR=/tmp/other \"$blobd\" limit off
        if command -v python3 >/dev/null; then
            as_owner env PYTHONPATH=\"$PYTHONPATH\" PYTHONDONTWRITEBYTECODE=1 python3 -c \\
                'import blobd; print(blobd.Client().version().root)'
        else echo /tmp/home/.local/share/blobd; fi
        cat /tmp/log";
    let Some(run) = in_empty_machine(script) else { return };
    let run = run.succeeds();
    let text = run.text();
    let lines: Vec<&str> = text.lines().collect();
    let found = ["700 65534", "600 65534", "no limit", "/tmp/home/.local/share/blobd"];
    assert_eq!(lines[..4], found, "{text}{}", run.stderr);
    assert!(text.contains("the socket is in /tmp/blobd-65534"), "{text}");
}

/// After `su`, the variable is that of the user before.
#[test]
fn runtime_directory_of_another_user_is_not_used() {
    let script = "
        mkdir -m 700 /run/theirs /run/own; chown 65534 /run/own
        as_owner env XDG_RUNTIME_DIR=/run/theirs \"$blobd\" serve 2>/tmp/log &
        wait_for_daemon
        kill -TERM \"$(pidof -s blobd)\"; wait
        ls /tmp/blobd-65534 /run/theirs
        as_owner env XDG_RUNTIME_DIR=/run/own \"$blobd\" serve 2>/tmp/log &
        until test -S /run/own/blobd/blobd.sock; do sleep 0.1; done";
    let Some(run) = in_empty_machine(script) else { return };
    let text = run.succeeds().text();
    assert_eq!(text.split_whitespace().collect::<Vec<_>>(), ["/run/theirs:", "/tmp/blobd-65534:"]);
}

#[test]
fn directory_that_another_user_has_made_is_not_used() {
    let script = "
        mkdir -m 777 /tmp/blobd-65534
        \"$blobd\" serve --root /tmp/theirs --socket /tmp/blobd-65534/blobd.sock 2>/tmp/log &
        until test -S /tmp/blobd-65534/blobd.sock; do sleep 0.1; done
        chmod 666 /tmp/blobd-65534/blobd.sock
        as_owner \"$blobd\" serve 2>/tmp/err || echo serve $?; cat /tmp/err
        as_owner \"$blobd\" ls --socket /tmp/blobd-65534/blobd.sock 2>/tmp/err || echo ls $?; cat /tmp/err
        as_owner \"$blobd\" ls
        if command -v python3 >/dev/null; then
            as_owner env PYTHONPATH=\"$PYTHONPATH\" PYTHONDONTWRITEBYTECODE=1 python3 -c \\
                'import blobd; print(blobd.Client().version().root)' 2>&1 | tail -1
        else echo wrong owner; fi";
    let Some(run) = in_empty_machine(script) else { return };
    let text = run.succeeds().text();
    let lines: Vec<&str> = text.lines().collect();
    let refusal = "/tmp/blobd-65534: wrong owner: expected uid 65534, found uid 0";
    assert!(lines[0] == "serve 7" && lines[1].contains(refusal), "{text}");
    assert!(lines[2].starts_with("hint: set XDG_RUNTIME_DIR"), "{text}");
    assert!(lines[3] == "ls 7" && lines[4].contains(refusal), "{text}");
    assert!(lines[5].starts_with("no models"), "the command uses its own store: {text}");
    assert!(lines[6].contains("wrong owner"), "{text}");
}
