//! Waiting for what another process does: by looking, until a deadline, never by a fixed sleep.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long anything may take before a test gives up. Only a failing test waits as long.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
///
/// # Panics
/// When the deadline passes.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    eventually_some(what, || condition().then_some(()));
}

/// Waits until there is a value.
///
/// # Panics
/// When the deadline passes.
pub fn eventually_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        sleep(Duration::from_millis(5));
    }
}
