//! The daemon's handling of signals.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};

use blobd_client::Client;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::hanging::{Hang, HangingFiles};
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn ignored_signals_do_not_end_the_daemon() {
    let daemon = TestDaemon::start();
    let pid = Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    for (signal, line) in [
        (Signal::HUP, "SIGHUP: the configuration has not changed"),
        (Signal::USR1, "signal 10: ignored"),
        (Signal::USR2, "signal 12"),
    ] {
        kill_process(pid, signal).unwrap();
        eventually("it is logged", || daemon.log().contains(line));
    }
    daemon.command().line("ls").succeeds();
}

#[test]
fn every_stop_signal_ends_the_daemon_cleanly() {
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let folder = tmpfs_directory();
        let socket = folder.path().join("s");
        let mut serve = Blobd::at_root(&folder.path().join("store")).command();
        let mut child =
            serve.arg("serve").arg("--socket").arg(&socket).stderr(Stdio::null()).spawn().unwrap();
        eventually("the daemon responds", || Client::connect(&socket).is_ok());
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        assert!(status.success(), "{signal:?}: {status}");
        assert!(!socket.exists(), "{signal:?}");
    }
}

/// A process that is killed if the test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn daemon_survives_the_end_of_its_terminal() {
    let folder = tmpfs_directory();
    let socket = folder.path().join("s");
    let mut serve = Command::new("script");
    Blobd::at_root(&folder.path().join("store")).prepare(&mut serve);
    let program = blobd_tests::programs::blobd();
    let line = format!("exec {} serve --socket {}", program.display(), socket.display());
    serve.args(["--quiet", "--command", &line, "/dev/null"]);
    let Ok(terminal) = serve.spawn() else {
        skipped("there is no `script`, which Debian has in bsdutils");
        return;
    };
    let mut terminal = Killed(terminal);
    eventually("the daemon responds", || Client::connect(&socket).is_ok());
    let pid = Client::connect(&socket).unwrap().version().unwrap().pid;
    kill_process(Pid::from_child(&terminal.0), Signal::KILL).unwrap();
    assert_eq!(terminal.0.wait().unwrap().signal(), Some(9));
    // Its messages can no longer be written.
    for _ in 0..3 {
        assert!(Client::connect(&socket).and_then(|client| client.models()).is_ok());
    }
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::TERM).unwrap();
    eventually("it has removed its socket", || !socket.exists());
}

#[test]
fn ctrl_c_during_an_import_says_what_is_left_of_it() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense_of(1, 2, 128);
    let Some(files) = HangingFiles::mount(&daemon.scratch().join("hanging"), model.bytes()) else { return };
    for (json, expected) in
        [(&[][..], "blobd: stopped; finished models"), (&["--json"], r#""code":"interrupted""#)]
    {
        let before = files.waiting();
        // SIGINT may be ignored in the tests' own process.
        let mut command = Command::new("env");
        daemon.command().prepare(&mut command);
        command.args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()]);
        command.arg("import").arg(files.path(Hang::Read)).args(json);
        let import = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("it hangs", || files.waiting() > before);
        kill_process(Pid::from_child(&import), Signal::INT).unwrap();
        let output = import.wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{words}");
        assert!(words.contains(expected), "{words}");
    }
    files.unblock();
}
