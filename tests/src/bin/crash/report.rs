//! Prints results and counts violations.

use std::time::Duration;

/// The result so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    violations: usize,
}

impl Report {
    /// Reports that a part cannot run here.
    pub(crate) fn skip(&mut self, part: &str, reason: &str) {
        println!("{part}: skipped: {reason}");
    }

    /// Reports that an invariant does not hold.
    pub(crate) fn violation(&mut self, text: &str) {
        self.violations += 1;
        println!("VIOLATION: {}", text.replace('\n', " "));
    }

    /// Reports that all crash states of a part were checked.
    pub(crate) fn done(&mut self, part: &str, states: usize, violations: usize, time: Duration) {
        let each = time.checked_div(u32::try_from(states).unwrap_or(u32::MAX)).unwrap_or_default();
        println!(
            "{part}: {states} crashes, {violations} violations, {} ms each, {:.0} s",
            each.as_millis(),
            time.as_secs_f64()
        );
    }

    /// Whether every invariant held.
    pub(crate) fn is_clean(&self) -> bool {
        self.violations == 0
    }
}
