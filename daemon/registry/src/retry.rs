//! Retries: when and how often a failed request is repeated.
//!
//! The client repeats its requests for manifests and lists of files; a transfer, which knows how much it has
//! received, repeats its requests for bytes. Nothing below them sends a request twice, so attempts do not
//! multiply. What went wrong is counted, for the daemon's metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::error::Result;
use super::{RegistryClient, RegistryError};

/// How often and when a failed request is repeated.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// The wait after the first failure; doubled after each further one.
    pub backoff: Duration,
    /// The longest such wait.
    pub longest_backoff: Duration,
    /// How many failures in a row without progress are tolerated.
    pub max_failures: u32,
    /// [`Self::max_failures`] for a server that has not sent anything yet.
    pub max_first_failures: u32,
    /// The longest wait that is accepted from a `Retry-After`.
    pub longest_retry_after: Duration,
    /// [`Self::longest_retry_after`] for a server that has not sent anything yet.
    pub longest_first_retry_after: Duration,
    /// A request for a manifest or list is not repeated if it took longer than this without a response.
    pub slowest_repeated: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            backoff: Duration::from_millis(500),
            longest_backoff: Duration::from_secs(15),
            // About half a minute in all, in which a router can restart.
            max_failures: 6,
            max_first_failures: 2,
            // Registries reset their request limits about every minute.
            longest_retry_after: Duration::from_secs(120),
            // A user waits at the prompt: fail early with a message.
            longest_first_retry_after: Duration::from_secs(5),
            slowest_repeated: Duration::from_secs(2),
        }
    }
}

/// How many bytes one attempt must receive to count as progress. With less, the transfer would take forever.
const PROGRESS_BYTES: u64 = 64 << 10;

/// Counts the failures of one task since its last progress.
#[derive(Clone, Debug)]
pub struct Retry {
    policy: RetryPolicy,
    in_a_row: u32,
    has_progress: bool,
}

impl Retry {
    pub const fn new(policy: RetryPolicy) -> Self {
        Self { policy, in_a_row: 0, has_progress: false }
    }

    /// Records bytes received from the server, over any connection.
    pub const fn note_progress(&mut self, bytes: u64) {
        self.has_progress |= bytes >= PROGRESS_BYTES;
    }

    /// The wait before the next attempt, after one that received `bytes` and failed; `None` to give up.
    /// Connections that never worked are given up sooner.
    pub fn wait_after(&mut self, error: &RegistryError, bytes: u64) -> Option<Duration> {
        self.note_progress(bytes);
        // A registry that responded earlier may be restarting, or the network may be down for a moment.
        let may_pass = error.is_transient() || self.has_progress && error.is_absent_host();
        self.in_a_row = if bytes >= PROGRESS_BYTES { 1 } else { self.in_a_row.saturating_add(1) };
        let RetryPolicy { backoff, longest_backoff, .. } = self.policy;
        let (most, longest_asked) = match self.has_progress {
            true => (self.policy.max_failures, self.policy.longest_retry_after),
            false => (self.policy.max_first_failures, self.policy.longest_first_retry_after),
        };
        let wait = backoff.saturating_mul(2u32.saturating_pow(self.in_a_row - 1)).min(longest_backoff);
        let asked = error.retry_after().unwrap_or_default().min(longest_asked);
        (may_pass && self.in_a_row <= most).then(|| wait.max(asked))
    }
}

impl RegistryClient {
    /// A counter of failures with this client's policy.
    pub fn retry(&self) -> Retry {
        Retry::new(self.shared.retry)
    }

    /// Sends a request and repeats it after transient failures. The limits are those for a user who waits at a prompt.
    pub(super) async fn retried<T, F: Future<Output = Result<T>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<T> {
        let mut retry = self.retry();
        loop {
            let started = Instant::now();
            let error = match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let took_long = error.is_no_response() && started.elapsed() > self.shared.retry.slowest_repeated;
            let wait = retry.wait_after(&error, 0).filter(|_| !took_long);
            self.note_failure(&error, wait.is_some());
            let Some(wait) = wait else { return Err(error) };
            tracing::debug!("{error}; next attempt in {wait:?}");
            tokio::time::sleep(wait).await;
        }
    }
}

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
pub struct FailureCounts {
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
    pub fn failure_counts(&self) -> FailureCounts {
        let Counts { retries, stalls, wrong_files, received_bytes: _ } = &*self.counts;
        let [retries, stalls, wrong_files] =
            [retries, stalls, wrong_files].map(|count| count.load(Ordering::Relaxed));
        FailureCounts { retries, stalls, wrong_files }
    }

