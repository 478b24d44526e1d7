//! Counters for the daemon's metrics: bytes received, and requests that went wrong.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{RegistryClient, RegistryError};

/// Totals since the first client was made.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    retries: AtomicU64,
    stalls: AtomicU64,
    wrong_files: AtomicU64,
    received_bytes: AtomicU64,
}

impl Counts {
    /// Records bytes of a file.
    pub(crate) fn note_received(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Troubles {
    /// Requests repeated after a failure.
    pub retries: u64,
    /// Connections given up because they delivered nothing, or far less than others.
    pub stalls: u64,
    /// Complete files with a wrong digest.
    pub wrong_files: u64,
}

fn increment(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

impl RegistryClient {
    /// How often something went wrong with this client and the clients that it replaces.
    #[must_use]
    pub fn troubles(&self) -> Troubles {
        let Counts { retries, stalls, wrong_files, received_bytes: _ } = &*self.counts;
        let [retries, stalls, wrong_files] =
            [retries, stalls, wrong_files].map(|count| count.load(Ordering::Relaxed));
        Troubles { retries, stalls, wrong_files }
    }

    /// Bytes of files that arrived over the network, for this client and the clients that it replaces. Unwanted bytes
    /// count, and repeated downloads count each time.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.counts.received_bytes.load(Ordering::Relaxed)
    }

    /// Records a failed request, and whether it is repeated.
    pub fn note_failure(&self, error: &RegistryError, is_repeated: bool) {
        if matches!(error, RegistryError::Stalled { .. }) {
            self.note_stall();
        }
        if is_repeated {
            increment(&self.counts.retries);
        }
    }

    /// Records a connection that was given up because others are faster.
    pub fn note_stall(&self) {
        increment(&self.counts.stalls);
    }

    /// Records a complete file with a wrong digest.
    pub fn note_wrong_file(&self) {
        increment(&self.counts.wrong_files);
    }
}
