//! A machine with a daemon for all users never moves a user to another store: one table for the command line and for
//! the clients in all languages.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_tests::command::{self, Blobd};
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::service::Service;
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

use super::multi_user::can_be_others;
use super::sockets::{OWNER, in_empty_machine};

/// What is at the system's socket.
#[derive(Clone, Copy, Debug)]
enum System {
    Absent,
    /// A socket that a daemon has left behind.
    Silent,
    /// A daemon that does not admit the user.
    Closed,
    Open,
}

/// What a machine has, and what a client without a named socket finds there: the model of a daemon, an empty store
/// (which only the command line opens), or the code of an error.
#[derive(Clone, Copy, Debug)]
struct Machine {
    system: System,
    /// Created as root; a name that ends with `/null` is a link to `/dev/null`, and one that ends with `/hidden` is in a
    /// directory that only root may enter.
    file: &'static str,
    has_own_daemon: bool,
    command_line: &'static str,
    clients: &'static str,
}

const fn machine(
    system: System,
    file: &'static str,
    has_own_daemon: bool,
    command_line: &'static str,
    clients: &'static str,
) -> Machine {
    Machine { system, file, has_own_daemon, command_line, clients }
}

const MACHINES: &[Machine] = &[
    machine(System::Absent, "", false, "empty", "unavailable"),
    machine(System::Absent, "", true, "own:latest", "own:latest"),
    machine(System::Open, "", true, "theirs:latest", "theirs:latest"),
    machine(System::Open, "/etc/systemd/system/blobd.socket", false, "theirs:latest", "theirs:latest"),
    machine(System::Closed, "", false, "denied", "denied"),
    machine(System::Closed, "", true, "denied", "denied"),
    machine(System::Silent, "", false, "unavailable", "unavailable"),
    machine(System::Silent, "", true, "unavailable", "unavailable"),
    machine(System::Silent, "/usr/lib/systemd/system/blobd.socket", true, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/systemd/system/blobd.socket", true, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/systemd/system/blobd.service", true, "unavailable", "unavailable"),
    machine(System::Absent, "/run/systemd/system/blobd.service", true, "unavailable", "unavailable"),
    machine(System::Absent, "/run/systemd/transient/blobd.service", true, "unavailable", "unavailable"),
    machine(System::Absent, "/run/systemd/generator/blobd.service", true, "unavailable", "unavailable"),
    machine(System::Absent, "/usr/local/lib/systemd/system/blobd.socket", true, "unavailable", "unavailable"),
    machine(System::Absent, "/usr/lib/systemd/system/blobd.service", false, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/blobd/config.toml", true, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/blobd/config.toml/hidden", true, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/blobd/config.toml/hidden", false, "unavailable", "unavailable"),
    machine(System::Absent, "/etc/systemd/system/blobd.socket/null", true, "own:latest", "own:latest"),
    machine(System::Absent, "/etc/systemd/system/blobd-gc.timer", true, "own:latest", "own:latest"),
];

/// Shell functions that make a machine, and print what each client finds there.
fn functions(model: &Path, go: Option<&Path>) -> String {
    let (model, test_client) = (model.display(), programs::test_client());
    let go = go.map_or_else(String::new, |go| {
        format!(
            "echo go $(as_owner env BLOBD_TEST_DEFAULT=1 {} -test.run TestDefaultDaemonForOthers | sed -n 's/^found: *//p')",
            go.display()
        )
    });
    format!(
        "mkdir /run/blobd /run/kept
        \"$blobd\" import {model} --name theirs --root /tmp/theirs -q
        as_owner \"$blobd\" import {model} --name own -q
        \"$blobd\" serve --root /tmp/theirs --socket /run/kept/open 2>/tmp/log.theirs &
        \"$blobd\" serve --root /tmp/stale --socket /run/kept/stale 2>/tmp/log.stale &
        stale=$!
        as_owner \"$blobd\" serve 2>/tmp/log & wait_for_daemon
        until test -S /run/kept/open && test -S /run/kept/stale; do sleep 0.1; done
        kill -KILL $stale; chmod 666 /run/kept/stale
        mv /tmp/blobd-{OWNER}/blobd.sock /tmp/blobd-{OWNER}/kept
        found() {{ as_owner env XDG_DATA_HOME=/tmp/home/empty \"$@\"; }}
        show() {{
            echo command_line $(found \"$blobd\" ls --json 2>&1 | sed -n -e 's/^{{\"models\":\\[\\].*/empty/p' \\
                -e 's/^{{\"models\":.*\"name\":\"\\([a-z:]*\\)\".*/\\1/p' -e 's/^{{\"error\":{{\"code\":\"\\([a-z_]*\\)\".*/\\1/p')
            echo rust $(as_owner {test_client} --default)
            if as_owner python3 -c pass 2>/dev/null; then
                echo python $(as_owner env PYTHONPATH=\"$PYTHONPATH\" PYTHONDONTWRITEBYTECODE=1 python3 -c \"
import blobd
try: print(blobd.models()[0].name)
except blobd.BlobdError as error: print(error.code)\")
            fi
            {go}
        }}
        ",
        test_client = test_client.display()
    )
}

impl Machine {
    /// Prints a line `command_line FOUND`, and a line for each client.
    fn script(&self) -> String {
        let mut script = String::from("rm -f /run/blobd/blobd.sock\n");
        script += match self.system {
            System::Absent => "",
            System::Silent => "ln /run/kept/stale /run/blobd/blobd.sock\n",
            System::Closed => "chmod 600 /run/kept/open; ln /run/kept/open /run/blobd/blobd.sock\n",
            System::Open => "chmod 666 /run/kept/open; ln /run/kept/open /run/blobd/blobd.sock\n",
        };
        if self.has_own_daemon {
            writeln!(script, "mv /tmp/blobd-{OWNER}/kept /tmp/blobd-{OWNER}/blobd.sock").unwrap();
        }
        let (file, is_mask) = self.file.strip_suffix("/null").map_or((self.file, false), |file| (file, true));
        let (file, is_hidden) = file.strip_suffix("/hidden").map_or((file, false), |file| (file, true));
        let show = if is_hidden { format!("chmod 755 $(dirname {file})\n") } else { String::new() };
        if !file.is_empty() {
            let create = if is_mask { "ln -s /dev/null" } else { "touch" };
            writeln!(script, "mkdir -p $(dirname {file}); {create} {file}").unwrap();
        }
        if is_hidden {
            writeln!(script, "chmod 700 $(dirname {file})").unwrap();
        }
        script += "echo machine; show\n";
        script += &show;
        if !file.is_empty() {
            writeln!(script, "rm {file}").unwrap();
        }
        if self.has_own_daemon {
            writeln!(script, "mv /tmp/blobd-{OWNER}/blobd.sock /tmp/blobd-{OWNER}/kept").unwrap();
        }
        script
    }
}

/// The tests of the Go client as a program, in a directory that other users can enter; `None` without Go.
fn go_program(folder: &TempDir) -> Option<PathBuf> {
    let program = folder.path().join("go.test");
    let mut build = Command::new("go");
    build.args(["test", "-c", "-o"]).arg(&program).env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local");
    build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../client/go"));
    match build.output() {
        Ok(built) if built.status.success() => Some(program),
        Ok(failed) => panic!("{}", String::from_utf8_lossy(&failed.stderr)),
        Err(_no_go) => None,
    }
}

/// A directory with a model, which all users may enter.
fn model() -> (TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt as _;
    // Not in /tmp, which is empty on the machines of these tests.
    let folder = tempfile::tempdir_in(programs::blobd().parent().expect("a directory")).unwrap();
    let model = ModelFile::dense_of(1, 2, 128).write_to(folder.path(), "m.gguf");
    for (path, mode) in [(folder.path(), 0o755), (&model, 0o644)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    (folder, model)
}

#[test]
fn every_client_finds_the_same_daemon_or_none_on_every_machine() {
    if !can_be_others() {
        return;
    }
    let (folder, model) = model();
    let go = go_program(&folder);
    let mut script = functions(&model, go.as_deref());
    MACHINES.iter().for_each(|machine| script += &machine.script());
    let Some(run) = in_empty_machine(&script) else { return };
    let text = run.succeeds().text();
    let found: Vec<&str> = text.split("machine\n").skip(1).collect();
    assert_eq!(found.len(), MACHINES.len(), "{text}");
    for (machine, lines) in MACHINES.iter().zip(found) {
        let found: BTreeMap<&str, &str> = lines.lines().filter_map(|line| line.split_once(' ')).collect();
        assert!(found.contains_key("command_line") && found.contains_key("rust"), "{machine:?}: {lines}");
        assert!(go.is_none() || found.contains_key("go"), "{machine:?}: {lines}");
        for (client, found) in found {
            let expected = if client == "command_line" { machine.command_line } else { machine.clients };
            assert_eq!(found, expected, "{client}: {machine:?}");
        }
    }
}

/// A machine whose service cannot start. `systemctl` and `journalctl` are what systemd would print.
const FAILED_SERVICE: &str = r#"
    mkdir -p /tmp/bin /etc/systemd/system; touch /etc/systemd/system/blobd.socket
    cat >/tmp/bin/systemctl <<'END'
#!/bin/sh
printf 'Id=blobd.socket\nLoadState=loaded\nActiveState=failed\nResult=service-start-limit-hit\n\n'
printf 'Id=blobd.service\nLoadState=loaded\nActiveState=failed\nResult=exit-code\nExecMainStatus=78\n'
printf 'InvocationID=0123456789abcdef0123456789abcdef\n'
END
    cat >/tmp/bin/journalctl <<'END'
#!/bin/sh
echo "blobd: /etc/blobd/config.toml:3:1: unknown key \"quotas\""
echo "hint: did you mean [quotas]?"
END
    chmod +x /tmp/bin/*; PATH=/tmp/bin:$PATH
"#;

#[test]
fn every_command_of_a_user_fails_with_the_state_of_the_service_and_creates_nothing() {
    let script = format!(
        "{FAILED_SERVICE}
        touch /tmp/home/m.gguf; mkdir /tmp/home/mnt; chmod 777 /tmp/home/mnt
        run() {{ code=0; as_owner \"$blobd\" \"$@\" >/tmp/out 2>&1 || code=$?; echo \"$code $*\"; }}
        run ls
        cat /tmp/out
        for command in 'pull m' 'import /tmp/home/m.gguf' 'export m' 'exec -- true' 'mount /tmp/home/mnt' web health df ps \
            gc verify reindex 'show m' 'rm m' 'tag a b' 'warm m' 'undelete m' 'history m' log 'pin m' 'ls --trash' \
            'partial ls' outdated 'limit off' 'release 1'; do run $command; done
        run doctor; cat /tmp/out
        run config show; grep 'commands of this user fail' /tmp/out
        run __suggest models
        as_owner ls -A /tmp/home
        run ls --root /tmp/home/absent
        as_owner env BLOBD_ROOT=/tmp/home/own \"$blobd\" ls 2>&1
        as_owner mkdir -p /tmp/home/.config/blobd
        echo 'root = \"/tmp/home/own\"' >/tmp/home/.config/blobd/config.toml
        run config show; grep 'note: commands of this user use these settings' /tmp/out
        run ls"
    );
    let Some(run) = in_empty_machine(&script) else { return };
    let text = run.succeeds().text();
    let (commands, rest) = text.split_once("1 doctor\n").unwrap_or_else(|| panic!("{text}"));
    let mut lines = commands.lines();
    assert_eq!(lines.next(), Some("8 ls"), "{text}");
    assert_eq!(
        lines.next(),
        Some(
            "blobd: /run/blobd/blobd.sock: the system's daemon does not answer: blobd.service is failed (exit code 78): \
             /etc/blobd/config.toml:3:1: unknown key \"quotas\""
        )
    );
    let hint = lines.next().unwrap();
    assert!(hint.contains("systemctl status") && hint.contains("BLOBD_ROOT"), "{hint}");
    let others: Vec<&str> = lines.collect();
    assert_eq!(others.len(), 25, "{text}");
    assert!(others.iter().all(|line| line.starts_with("8 ")), "{text}");
    let note = rest.lines().rev().nth(1).unwrap();
    assert!(
        note.ends_with(
            "models of the system's daemon: /run/blobd/blobd.sock: the system's daemon does not answer: \
        blobd.service is failed (exit code 78): /etc/blobd/config.toml:3:1: unknown key \"quotas\""
        ),
        "{text}"
    );
    let (doctor, rest) = rest.split_once("0 config show\n").unwrap();
    assert!(doctor.contains("blobd.service is failed (exit code 78)"), "{doctor}");
    let rest: Vec<&str> = rest.lines().collect();
    assert!(rest[0].starts_with("commands of this user fail: /run/blobd/blobd.sock: "), "{text}");
    assert_eq!(rest[1..5], ["0 __suggest models", "m.gguf", "mnt", "3 ls --root /tmp/home/absent"], "{text}");
    assert!(rest[5].starts_with("no models") && rest.last() == Some(&"0 ls"), "{text}");
}

#[test]
fn root_uses_the_systems_store_and_says_so_but_creates_none() {
    if !can_be_others() {
        return;
    }
    let (_folder, model) = model();
    let script = format!(
        "{FAILED_SERVICE}
        mount -t tmpfs none /var/lib
        as_root() {{ env -i PATH=\"$PATH\" HOME=/root \"$blobd\" \"$@\"; }}
        as_root ls 2>/tmp/err || echo $?
        cat /tmp/err; ls -A /var/lib
        as_root import {} --name m --root /var/lib/blobd -q
        as_root ls --quiet; as_root ls 2>&1 >/dev/null",
        model.display()
    );
    let Some(run) = in_empty_machine(&script) else { return };
    let text = run.succeeds().text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "8", "{text}");
    assert!(lines[1].contains("blobd.service is failed (exit code 78)"), "{text}");
    assert!(lines[2].starts_with("hint: ") && lines[3].starts_with('m'), "{text}");
    assert!(lines.last().unwrap().ends_with("; using /var/lib/blobd"), "{text}");
}

/// The daemon's owner may have named it in the configuration; then it is not the system's default one.
#[test]
fn configured_socket_of_another_user_must_respond_and_an_own_one_need_not() {
    let script = "
        mkdir -m 755 /run/theirs; as_owner mkdir -p /tmp/home/.config/blobd /tmp/home/own
        for socket in /run/theirs/blobd.sock /tmp/home/own/blobd.sock; do
            echo \"socket = \\\"$socket\\\"\" >/tmp/home/.config/blobd/config.toml
            code=0; as_owner \"$blobd\" ls 2>&1 || code=$?; echo $code
        done";
    let Some(run) = in_empty_machine(script) else { return };
    let text = run.succeeds().text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "blobd: /run/theirs/blobd.sock: nothing listens there", "{text}");
    assert!(lines[2] == "8" && lines[3].starts_with("no models") && lines.last() == Some(&"0"), "{text}");
}

#[test]
fn error_in_the_journal_has_the_priority_of_an_error() {
    let folder = tmpfs_directory();
    let log = folder.path().join("log");
    let run = |variable: &str| {
        let script = format!("exec 2>\"$0\"; {variable} \"$1\" ls --root /nonexistent/store; cat \"$0\"");
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg(&log).arg(programs::blobd());
        Blobd::at_root(folder.path()).prepare(&mut shell);
        command::run(&mut shell).text()
    };
    let journal = run("JOURNAL_STREAM=$(stat -c %d:%i \"$0\")");
    assert!(journal.starts_with("<3>blobd: /nonexistent/store: contains no store"), "{journal}");
    assert!(journal.contains("\n<3>hint: "), "{journal}");
    assert!(run("JOURNAL_STREAM=1:2").starts_with("blobd: /nonexistent/store"));
}

#[test]
fn daemon_that_cannot_start_says_why_to_the_clients_that_wait() {
    let mut service = Service::new().configured("quotta = 1\n");
    let socket = service.socket();
    let waiting = std::thread::spawn(move || Blobd::at_socket(&socket).line("ls"));
    // The daemon ends with a connection in its backlog, or before the command connects: then the next one answers.
    while !waiting.is_finished() {
        service.start();
        assert_eq!(service.ended().code(), Some(78), "{}", service.log());
    }
    let run = waiting.join().unwrap().exits_with(8);
    assert!(
        run.stderr.contains("the daemon cannot start: ") && run.stderr.contains("unknown key"),
        "{}",
        run.stderr
    );
}
