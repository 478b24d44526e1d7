//! Times in tables: relative to now, or local. In JSON they are RFC 3339 in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::sys::local_time;

/// Parses a period such as `30d`. Fails with the reason.
pub fn parse_period(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_refusal| format!("{text:?}: not a time; write for example 30d, 12h or 90s"))
}

/// `3 days ago`, `in 6 days`, `just now`. A text that is not a time is returned as it is.
pub fn relative(rfc3339: &str) -> String {
    relative_to(rfc3339, SystemTime::now())
}

/// `2026-11-23 16:02` in the time zone of this process.
pub fn local(rfc3339: &str) -> String {
    let since_1970 =
        humantime::parse_rfc3339(rfc3339).ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since_1970.and_then(|since| local_time(since.as_secs())).unwrap_or_else(|| rfc3339.to_owned())
}

/// The time that has passed since; zero if it is in the future or cannot be parsed.
pub fn age(rfc3339: &str) -> Duration {
    let time = humantime::parse_rfc3339(rfc3339).ok();
    time.and_then(|time| SystemTime::now().duration_since(time).ok()).unwrap_or_default()
}

fn relative_to(rfc3339: &str, now: SystemTime) -> String {
    let Ok(time) = humantime::parse_rfc3339(rfc3339) else { return rfc3339.to_owned() };
    match now.duration_since(time) {
        Ok(age) => units(age).map_or_else(|| "just now".to_owned(), |age| format!("{age} ago")),
        Err(ahead) => {
            let rounded = ahead.duration().saturating_add(ROUNDING);
            units(rounded).map_or_else(|| "now".to_owned(), |time| format!("in {time}"))
        }
    }
}

/// Added to times in the future: for so long after `rm --keep 7d` the model is said to expire in 7 days, not in 6.
const ROUNDING: Duration = Duration::from_secs(20);

/// `3 days`; `None` below a minute.
fn units(duration: Duration) -> Option<String> {
    const UNITS: [(u64, &str); 5] =
        [(365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute")];
    let seconds = duration.as_secs();
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| seconds >= *unit)?;
    let count = seconds.checked_div(unit)?;
    Some(format!("{count} {name}{}", if count == 1 { "" } else { "s" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_relative_in_both_directions() {
        let now = humantime::parse_rfc3339("2026-11-23T12:00:00Z").unwrap();
        for (time, text) in [
            ("2026-11-23T11:59:30Z", "just now"),
            ("2026-11-23T11:58:59Z", "1 minute ago"),
            ("2026-11-20T11:00:00Z", "3 days ago"),
            ("2024-11-20T11:00:00Z", "2 years ago"),
            ("2026-11-23T12:00:30Z", "now"),
            ("2026-11-29T13:00:00Z", "in 6 days"),
            ("2026-11-30T11:59:58Z", "in 7 days"),
            ("yesterday", "yesterday"),
        ] {
            assert_eq!(relative_to(time, now), text, "{time}");
        }
    }

    #[test]
    fn local_time_has_the_form_of_a_date_and_a_time() {
        let text = local("2026-11-23T12:00:00Z");
        assert!(text.starts_with("2026-11-2") && text.len() == 16, "{text}");
        assert_eq!(local("never"), "never");
    }
}
