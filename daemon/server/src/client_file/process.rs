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
use blobd_client::protocol::request::ImportParams;
use blobd_store::{CHUNK_BYTES, CHUNKS_IN_USE, fill};
use rustix::io::Errno;

use super::note::{Note, RECORD_BYTES, Refusal, Request, decode, encode};
use crate::ops::FileFacts;
use crate::socket::MAX_FDS_PER_MESSAGE;
use crate::sys::{map_shared, take_standard_descriptors};

/// How long a client may take to send its file.
pub(crate) const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Receives a descriptor on standard input, then serves the requests on standard error: reads the file
/// into the shared memory at standard output. Ends when the daemon closes its end.
pub fn run() {
    let [connection, memory, notes] = take_standard_descriptors();
    // An error was reported, or the daemon has closed its end.
    let _ = serve(connection, &File::from(memory), &UnixStream::from(notes));
}

fn serve(connection: OwnedFd, memory: &File, mut notes: &UnixStream) -> io::Result<()> {
    let received = receive(&connection, notes);
    // An open duplicate would hide from the client that the daemon has closed the connection.
    drop(connection);
    let files = match received {
        Ok(files) => files,
        Err(refusal) => return notes.write_all(&encode(&Note::Refused(refusal))?),
    };
    notes.write_all(&encode(&Note::Received(u8::try_from(files.len()).unwrap_or(u8::MAX)))?)?;
    notes.set_read_timeout(None)?;
    let mut slots = map_shared(memory, CHUNKS_IN_USE, CHUNK_BYTES)?;
    let mut record = [0; RECORD_BYTES];
    loop {
        notes.read_exact(&mut record)?;
        let Some(request) = decode(&record) else { return Err(ErrorKind::InvalidData.into()) };
        let note = match request {
            Request::Inspect { file } => numbered(&files, file).and_then(FileFacts::of).map(Note::Facts),
            Request::Read { file, slot, offset, length } => {
                let slot = slots.get_mut(slot).and_then(|slot| slot.get_mut(..length));
                let read = |file| read(file, offset, slot.unwrap_or_default());
                numbered(&files, file).and_then(read).map(Note::Read)
            }
        };
        let note = note.unwrap_or_else(|error| Note::Failed(errno(&error)));
        notes.write_all(&encode(&note)?)?;
    }
}

fn numbered(files: &[File], number: u8) -> io::Result<&File> {
    files.get(usize::from(number)).ok_or_else(|| ErrorKind::InvalidInput.into())
}

/// Fills the buffer, unless the file ends earlier. Uses its own offset, because the client's descriptor
/// shares the file's.
fn read(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    fill(|rest, offset| file.read_at(rest, offset), buffer, offset)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error())
}

/// The first frame must have as many descriptors attached as it says: that of the file and those of its sidecars.
fn receive(connection: &OwnedFd, notes: &UnixStream) -> Result<Vec<File>, Refusal> {
    let (mut decoder, mut fds) = (FrameDecoder::new(), VecDeque::new());
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
    let count = match frame {
        Frame::Fds { first: 0, count } if !decoder.is_inside_frame() => {
            usize::try_from(count).unwrap_or(usize::MAX)
        }
        _ => return Err(Refusal::Frame),
    };
    if !(1..=ImportParams::MAX_SIDECARS + 1).contains(&count) {
        return Err(Refusal::Frame);
    }
    match fds.len() {
        0 => Err(Refusal::NoFile),
        received if received != count => Err(Refusal::Files),
        _ => Ok(fds.into_iter().map(File::from).collect()),
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
