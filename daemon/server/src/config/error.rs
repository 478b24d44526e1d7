//! Errors of the configuration file: one line that begins with `file:line:column`, and a hint.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::string::FromUtf8Error;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use toml::de::{DeTable, DeValue};

use super::keys::{is_section, names};
use super::registries::without_passwords;

#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub(crate) struct ConfigError {
    /// `FILE` or `FILE:LINE:COLUMN`.
    place: String,
    what: String,
    hint: Option<String>,
}

/// A value that contradicts others, or a name that does not exist.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// With its section, such as `space.quota`.
    pub(super) key: &'static str,
    pub(super) what: String,
    /// The offset of the value, if it is not the whole value of the key.
    pub(super) start: Option<usize>,
    pub(super) hint: Option<String>,
    /// Whether the same value may be valid later.
    pub(super) is_temporary: bool,
}

impl Refusal {
    pub(super) const fn new(key: &'static str, what: String) -> Self {
        Self { key, what, start: None, hint: None, is_temporary: false }
    }

    /// The error of a program that cannot continue without the file.
    pub(super) fn body(&self, path: &Path, text: &str) -> ErrorBody {
        let body = ConfigError::from_refusal(path, text, self).body();
        // A service manager starts the daemon again after this one.
        if self.is_temporary { ErrorBody { code: ErrorCode::Internal, ..body } } else { body }
    }
}

impl ConfigError {
    pub(super) fn unreadable(path: &Path, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => Some("create it, or leave out --config and BLOBD_CONFIG"),
            io::ErrorKind::PermissionDenied => {
                Some("if HOME is another user's, correct it, or give --config")
            }
            _ => None,
        };
        let what = format!("cannot read: {error}");
        Self { place: path.display().to_string(), what, hint: hint.map(str::to_owned) }
    }

    pub(super) fn at(place: &str, what: String) -> Self {
        Self { place: place.to_owned(), what, hint: None }
    }

    pub(super) fn not_utf8(path: &Path, error: &FromUtf8Error) -> Self {
        let (content, offset) = (error.as_bytes(), error.utf8_error().valid_up_to());
        let text = String::from_utf8_lossy(content.get(..offset).unwrap_or_default());
        let byte = content.get(offset).copied().unwrap_or_default();
        Self {
            place: place(path, &text, offset),
            what: format!("expected text in UTF-8, found the byte {byte:#04x}"),
            hint: Some("save the file in the encoding UTF-8".to_owned()),
        }
    }

    pub(super) fn from_toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        let message = one_line(error.message());
        let span = error.span().unwrap_or_default();
        if message.starts_with("unknown field") {
            let key = text.get(span.clone()).unwrap_or_default().trim_matches(['"', '\'']);
            let allowed = allowed_keys(&message);
            let section = section_at(text, span.start);
            let (what, hint) =
                (without_passwords(&format!("unknown key {key:?}")), Some(hint_for(key, &section, &allowed)));
            return Self { place: place(path, text, span.start), what, hint };
        }
        let key = key_at(text, &span).or_else(|| key_of_line(text, span.start));
        let key = key.map_or_else(String::new, |key| format!("{key}: "));
        let found = one_line(text.get(span.clone()).unwrap_or_default());
        let what = without_passwords(&format!("{key}{}", in_plain_words(&message, &found)));
        Self { place: place(path, text, span.start), what, hint: None }
    }

    pub(super) fn from_refusal(path: &Path, text: &str, refusal: &Refusal) -> Self {
        let of_key =
            || entries(text).into_iter().find(|entry| entry.key == refusal.key).map(|entry| entry.start);
        let at = refusal.start.or_else(of_key);
        let place = at.map_or_else(|| path.display().to_string(), |offset| place(path, text, offset));
        Self { place, what: format!("{}: {}", refusal.key, refusal.what), hint: refusal.hint.clone() }
    }

    pub(crate) fn body(self) -> ErrorBody {
        let body = ErrorBody::new(ErrorCode::InvalidRequest, &self);
        match self.hint {
            Some(hint) => body.with_hint(hint),
            None => body,
        }
    }
}

/// `FILE:LINE:COLUMN`.
pub(super) fn place(path: &Path, text: &str, offset: usize) -> String {
    let (line, column) = position(text, offset);
    format!("{}:{line}:{column}", path.display())
}

fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let column = before.get(start..).unwrap_or_default().chars().count() + 1;
    (line, column)
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Rewrites serde's messages: `invalid type: integer `-5`, expected u8` → `expected a whole number, found -5`. `value`
/// is the value's text in the file.
fn in_plain_words(message: &str, value: &str) -> String {
    let value = if value.is_empty() { "nothing" } else { value };
    match message {
        // Serde's message about unquoted words: `yes`, `5 GB`.
        "string values must be quoted, expected literal string" => {
            return format!("expected a text in quotes, a number, true or false, found {value}");
        }
        "wanted string or table" => return format!("expected a text in quotes, found {value}"),
        _ => {}
    }
    let without_kind = ["invalid type: ", "invalid value: ", "unknown variant "]
        .into_iter()
        .find_map(|start| message.strip_prefix(start))
        .and_then(|rest| rest.split_once(", expected "));
    let Some((found, expected)) = without_kind else { return of_syntax(message) };
    let found = ["integer ", "string ", "boolean ", "floating point "]
        .into_iter()
        .find_map(|kind| found.strip_prefix(kind))
        .unwrap_or(found);
    let found = match found.strip_prefix('`').and_then(|found| found.strip_suffix('`')) {
        Some(variant) if message.starts_with("unknown variant") => format!("{variant:?}"),
        Some(number) => number.to_owned(),
        None if found == "map" => "a table".to_owned(),
        None if found == "sequence" => "a list".to_owned(),
        None => found.to_owned(),
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number that is not negative",
        "a sequence" => "a list",
        "a boolean" => "true or false",
        "a map" => "a table",
        _ if expected.starts_with("struct ") => "a section such as [space]",
        other => &alternatives(other),
    };
    format!("expected {expected}, found {found}")
}

/// Rewrites messages about syntax: `unclosed array, expected `]`` → `unclosed array: expected "]"`.
fn of_syntax(message: &str) -> String {
    match message.split_once(", expected ") {
        Some((what, expected)) if !message.starts_with("expected ") => {
            format!("{what}: expected {}", alternatives(expected))
        }
        _ => message.to_owned(),
    }
}

/// `one of `a`, `b`, `c`` → `"a", "b" or "c"`.
fn alternatives(expected: &str) -> String {
    let Some(listed) = expected.strip_prefix("one of ") else { return expected.replace('`', "\"") };
    let listed = listed.replace('`', "\"");
    match listed.rsplit_once(", ") {
        Some((others, last)) => format!("{others} or {last}"),
        None => listed,
    }
}

/// The keys that serde lists after `expected`: those that are allowed in place of the unknown one.
fn allowed_keys(message: &str) -> Vec<&str> {
    let expected = message.split_once(", expected ").map_or("", |(_, expected)| expected);
    expected.split('`').skip(1).step_by(2).collect()
}

/// The section with a dot at its end; empty outside of sections.
fn section_at(text: &str, start: usize) -> String {
    let entry = entries(text).into_iter().find(|entry| entry.start == start);
    entry.map_or_else(String::new, |entry| entry.section)
}

/// The section that a key belongs to, or the most similar one of the keys that are allowed in its place.
fn hint_for(key: &str, section: &str, allowed: &[&str]) -> String {
    let known = names();
    if let Some(known) = known.iter().find(|known| name_of(known) == key && !known.starts_with('[')) {
        return match known.rsplit_once('.') {
            Some((section, _)) => format!("{known} belongs to the section [{section}]"),
            None => format!("{known} must come before the first section"),
        };
    }
    let here = allowed.iter().map(|name| match is_section(name) {
        true if section.is_empty() => format!("[{name}]"),
        _ => format!("{section}{name}"),
    });
    // Outside of sections, the line of the section may be missing.
    let elsewhere = known.into_iter().filter(|_| section.is_empty());
    let distance = |known: &String| strsim::levenshtein(&key.to_lowercase(), name_of(known));
    let near = here.chain(elsewhere).filter(|known| distance(known) <= 1 + key.len() / 4);
    match near.min_by_key(distance) {
        Some(near) => format!("did you mean {near}?"),
        None => "`man blobd.toml` lists all keys".to_owned(),
    }
}

/// A key without its section; a section without its brackets.
fn name_of(known: &str) -> &str {
    known.rsplit_once('.').map_or(known, |(_, name)| name).trim_matches(['[', ']'])
}

struct Entry {
    /// With its section.
    key: String,
    /// The section with a dot at its end; empty outside of sections.
    section: String,
    start: usize,
    /// Where its value ends.
    end: usize,
}

pub(super) fn lines(text: &str) -> BTreeMap<String, usize> {
    entries(text).into_iter().map(|entry| (entry.key, position(text, entry.start).0)).collect()
}

pub(super) fn line(text: &str, offset: usize) -> usize {
    position(text, offset).0
}

