//! Waits for another process by polling until a deadline, never by a fixed sleep.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The time limit of every wait. Only a failing test waits that long.
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
