//! The process of an attack: it prepares itself, waits until it is told to begin, counts what it does, and
//! ends when it is told to.

use std::ffi::OsStr;
use std::io::{self, BufRead as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_tests::hanging::{Hang, HangingFiles};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, nice, set_parent_process_death_signal, setrlimit,
};

use crate::actor::Actor;
use crate::arena::Arena;
use crate::attacks::{self, Attack};
use crate::ground::{Ground, PREPARING, Tally};
use crate::{ATTACKER_UID, Outcome};

/// How long an attacker may take to end.
const ENDING: Duration = Duration::from_secs(2);

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
    let ground = Ground::new(socket, folder, hanging_files);
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
    println!("{}", serde_json::to_string(&ground.tally())?);
    Ok(())
}
