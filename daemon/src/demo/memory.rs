//! How much memory a process uses, and how much of it is weights.
//!
//! Resident memory (RSS) counts every page that a process has mapped and touched. Proportional
//! memory (PSS) divides a page among the processes that share it, so only PSS can be added up.

use std::io;

use serde::{Deserialize, Serialize};

/// What the kernel counts for one process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryUse {
    /// All resident pages.
    pub(crate) rss_bytes: u64,
    /// The same, shared pages divided by the number of processes that share them.
    pub(crate) pss_bytes: u64,
    /// Resident pages of mapped blobs.
    pub(crate) weights_rss_bytes: u64,
    /// The same, divided.
    pub(crate) weights_pss_bytes: u64,
    /// Memory of the process's own: heap and stacks.
    pub(crate) anonymous_bytes: u64,
}

impl MemoryUse {
    /// Of this process, at this moment.
    ///
    /// # Errors
    /// When the kernel does not tell.
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

/// `Rss:     120 kB` as a name and bytes; none for a line that names a mapping. Other lines have
/// no kilobytes and count nothing.
fn figure(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    if name.contains(['-', ' ']) {
        return None;
    }
    let kilobytes = value.trim().strip_suffix(" kB").and_then(|number| number.parse::<u64>().ok());
    Some((name, kilobytes.unwrap_or_default().saturating_mul(1024)))
}

/// How the path of every blob of a store ends.
const BLOB_IN_PATH: &str = "/blobs/sha256-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_told_from_other_mappings() {
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
    fn kernel_tells_about_this_process() {
        let memory = MemoryUse::of_this_process().unwrap();
        assert!(memory.pss_bytes > 0 && memory.rss_bytes >= memory.pss_bytes, "{memory:?}");
        assert!(memory.anonymous_bytes > 0);
    }
}
