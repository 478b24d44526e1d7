//! Times as the protocol writes them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Formats a time as RFC 3339. Times outside the years 1970 to 9999, which a file can have, become the nearest
/// time inside.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    const END_OF_9999: u64 = 253_402_300_799;
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(END_OF_9999));
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outside_1970_to_9999_are_clamped() {
        let day = Duration::from_secs(86_400);
        assert_eq!(rfc3339(UNIX_EPOCH + day), "1970-01-02T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH - day), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH + 4_000_000 * day), "9999-12-31T23:59:59Z");
    }
}
