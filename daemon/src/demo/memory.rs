//! How much memory a process uses, and how much of it is mapped weights.
//!
//! Resident memory (RSS) counts every page that a process has mapped and touched. Proportional
//! memory (PSS) divides a page among the processes that share it, so only PSS can be added up.

use std::io;

use serde::{Deserialize, Serialize};

/// The kernel's counts for one process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryUse {
    pub(crate) rss_bytes: u64,
    pub(crate) pss_bytes: u64,
    pub(crate) weights_rss_bytes: u64,
    pub(crate) weights_pss_bytes: u64,
    /// Private memory: heap and stacks.
    pub(crate) anonymous_bytes: u64,
}

impl MemoryUse {
    pub(crate) fn of_this_process() -> io::Result<Self> {
        std::fs::read_to_string("/proc/self/smaps").map(|smaps| Self::parse(&smaps))
    }

    fn parse(smaps: &str) -> Self {
        let mut sum = Self::default();
        let mut is_weights = false;
        for line in smaps.lines() {
            match figure(line) {
                None => is_weights = line.contains(BLOB_IN_PATH),
                Some(("Rss", bytes)) => {
                    sum.rss_bytes += bytes;
                    sum.weights_rss_bytes += if is_weights { bytes } else { 0 };
                }
                Some(("Pss", bytes)) => {
                    sum.pss_bytes += bytes;
                    sum.weights_pss_bytes += if is_weights { bytes } else { 0 };
                }
                Some(("Anonymous", bytes)) => sum.anonymous_bytes += bytes,
                Some(_) => {}
            }
        }
        sum
    }
}

/// Parses `Rss:     120 kB` into a name and bytes; `None` for the line that begins a mapping. Lines without
/// kilobytes count as zero.
fn figure(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    if name.contains(['-', ' ']) {
        return None;
    }
    let kilobytes = value.trim().strip_suffix(" kB").and_then(|number| number.parse::<u64>().ok());
    Some((name, kilobytes.unwrap_or_default().saturating_mul(1024)))
}

/// Part of the path of every blob.
const BLOB_IN_PATH: &str = "/blobs/sha256-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_counted_separately_from_other_mappings() {
        let smaps = "\
7f00-7f01 r--s 00000000 fe:00 12 /tmp/store/blobs/sha256-ab (deleted)
Size:                 64 kB
Rss:                  60 kB
Pss:                  30 kB
Pss_Dirty:             4 kB
Anonymous:             0 kB
VmFlags: rd sh mr
7f02-7f03 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
Pss:                   8 kB
Anonymous:             8 kB
";
        let expected = MemoryUse {
            rss_bytes: 68 << 10,
            pss_bytes: 38 << 10,
            weights_rss_bytes: 60 << 10,
            weights_pss_bytes: 30 << 10,
            anonymous_bytes: 8 << 10,
        };
        assert_eq!(MemoryUse::parse(smaps), expected);
    }

    #[test]
    fn kernel_reports_the_memory_of_this_process() {
        let memory = MemoryUse::of_this_process().unwrap();
        assert!(memory.pss_bytes > 0 && memory.rss_bytes >= memory.pss_bytes, "{memory:?}");
        assert!(memory.anonymous_bytes > 0);
    }
}
