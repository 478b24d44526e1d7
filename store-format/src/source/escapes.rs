//! Percent-escapes in addresses (RFC 3986, section 2.1).
//!
//! The same file has one address, however a person or a browser wrote it: what needs no escape has none, and what
//! needs one has one with capital digits.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::SourceError;

/// All but RFC 3986's unreserved characters (section 2.3) and the `/` between the parts of a path.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// A path with an escape for every character that needs one.
pub(super) fn escaped(path: &str) -> String {
    utf8_percent_encode(path, ESCAPED).to_string()
}

/// A path without escapes.
///
/// # Errors
/// [`SourceError::Escape`] when an escape is incomplete, stands for a control character, or is not part of UTF-8.
pub(super) fn unescaped(path: &str) -> Result<Cow<'_, str>, SourceError> {
    let refused = |escape: &str| SourceError::Escape {
        escape: escape.to_owned(),
        found: path.chars().take(200).collect(),
    };
    for (start, _) in path.match_indices('%') {
        let escape: String = path.get(start..).unwrap_or_default().chars().take(3).collect();
        let digits = escape.get(1..).unwrap_or_default();
        if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(refused(&escape));
        }
    }
    let text =
        percent_decode_str(path).decode_utf8().map_err(|_invalid| refused(first_beyond_ascii(path)))?;
    match text.chars().find(|c| c.is_control()) {
        Some(control) => Err(refused(&format!("%{:02X}", u32::from(control)))),
        None => Ok(text),
    }
}

/// A path of a URL in its usual form. Escapes of separators stay: they may mean something else than the separators
/// themselves.
pub(super) fn normalized(path: &str) -> Result<String, SourceError> {
    unescaped(path)?;
    let mut text = String::with_capacity(path.len());
    let mut rest = path;
    while let Some((before, escape, after)) = split_at_escape(rest) {
        text.push_str(&utf8_percent_encode(before, WRITTEN).to_string());
        match u8::from_str_radix(escape, 16) {
            Ok(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{}", escape.to_ascii_uppercase())),
        }
        rest = after;
    }
    text.push_str(&utf8_percent_encode(rest, WRITTEN).to_string());
    Ok(text)
}

/// What RFC 3986 does not allow in a path (section 3.3).
const WRITTEN: &AsciiSet = &ESCAPED
    .remove(b'!')
    .remove(b'$')
    .remove(b'&')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b'+')
    .remove(b',')
    .remove(b';')
    .remove(b'=')
    .remove(b':')
    .remove(b'@');

/// The text before the first escape, its two digits, and the text after it.
fn split_at_escape(text: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = text.split_once('%')?;
    let (digits, after) = rest.split_at_checked(2)?;
    Some((before, digits, after))
}

/// The first escape of a byte beyond ASCII.
fn first_beyond_ascii(path: &str) -> &str {
    let escapes = path.match_indices('%').filter_map(|(start, _)| path.get(start..start.saturating_add(3)));
    let is_beyond = |escape: &&str| escape.get(1..2).is_some_and(|digit| digit >= "8");
    escapes.into_iter().find(is_beyond).unwrap_or(path)
}
