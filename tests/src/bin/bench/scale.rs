//! Scale: the costs of starting, `ls`, `df` and `gc`, and the daemon's memory, as a store grows.
//!
//! The store is generated: tiny blobs with the right digests, and a recipe and a manifest per model. Every
//! model shares blobs with its neighbours. The measurements use the real daemon and the real commands, from
//! start to exit.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorCode;
use blobd_store_format::reference::Reference;
use rustix::process::{Pid, Signal, kill_process};

use crate::Setup;
use crate::generated::Generated;
use crate::measure::{Outcome, Series, run as run_command, timed};

/// The default sizes of stores, as blobs and models.
const SIZES: [(u32, u32); 3] = [(10_000, 100), (100_000, 1_000), (1_000_000, 10_000)];
/// How often a command is timed.
const ROUNDS: usize = 5;

/// Measures each size.
pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let sizes = match (setup.blobs, setup.models) {
        (Some(blobs), Some(models)) => vec![(blobs, models)],
        _ => SIZES.to_vec(),
    };
    for (blobs, models) in sizes {
        let directory = tempfile::tempdir_in(&setup.disk)?;
        let (time, generated) = timed(|| Generated::write(&directory.path().join("store"), blobs, models))?;
        println!("\n{blobs} blobs, {models} models of {} blobs each", generated.blobs_per_model);
        println!("  (generated in {:.0} s)", time.as_secs_f64());
        measure(setup, directory.path(), &generated.some_model)?;
    }
    Ok(())
}

fn measure(setup: &Setup, directory: &Path, model: &Reference) -> Outcome<()> {
    run_command(&mut Command::new("sync"))?;
    let is_cold = std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok();
    let what = if is_cold { "start with cold caches" } else { "start (caches not dropped: not root)" };
    let daemon = start(setup, directory, model, what)?;
    for command in ["ls", "df"] {
        let seconds = command_seconds(setup, &daemon, &[command, "--json"], ROUNDS)?;
        report(&format!("blobd {command} --json"), seconds * 1e3, "ms", "200");
    }
    let busy = daemon.processor_seconds()?;
    report("blobd gc --dry-run", command_seconds(setup, &daemon, &["gc", "--dry-run"], 1)?, "s", "10");
    report("blobd gc --dry-run: processor time", daemon.processor_seconds()? - busy, "s", "-");
    daemon.report_memory()?;
    let (time, ()) = timed(|| daemon.end(Signal::TERM))?;
    report("clean stop", time.as_secs_f64(), "s", "-");
    let daemon = start(setup, directory, model, "start after a clean stop")?;
    daemon.report_memory()?;
    daemon.end(Signal::KILL)?;
    let daemon = start(setup, directory, model, "start after kill -9")?;
    let (time, done) = timed(|| Ok(daemon.client()?.reindex()?))?;
    report("reindex", time.as_secs_f64(), "s", "-");
    daemon.report_memory()?;
    if done.differences != 0 {
        return Err(format!("the index was wrong: {done:?}").into());
    }
    daemon.end(Signal::KILL)
}

/// Starts the daemon, opens a model as soon as that is possible, and waits for the index.
fn start(setup: &Setup, directory: &Path, model: &Reference, what: &str) -> Outcome<Daemon> {
    let begin = Instant::now();
    let daemon = Daemon::spawn(&setup.blobd, directory)?;
    let opened = daemon.client()?.open(model)?;
    report(&format!("{what}: first open"), begin.elapsed().as_secs_f64(), "s", "1");
    drop(opened);
    daemon.wait_for_index()?;
    report(&format!("{what}: index complete"), begin.elapsed().as_secs_f64(), "s", "-");
    Ok(daemon)
}

fn command_seconds(setup: &Setup, daemon: &Daemon, arguments: &[&str], rounds: usize) -> Outcome<f64> {
    let mut series = Series::default();
    for _ in 0..rounds {
        let mut command = Command::new(&setup.blobd);
        command.args(arguments).arg("--socket").arg(&daemon.socket);
        series.push(timed(|| run_command(&mut command))?.0);
    }
    Ok(series.seconds())
}

fn report(what: &str, value: f64, unit: &str, limit: &str) {
    println!("  {what:44} {value:8.2} {unit:3} (limit {limit})");
}

struct Daemon {
    child: Child,
    socket: PathBuf,
}

impl Daemon {
    fn spawn(blobd: &Path, directory: &Path) -> Outcome<Self> {
        let socket = directory.join("sock");
        let log = std::fs::File::create(directory.join("log"))?;
        let mut command = Command::new(blobd);
        command.args(["serve", "--root"]).arg(directory.join("store")).arg("--socket").arg(&socket);
        let child = command.stderr(log).stdout(Stdio::null()).spawn()?;
        let daemon = Self { child, socket };
        let deadline = Instant::now() + Duration::from_secs(60);
        while daemon.client().is_err() {
            if Instant::now() > deadline {
                return Err("the daemon does not respond".into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(daemon)
    }

    fn client(&self) -> Outcome<Client> {
        Ok(Client::connect(&self.socket)?)
    }

    /// `df` waits for the index, with a time limit.
    fn wait_for_index(&self) -> Outcome<()> {
        loop {
            match self.client()?.disk_usage() {
                Err(error) if error.code() == ErrorCode::Busy => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// The daemon's processor time so far, in user code and in the kernel.
    fn processor_seconds(&self) -> Outcome<f64> {
        const TICKS_PER_SECOND: f64 = 100.0;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The second field, the program's name, is in parentheses and may have spaces.
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
        let ticks = fields.map(str::parse::<u32>).sum::<Result<u32, _>>()?;
        Ok(f64::from(ticks) / TICKS_PER_SECOND)
    }

    fn report_memory(&self) -> Outcome<()> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        for (field, what) in [("VmRSS:", "memory of the daemon"), ("VmHWM:", "memory of the daemon, peak")] {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).ok_or("no such field")?;
            let kib: u32 = line.trim().trim_end_matches(" kB").parse()?;
            report(what, f64::from(kib) / 1024.0, "MiB", "250");
        }
        Ok(())
    }

    fn end(mut self, signal: Signal) -> Outcome<()> {
        kill_process(Pid::from_child(&self.child), signal)?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended already unless a measurement failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
