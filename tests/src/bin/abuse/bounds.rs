//! The bounds that must hold while a daemon is attacked, and afterwards.

use std::time::Duration;

use serde::Serialize;

use crate::monitor::Usage;
use crate::timings::float;
use crate::witness::{Measured, VERBS};

/// The witness's medians may grow by this factor.
const MEDIAN_FACTOR: f64 = 2.0;
/// The longest time that one call of the witness may take.
const WORST_MS: f64 = 200.0;
/// The peak of the daemon's resident memory.
const MEMORY_MIB: f64 = 256.0;
/// How much more resident memory than before may be in use after the attackers have ended.
const REMAINING_MIB: f64 = 64.0;
/// The most threads: half as many as blocking work may have.
const THREADS: u64 = 256;
/// More threads than before may stay: one for each kind of request of the witness, and the process that reads the file
/// of an import. In the baseline, these need not have run at the same time.
const WITNESS_THREADS: u64 = VERBS.len() as u64 + 1;
/// Log lines per second and user. One line more is allowed for the current second.
const LOG_LINES_PER_SECOND: f64 = 1.0;
/// Each request of root during an attack.
pub(crate) const ADMIN_BOUND: Duration = Duration::from_secs(2);
/// The time after an attack until threads, descriptors and memory are back to their values before it.
pub(crate) const RECOVERY_BOUND: Duration = Duration::from_secs(10);
/// From SIGTERM to the end of the process.
pub(crate) const STOP_BOUND: Duration = Duration::from_secs(10);

/// One bound and what was measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    /// The attack during which it was measured.
    pub(crate) attack: String,
    /// The measurement.
    pub(crate) what: String,
    pub(crate) measured: f64,
    /// The upper limit.
    pub(crate) bound: f64,
    pub(crate) unit: &'static str,
    pub(crate) holds: bool,
}

impl Check {
    /// Checks that `measured` does not exceed `bound`. NaN stands for a missing value, and fails.
    pub(crate) fn at_most(attack: &str, what: &str, measured: f64, bound: f64, unit: &'static str) -> Self {
        let (attack, what) = (attack.to_owned(), what.to_owned());
        Self { attack, what, measured, bound, unit, holds: measured <= bound }
    }
}

/// The daemon's process before, during and after an attack.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UsagePhases {
    pub(crate) before: Usage,
    pub(crate) peak: Usage,
    pub(crate) after: Usage,
}

impl UsagePhases {
    /// Whether the daemon is back to the resources that it used before.
    pub(crate) fn has_returned(&self) -> bool {
        let Self { before, after, .. } = self;
        after.threads <= before.threads + WITNESS_THREADS
            && after.descriptors <= before.descriptors
            && mib(after.resident_bytes) <= mib(before.resident_bytes) + REMAINING_MIB
    }
}

/// The bounds on the witness's calls.
pub(crate) fn of_witness(attack: &str, baseline: &Measured, measured: &Measured) -> Vec<Check> {
    let mut checks = Vec::new();
    for verb in VERBS {
        let (Some(baseline), Some(measured)) = (baseline.get(verb), measured.get(verb)) else {
            checks.push(Check::at_most(attack, &format!("{verb}: no response"), f64::NAN, WORST_MS, "ms"));
            continue;
        };
        let bound = baseline.median() * MEDIAN_FACTOR;
        let mut check = |what: &str, measured, bound, unit| {
            checks.push(Check::at_most(attack, &format!("{verb}: {what}"), measured, bound, unit));
        };
        check("median", measured.median(), bound, "ms");
        check("worst", measured.max(), WORST_MS, "ms");
        check("refused", count(measured.errors.len()), 0.0, "calls");
    }
    checks
}

/// The bounds on the daemon's process.
pub(crate) fn of_daemon(attack: &str, usage: &UsagePhases) -> Vec<Check> {
    let UsagePhases { before, peak, after } = usage;
    let check = |what: &str, measured, bound, unit| Check::at_most(attack, what, measured, bound, unit);
    vec![
        check("memory at its peak", mib(peak.peak_resident_bytes), MEMORY_MIB, "MiB"),
        check(
            "memory afterwards",
            mib(after.resident_bytes),
            mib(before.resident_bytes) + REMAINING_MIB,
            "MiB",
        ),
        check("threads at their peak", float(peak.threads), float(THREADS), "threads"),
        check("threads afterwards", float(after.threads), float(before.threads + WITNESS_THREADS), "threads"),
        check("descriptors afterwards", float(after.descriptors), float(before.descriptors), "fds"),
    ]
}

/// The bound on the log.
pub(crate) fn of_log(attack: &str, users: usize, lines: usize, time: Duration) -> Check {
    let bound = (time.as_secs_f64().ceil() * LOG_LINES_PER_SECOND + 1.0) * count(users);
    Check::at_most(attack, "lines in the log", count(lines), bound, "lines")
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn count(number: usize) -> f64 {
    float(number as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timings::Timings;

    fn measured(milliseconds: &[f64]) -> Measured {
        let timings = Timings { milliseconds: milliseconds.to_vec(), errors: Vec::new() };
        VERBS.iter().map(|verb| ((*verb).to_owned(), timings.clone())).collect()
    }

    fn broken(checks: &[Check]) -> Vec<&str> {
        checks.iter().filter(|check| !check.holds).map(|check| check.what.as_str()).take(1).collect()
    }

    #[test]
    fn slow_witness_breaks_a_bound() {
        let baseline = measured(&[1.0, 1.0, 1.0]);
        assert!(broken(&of_witness("a", &baseline, &measured(&[1.0, 1.9, 199.0]))).is_empty());
        assert_eq!(broken(&of_witness("a", &baseline, &measured(&[2.1, 2.1, 2.1]))), ["version: median"]);
        assert_eq!(broken(&of_witness("a", &baseline, &measured(&[1.0, 1.0, 201.0]))), ["version: worst"]);
        assert_eq!(broken(&of_witness("a", &baseline, &Measured::new())), ["version: no response"]);
    }

    #[test]
    fn leaked_threads_and_descriptors_break_a_bound() {
        let usage = |threads, descriptors| Usage { threads, descriptors, ..Usage::default() };
        let phases = |after| UsagePhases { before: usage(5, 9), peak: usage(99, 99), after };
        assert!(
            phases(usage(5, 9)).has_returned() && broken(&of_daemon("a", &phases(usage(5, 9)))).is_empty()
        );
        assert_eq!(broken(&of_daemon("a", &phases(usage(11, 9)))), ["threads afterwards"]);
        assert_eq!(broken(&of_daemon("a", &phases(usage(5, 10)))), ["descriptors afterwards"]);
    }

    #[test]
    fn flooded_log_breaks_a_bound() {
        assert!(of_log("a", 1, 11, Duration::from_secs(10)).holds);
        assert!(!of_log("a", 1, 12, Duration::from_secs(10)).holds);
        assert!(of_log("a", 2, 22, Duration::from_secs(10)).holds);
    }
}
