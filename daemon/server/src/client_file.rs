//! Reads files that clients have opened in separate processes.
//!
//! A client's file may be on an unreachable network, or on a file system that its user wrote to do harm: inspecting,
//! reading and even closing it may block for ever, and some of these calls cannot be interrupted even by killing the
//! process. So the daemon never has such a descriptor: a process of the same program receives it on the client's
//! connection, and reads the file into memory that it shares with the daemon. If that process blocks, the daemon
//! abandons it; it holds no resources of the daemon.
//!
//! A socket pair carries requests to the process and notes from it. The memory has slots; a slot belongs
//! to the process from a request to read into it until its note, and to the daemon otherwise. Pipes and
//! sockets for the bytes were slower: they cost one more copy or a fifth of an import's processor time, and
//! the kernel holds a pipe's lock while it waits for the file, so the daemon would wait too.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blobd_client::protocol::MAX_WANTED_FILES;
use blobd_client::protocol::connection::{is_too_many_in_flight, send_message};
use blobd_store::{CHUNK_BYTES, CHUNKS_IN_USE};
use blobd_store_format::file_type::ShardName;
use bytes::Bytes;
use rustix::process::{Resource, getrlimit};
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;

use crate::ingest::{FileSource, UnreadableFile};
use crate::ops::{FileFacts, ImportSource, client_has_gone};
use crate::permits::Permit;
use crate::sys::{map_shared, shared_memory};

mod channel;
mod process;

pub(crate) use channel::Refusal;
use channel::{EmptySlot, FilledSlot, Note, RECORD_BYTES, Request};
use process::CLIENT_TIMEOUT;
pub use process::run;

/// The first argument of the process that reads a file, which then calls [`run`].
pub const COMMAND: &str = "client-file";

/// The running program, even if its file was replaced since.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Additional time for the start of the process on a loaded machine.
const PROCESS_START_TIMEOUT: Duration = Duration::from_secs(20);

/// The most files that stay open: a model of the most shards, and files that come before them.
const MAX_KEPT: usize = ShardName::MAX_COUNT + 128;
/// Descriptors that the process has beside those, while it receives further ones.
const OTHER_DESCRIPTORS: u64 = 16 + MAX_WANTED_FILES as u64;

/// How often a wait checks whether the client has disconnected.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The files of a client that a separate process reads. On drop the process is killed; if it is blocked, it is abandoned.
#[derive(Debug)]
pub(crate) struct ClientFile {
    notes: UnixStream,
    empty: Receiver<EmptySlot>,
    to_empty: Sender<EmptySlot>,
    /// The slots that the process fills, in order.
    lent: VecDeque<EmptySlot>,
    /// The numbers of the files whose descriptors the process has.
    received: Range<usize>,
    /// Among these.
    selected: u16,
    /// Where the content of the selected file begins in its descriptor; `None` if that is a pipe.
    offset: Option<u64>,
    /// How many of the first files stay open when further ones are received.
    kept: usize,
    /// How the further files of a list are requested.
    list: Option<FileList>,
    cancelled: Arc<AtomicBool>,
    process: Process,
}

/// The files that the client has listed, and whose descriptors it sends when they are wanted.
#[derive(Debug)]
pub(crate) struct FileList {
    /// Where the content of each begins in its descriptor; `None` for a pipe.
    pub(crate) places: Vec<Option<u64>>,
    /// Has the client told which files are wanted: the first, and how many.
    pub(crate) want: UnboundedSender<(u32, u32)>,
    /// Why the client's connection is to be closed.
    pub(crate) refusal: Arc<OnceLock<Refusal>>,
}

