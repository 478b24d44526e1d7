//! Which bytes of a file a request selects, and whether its client has the file already (RFC 9110, sections 13 and 14).

use std::ops::Range;

use hyper::header::{HeaderMap, HeaderName, IF_NONE_MATCH, IF_RANGE, RANGE};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Selected {
    Whole,
    Part(Range<u64>),
    /// A range that begins after the end of the file.
    Nothing,
}

/// Several ranges in one request select the whole file, as the standard allows.
pub(super) fn selected(headers: &HeaderMap, etag: &str, length: u64) -> Selected {
    let Some(range) = text(headers, &RANGE) else { return Selected::Whole };
    // A client that continues a download of another version gets the whole file.
    if headers.contains_key(IF_RANGE) && text(headers, &IF_RANGE) != Some(etag) {
        return Selected::Whole;
    }
    part(range, length)
}

fn part(range: &str, length: u64) -> Selected {
    let Some((unit, range)) = range.split_once('=') else { return Selected::Whole };
    let Some((first, last)) = range.trim().split_once('-') else { return Selected::Whole };
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return Selected::Whole;
    }
    let (start, end) = match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => (first, last.saturating_add(1).min(length)),
        (Some(first), None) if last.is_empty() => (first, length),
        (None, Some(suffix)) if first.is_empty() => match suffix {
            0 => return Selected::Nothing,
            suffix => (length.saturating_sub(suffix), length),
        },
        _ => return Selected::Whole,
    };
    if start < end { Selected::Part(start..end) } else { Selected::Nothing }
}

fn number(text: &str) -> Option<u64> {
    // The standard library would accept a sign.
    let are_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // A number that is too large is beyond the end of every file.
    are_digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// Whether the client has this version.
pub(super) fn has_version(headers: &HeaderMap, etag: &str) -> bool {
    let listed = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut listed = listed.flat_map(|value| value.split(',')).map(str::trim);
    listed.any(|known| known == "*" || known.strip_prefix("W/").unwrap_or(known) == etag)
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn headers<const N: usize>(list: [(HeaderName, &'static str); N]) -> HeaderMap {
        list.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn single_ranges_are_parts_and_everything_else_is_the_whole() {
        for (range, found) in [
            ("bytes=0-0", Selected::Part(0..1)),
            ("bytes=2-", Selected::Part(2..10)),
            ("bytes=2-99", Selected::Part(2..10)),
            ("bytes=9-9", Selected::Part(9..10)),
            ("bytes=-3", Selected::Part(7..10)),
            ("bytes=-30", Selected::Part(0..10)),
            ("Bytes = 1-2", Selected::Part(1..3)),
            ("bytes=0-99999999999999999999999", Selected::Part(0..10)),
            ("bytes=10-", Selected::Nothing),
            ("bytes=99999999999999999999999-", Selected::Nothing),
            ("bytes=-0", Selected::Nothing),
            ("bytes=0-1,4-5", Selected::Whole),
            ("bytes=5-2", Selected::Whole),
            ("bytes=-", Selected::Whole),
            ("bytes=+1-2", Selected::Whole),
            ("bytes=a-b", Selected::Whole),
            ("items=0-1", Selected::Whole),
            ("bytes", Selected::Whole),
        ] {
            assert_eq!(part(range, 10), found, "{range}");
        }
        assert_eq!(part("bytes=0-", 0), Selected::Nothing);
    }

    #[test]
    fn ranges_of_another_version_select_the_whole_file() {
        let etag = "\"sha256:ab\"";
        let with = |if_range| selected(&headers([(RANGE, "bytes=1-2"), (IF_RANGE, if_range)]), etag, 10);
        assert_eq!(with("\"sha256:ab\""), Selected::Part(1..3));
        for other in ["\"sha256:cd\"", "W/\"sha256:ab\"", "Fri, 27 Nov 2026 08:00:00 GMT"] {
            assert_eq!(with(other), Selected::Whole, "{other}");
        }
        assert_eq!(selected(&headers([]), etag, 10), Selected::Whole);
    }

    #[test]
    fn versions_that_the_client_has_are_compared() {
        let has = |value| has_version(&headers([(IF_NONE_MATCH, value)]), "\"a\"");
        assert!(has("\"a\"") && has("\"b\", \"a\"") && has("W/\"a\"") && has("*"));
        assert!(!has("\"b\"") && !has("a") && !has_version(&headers([]), "\"a\""));
    }
}
