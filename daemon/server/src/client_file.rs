//! Reads files that clients have opened in separate processes.
//!
//! A client's file may be on an unreachable network, or on a file system that its user wrote to do harm:
//! inspecting, reading and even closing it may block for ever, and some of these calls cannot be
//! interrupted even by killing the process. So the daemon never has such a descriptor. A process of the
//! same program takes the client's connection, receives the descriptor, and reads the file into memory that
//! it shares with the daemon. If it blocks, the daemon abandons it; it holds no resources of the daemon.
//!
//! A socket pair carries requests to the process and notes from it. The memory has slots; a slot belongs
//! to the process from a request to read into it until its note, and to the daemon otherwise. Pipes and
//! sockets for the bytes were slower: they cost one more copy or a fifth of an import's processor time, and
//! the kernel holds a pipe's lock while it waits for the file, so the daemon would wait too.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use blobd_store::{CHUNK_BYTES, CHUNKS_IN_USE};
use bytes::Bytes;
use tokio::runtime::Handle;

use crate::ingest::{FileSource, UnreadableFile};
use crate::ops::{FileFacts, ImportSource, client_has_gone};
use crate::permits::Permit;
use crate::sys::{map_shared, shared_memory};

mod note;
mod process;
mod slot;

pub(crate) use note::Refusal;
use note::{Note, RECORD_BYTES, Request};
pub(crate) use process::CLIENT_TIMEOUT;
pub use process::run;
use slot::{EmptySlot, FilledSlot};

/// The first argument of the process that reads a file, which then calls [`run`].
pub const COMMAND: &str = "client-file";

/// The running program, even if its file was replaced since.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How often a wait checks whether the client has disconnected.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A file that a separate process reads. On drop the process is killed; if it is blocked, it is abandoned.
#[derive(Debug)]
pub(crate) struct ClientFile {
    notes: UnixStream,
    empty: Receiver<EmptySlot>,
    to_empty: Sender<EmptySlot>,
    /// The slots that the process fills, in this order.
    lent: VecDeque<EmptySlot>,
    /// The file that is read, of those that the client has sent.
    selected: u8,
    cancelled: Arc<AtomicBool>,
    _process: Process,
}

impl ClientFile {
    /// Starts a process that receives descriptors from the client on `connection`. Nothing else may
    /// receive from it until [`Self::receive_files`] returns. When `cancelled` is set, each wait ends soon.
    pub(crate) fn start(connection: OwnedFd, permit: Permit, cancelled: Arc<AtomicBool>) -> io::Result<Self> {
        let (notes, their_notes) = UnixStream::pair()?;
        notes.set_read_timeout(Some(POLL_INTERVAL))?;
        let memory = shared_memory(CHUNKS_IN_USE * CHUNK_BYTES)?;
        let (to_empty, empty) = channel();
        for slot in map_shared(&memory, CHUNKS_IN_USE, CHUNK_BYTES)?.into_iter().enumerate() {
            to_empty.send(slot).map_err(io::Error::other)?;
        }
        let mut command = Command::new(THIS_PROGRAM);
        // It reads only this file, and keeps no directory in use.
        command.arg(COMMAND).env_clear().current_dir("/");
        command.stdin(connection).stdout(memory).stderr(OwnedFd::from(their_notes));
        let child = command.spawn()?;
        let process = Process(Some((child, permit)));
        Ok(Self { notes, empty, to_empty, lent: VecDeque::new(), selected: 0, cancelled, _process: process })
    }

    /// Waits until the process has the descriptors of `count` files. After that only the daemon uses the connection.
    pub(crate) fn receive_files(&mut self, count: usize, limit: Duration) -> io::Result<Result<(), Refusal>> {
        match self.note(Some(Instant::now() + limit))? {
            Note::Received(received) if usize::from(received) == count => Ok(Ok(())),
            Note::Received(_) => Ok(Err(Refusal::Files)),
            Note::Refused(refusal) => Ok(Err(refusal)),
            note => Err(unexpected(note)),
        }
    }

    fn note(&mut self, until: Option<Instant>) -> io::Result<Note> {
        let (mut record, mut filled) = ([0; RECORD_BYTES], 0);
        while let Some(rest) = record.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.wait(until, |file| file.notes.read(rest))? {
                0 => return Err(io::Error::other("the process that reads the file has ended")),
                read => filled += read,
            }
        }
        note::decode(&record).ok_or_else(|| io::Error::other("the process that reads the file has failed"))
    }

    fn send(&mut self, request: Request) -> io::Result<()> {
        self.notes.write_all(&note::encode(&request)?)
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

impl FileSource for ClientFile {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        let slot = self.empty.recv().map_err(io::Error::other)?;
        let length = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        self.send(Request::Read { file: self.selected, slot: slot.0, offset: range.start, length })?;
        self.lent.push_back(slot);
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        let note = self.note(None)?;
        match (note, self.lent.pop_front()) {
            (Note::Read(length), Some(slot)) => {
                Ok(Bytes::from_owner(FilledSlot::new(slot, length, self.to_empty.clone())))
            }
            (Note::Failed(errno), _) => Err(UnreadableFile::from_errno(errno).into()),
            (note, _) => Err(unexpected(note)),
        }
    }
}

impl ImportSource for ClientFile {
    fn select(&mut self, number: usize) -> io::Result<()> {
        self.selected = u8::try_from(number).map_err(io::Error::other)?;
        Ok(())
    }

    fn inspect(&mut self) -> io::Result<FileFacts> {
        self.send(Request::Inspect { file: self.selected })?;
        match self.note(None)? {
            Note::Facts(facts) => Ok(facts),
            Note::Failed(errno) => Err(UnreadableFile::from_errno(errno).into()),
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