    /// Bytes of files that arrived over the network, for this client and the clients that it replaces. Unwanted bytes
    /// count, and repeated downloads count each time.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConnectFailure, ServerReason};

    const POLICY: RetryPolicy = RetryPolicy {
        backoff: Duration::from_millis(500),
        longest_backoff: Duration::from_secs(15),
        max_failures: 3,
        max_first_failures: 2,
        longest_retry_after: Duration::from_secs(120),
        longest_first_retry_after: Duration::from_secs(5),
        slowest_repeated: Duration::from_secs(2),
    };
    const FIRST: Duration = POLICY.backoff;

    fn busy(retry_after: Option<u64>) -> RegistryError {
        let retry_after = retry_after.map(Duration::from_secs);
        let (host, reason) = ("h".to_owned(), ServerReason::default());
        RegistryError::TooManyRequests { host, reason, retry_after, is_anonymous: false }
    }

    fn status(status: u16, retry_after: Option<Duration>) -> RegistryError {
        let (host, reason) = ("h".to_owned(), ServerReason::default());
        RegistryError::Status { host, status, reason, is_plain_http: false, retry_after }
    }

    #[test]
    fn only_consecutive_failures_without_progress_end_the_retries() {
        let mut retry = Retry::new(POLICY);
        assert_eq!(retry.wait_after(&busy(None), 1 << 20), Some(FIRST));
        assert_eq!(retry.wait_after(&busy(None), 9), Some(FIRST * 2));
        assert_eq!(retry.wait_after(&busy(None), 1 << 20), Some(FIRST));
        assert_eq!(retry.wait_after(&busy(None), 9), Some(FIRST * 2));
        assert_eq!(retry.wait_after(&busy(None), 9), Some(FIRST * 4));
        assert_eq!(retry.wait_after(&busy(None), 9), None);
    }

    #[test]
    fn server_that_never_sent_anything_is_given_up_sooner() {
        let mut retry = Retry::new(POLICY);
        assert_eq!(retry.wait_after(&busy(None), 9), Some(FIRST));
        assert_eq!(retry.wait_after(&busy(None), 9), Some(FIRST * 2));
        assert_eq!(retry.wait_after(&busy(None), 9), None);
    }

    #[test]
    fn wait_that_a_server_requests_is_obeyed_up_to_a_limit() {
        let after = |seconds, bytes| Retry::new(POLICY).wait_after(&busy(Some(seconds)), bytes);
        assert_eq!(after(60, 1 << 20), Some(Duration::from_secs(60)));
        assert_eq!(after(3600, 1 << 20), Some(POLICY.longest_retry_after));
        assert_eq!(after(3600, 0), Some(POLICY.longest_first_retry_after), "a user waits");
        assert_eq!(after(0, 0), Some(FIRST), "a server cannot shorten the wait");
        assert_eq!(Retry::new(POLICY).wait_after(&status(503, Some(FIRST * 3)), 0), Some(FIRST * 3));
    }

    #[test]
    fn only_transient_failures_are_repeated() {
        for (number, is_repeated) in
            [(500, true), (503, true), (522, true), (408, true), (410, false), (501, false)]
        {
            let wait = Retry::new(POLICY).wait_after(&status(number, None), 1 << 20);
            assert_eq!(wait.is_some(), is_repeated, "{number}");
        }
        let absent = RegistryError::Unreachable { host: "h".to_owned(), reason: ConnectFailure::Refused };
        let mut retry = Retry::new(POLICY);
        assert_eq!(retry.wait_after(&absent, 0), None, "the host never responded");
        let mut retry = Retry::new(POLICY);
        retry.note_progress(1 << 20);
        assert_eq!(retry.wait_after(&absent, 0), Some(FIRST), "the host responded before");
    }
}
