//! When a request that failed is sent again.
//!
//! This is the one place that decides it. The client repeats by it what it needs itself, manifests and
//! lists of files; a transfer, which knows what has arrived, repeats by it its requests for bytes. Nothing
//! below either of them sends a request twice, so attempts do not multiply.

use std::time::{Duration, Instant};

use super::{RegistryClient, RegistryError};

/// How often and when a request that failed is sent again.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// How long to wait after the first failure; doubled after each that follows.
    pub backoff: Duration,
    /// The longest such wait.
    pub longest_backoff: Duration,
    /// After how many failures in a row that bring nothing to give up.
    pub max_failures: u32,
    /// The same with a server that has never sent anything.
    pub max_first_failures: u32,
    /// The longest wait that a `Retry-After` can ask for.
    pub longest_retry_after: Duration,
    /// The same while nothing has come.
    pub longest_first_retry_after: Duration,
    /// A manifest or a list is not asked for again if it took longer than this to get no answer.
    pub slowest_repeated: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            backoff: Duration::from_millis(500),
            longest_backoff: Duration::from_secs(15),
            // About half a minute of them: a router restarts in that time.
            max_failures: 6,
            max_first_failures: 2,
            // Registries that count requests give theirs back every minute or so.
            longest_retry_after: Duration::from_secs(120),
            // A user waits at the prompt: rather fail and say so.
            longest_first_retry_after: Duration::from_secs(5),
            slowest_repeated: Duration::from_secs(2),
        }
    }
}

/// So much is progress; at less for each attempt a transfer would never end.
const PROGRESS_BYTES: u64 = 64 << 10;

/// The failures of one task: how many there were since the last progress.
#[derive(Clone, Debug)]
pub struct Retry {
    policy: RetryPolicy,
    in_a_row: u32,
    has_progress: bool,
}

impl Retry {
    /// No failure yet.
    #[must_use]
    pub const fn new(policy: RetryPolicy) -> Self {
        Self { policy, in_a_row: 0, has_progress: false }
    }

    /// So many bytes have come from the server, by whichever connection.
    pub const fn note_progress(&mut self, bytes: u64) {
        self.has_progress |= bytes >= PROGRESS_BYTES;
    }

    /// How long to wait before the next attempt, after one that brought `bytes` and failed; `None` when
    /// there should be none. A server that has never sent anything is given up sooner than one whose
    /// connection has broken.
    pub fn wait_after(&mut self, error: &RegistryError, bytes: u64) -> Option<Duration> {
        self.note_progress(bytes);
        // A registry that was there a moment ago is being restarted, or the network is.
        let may_pass = error.may_pass() || self.has_progress && error.is_absent_host();
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
    /// Counts the failures of a task that asks for bytes, by this client's policy.
    #[must_use]
    pub fn retry(&self) -> Retry {
        Retry::new(self.shared.retry)
    }

    /// Repeats what somebody waits for at a prompt.
    pub(super) async fn retried<T, F: Future<Output = Result<T, RegistryError>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<T, RegistryError> {
        let mut retry = self.retry();
        loop {
            let started = Instant::now();
            let error = match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let has_no_answer =
                matches!(error, RegistryError::Unreachable { .. } | RegistryError::Stalled { .. });
            let took_long = has_no_answer && started.elapsed() > self.shared.retry.slowest_repeated;
            let Some(wait) = retry.wait_after(&error, 0).filter(|_| !took_long) else { return Err(error) };
            tracing::debug!("{error}; again in {wait:?}");
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        RegistryError::TooManyRequests { host: "h".to_owned(), retry_after }
    }

    #[test]
    fn only_failures_in_a_row_that_bring_nothing_end_it() {
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
    fn wait_that_a_server_asks_for_is_kept_up_to_a_limit() {
        let after = |seconds, bytes| Retry::new(POLICY).wait_after(&busy(Some(seconds)), bytes);
        assert_eq!(after(60, 1 << 20), Some(Duration::from_secs(60)));
        assert_eq!(after(3600, 1 << 20), Some(POLICY.longest_retry_after));
        assert_eq!(after(3600, 0), Some(POLICY.longest_first_retry_after), "somebody waits");
        assert_eq!(after(0, 0), Some(FIRST), "no server can ask for haste");
        let unavailable =
            RegistryError::Status { host: "h".to_owned(), status: 503, retry_after: Some(FIRST * 3) };
        assert_eq!(Retry::new(POLICY).wait_after(&unavailable, 0), Some(FIRST * 3));
    }

    #[test]
    fn only_what_may_pass_is_repeated() {
        let status = |status| RegistryError::Status { host: "h".to_owned(), status, retry_after: None };
        for (number, is_repeated) in
            [(500, true), (503, true), (522, true), (408, true), (410, false), (501, false)]
        {
            let wait = Retry::new(POLICY).wait_after(&status(number), 1 << 20);
            assert_eq!(wait.is_some(), is_repeated, "{number}");
        }
        let absent = RegistryError::Refused { host: "h".to_owned() };
        let mut retry = Retry::new(POLICY);
        assert_eq!(retry.wait_after(&absent, 0), None, "nobody was ever there");
        let mut retry = Retry::new(POLICY);
        retry.note_progress(1 << 20);
        assert_eq!(retry.wait_after(&absent, 0), Some(FIRST), "it comes back");
    }
}
