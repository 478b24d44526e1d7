//! The process of an attack: it prepares, waits for the command to begin, counts its actions, and ends on
//! command.

use std::ffi::OsStr;
use std::io::{self, BufRead as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_tests::hanging::{Hang, HangingFiles};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, nice, set_parent_process_death_signal, setrlimit,
};

use crate::attacks::{self, Attack};
use crate::context::{AttackContext, Counts, PREPARATION_TIMEOUT};
use crate::environment::Environment;
use crate::role_process::RoleProcess;
use crate::{ATTACKER_UID, Outcome};

/// How long an attacker may take to report its counts.
const END_TIMEOUT: Duration = Duration::from_secs(2);

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
    process: RoleProcess,
    /// The files that it makes the daemon read.
    hanging: Option<HangingFiles>,
}

impl Attacker {
    /// Starts the process, which begins to prepare the attack.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(attack: &Attack, environment: &Environment, may_mount: bool) -> Outcome<Self> {
        let is_wanted = may_mount && attack.takes_hanging_files;
        let hanging = is_wanted.then(|| environment.mount_hanging_files()).flatten();
        let paths: Vec<_> = hanging.iter().flat_map(|files| HANGS.map(|hang| files.path(hang))).collect();
        let (socket, folder) = (environment.socket(), environment.folder("attacker"));
        let mut role =
            vec![OsStr::new("attacker"), OsStr::new(attack.name), socket.as_os_str(), folder.as_os_str()];
        role.extend(paths.iter().map(|path| path.as_os_str()));
        Ok(Self { process: RoleProcess::start(ATTACKER_UID, &role)?, hanging })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until the attack is prepared.
    ///
    /// # Errors
    /// When it cannot be prepared.
    pub(crate) fn wait_until_ready(&self) -> Outcome<()> {
        let line = self.process.read_line(PREPARATION_TIMEOUT)?;
        if line == READY { Ok(()) } else { Err(line.into()) }
    }

    /// Starts the attack.
    ///
    /// # Errors
    /// When the process has ended.
    pub(crate) fn begin(&mut self) -> Outcome<()> {
        self.process.send_line("begin")
    }

    /// Ends the process, by force if necessary. Returns its counts, which are empty if it does not report
    /// them.
    pub(crate) fn end(mut self) -> Counts {
        let reported = self.process.send_line("end").and_then(|()| self.process.read_line(END_TIMEOUT));
        reported.ok().and_then(|line| serde_json::from_str(&line).ok()).unwrap_or_default()
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // The process cannot end while the files that it has open hang.
        self.process.kill();
        self.hanging.iter().for_each(HangingFiles::unblock);
    }
}

const READY: &str = "ready";

/// Runs an attack in this process.
///
/// # Errors
/// When the attack cannot be prepared, or the parent process has ended.
pub(crate) fn run(name: &str, socket: PathBuf, folder: &Path, hanging_files: Vec<PathBuf>) -> Outcome<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The attacks exhaust other resources than the processor.
    nice(10)?;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder)?;
    let context = AttackContext::new(socket, folder, hanging_files);
    let attack = attacks::find(name).ok_or_else(|| format!("{name}: no such attack"))?;
    let mut lines = io::stdin().lock().lines();
    let begin = match (attack.prepare)(&context) {
        Ok(begin) => begin,
        Err(error) => {
            println!("{name}: cannot be prepared: {error}");
            return Err(error);
        }
    };
    println!("{READY}");
    lines.next().ok_or("standard input ended before the command to begin")??;
    begin()?;
    lines.next();
    println!("{}", serde_json::to_string(&context.counts())?);
    Ok(())
}