/// The innermost key whose value contains the span; for an error in a key itself, its section.
fn key_at(text: &str, span: &Range<usize>) -> Option<String> {
    let entries = entries(text).into_iter();
    let around = entries.filter(|entry| entry.start <= span.start && span.end <= entry.end);
    let innermost = around.max_by_key(|entry| entry.start)?;
    Some(match innermost.start == span.start {
        true => innermost.section.trim_end_matches('.').to_owned(),
        false => innermost.key,
    })
}

/// The key on the line of an offset, with its section, in a file that is not TOML.
fn key_of_line(text: &str, offset: usize) -> Option<String> {
    let before = text.get(..offset)?;
    let line_start = before.rfind('\n').map_or(0, |newline| newline.saturating_add(1));
    let (key, _) = before.get(line_start..)?.split_once('=')?;
    let is_key = |key: &str| {
        !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    let lines = before.get(..line_start)?.lines().rev().map(str::trim);
    let section = lines.clone().find(|line| line.starts_with('[')).map(|line| line.trim_matches(['[', ']']));
    let key = Some(key.trim()).filter(|key| is_key(key))?;
    match section.filter(|section| is_key(section)) {
        Some(section) => Some(format!("{section}.{key}")),
        None => Some(key.to_owned()),
    }
}

/// All keys of the file; none if it is not TOML. Not recursive: the nesting comes from the file.
fn entries(text: &str) -> Vec<Entry> {
    let Ok(document) = DeTable::parse(text) else { return Vec::new() };
    let mut entries = Vec::new();
    let mut tables: Vec<(String, &DeTable<'_>)> = vec![(String::new(), document.get_ref())];
    while let Some((section, table)) = tables.pop() {
        for (key, value) in table {
            let name = format!("{section}{}", key.get_ref());
            match value.get_ref() {
                DeValue::Table(inner) => tables.push((format!("{name}."), inner)),
                DeValue::Array(items) => {
                    let inner = items.iter().filter_map(|item| item.get_ref().as_table());
                    tables.extend(inner.map(|inner| (format!("{name}."), inner)));
                }
                _ => {}
            }
            let section = section.clone();
            entries.push(Entry { key: name, section, start: key.span().start, end: value.span().end });
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    /// The error and the hint of a file `c.toml` with this content.
    fn error(text: &str) -> (String, String) {
        let error = Config::parse(Path::new("c.toml"), text).unwrap_err().body();
        assert_eq!(error.message.lines().count(), 1, "{}", error.message);
        (error.message, error.hint.unwrap_or_default())
    }

    #[test]
    fn missing_value_is_reported_as_nothing() {
        for text in ["root =", "root =\nsocket = \"/s\"", "root = # later"] {
            let expected = "root: expected a text in quotes, a number, true or false, found nothing";
            assert!(error(text).0.ends_with(expected), "{}", error(text).0);
        }
    }

    #[test]
    fn unknown_key_is_named_with_its_place_and_the_nearest_key() {
        for (text, message, hint) in [
            ("rooot = \"/x\"", "c.toml:1:1: unknown key \"rooot\"", "did you mean root?"),
            ("\n[space]\n  qouta = 1\n", "c.toml:3:3: unknown key \"qouta\"", "did you mean space.quota?"),
            ("quota = 1", "c.toml:1:1: unknown key \"quota\"", "quota belongs to the section [space]"),
            ("[space]\nroot = \"/x\"", "c.toml:2:1: unknown key \"root\"", "root must come before the first"),
            ("[transfer]\nzzz = 1", "c.toml:2:1: unknown key \"zzz\"", "lists all keys"),
            ("[scub]\nrate = 1", "c.toml:1:2: unknown key \"scub\"", "did you mean [scrub]?"),
            (
                "[quotas.users]\n0 = { hrad = 1 }",
                "c.toml:2:7: unknown key \"hrad\"",
                "mean quotas.users.0.hard?",
            ),
            ("[quotas.default]\nsfot = 1", "c.toml:2:1: unknown key \"sfot\"", "mean quotas.default.soft?"),
            ("[access]\nraed = []", "c.toml:2:1: unknown key \"raed\"", "did you mean access.read?"),
        ] {
            let (found, found_hint) = error(text);
            assert_eq!(found, message, "{text}");
            assert!(found_hint.contains(hint), "{text}: {found_hint}");
        }
    }

    #[test]
    fn wrong_value_is_named_with_its_key_and_what_is_expected() {
        for (text, message) in [
            ("[space]\nquota = -5", "c.toml:2:9: space.quota: SIZE, found -5"),
            ("[space]\nquota = true", "c.toml:2:9: space.quota: SIZE, found true"),
            ("[space]\nquota = 1.5", "c.toml:2:9: space.quota: SIZE, found 1.5"),
            (
                "[space]\nquota = 20",
                "c.toml:2:9: space.quota: expected a unit in quotes: 20MiB or 20GiB, or 20B for bytes, found 20",
            ),
            ("[space]\nquota = []", "c.toml:2:9: space.quota: SIZE, found a list"),
            ("[space]\nquota = \"much\"", "c.toml:2:9: space.quota: SIZE, found \"much\""),
            (
                "[scrub]\nrate_bytes_per_second = \"fast\"",
                "c.toml:2:25: scrub.rate_bytes_per_second: expected a rate such as \"50 MiB/s\" or a number of \
                 bytes per second, found \"fast\"",
            ),
            (
                "[space]\nhigh_watermark = 300",
                "c.toml:2:18: space.high_watermark: expected a percentage from 0 to 100, found 300",
            ),
            (
                "[transfer]\nmax_connections = -1",
                "c.toml:2:19: transfer.max_connections: expected a whole number that is not negative, found -1",
            ),
            (
                "durability = \"fsynk\"",
                "c.toml:1:14: durability: expected \"auto\", \"fsync\" or \"syncfs\", found \"fsynk\"",
            ),
            ("single_user = 1", "c.toml:1:15: single_user: expected true or false, found 1"),
            (
                "root = \"models\"",
                "c.toml:1:8: root: expected an absolute path such as \"/srv/models\", found \"models\"",
            ),
            (
                "ca_files = [\"/a\", \"~/b\"]",
                "c.toml:1:19: ca_files: expected an absolute path such as \"/srv/models\", found \"~/b\"",
            ),
            (
                "socket_mode = \"0060\"",
                "c.toml:1:15: socket_mode: expected an octal mode such as \"0660\", at least \"0600\", found \"0060\"",
            ),
            ("durability = 5", "c.toml:1:14: durability: expected a text in quotes, found 5"),
            (
                "single_user = yes",
                "c.toml:1:15: single_user: expected a text in quotes, a number, true or false, found yes",
            ),
            ("single_user = \"map\"", "c.toml:1:15: single_user: expected true or false, found \"map\""),
            ("space = 5", "c.toml:1:9: space: expected a section such as [space], found 5"),
        ] {
            let message = message.replace("SIZE", "expected a size such as \"200 GiB\"");
            assert_eq!(error(text).0, message, "{text}");
        }
    }

    /// A wrong value of any key, present and future, is reported in the one form that errors have.
    #[test]
    fn error_of_every_key_says_what_is_expected_and_what_was_found() {
        for key in names() {
            for (value, found) in [("-1.5", "-1.5"), ("[[1.5]]", "a list"), ("yes", "yes")] {
                let key = key.trim_matches(['[', ']']);
                let text = match key.rsplit_once('.') {
                    None => format!("{key} = {value}"),
                    Some((list @ ("policy.rules" | "trust"), name)) => {
                        format!("[[{list}]]\n{name} = {value}")
                    }
                    Some((section, name)) => format!("[{section}]\n{name} = {value}"),
                };
                let (message, _) = error(&text);
                let (_, what) =
                    message.split_once(&format!(": {key}: ")).unwrap_or_else(|| panic!("{message}"));
                let (expected, shown) = what.rsplit_once(", found ").unwrap_or_else(|| panic!("{message}"));
                assert!(expected.starts_with("expected ") && expected.len() > 10, "{text}: {message}");
                assert!(shown == found || value.contains(shown), "{text}: {message}");
            }
        }
    }

    #[test]
    fn values_that_contradict_each_other_are_named_with_their_place() {
        let (message, _) = error("[space]\nquota = '1 B'\nlow_watermark = 96");
        assert!(message.starts_with("c.toml:3:1: space.low_watermark: expected low_watermark to be at most high_watermark, found 96"), "{message}");
        let (message, _) = error("[space]\nevict = \"all\"");
        assert!(
            message.starts_with("c.toml:2:1: space.evict: expected quota or min_free beside it"),
            "{message}"
        );
        let (message, _) = error("# ü\n[transfer]\nmax_connections = 65");
        assert!(
            message.starts_with("c.toml:3:1: transfer.max_connections: expected 1 to 64, found 65"),
            "{message}"
        );
    }

    #[test]
    fn syntax_errors_are_one_line_without_replaced_characters() {
        for text in
            ["[mirrors", "root = /x", "root = \"/x", "= 1", "\u{0}", "a = 1\na = 2", "[space]\n[space]"]
        {
            let (message, _) = error(text);
            assert!(message.starts_with("c.toml:"), "{text}: {message}");
            assert!(
                !message.contains(char::is_control) && !message.contains('\u{fffd}'),
                "{text}: {message}"
            );
        }
    }
}
