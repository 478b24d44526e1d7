//! A child process of this program's own binary under another uid. Parent and child exchange lines of text
//! over the child's standard input and output.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use crate::Outcome;

/// A child process with a role (witness or attacker); killed when dropped.
#[derive(Debug)]
pub(crate) struct RoleProcess {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl RoleProcess {
    /// Starts the process as the user `uid`; `role` is the name of the role and its arguments.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(crate) fn start(uid: u32, role: &[&OsStr]) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").args(role).uid(uid).gid(uid);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no pipe to the process")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe from the process")?);
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Ok(Self { child, input, lines })
    }

    /// Its process ID.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// # Errors
    /// When the process has ended.
    pub(crate) fn send_line(&mut self, line: &str) -> Outcome<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// The next line that it prints.
    ///
    /// # Errors
    /// When none comes in time.
    pub(crate) fn read_line(&self, timeout: Duration) -> Outcome<String> {
        self.lines.recv_timeout(timeout).map_err(|error| format!("process {}: {error}", self.pid()).into())
    }

    /// Kills it without waiting for its end.
    pub(crate) fn kill(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}
