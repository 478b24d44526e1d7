//! The processes of an attack: each prepares, waits for the command to begin, counts its actions, and ends on
//! command.

use std::ffi::OsStr;
use std::io::{self, BufRead as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_tests::hanging::{Hang, HangingFiles};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, nice, set_parent_process_death_signal, setrlimit,
};

use crate::Outcome;
use crate::attacks::{self, Attack};
use crate::context::{AttackContext, Counts, PREPARATION_TIMEOUT};
use crate::environment::Environment;
use crate::role_process::RoleProcess;

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

/// A handle on the processes of an attack, one for each user.
pub(crate) struct Attacker {
    processes: Vec<RoleProcess>,
    /// The files that it makes the daemon read.
    hanging: Option<HangingFiles>,
}

impl Attacker {
    /// Starts the processes, which prepare the attack one after the other.
    ///
    /// # Errors
    /// When one cannot be started, or cannot prepare the attack.
    pub(crate) fn start(attack: &Attack, environment: &Environment, may_mount: bool) -> Outcome<Self> {
        let is_wanted = may_mount && attack.takes_hanging_files;
        let hanging = is_wanted.then(|| environment.mount_hanging_files()).flatten();
        let paths: Vec<_> = hanging.iter().flat_map(|files| HANGS.map(|hang| files.path(hang))).collect();
        let mut attacker = Self { processes: Vec::new(), hanging };
        for uid in attack.users {
            let (socket, folder) = (environment.socket(), environment.folder_of(*uid));
            let mut role =
                vec![OsStr::new("attacker"), OsStr::new(attack.name), socket.as_os_str(), folder.as_os_str()];
            role.extend(paths.iter().map(|path| path.as_os_str()));
            let process = RoleProcess::start(*uid, &role)?;
            let line = process.read_line(PREPARATION_TIMEOUT)?;
            if line != READY {
                return Err(line.into());
            }
            attacker.processes.push(process);
        }
        Ok(attacker)
    }

    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> {
        self.processes.iter().map(RoleProcess::pid)
    }

    /// Starts the attack.
    ///
    /// # Errors
    /// When a process has ended.
    pub(crate) fn begin(&mut self) -> Outcome<()> {
        self.processes.iter_mut().try_for_each(|process| process.send_line("begin"))
    }

    /// Ends the processes, by force if necessary. Returns the sums of their counts, which are empty if none reports them.
    pub(crate) fn end(mut self) -> Counts {
        let mut sums = Counts::new();
        for process in &mut self.processes {
            let reported = process.send_line("end").and_then(|()| process.read_line(END_TIMEOUT));
            let counts: Option<Counts> = reported.ok().and_then(|line| serde_json::from_str(&line).ok());
            for (what, number) in counts.into_iter().flatten() {
                *sums.entry(what).or_default() += number;
            }
        }
        sums
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // The processes cannot end while the files that they have open hang.
        self.processes.iter_mut().for_each(RoleProcess::kill);
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
