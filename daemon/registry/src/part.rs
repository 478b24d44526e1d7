//! Determines which part of a file the response to a range request contains.
//!
//! Servers answer such requests in many ways. A part is accepted only if it is certain which part it is. Otherwise the
//! file is requested again without a range.

use std::ops::Range;

use hyper::StatusCode;
use hyper::header::{CONTENT_RANGE, CONTENT_TYPE, HeaderValue};

use super::request::Response;

/// The content of a response to a range request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PartContent {
    /// The file from its first byte to its last.
    Whole,
    /// The requested part.
    Requested,
    /// Another part, with a description of it. Another request may get the right one.
    Other(String),
    /// An unknown part, with a description of the response. The server always answers like this.
    Unclear(String),
}

/// Longer headers are cut when printed.
const MAX_PRINTED_CHARS: usize = 80;

impl PartContent {
    /// Classifies the response to a request for `range` of a file of `size` bytes. `is_checked` says that the file's
    /// digest is known, so a wrong part would be detected later.
    pub(super) fn from_response(
        response: &Response,
        range: &Range<u64>,
        size: u64,
        is_checked: bool,
    ) -> Self {
        let length = range.end.saturating_sub(range.start);
        let announced = response.announced_bytes();
        let may_be = |bytes| announced.is_none_or(|announced| announced == bytes);
        let named = named_part(response);
        let is_requested = |part: &NamedPart| {
            part.range == *range && part.total.is_none_or(|total| total == size) && may_be(length)
        };
        match (response.response.status(), &named) {
            // The requested part, but with the status of a whole file.
            (StatusCode::OK, ContentRange::Part(part)) if is_requested(part) && announced == Some(length) => {
                Self::Requested
            }
            (StatusCode::OK, _) => Self::Whole,
            (_, ContentRange::Part(part)) if is_requested(part) => Self::Requested,
            (_, ContentRange::Part(part)) if part.range == (0..size) && may_be(size) => Self::Whole,
            (_, ContentRange::Nothing) if is_checked && announced == Some(length) => Self::Requested,
            (_, ContentRange::Nothing) if is_checked && announced == Some(size) => Self::Whole,
            (_, ContentRange::Nothing) => Self::Unclear("a part without Content-Range".to_owned()),
            (_, ContentRange::Several) => Self::Unclear("several parts".to_owned()),
            (_, ContentRange::Part(_)) => Self::Other(printed(response)),
            (_, ContentRange::Malformed) => Self::Unclear(printed(response)),
        }
    }
}

/// The length of the whole file, from `bytes 0-3/1234`.
pub(super) fn total(response: &Response) -> Option<u64> {
    match named_part(response) {
        ContentRange::Part(part) => part.total,
        _ => None,
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ContentRange {
    Nothing,
    Part(NamedPart),
    Several,
    Malformed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedPart {
    range: Range<u64>,
    /// The length of the file, unless it is `*`.
    total: Option<u64>,
}

fn named_part(response: &Response) -> ContentRange {
    let kind = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if kind.to_ascii_lowercase().starts_with(b"multipart/byteranges") {
        return ContentRange::Several;
    }
    let mut values = response.headers().get_all(CONTENT_RANGE).iter();
    match (values.next(), values.next()) {
        (None, _) => ContentRange::Nothing,
        (Some(value), None) if value.is_empty() => ContentRange::Nothing,
        (Some(value), None) => {
            value.to_str().ok().and_then(parse).map_or(ContentRange::Malformed, ContentRange::Part)
        }
        (Some(_), Some(_)) => ContentRange::Several,
    }
}

/// Parses `bytes 0-3/1234`. The unit may be in capitals, absent, or followed by `=` or `:` as some servers write it.
fn parse(value: &str) -> Option<NamedPart> {
    let value = value.trim();
    let digits = value.find(|c: char| c.is_ascii_digit())?;
    let (unit, range) = value.split_at(digits);
    let unit = unit.trim_end_matches([' ', '\t', '=', ':']);
    if !unit.is_empty() && !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (range, total) = range.split_once('/').unwrap_or((range, "*"));
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse::<u64>().ok()?);
    let end = last.checked_add(1).filter(|end| first < *end)?;
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok().filter(|total| end <= *total)?),
    };
    Some(NamedPart { range: first..end, total })
}

fn printed(response: &Response) -> String {
    let value = response.headers().get(CONTENT_RANGE).map(HeaderValue::as_bytes).unwrap_or_default();
    let text = String::from_utf8_lossy(value);
    text.chars().filter(|c| !c.is_control()).take(MAX_PRINTED_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_in_several_ways() {
        let named = |range, total| Some(NamedPart { range, total });
        for (value, expected) in [
            ("bytes 0-9/10", named(0..10, Some(10))),
            ("Bytes 5-7/14", named(5..8, Some(14))),
            ("bytes=5-7/14", named(5..8, Some(14))),
            ("bytes: 5-7/14", named(5..8, Some(14))),
            ("5-7/14", named(5..8, Some(14))),
            ("bytes 5-7/*", named(5..8, None)),
            ("bytes 5-7", named(5..8, None)),
            ("bytes  5 - 7 / 14 ", named(5..8, Some(14))),
            ("bytes 5-7/6", None),
            ("bytes 7-5/14", None),
            ("bytes */14", None),
            ("bytes 5-/14", None),
            ("bytes 0-18446744073709551615/*", None),
            ("items 5-7/14", None),
            ("bytes 5-7/x", None),
            ("", None),
        ] {
            assert_eq!(parse(value), expected, "{value}");
        }
    }
}
