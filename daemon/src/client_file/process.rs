//! The process that reads a client's file. Only this process waits for the file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blobd_client::protocol::connection::receive_message;
use blobd_client::protocol::frame::{Frame, FrameDecoder};
use rustix::fs::sendfile;
use rustix::io::Errno;

use super::note::{Note, Refusal};
use crate::ops::FileFacts;
use crate::socket::MAX_FDS_PER_MESSAGE;
use crate::sys::take_standard_descriptors;

/// The request to inspect the file again.
pub(super) const INSPECT: u8 = b'i';

/// How long a client may take to send its file.
pub(crate) const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

const CHUNK_BYTES: usize = 1 << 20;

/// Receives a descriptor on standard input, sends the file's bytes to standard output, and reports on
/// standard error. Ends when the daemon closes either.
pub(crate) fn run() {
    let [connection, bytes, notes] = take_standard_descriptors();
    let (bytes, notes) = (UnixStream::from(bytes), UnixStream::from(notes));
    // An error was reported, or the daemon has closed its end.
    let _ = serve(connection, &bytes, &notes);
}

fn serve(connection: OwnedFd, bytes: &UnixStream, mut notes: &UnixStream) -> io::Result<()> {
    let received = receive(&connection, notes);
    // An open duplicate would hide from the client that the daemon has closed the connection.
    drop(connection);
    let file = match received {
        Ok(file) => file,
        Err(refusal) => return notes.write_all(&Note::Refused(refusal).encode()?),
    };
    notes.write_all(&Note::Received.encode()?)?;
    let inspected = inspect(&file);
    notes.write_all(&inspected.encode()?)?;
    let Note::Facts(facts) = inspected else { return Ok(()) };
    if !facts.is_file() {
        return Ok(());
    }
    if let Err(note) = send(&file, facts.size, bytes) {
        notes.write_all(&note.encode()?)?;
        return bytes.shutdown(Shutdown::Write);
    }
    let mut request = [0];
    notes.set_read_timeout(None)?;
    if notes.read(&mut request)? == 1 {
        notes.write_all(&inspect(&file).encode()?)?;
    }
    Ok(())
}

fn inspect(file: &File) -> Note {
    FileFacts::of(file).map_or_else(|error| Note::Failed(errno(&error)), Note::Facts)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error())
}

/// The first frame must have exactly one descriptor attached.
fn receive(connection: &OwnedFd, notes: &UnixStream) -> Result<File, Refusal> {
    let (mut decoder, mut fds) = (FrameDecoder::new(), VecDeque::new());
    let started = Instant::now();
    let mut buffer = [0; 1024];
    let frame = loop {
        match receive_message(connection, &mut buffer, &mut fds, MAX_FDS_PER_MESSAGE) {
            Ok(0) => return Err(Refusal::Closed),
            Ok(received) => decoder.push(buffer.get(..received).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(notes, started)?,
            Err(_) => return Err(Refusal::Failed),
        }
        if let Some(frame) = decoder.next_frame().map_err(|_malformed| Refusal::Frame)? {
            break frame;
        }
    };
    if !matches!(frame, Frame::Fds { first: 0, count: 1 }) || decoder.is_inside_frame() {
        return Err(Refusal::Frame);
    }
    match (fds.pop_front(), fds.is_empty()) {
        (None, _) => Err(Refusal::NoFile),
        (Some(_), false) => Err(Refusal::Files),
        (Some(fd), true) => Ok(File::from(fd)),
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
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(())
        }
        _ => Err(Refusal::Closed),
    }
}

/// Sends `size` bytes from the start of the file. Uses its own offset, because the client's descriptor
/// shares the file's.
fn send(file: &File, size: u64, bytes: &UnixStream) -> Result<(), Note> {
    let mut offset = 0;
    while offset < size {
        let left = usize::try_from(size - offset).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        match sendfile(bytes, file, Some(&mut offset), left) {
            Ok(0) => return Err(Note::Short),
            Ok(_) | Err(Errno::INTR) => {}
            // Some file systems do not support it.
            Err(Errno::INVAL | Errno::NOSYS) => copy(file, &mut offset, left, bytes)?,
            Err(error) => return Err(Note::Failed(error.raw_os_error())),
        }
    }
    Ok(())
}

fn copy(file: &File, offset: &mut u64, length: usize, mut bytes: &UnixStream) -> Result<(), Note> {
    let mut buffer = vec![0; length];
    let copied = file.read_at(&mut buffer, *offset).and_then(|read| {
        bytes.write_all(buffer.get(..read).unwrap_or_default())?;
        Ok(read)
    });
    match copied {
        Ok(0) => Err(Note::Short),
        Ok(read) => {
            *offset += read as u64;
            Ok(())
        }
        Err(error) => Err(Note::Failed(errno(&error))),
    }
}