impl ClientFile {
    /// Starts a process that receives descriptors from the client on `connection`. Nothing else may
    /// receive from it until [`Self::receive_files`] returns or, with a list, as long as the process works. When `cancelled` is set, each wait ends soon.
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
        let (lent, received) = (VecDeque::new(), 0..0);
        Ok(Self {
            notes,
            empty,
            to_empty,
            lent,
            received,
            selected: 0,
            offset: Some(0),
            kept: 0,
            list: None,
            cancelled,
            process,
        })
    }

    /// Selects from a list of files, and requests their descriptors from the client when they are needed.
    pub(crate) fn with_list(self, list: FileList) -> Self {
        Self { list: Some(list), ..self }
    }

    /// Waits until the process has the descriptors of `count` files, which are all. After that only the daemon uses the
    /// connection.
    pub(crate) fn receive_files(&mut self, count: usize) -> io::Result<Result<(), Refusal>> {
        self.receive_range(0..count, true)
    }

    fn receive_range(&mut self, files: Range<usize>, is_last: bool) -> io::Result<Result<(), Refusal>> {
        let keeps = files.start < self.kept;
        let first = u32::try_from(files.start).map_err(io::Error::other)?;
        let count = u8::try_from(files.len()).map_err(io::Error::other)?;
        self.send(Request::Receive { first, count, is_last, keeps })?;
        match self.note(Some(Instant::now() + CLIENT_TIMEOUT + PROCESS_START_TIMEOUT))? {
            Note::Received => {
                self.received = if keeps { self.received.start..files.end } else { files };
                Ok(Ok(()))
            }
            Note::Refused(refusal) => Ok(Err(refusal)),
            note => Err(unexpected(note)),
        }
    }

    /// Has the client send the next files of its list.
    fn receive_next(&mut self) -> io::Result<()> {
        let Some(list) = &self.list else { return Err(io::ErrorKind::InvalidInput.into()) };
        let start = self.received.end;
        let next = start..list.places.len().min(start.saturating_add(MAX_WANTED_FILES));
        let (first, count) = (u32::try_from(next.start), u32::try_from(next.len()));
        let wanted = (first.map_err(io::Error::other)?, count.map_err(io::Error::other)?);
        list.want.send(wanted).map_err(|_closed| client_has_gone())?;
        let (is_last, refusal) = (next.end == list.places.len(), Arc::clone(&list.refusal));
        self.receive_range(next, is_last)?.map_err(|found| {
            // There is only one.
            let _ = refusal.set(found);
            client_has_gone()
        })
    }

    fn note(&mut self, until: Option<Instant>) -> io::Result<Note> {
        let (mut record, mut filled) = ([0; RECORD_BYTES], 0);
        while let Some(rest) = record.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.wait(until, |file| file.notes.read(rest))? {
                0 => return Err(io::Error::other("the process that reads the file has ended")),
                read => filled += read,
            }
        }
        channel::decode(&record).ok_or_else(|| io::Error::other("the process that reads the file has failed"))
    }

    fn send(&mut self, request: Request) -> io::Result<()> {
        self.notes.write_all(&channel::encode(&request)?)
    }

    /// Sends a request with a descriptor; false if the kernel passes no more descriptors now.
    fn send_with(&mut self, request: Request, descriptor: BorrowedFd<'_>) -> io::Result<bool> {
        let record = channel::encode(&request)?;
        match send_message(&self.notes, &record, &[descriptor]) {
            Err(error) if is_too_many_in_flight(&error) => Ok(false),
            sent => {
                self.notes.write_all(record.get(sent?..).unwrap_or_default())?;
                Ok(true)
            }
        }
    }

    /// Retries until data arrives, the client disconnects, or the time is over.
    fn wait(
        &mut self,
        until: Option<Instant>,
        mut read: impl FnMut(&mut Self) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            self.check_wanted()?;
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
        let offset = match self.offset {
            Some(offset) => Some(offset.checked_add(range.start).ok_or(io::ErrorKind::InvalidInput)?),
            None => None,
        };
        self.send(Request::Read { file: self.selected, slot: slot.0, offset, length })?;
        self.lent.push_back(slot);
        Ok(())
    }

    fn is_stream(&self) -> bool {
        self.offset.is_none()
    }

    /// A file on another file system or on one that cannot do that, and most files that are in use in some special way,
    /// such as for swapping, are refused by the kernel.
    fn reflink_to(&mut self, target: BorrowedFd<'_>) -> io::Result<bool> {
        // A reflink takes the whole file, and content that begins at an offset is only a part of it.
        if self.offset != Some(0) || !self.send_with(Request::Reflink { file: self.selected }, target)? {
            return Ok(false);
        }
        match self.note(None)? {
            Note::Shared => Ok(true),
            Note::Failed(errno) => {
                tracing::debug!("no blocks are shared: {}", io::Error::from_raw_os_error(errno));
                Ok(false)
            }
            note => Err(unexpected(note)),
        }
    }

    fn check_wanted(&self) -> io::Result<()> {
        if self.cancelled.load(Ordering::Relaxed) { Err(client_has_gone()) } else { Ok(()) }
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
        if number == self.received.end && self.list.is_some() {
            self.receive_next()?;
        }
        let place = number.checked_sub(self.received.start).filter(|_| number < self.received.end);
        self.selected = u16::try_from(place.ok_or(io::ErrorKind::InvalidInput)?).map_err(io::Error::other)?;
        let place = self.list.as_ref().and_then(|list| list.places.get(number));
        self.offset = place.copied().unwrap_or(Some(0));
        Ok(())
    }

    fn close(&mut self) {
        // The memory is free when neither the process nor this one has it mapped.
        self.process = Process(None);
        self.empty.try_iter().for_each(drop);
    }

    fn keep(&mut self, count: usize) -> bool {
        // The process has the limit of this one.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let fits = count <= MAX_KEPT && (count as u64).saturating_add(OTHER_DESCRIPTORS) <= limit;
        self.kept = if fits { count } else { 0 };
        fits
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

/// Waits without a thread: it takes until the file system responds.
async fn reap(mut child: Child, permit: Permit) {
    const LONGEST: Duration = Duration::from_secs(1);
    let mut pause = Duration::from_millis(1);
    while matches!(child.try_wait(), Ok(None)) {
        tokio::time::sleep(pause).await;
        pause = LONGEST.min(pause * 2);
    }
    drop(permit);
}
