//! The processes that live longer than one command: the daemon and the readers. Each is killed
//! when its guard is dropped.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

use super::error::DemoError;
use super::reader::{Opened, Question};
use super::stage::Stage;

/// A daemon that serves the demo's store.
#[derive(Debug)]
pub(super) struct DaemonProcess {
    child: Killed,
    log: PathBuf,
}

impl DaemonProcess {
    /// Starts it and waits until it answers.
    pub(super) fn start(stage: &Stage) -> Result<Self, DemoError> {
        let log = stage.path("daemon.log");
        let file = File::options().create(true).append(true).open(&log).map_err(DemoError::at(&log))?;
        let child = stage.command(&["serve"]).stdout(Stdio::null()).stderr(file).spawn();
        let mut daemon = Self { child: Killed(child.map_err(DemoError::io("daemon"))?), log };
        let deadline = Instant::now() + PATIENCE;
        while Client::connect(stage.socket()).and_then(|client| client.version()).is_err() {
            stage.check_interrupted()?;
            if let Some(status) = daemon.child.has_ended()? {
                return Err(daemon.failed(&format!("ended at its start, {status}")));
            }
            if Instant::now() > deadline {
                return Err(daemon.failed("does not answer"));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(daemon)
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Kills it as a crash would, with SIGKILL.
    pub(super) fn kill(self) -> Result<(), DemoError> {
        self.child.kill().map_err(DemoError::io("daemon"))
    }

    /// Asks it to stop, with SIGTERM, and waits until it has.
    pub(super) fn stop(mut self) -> Result<(), DemoError> {
        let pid = Pid::from_child(&self.child.0);
        kill_process(pid, Signal::TERM).map_err(io::Error::from).map_err(DemoError::io("daemon"))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.has_ended()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.failed(&format!("was asked to stop, {status}"))),
                None if Instant::now() > deadline => return Err(self.failed("does not stop")),
                None => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    fn failed(&self, problem: &str) -> DemoError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last_words = log.lines().last().unwrap_or_default().to_owned();
        DemoError::Daemon { problem: problem.to_owned(), last_words }
    }
}

/// A reader and the pipes to it. It ends when they are closed.
#[derive(Debug)]
pub(super) struct ReaderProcess {
    child: Killed,
    number: usize,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl ReaderProcess {
    /// Starts a reader of the model; it works while the caller does something else.
    pub(super) fn start(stage: &Stage, number: usize, reference: &str) -> Result<Self, DemoError> {
        let mut command = stage.command(&["demo-reader", reference]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(DemoError::io(format!("reader {number}")))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let child = Killed(child);
        let no_pipes = || DemoError::Reader { number, problem: "has no pipes".to_owned() };
        let (questions, answers) = pipes.ok_or_else(no_pipes)?;
        Ok(Self { child, number, questions, answers: BufReader::new(answers) })
    }

    /// Which of the readers it is.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Waits until it has opened and checked the model.
    pub(super) fn opened(&mut self) -> Result<Opened, DemoError> {
        self.answer()
    }

    /// Asks and waits for the answer.
    pub(super) fn ask<A: DeserializeOwned>(&mut self, question: Question) -> Result<A, DemoError> {
        let mut line = serde_json::to_vec(&question).map_err(|error| self.failed(&error))?;
        line.push(b'\n');
        self.questions.write_all(&line).map_err(|error| self.failed(&error))?;
        self.answer()
    }

    fn answer<A: DeserializeOwned>(&mut self) -> Result<A, DemoError> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(0) => Err(self.failed(&"ended early")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| self.failed(&error)),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, problem: &dyn std::fmt::Display) -> DemoError {
        DemoError::Reader { number: self.number, problem: problem.to_string() }
    }
}

/// A child that does not outlive its parent's interest in it.
#[derive(Debug)]
struct Killed(Child);

impl Killed {
    fn has_ended(&mut self) -> Result<Option<ExitStatus>, DemoError> {
        self.0.try_wait().map_err(DemoError::io("daemon"))
    }

    fn kill(mut self) -> io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended already, which is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How long a daemon may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
