//! The process that reads a client's file. Only this process waits for the file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blobd_client::protocol::connection::receive_message;
use blobd_client::protocol::frame::{Frame, FrameDecoder};
use blobd_store::{CHUNK_BYTES, CHUNKS_IN_USE, fill};
use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::channel::{Note, RECORD_BYTES, Refusal, Request, decode, encode};
use crate::ops::FileFacts;
use crate::socket::MAX_FDS_PER_MESSAGE;
use crate::sys::{map_shared, take_standard_descriptors};

pub(crate) const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The frame has two numbers.
const MAX_FRAME_BYTES: usize = 4 << 10;

/// Serves the requests on standard error: receives descriptors on standard input, and reads the files into the shared
/// memory at standard output. Ends when the daemon closes its end.
pub fn run() {
    let [connection, memory, notes] = take_standard_descriptors();
    // An error was reported, or the daemon has closed its end.
    let _ = serve(connection, &File::from(memory), &UnixStream::from(notes));
}

fn serve(connection: OwnedFd, memory: &File, mut notes: &UnixStream) -> io::Result<()> {
    let mut connection = Some(connection);
    let mut slots = map_shared(memory, CHUNKS_IN_USE, CHUNK_BYTES)?;
    let (mut files, mut record) = (Vec::new(), [0; RECORD_BYTES]);
    loop {
        let target = receive_record(notes, &mut record)?;
        let Some(request) = decode(&record) else { return Err(ErrorKind::InvalidData.into()) };
        // Those before the received ones are closed after the note, because that may block like any use of them.
        let mut closed = Vec::new();
        let note = match request {
            Request::Receive { first, count, is_last, keeps } => {
                let open = connection.as_ref().ok_or(ErrorKind::NotConnected)?;
                let received = receive(open, notes, first, count);
                notes.set_read_timeout(None)?;
                // An open duplicate would hide from the client that the daemon has closed the connection.
                connection = connection.filter(|_| !is_last);
                received.map_or_else(Note::Refused, |received| {
                    match keeps {
                        true => files.extend(received),
                        false => closed = std::mem::replace(&mut files, received),
                    }
                    Note::Received
                })
            }
            Request::Inspect { file } => {
                noted(numbered(&files, file).and_then(FileFacts::from_file).map(Note::Facts))
            }
            Request::Read { file, slot, offset, length } => {
                let slot = slots.get_mut(slot).and_then(|slot| slot.get_mut(..length));
                let read = |file| read(file, offset, slot.unwrap_or_default());
                noted(numbered(&files, file).and_then(read).map(Note::Read))
            }
            Request::Reflink { file } => {
                noted(numbered(&files, file).and_then(|file| reflink(file, target)).map(|()| Note::Shared))
            }
        };
        notes.write_all(&encode(&note)?)?;
        drop(closed);
    }
}

/// Receives a request, and the descriptor that comes with it, if one does.
fn receive_record(notes: &UnixStream, record: &mut [u8; RECORD_BYTES]) -> io::Result<Option<OwnedFd>> {
    let (mut filled, mut fds) = (0, VecDeque::new());
    while let Some(rest) = record.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match receive_message(notes, rest, &mut fds, 1)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            received => filled += received,
        }
    }
    Ok(fds.pop_front())
}

/// Has an empty file share all blocks of this one, and closes it.
fn reflink(file: &File, target: Option<OwnedFd>) -> io::Result<()> {
    let target = target.ok_or(ErrorKind::InvalidInput)?;
    Ok(ioctl_ficlone(target, file)?)
}

fn noted(result: io::Result<Note>) -> Note {
    result.unwrap_or_else(|error| Note::Failed(errno(&error)))
}

fn numbered(files: &[File], number: u16) -> io::Result<&File> {
    files.get(usize::from(number)).ok_or_else(|| ErrorKind::InvalidInput.into())
}

/// Fills the buffer, unless the file ends earlier. Uses its own offset, because the client's descriptor
/// shares the file's. A pipe has none.
fn read(mut file: &File, offset: Option<u64>, buffer: &mut [u8]) -> io::Result<usize> {
    match offset {
        Some(offset) => fill(|rest, offset| file.read_at(rest, offset), buffer, offset),
        None => fill(|rest, _| file.read(rest), buffer, 0),
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error())
}

/// Receives the descriptors of `count` files. They are attached to the next frame, which has the same numbers.
fn receive(connection: &OwnedFd, notes: &UnixStream, first: u32, count: u8) -> Result<Vec<File>, Refusal> {
    let (mut decoder, mut fds) = (FrameDecoder::with_limit(MAX_FRAME_BYTES), VecDeque::new());
    let started = Instant::now();
    let mut buffer = [0; 1024];
    let frame = loop {
        match receive_message(connection, &mut buffer, &mut fds, MAX_FDS_PER_MESSAGE) {
            Ok(0) => return Err(Refusal::Closed),
            Ok(received) => decoder.push(buffer.get(..received).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(notes, started)?,
            Err(_) => return Err(Refusal::Failed),
        }
        if let Some(frame) = decoder.next_frame().map_err(|_malformed| Refusal::Frame)? {
            break frame;
        }
    };
    let count = u32::from(count);
    match frame {
        Frame::Fds { first: found, .. } if found != first || decoder.is_inside_frame() => Err(Refusal::Frame),
        Frame::Fds { .. } if fds.is_empty() => Err(Refusal::NoFile),
        Frame::Fds { count: found, .. } if found != count || u32::try_from(fds.len()) != Ok(count) => {
            Err(Refusal::Files)
        }
        Frame::Fds { .. } => Ok(fds.into_iter().map(File::from).collect()),
        _ => Err(Refusal::Frame),
    }
}

/// Waits a short time for the client, and checks that the daemon has not closed its end.
fn wait(mut notes: &UnixStream, started: Instant) -> Result<(), Refusal> {
    const POLL_INTERVAL: Duration = Duration::from_millis(5);
    if started.elapsed() > CLIENT_TIMEOUT {
        return Err(Refusal::Slow);
    }
    let waited = notes.set_read_timeout(Some(POLL_INTERVAL)).and_then(|()| notes.read(&mut [0]));
    match waited {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
        _ => Err(Refusal::Closed),
    }
}
