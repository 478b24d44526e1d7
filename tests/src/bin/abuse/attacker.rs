//! The process of an attack: it prepares itself, waits until it is told to begin, counts what it does, and
//! ends when it is told to.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::request::ImportParams;
use blobd_tests::hanging::{Hang, HangingFiles};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, nice, set_parent_process_death_signal, setrlimit,
};

use crate::actor::Actor;
use crate::arena::{Arena, client};
use crate::attacks::{self, Attack};
use crate::{ATTACKER_UID, Outcome};

/// How long preparations may take: imports of large headers by a daemon without optimisation.
const PREPARING: Duration = Duration::from_secs(300);
/// How long an attacker may take to end.
const ENDING: Duration = Duration::from_secs(2);
/// How long an attacker waits for the daemon, unless it means to wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Two files for each way to hang.
const HANGS: [Hang; 8] = [
    Hang::Read,
    Hang::DirectRead,
    Hang::Inspect,
    Hang::Close,
    Hang::Read,
    Hang::DirectRead,
    Hang::Inspect,
    Hang::Close,
];

/// What an attack has counted, by name.
pub(crate) type Tally = BTreeMap<String, u64>;

/// A handle on an attacker's process.
pub(crate) struct Attacker {
    actor: Actor,
    /// What it has the daemon read.
    hanging: Option<HangingFiles>,
}

impl Attacker {
    /// Starts the process, which prepares itself.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(attack: &Attack, arena: &Arena, may_mount: bool) -> Outcome<Self> {
        let is_wanted = may_mount && attack.takes_hanging_files;
        let hanging = is_wanted.then(|| arena.mount_hanging_files()).flatten();
        let paths: Vec<_> = hanging.iter().flat_map(|files| HANGS.map(|hang| files.path(hang))).collect();
        let (socket, folder) = (arena.socket(), arena.folder("attacker"));
        let mut words =
            vec![OsStr::new("attacker"), OsStr::new(attack.name), socket.as_os_str(), folder.as_os_str()];
        words.extend(paths.iter().map(|path| path.as_os_str()));
        Ok(Self { actor: Actor::start(ATTACKER_UID, &words)?, hanging })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.actor.pid()
    }

    /// Waits until it is prepared.
    ///
    /// # Errors
    /// When it cannot prepare itself.
    pub(crate) fn wait_until_ready(&self) -> Outcome<()> {
        let line = self.actor.line(PREPARING)?;
        if line == READY { Ok(()) } else { Err(line.into()) }
    }

    /// Has it begin.
    ///
    /// # Errors
    /// When it is gone.
    pub(crate) fn begin(&mut self) -> Outcome<()> {
        self.actor.tell("begin")
    }

    /// Ends it, by force if it does not end by itself; what it has counted, if it tells.
    pub(crate) fn end(mut self) -> Tally {
        let told = self.actor.tell("end").and_then(|()| self.actor.line(ENDING));
        told.ok().and_then(|line| serde_json::from_str(&line).ok()).unwrap_or_default()
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // It cannot end before what it has opened is let go.
        self.actor.kill();
        self.hanging.iter().for_each(HangingFiles::let_go);
    }
}

const READY: &str = "ready";

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

/// The role.
///
/// # Errors
/// When the attack cannot be prepared, or the process that started this one is gone.
pub(crate) fn play(name: &str, socket: PathBuf, folder: &Path, hanging_files: Vec<PathBuf>) -> Outcome<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The attacks are to exhaust other resources than the processor.
    nice(10)?;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder)?;
    let ground = Ground { socket, folder, hanging_files, tally: Arc::default() };
    let attack = attacks::find(name).ok_or_else(|| format!("{name}: no such attack"))?;
    let mut lines = io::stdin().lock().lines();
    let begin = match (attack.prepare)(&ground) {
        Ok(begin) => begin,
        Err(error) => {
            println!("{name}: cannot be prepared: {error}");
            return Err(error);
        }
    };
    println!("{READY}");
    lines.next().ok_or("nobody says when to begin")??;
    begin()?;
    lines.next();
    println!("{}", serde_json::to_string(&*ground.lock())?);
    Ok(())
}

impl Ground {
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
