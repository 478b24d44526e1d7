//! A process that this program starts from its own binary, under another uid, and talks with by lines.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use crate::Outcome;

/// A process in a role; killed when dropped.
#[derive(Debug)]
pub(crate) struct Actor {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Actor {
    /// Starts a role as a user.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(crate) fn start(uid: u32, words: &[&OsStr]) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").args(words).uid(uid).gid(uid);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no pipe to the process")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe from the process")?);
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Ok(Self { child, input, lines })
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    ///
    /// # Errors
    /// When the process is gone.
    pub(crate) fn tell(&mut self, line: &str) -> Outcome<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// The next line that it prints.
    ///
    /// # Errors
    /// When none comes in time.
    pub(crate) fn line(&self, patience: Duration) -> Outcome<String> {
        self.lines.recv_timeout(patience).map_err(|error| format!("process {}: {error}", self.pid()).into())
    }

    /// Kills it and does not wait for that.
    pub(crate) fn kill(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}
