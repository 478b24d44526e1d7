//! The section `[audit]`: the log of what was done and refused.

use std::path::PathBuf;
use std::sync::Arc;

use blobd_store::Store;
use serde::Deserialize;

use super::error::Refusal;
use super::values;
use super::values::size_text;
use crate::audit::{LogDirectory, LogSettings, Rotation};

/// The section `[audit]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AuditConfig {
    /// Whether there is an audit log.
    pub enabled: bool,
    /// Its directory; if absent, `audit` in the store.
    #[serde(deserialize_with = "values::path")]
    pub directory: Option<PathBuf>,
    /// A file that would become larger is followed by the next one.
    #[serde(deserialize_with = "values::whole_size")]
    pub max_bytes: u64,
    /// How many files of this size the log takes at most.
    pub keep: usize,
    /// Whether each record is also sent to systemd's journal.
    pub journal: bool,
}

impl Default for AuditConfig {
    fn default() -> Self {
        // A record has about 300 bytes: half a million records.
        Self { enabled: true, directory: None, max_bytes: 16 << 20, keep: 10, journal: false }
    }
}

impl AuditConfig {
    /// Smaller files would be replaced within a few records.
    const MIN_BYTES: u64 = 64 << 10;
    /// A request for records that few files have reads whole files.
    const MAX_BYTES: u64 = 1 << 30;
    /// With one, a file would have little more than the longest record.
    const MIN_KEEP: usize = 2;
    /// A reader lists all of them.
    const MAX_KEEP: usize = 10_000;

    pub(super) fn check(&self) -> Result<(), Refusal> {
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&self.max_bytes) {
            let what = format!("expected 64 KiB to 1 GiB, found {}", size_text(self.max_bytes));
            return Err(Refusal::new("audit.max_bytes", what));
        }
        if !(Self::MIN_KEEP..=Self::MAX_KEEP).contains(&self.keep) {
            let what = format!("expected {} to {}, found {}", Self::MIN_KEEP, Self::MAX_KEEP, self.keep);
            return Err(Refusal::new("audit.keep", what));
        }
        Ok(())
    }

    /// The log that the configuration means, whether it is on or off.
    pub(crate) fn log(&self, store: &Arc<Store>) -> LogSettings {
        let directory =
            self.directory.as_deref().map_or_else(|| LogDirectory::of_store(store), LogDirectory::at);
        self.log_at(directory)
    }

    /// The log in the store, if the configuration names another place.
    pub(crate) fn log_left_in_store(&self, store: &Arc<Store>) -> Option<LogSettings> {
        self.directory.as_ref().map(|_| self.log_at(LogDirectory::of_store(store)))
    }

    const fn log_at(&self, directory: LogDirectory) -> LogSettings {
        let rotation = Rotation { max_bytes: self.max_bytes, keep: self.keep };
        LogSettings { directory, rotation, is_forwarded: self.journal }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_a_smallest_and_a_largest_size() {
        let check = |max_bytes| AuditConfig { max_bytes, ..AuditConfig::default() }.check();
        assert!(check(64 << 10).is_ok() && check(1 << 30).is_ok());
        for bytes in [(64 << 10) - 1, (1 << 30) + 1] {
            let refusal = format!("{:?}", check(bytes).unwrap_err());
            assert!(refusal.contains("expected 64 KiB to 1 GiB, found "), "{refusal}");
        }
    }
}
