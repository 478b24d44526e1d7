//! Occupies free memory, so that benchmarks do not measure the hypervisor.
//!
//! A virtual machine with free-page reporting returns free memory to the hypervisor. The first access to such
//! a page later costs ten times as much as the copy to be measured. So most of the free memory is occupied
//! first, and the kernel recycles page cache instead, as on a machine that has been up for a while.

use std::path::Path;

use crate::measure::Outcome;

/// Memory that is occupied until it is dropped.
pub(crate) struct Balloon(Vec<u8>);

impl Balloon {
    /// The memory that stays free: several times as much as one round of a measurement writes.
    const SPARED_BYTES: u64 = 5 << 30;

    /// Occupies memory on machines that report free pages, and none on others.
    pub(crate) fn inflate() -> Outcome<Self> {
        const REPORTING: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
        if !Path::new(REPORTING).exists() {
            return Ok(Self(Vec::new()));
        }
        let bytes = available_bytes()?.saturating_sub(Self::SPARED_BYTES);
        println!(
            "  (free pages are reported to the hypervisor here: {} GiB are occupied meanwhile)",
            bytes >> 30
        );
        Ok(Self(std::hint::black_box(vec![1; usize::try_from(bytes)?])))
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        std::hint::black_box(&mut self.0);
    }
}

fn available_bytes() -> Outcome<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line =
        meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).ok_or("no MemAvailable")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}
