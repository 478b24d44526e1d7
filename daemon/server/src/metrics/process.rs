//! This process as the kernel sees it.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use super::events::as_float;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    pub(super) resident_bytes: u64,
    pub(super) virtual_bytes: u64,
    pub(super) open_files: u64,
    pub(super) max_files: u64,
    /// Since 1970.
    pub(super) start_seconds: f64,
}

impl Process {
    /// `None` without `/proc`.
    pub(super) fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        let boot = boot_seconds(&fs::read_to_string("/proc/stat").ok()?)?;
        let ticks = as_float(clock_ticks_per_second().max(1));
        let Fields { cpu_ticks, start_ticks, virtual_bytes, resident_pages } = Fields::parse(&stat)?;
        Some(Self {
            cpu_seconds: as_float(cpu_ticks) / ticks,
            resident_bytes: resident_pages.saturating_mul(page_size() as u64),
            virtual_bytes,
            // One of them is that of the directory itself.
            open_files: (fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1),
            max_files: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
            start_seconds: as_float(boot) + as_float(start_ticks) / ticks,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    cpu_ticks: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Fields {
    /// Parses `/proc/self/stat`, see proc_pid_stat(5). The second field is the name in parentheses, which may contain
    /// spaces.
    fn parse(stat: &str) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The third field of the file is the first one here.
        let number = |field: usize| fields.get(field.checked_sub(3)?)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: number(14)?.saturating_add(number(15)?),
            start_ticks: number(22)?,
            virtual_bytes: number(23)?,
            resident_pages: number(24)?,
        })
    }
}

/// When the machine was started.
fn boot_seconds(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn fields_are_counted_after_a_name_with_spaces_and_parentheses() {
        let stat =
            "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 0 0 20 0 5 0 4242 1000000 300 18446744073709551615";
        let fields = Fields::parse(stat).unwrap();
        let expected =
            Fields { cpu_ticks: 120, start_ticks: 4242, virtual_bytes: 1_000_000, resident_pages: 300 };
        assert_eq!(fields, expected);
        assert_eq!(Fields::parse("7 (a) S 1 2"), None);
    }

    #[test]
    fn this_process_runs_has_memory_and_has_started_before_now() {
        let process = Process::read().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(process.start_seconds <= now + 1.0 && process.start_seconds > now - 1e6, "{process:?}");
        assert!(process.resident_bytes > 1 << 20 && process.virtual_bytes > process.resident_bytes);
        assert!(process.open_files >= 3 && process.max_files >= process.open_files, "{process:?}");
    }
}
