//! What an attack has at hand: the daemon's socket, a folder, files that hang, and counters.

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
use crate::arena::client;

/// How long preparations may take: imports of large headers by a daemon without optimisation.
pub(crate) const PREPARING: Duration = Duration::from_secs(300);
/// How long an attacker waits for the daemon, unless it means to wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// What an attack has counted, by name.
pub(crate) type Tally = BTreeMap<String, u64>;

/// What an attack works with.
#[derive(Clone, Debug)]
pub(crate) struct Ground {
    /// Where the daemon listens.
    pub(crate) socket: PathBuf,
    /// For the attack's files.
    pub(crate) folder: PathBuf,
    /// Files that hang.
    pub(crate) hanging_files: Vec<PathBuf>,
    tally: Arc<Mutex<Tally>>,
}

impl Ground {
    /// Nothing is counted yet.
    pub(crate) fn new(socket: PathBuf, folder: PathBuf, hanging_files: Vec<PathBuf>) -> Self {
        Self { socket, folder, hanging_files, tally: Arc::default() }
    }

    /// What was counted.
    pub(crate) fn tally(&self) -> Tally {
        self.lock().clone()
    }

    /// A client of the attacker, which does not wait for ever.
    pub(crate) fn client(&self) -> Client {
        client(&self.socket, PATIENCE)
    }

    /// Counts one more of something.
    pub(crate) fn count(&self, what: &str) {
        *self.lock().entry(what.to_owned()).or_default() += 1;
    }

    /// Notes a number.
    pub(crate) fn note(&self, what: &str, number: u64) {
        self.lock().insert(what.to_owned(), number);
    }

    /// Does something over and over on a thread, once in `period` at most, until the process ends.
    pub(crate) fn repeat(
        &self,
        period: Duration,
        mut work: impl FnMut(&Self) -> Outcome<()> + Send + 'static,
    ) {
        let ground = self.clone();
        thread::spawn(move || {
            loop {
                let start = Instant::now();
                if work(&ground).is_err() {
                    ground.count("errors");
                }
                thread::sleep(period.saturating_sub(start.elapsed()));
            }
        });
    }

    /// Imports bytes as a model.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub(crate) fn import(&self, name: &str, bytes: &[u8]) -> Outcome<()> {
        let path = self.folder.join("model.gguf");
        std::fs::write(&path, bytes)?;
        let params = ImportParams { file_name: "model.gguf".to_owned(), name: Some(name.parse()?) };
        let client = self.client().with_timeout(PREPARING);
        client.import(&params, std::fs::File::open(&path)?, |_completed, _total| ())?;
        Ok(())
    }

    /// Connects and sends a request; the answer is left unread.
    ///
    /// # Errors
    /// When the daemon does not take it.
    pub(crate) fn send(&self, head: &str, body: &str) -> io::Result<UnixStream> {
        let mut stream = self.connect()?;
        stream.write_all(request(head, body).as_bytes())?;
        Ok(stream)
    }

    /// The same for an upgrade, whose head is read and nothing else.
    ///
    /// # Errors
    /// As for [`Self::send`], or when the daemon refuses.
    pub(crate) fn upgrade(&self, path: &str, body: &str) -> io::Result<UnixStream> {
        let head = format!("POST {path} HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1");
        let mut stream = self.send(&head, body)?;
        let (mut answer, mut byte) = (Vec::new(), [0]);
        while !answer.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        let accepted = answer.starts_with(b"HTTP/1.1 101 ");
        if accepted { Ok(stream) } else { Err(io::Error::other("the upgrade was refused")) }
    }

    /// Connects.
    ///
    /// # Errors
    /// Those of `connect`.
    pub(crate) fn connect(&self) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Tally> {
        // Every change is complete before anything could panic.
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request as bytes; its head is given without the fields that every request has.
pub(crate) fn request(head: &str, body: &str) -> String {
    format!("{head}\r\nHost: blobd\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Passes one open file as an import does.
///
/// # Errors
/// When the daemon does not take it.
pub(crate) fn pass_file(stream: &UnixStream, file: BorrowedFd<'_>) -> Outcome<()> {
    use blobd_client::protocol::frame::Frame;
    Ok(send_all(stream, &Frame::Fds { first: 0, count: 1 }.encode()?, &[file])?)
}
