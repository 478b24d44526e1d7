//! Reads files that clients have opened in separate processes.
//!
//! A client's file may be on an unreachable network, or on a file system that its user wrote to do harm:
//! inspecting, reading and even closing it may block for ever, and some of these calls cannot be
//! interrupted even by killing the process. So the daemon never has such a descriptor. A process of the
//! same program takes the client's connection, receives the descriptor, and sends the file's bytes. If it
//! blocks, the daemon abandons it; it holds no resources of the daemon.
//!
//! Two socket pairs connect it with the daemon: one carries the bytes, the other [`Note`]s from the process
//! and the request to inspect the file again. A pipe for the bytes takes a tenth less system time, but the
//! kernel holds a pipe's lock while it waits for the file, and the daemon's `read` and `close` would wait too.

use std::io::{self, Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::ops::{FileFacts, ImportSource, client_has_gone};
use crate::permits::Permit;

mod note;
mod process;

pub(crate) use note::Refusal;
use note::{NOTE_BYTES, Note};
pub(crate) use process::{CLIENT_TIMEOUT, run};

/// The hidden command that this process runs.
pub(crate) const COMMAND: &str = "client-file";

/// The running program, even if its file was replaced since.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How often a wait checks whether the client has disconnected.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A file that a separate process reads. On drop the process is killed; if it is blocked, it is abandoned.
#[derive(Debug)]
pub(crate) struct ClientFile {
    bytes: UnixStream,
    notes: UnixStream,
    cancelled: Arc<AtomicBool>,
    is_inspected: bool,
    _process: Process,
}

impl ClientFile {
    /// Starts a process that receives a descriptor from the client on `connection`. Nothing else may
    /// receive from it until [`Self::receive`] returns. When `cancelled` is set, each wait ends soon.
    pub(crate) fn start(connection: OwnedFd, permit: Permit, cancelled: Arc<AtomicBool>) -> io::Result<Self> {
        let (bytes, their_bytes) = UnixStream::pair()?;
        let (notes, their_notes) = UnixStream::pair()?;
        for stream in [&bytes, &notes] {
            stream.set_read_timeout(Some(POLL_INTERVAL))?;
        }
        let mut command = Command::new(THIS_PROGRAM);
        // It reads only this file, and keeps no directory in use.
        command.arg(COMMAND).env_clear().current_dir("/");
        command.stdin(connection).stdout(OwnedFd::from(their_bytes)).stderr(OwnedFd::from(their_notes));
        let child = command.spawn()?;
        let process = Process(Some((child, permit)));
        Ok(Self { bytes, notes, cancelled, is_inspected: false, _process: process })
    }

    /// Waits until the process has the descriptor. After that only the daemon uses the connection.
    pub(crate) fn receive(&mut self, limit: Duration) -> io::Result<Result<(), Refusal>> {
        match self.note(Some(Instant::now() + limit))? {
            Note::Received => Ok(Ok(())),
            Note::Refused(refusal) => Ok(Err(refusal)),
            note => Err(unexpected(note)),
        }
    }

    fn note(&mut self, until: Option<Instant>) -> io::Result<Note> {
        let (mut record, mut filled) = ([0; NOTE_BYTES], 0);
        while let Some(rest) = record.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.wait(until, |file| file.notes.read(rest))? {
                0 => return Err(io::Error::other("the process that reads the file has ended")),
                read => filled += read,
            }
        }
        Note::decode(&record).ok_or_else(|| io::Error::other("the process that reads the file has failed"))
    }

    /// Retries until data arrives, the client disconnects, or the time is over.
    fn wait(
        &mut self,
        until: Option<Instant>,
        mut read: impl FnMut(&mut Self) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(client_has_gone());
            }
            match read(self) {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                read => return read,
            }
            if until.is_some_and(|until| Instant::now() > until) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Read for ClientFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.wait(None, |file| file.bytes.read(buffer))? {
            0 if !buffer.is_empty() => match self.note(None)? {
                Note::Short => Ok(0),
                Note::Failed(errno) => Err(io::Error::from_raw_os_error(errno)),
                note => Err(unexpected(note)),
            },
            read => Ok(read),
        }
    }
}

impl ImportSource for ClientFile {
    fn inspect(&mut self) -> io::Result<FileFacts> {
        if std::mem::replace(&mut self.is_inspected, true) {
            self.notes.write_all(&[process::INSPECT])?;
        }
        match self.note(None)? {
            Note::Facts(facts) => Ok(facts),
            Note::Failed(errno) => Err(io::Error::from_raw_os_error(errno)),
            note => Err(unexpected(note)),
        }
    }
}

fn unexpected(note: Note) -> io::Error {
    io::Error::other(format!("the process that reads the file sent {note:?}, which is not expected now"))
}

/// A process that is killed on drop, and counted until it has ended.
#[derive(Debug)]
struct Process(Option<(Child, Permit)>);

impl Drop for Process {
    fn drop(&mut self) {
        let Some((mut child, permit)) = self.0.take() else { return };
        // Fails only if it has already ended.
        let _ = child.kill();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(reap(child, permit));
        }
    }
}

/// Waits without a thread: it may take as long as the file system does not respond.
async fn reap(mut child: Child, permit: Permit) {
    const LONGEST: Duration = Duration::from_secs(1);
    let mut pause = Duration::from_millis(1);
    while matches!(child.try_wait(), Ok(None)) {
        tokio::time::sleep(pause).await;
        pause = LONGEST.min(pause * 2);
    }
    drop(permit);
}
