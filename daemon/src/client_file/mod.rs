//! Files that clients have opened, read by processes of their own.
//!
//! A file of a client may be on a network that is gone, or on a file system that its user has written to
//! do harm: to inspect it, to read it and even to close it may take for ever, and the kernel lets nobody
//! leave some of these calls, not even a thread whose process is killed. So the daemon never has such a
//! descriptor. A process of the same program takes the client's connection, receives the descriptor,
//! and sends the file's bytes; if it hangs, it is left to itself, with nothing of the daemon's.
//!
//! Two socket pairs lead to it: one carries the bytes, the other [`Note`]s from the process and the
//! question to inspect the file once more.

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

/// The hidden command that the process runs.
pub(crate) const COMMAND: &str = "client-file";

/// This very program, also if another has been installed in its place since.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How often who waits for the process looks whether the client has gone.
const NOW_AND_THEN: Duration = Duration::from_millis(100);

/// A file that a process reads. The process ends when this is dropped, or is left to itself if it cannot.
#[derive(Debug)]
pub(crate) struct ClientFile {
    bytes: UnixStream,
    notes: UnixStream,
    cancelled: Arc<AtomicBool>,
    /// Whether the file was inspected for the first time.
    is_inspected: bool,
    _process: Process,
}

impl ClientFile {
    /// Starts a process that takes a descriptor from the client on `connection`. Nobody else may receive
    /// there until [`Self::receive`] is done. When `cancelled` is set, every wait ends soon.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(crate) fn start(connection: OwnedFd, permit: Permit, cancelled: Arc<AtomicBool>) -> io::Result<Self> {
        let (bytes, their_bytes) = UnixStream::pair()?;
        let (notes, their_notes) = UnixStream::pair()?;
        for stream in [&bytes, &notes] {
            stream.set_read_timeout(Some(NOW_AND_THEN))?;
        }
        let mut command = Command::new(THIS_PROGRAM);
        // It reads nothing but the file, and keeps no directory busy.
        command.arg(COMMAND).env_clear().current_dir("/");
        command.stdin(connection).stdout(OwnedFd::from(their_bytes)).stderr(OwnedFd::from(their_notes));
        let child = command.spawn()?;
        let process = Process(Some((child, permit)));
        Ok(Self { bytes, notes, cancelled, is_inspected: false, _process: process })
    }

    /// Waits until the process has the descriptor. From then on the connection is the daemon's alone.
    ///
    /// # Errors
    /// A [`Refusal`] when the client has sent something else.
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

    /// Tries until something has come, the client has gone or the time is over.
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
    io::Error::other(format!("the process that reads the file says {note:?} out of turn"))
}

/// A process that is ended when this is dropped, and counted until it is gone.
#[derive(Debug)]
struct Process(Option<(Child, Permit)>);

impl Drop for Process {
    fn drop(&mut self) {
        let Some((mut child, permit)) = self.0.take() else { return };
        // Fails only if it has ended already.
        let _ = child.kill();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(reap(child, permit));
        }
    }
}

/// Waits without a thread: it may take as long as the file's server likes.
async fn reap(mut child: Child, permit: Permit) {
    const LONGEST: Duration = Duration::from_secs(1);
    let mut pause = Duration::from_millis(1);
    while matches!(child.try_wait(), Ok(None)) {
        tokio::time::sleep(pause).await;
        pause = LONGEST.min(pause * 2);
    }
    drop(permit);
}
