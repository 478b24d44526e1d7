//! Samples the resources that the daemon's process and its children use, several times a second.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::timings::float;

/// The time between two samples. Peaks of memory in between are not missed: the kernel records them.
const PERIOD: Duration = Duration::from_millis(50);

/// A daemon that uses more memory is killed, to protect the machine.
const CEILING_BYTES: u64 = 1 << 30;

/// The resources that a process and its children use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Resident memory, including the binary's pages. Of children, which share these pages, only anonymous
    /// memory counts.
    pub(crate) resident_bytes: u64,
    /// The peak of `resident_bytes` since the last reset; for children the current value.
    pub(crate) peak_resident_bytes: u64,
    pub(crate) threads: u64,
    /// Open file descriptors.
    pub(crate) descriptors: u64,
}

impl Usage {
    /// The current usage of a process and its children; `None` if it has ended.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Self::of_tree(pid, "VmRSS", "VmHWM")
    }

    /// Reads current and peak memory from these fields of `/proc/PID/status`.
    fn of_tree(pid: u32, current: &str, peak: &str) -> Option<Self> {
        let usage = Self::of_one(pid, current, peak).filter(|usage| usage.resident_bytes > 0)?;
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok();
        // Until a child has called exec, it shares all memory with its parent.
        let is_started = |child: &u32| fs::read(format!("/proc/{child}/cmdline")).ok() != command;
        let children = children_of(pid).into_iter().filter(is_started);
        let children = children.filter_map(|child| Self::of_tree(child, "RssAnon", "RssAnon"));
        Some(children.fold(usage, Self::plus))
    }

    fn of_one(pid: u32, current: &str, peak: &str) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            resident_bytes: field(current)? << 10,
            peak_resident_bytes: field(peak)? << 10,
            threads: field("Threads")?,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64,
        })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            resident_bytes: self.resident_bytes + other.resident_bytes,
            peak_resident_bytes: self.peak_resident_bytes + other.peak_resident_bytes,
            threads: self.threads + other.threads,
            descriptors: self.descriptors + other.descriptors,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            resident_bytes: self.resident_bytes.max(other.resident_bytes),
            peak_resident_bytes: self.peak_resident_bytes.max(other.peak_resident_bytes),
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

/// The child processes of all threads of a process.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    children.flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>()).collect()
}

/// Samples one process and its children until it is dropped.
#[derive(Debug)]
pub(crate) struct UsageMonitor {
    pid: u32,
    peak: Arc<Mutex<Usage>>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl UsageMonitor {
    pub(crate) fn start(pid: u32) -> Self {
        let (peak, stopping) = (Arc::<Mutex<Usage>>::default(), Arc::<AtomicBool>::default());
        let (shared, ended) = (Arc::clone(&peak), Arc::clone(&stopping));
        let sample = move || {
            while !ended.load(Ordering::Relaxed) {
                let usage = Usage::of(pid).unwrap_or_default();
                let mut peak = lock(&shared);
                *peak = peak.max(usage);
                drop(peak);
                if usage.resident_bytes > CEILING_BYTES {
                    let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::KILL));
                    return;
                }
                thread::sleep(PERIOD);
            }
        };
        Self { pid, peak, stopping, thread: Some(thread::spawn(sample)) }
    }

    /// Whether the process is running; a zombie is not.
    pub(crate) fn is_running(&self) -> bool {
        self.now().resident_bytes > 0
    }

    /// Resets the peaks.
    pub(crate) fn reset(&self) {
        // Resets the kernel's peak, too. If that fails, peaks between two samples are missed.
        let _ = fs::write(format!("/proc/{}/clear_refs", self.pid), "5");
        *lock(&self.peak) = Usage::of(self.pid).unwrap_or_default();
    }

    /// The peak of each resource since the last reset.
    pub(crate) fn peak(&self) -> Usage {
        *lock(&self.peak)
    }

    /// The current usage.
    pub(crate) fn now(&self) -> Usage {
        Usage::of(self.pid).unwrap_or_default()
    }
}

impl Drop for UsageMonitor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(usage: &Mutex<Usage>) -> MutexGuard<'_, Usage> {
    // Every change is complete before anything could panic.
    usage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Processor time of the machine and of some processes so far, in ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessorTime {
    available: u64,
    idle: u64,
    own: u64,
}

impl ProcessorTime {
    /// The processor time so far.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read.
    pub(crate) fn now(processes: &[u32]) -> std::io::Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().unwrap_or_default();
        // user nice system idle iowait irq softirq steal; guest time is included in user.
        let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).flat_map(str::parse).collect();
        let idle = ticks.iter().skip(3).take(2).sum();
        let own = processes.iter().filter_map(|pid| ticks_of(*pid)).sum();
        Ok(Self { available: ticks.iter().sum(), idle, own })
    }

    /// The share of processor time that other processes have used since then.
    ///
    /// # Errors
    /// As for [`Self::now`].
    pub(crate) fn others_share(&self, processes: &[u32]) -> std::io::Result<f64> {
        let now = Self::now(processes)?;
        let available = now.available.saturating_sub(self.available).max(1);
        let used = now.idle.saturating_sub(self.idle) + now.own.saturating_sub(self.own);
        Ok(float(available.saturating_sub(used)) / float(available))
    }
}

/// Processor time of a process and of the children that it has waited for, in user code and in the kernel.
fn ticks_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any character; 11 fields stand between it and the times.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').skip(11).take(4).map(|ticks| ticks.parse::<u64>().ok()).sum()
}
