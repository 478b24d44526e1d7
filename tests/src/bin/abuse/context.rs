//! The context of an attack: the daemon's socket, a directory, files that hang, and counters.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::request::ImportParams;

use crate::Outcome;
use crate::environment::client;

/// How long preparations may take: a daemon built without optimisation imports large headers.
pub(crate) const PREPARATION_TIMEOUT: Duration = Duration::from_secs(300);
/// The time limit of an attacker's requests, except those that are meant to hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Counters of an attack, by name.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Everything that an attack uses.
#[derive(Clone, Debug)]
pub(crate) struct AttackContext {
    /// The path of the daemon's socket.
    pub(crate) socket: PathBuf,
    /// For the attack's files.
    pub(crate) folder: PathBuf,
    /// Files that hang.
    pub(crate) hanging_files: Vec<PathBuf>,
    counts: Arc<Mutex<Counts>>,
}

impl AttackContext {
    /// All counters are zero.
    pub(crate) fn new(socket: PathBuf, folder: PathBuf, hanging_files: Vec<PathBuf>) -> Self {
        Self { socket, folder, hanging_files, counts: Arc::default() }
    }

    /// The counters so far.
    pub(crate) fn counts(&self) -> Counts {
        self.lock().clone()
    }

    /// A client of the daemon with a time limit.
    pub(crate) fn client(&self) -> Client {
        client(&self.socket, TIMEOUT)
    }

    /// Increments a counter.
    pub(crate) fn count(&self, what: &str) {
        *self.lock().entry(what.to_owned()).or_default() += 1;
    }

    /// Sets a counter.
    pub(crate) fn set(&self, what: &str, number: u64) {
        self.lock().insert(what.to_owned(), number);
    }

    /// Repeats `work` on a thread, at most once per `period`, until the process ends.
    pub(crate) fn repeat(
        &self,
        period: Duration,
        mut work: impl FnMut(&Self) -> Outcome<()> + Send + 'static,
    ) {
        let context = self.clone();
        thread::spawn(move || {
            loop {
                let start = Instant::now();
                if work(&context).is_err() {
                    context.count("errors");
                }
                thread::sleep(period.saturating_sub(start.elapsed()));
            }
        });
    }

    /// Imports bytes as a model.
    ///
    /// # Errors
    /// When the daemon refuses it.
    pub(crate) fn import(&self, name: &str, bytes: &[u8]) -> Outcome<()> {
        let path = self.folder.join("model.gguf");
        std::fs::write(&path, bytes)?;
        let params = ImportParams { name: Some(name.parse()?), ..ImportParams::new("model.gguf") };
        let client = self.client().with_timeout(PREPARATION_TIMEOUT);
        client.import(&params, std::fs::File::open(&path)?, |_completed, _total| ())?;
        Ok(())
    }

    /// Connects and sends a request, and reads nothing of the response.
    ///
    /// # Errors
    /// When connecting or sending fails.
    pub(crate) fn send(&self, head: &str, body: &str) -> io::Result<UnixStream> {
        let mut stream = self.connect()?;
        stream.write_all(request(head, body).as_bytes())?;
        Ok(stream)
    }

    /// Requests an upgrade, and reads only the head of the response.
    ///
    /// # Errors
    /// As for [`Self::send`], or when the daemon refuses.
    pub(crate) fn upgrade(&self, path: &str, body: &str) -> io::Result<UnixStream> {
        let head = format!("POST {path} HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1");
        let mut stream = self.send(&head, body)?;
        let (mut response, mut byte) = (Vec::new(), [0]);
        while !response.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte)?;
            response.extend(byte);
        }
        let accepted = response.starts_with(b"HTTP/1.1 101 ");
        if accepted { Ok(stream) } else { Err(io::Error::other("the upgrade was refused")) }
    }

    /// # Errors
    /// Those of `connect`.
    pub(crate) fn connect(&self) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(stream)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        // Every change is complete before anything could panic.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A whole request; `head` is given without the fields that every request has.
pub(crate) fn request(head: &str, body: &str) -> String {
    format!("{head}\r\nHost: blobd\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Passes one open file as an import does.
///
/// # Errors
/// When sending fails.
pub(crate) fn pass_file(stream: &UnixStream, file: BorrowedFd<'_>) -> Outcome<()> {
    use blobd_client::protocol::frame::Frame;
    Ok(send_all(stream, &Frame::Fds { first: 0, count: 1 }.encode()?, &[file])?)
}
