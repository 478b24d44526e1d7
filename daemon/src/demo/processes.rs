//! The daemon and the readers. Each process is killed when its guard is dropped.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

use super::DemoError;
use super::reader::{self, Opened, Request};
use super::sandbox::Sandbox;

#[derive(Debug)]
pub(super) struct DaemonProcess {
    child: ChildGuard,
    log: PathBuf,
}

impl DaemonProcess {
    /// Starts it and waits until it serves requests.
    pub(super) fn start(sandbox: &Sandbox) -> Result<Self, DemoError> {
        let log = sandbox.path("daemon.log");
        let file = File::options().create(true).append(true).open(&log).map_err(DemoError::at(&log))?;
        let child = sandbox.command(&["serve"]).stdout(Stdio::null()).stderr(file).spawn();
        let mut daemon = Self { child: ChildGuard(child.map_err(DemoError::io("daemon"))?), log };
        let deadline = Instant::now() + TIMEOUT;
        while Client::connect(sandbox.socket()).and_then(|client| client.version()).is_err() {
            sandbox.check_interrupted()?;
            if let Some(status) = daemon.child.has_ended()? {
                return Err(daemon.failed(&format!("ended during its start: {status}")));
            }
            if Instant::now() > deadline {
                return Err(daemon.failed("did not respond within 20 s"));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(daemon)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub(super) fn kill(self) -> Result<(), DemoError> {
        self.child.kill().map_err(DemoError::io("daemon"))
    }

    pub(super) fn stop(mut self) -> Result<(), DemoError> {
        let pid = Pid::from_child(&self.child.0);
        kill_process(pid, Signal::TERM).map_err(io::Error::from).map_err(DemoError::io("daemon"))?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.child.has_ended()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.failed(&format!("failed to stop: {status}"))),
                None if Instant::now() > deadline => return Err(self.failed("did not stop within 20 s")),
                None => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    fn failed(&self, problem: &str) -> DemoError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last_log_line = log.lines().last().unwrap_or_default().to_owned();
        DemoError::Daemon { problem: problem.to_owned(), last_log_line }
    }
}

/// A reader and its pipes. It ends when they are closed.
#[derive(Debug)]
pub(super) struct ReaderProcess {
    child: ChildGuard,
    number: usize,
    requests: ChildStdin,
    responses: BufReader<ChildStdout>,
}

impl ReaderProcess {
    pub(super) fn start(sandbox: &Sandbox, number: usize, reference: &str) -> Result<Self, DemoError> {
        let mut command = sandbox.command(&[reader::COMMAND, reference]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(DemoError::io(format!("reader {number}")))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let child = ChildGuard(child);
        let no_pipes = || DemoError::Reader { number, problem: "has no pipes".to_owned() };
        let (requests, responses) = pipes.ok_or_else(no_pipes)?;
        Ok(Self { child, number, requests, responses: BufReader::new(responses) })
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub(super) fn opened(&mut self) -> Result<Opened, DemoError> {
        self.response()
    }

    pub(super) fn request<A: DeserializeOwned>(&mut self, request: Request) -> Result<A, DemoError> {
        let mut line = serde_json::to_vec(&request).map_err(|error| self.failed(&error))?;
        line.push(b'\n');
        self.requests.write_all(&line).map_err(|error| self.failed(&error))?;
        self.response()
    }

    fn response<A: DeserializeOwned>(&mut self) -> Result<A, DemoError> {
        let mut line = String::new();
        match self.responses.read_line(&mut line) {
            Ok(0) => Err(self.failed(&"ended early")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| self.failed(&error)),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, problem: &dyn std::fmt::Display) -> DemoError {
        DemoError::Reader { number: self.number, problem: problem.to_string() }
    }
}

#[derive(Debug)]
struct ChildGuard(Child);

impl ChildGuard {
    fn has_ended(&mut self) -> Result<Option<ExitStatus>, DemoError> {
        self.0.try_wait().map_err(DemoError::io("daemon"))
    }

    fn kill(mut self) -> io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How long a daemon may take to start or to stop; error messages name it.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
