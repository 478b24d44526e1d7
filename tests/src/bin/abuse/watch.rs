//! What the daemon's process and its children use, looked at several times a second.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::timings::float;

/// How often the process is looked at. Peaks of memory in between are seen all the same: the kernel
/// keeps them.
const EVERY: Duration = Duration::from_millis(50);

/// A daemon that takes more is killed, before the machine suffers.
const CEILING_BYTES: u64 = 1 << 30;

/// What a process and its children use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Resident memory, with the binary's pages. Children run the same binary, whose pages are in memory
    /// once: of them only what is their own counts.
    pub(crate) resident_bytes: u64,
    /// The most of it since the last reset; of a child what it has now.
    pub(crate) peak_resident_bytes: u64,
    pub(crate) threads: u64,
    /// Open file descriptors.
    pub(crate) descriptors: u64,
}

impl Usage {
    /// What a process and its children use now; none if it has ended.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Self::of_tree(pid, "VmRSS", "VmHWM")
    }

    /// The same by the fields of the kernel that say how much memory the process has, and had at most.
    fn of_tree(pid: u32, now: &str, most: &str) -> Option<Self> {
        let usage = Self::of_one(pid, now, most).filter(|usage| usage.resident_bytes > 0)?;
        let command = fs::read(format!("/proc/{pid}/cmdline")).ok();
        // Until it runs its own program, a child shares all memory with its parent.
        let is_started = |child: &u32| fs::read(format!("/proc/{child}/cmdline")).ok() != command;
        let children = children_of(pid).into_iter().filter(is_started);
        let children = children.filter_map(|child| Self::of_tree(child, "RssAnon", "RssAnon"));
        Some(children.fold(usage, Self::plus))
    }

    fn of_one(pid: u32, now: &str, most: &str) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            resident_bytes: field(now)? << 10,
            peak_resident_bytes: field(most)? << 10,
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

/// The processes that the threads of a process have started.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    children.flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>()).collect()
}

/// Looks at one process and its children until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    pid: u32,
    peak: Arc<Mutex<Usage>>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(pid: u32) -> Self {
        let (peak, stopping) = (Arc::<Mutex<Usage>>::default(), Arc::<AtomicBool>::default());
        let (shared, ended) = (Arc::clone(&peak), Arc::clone(&stopping));
        let look = move || {
            while !ended.load(Ordering::Relaxed) {
                let usage = Usage::of(pid).unwrap_or_default();
                let mut peak = lock(&shared);
                *peak = peak.max(usage);
                drop(peak);
                if usage.resident_bytes > CEILING_BYTES {
                    let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::KILL));
                    return;
                }
                thread::sleep(EVERY);
            }
        };
        Self { pid, peak, stopping, thread: Some(thread::spawn(look)) }
    }

    /// Whether the process is still there, and not a zombie.
    pub(crate) fn is_running(&self) -> bool {
        self.now().resident_bytes > 0
    }

    /// Begins anew.
    pub(crate) fn reset(&self) {
        // The kernel's own peak; without it, what was seen in between is missed.
        let _ = fs::write(format!("/proc/{}/clear_refs", self.pid), "5");
        *lock(&self.peak) = Usage::of(self.pid).unwrap_or_default();
    }

    /// The most of each since the last reset.
    pub(crate) fn peak(&self) -> Usage {
        *lock(&self.peak)
    }

    /// What the process uses now.
    pub(crate) fn now(&self) -> Usage {
        Usage::of(self.pid).unwrap_or_default()
    }
}

impl Drop for Watch {
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

/// Processor time so far, of the machine and of some processes, in ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessorTime {
    available: u64,
    idle: u64,
    own: u64,
}

impl ProcessorTime {
    /// What was used so far.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub(crate) fn now(processes: &[u32]) -> std::io::Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().unwrap_or_default();
        // user nice system idle iowait irq softirq steal; what guests take is a part of user.
        let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).flat_map(str::parse).collect();
        let idle = ticks.iter().skip(3).take(2).sum();
        let own = processes.iter().filter_map(|pid| ticks_of(*pid)).sum();
        Ok(Self { available: ticks.iter().sum(), idle, own })
    }

    /// The part of the processors that other processes have taken since then.
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
    // The name is in parentheses and may hold anything; 11 fields come between it and the times.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').skip(11).take(4).map(|ticks| ticks.parse::<u64>().ok()).sum()
}
