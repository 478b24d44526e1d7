//! The audit log: its records, and the request that reads them.
//!
//! A record is one line of a file and one line of the response to `POST /v1/log`.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::ErrorResponse;

/// The longest line of the audit log, with its line break. A longer record is written without its details.
pub const MAX_LINE_BYTES: usize = 16 << 10;

/// The most characters of a name, and of a message, in a record.
const MAX_TEXT_CHARS: usize = 1000;

/// What a request, or the daemon itself, has done or was refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// When it ended, RFC 3339 in UTC, with milliseconds.
    pub time: String,
    /// The ID of the request; absent for what the daemon did by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Who requested it.
    pub uid: u32,
    /// The name of that user, if the daemon knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The process that requested it, if the kernel reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The name of its program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// What was requested, such as `pull` or `rm`; `evict` and `scrub` for what the daemon did by itself.
    pub verb: String,
    /// The model, as it is stored, or else as it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The digest of its manifest; for `scrub` the one of the blob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The bytes that were downloaded, written, freed, verified or opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// `ok`, `cancelled`, `unacknowledged`, or the code of the error; of the verb `audit`, `dropped` or `omitted`.
    pub result: String,
    /// The message of the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How long the request took, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// Whether nothing was changed because the client asked for a dry run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// More facts, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, Value>,
}

impl AuditRecord {
    /// The record as a line of the log, at most [`MAX_LINE_BYTES`] long. All control characters are escaped; what
    /// follows `?` in a URL, and users and passwords in it, are removed.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let short = |text: &String| without_secrets(text).chars().take(MAX_TEXT_CHARS).collect();
        let record = Self {
            model: self.model.as_ref().map(short),
            message: self.message.as_ref().map(short),
            command: self.command.as_ref().map(short),
            details: self.details.iter().map(|(name, value)| (name.clone(), short_detail(value))).collect(),
            ..self.clone()
        };
        let line = record.json_line();
        if line.len() <= MAX_LINE_BYTES {
            return line;
        }
        let details = BTreeMap::from([("omitted_bytes".to_owned(), json!(line.len()))]);
        Self { details, ..record }.json_line()
    }

    fn json_line(&self) -> Vec<u8> {
        // Strings and numbers can always be serialised.
        let mut line = escape_controls(serde_json::to_string(self).unwrap_or_default()).into_bytes();
        line.push(b'\n');
        line
    }

    /// The record of a line, with or without its line break; `None` if it is not one, as the rest of a line that was
    /// being written when the machine failed.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        if line.len() > MAX_LINE_BYTES {
            return None;
        }
        serde_json::from_slice(line).ok()
    }
}

/// JSON with DEL and the C1 control characters escaped too, which JSON does not require: some terminals take U+009B for
/// the start of an escape sequence.
#[must_use]
pub fn escape_controls(json: String) -> String {
    let is_raw = |c: char| matches!(c, '\u{7f}'..='\u{9f}');
    // JSON has these in strings only.
    if !json.contains(is_raw) {
        return json;
    }
    let escaped = |c: char| if is_raw(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escaped).collect()
}

fn short_detail(value: &Value) -> Value {
    match value {
        Value::String(text) => without_secrets(text).chars().take(MAX_TEXT_CHARS).collect::<String>().into(),
        value => value.clone(),
    }
}

/// The text without the queries, fragments, users and passwords of the URLs in it.
fn without_secrets(text: &str) -> String {
    if !text.contains("://") {
        return text.to_owned();
    }
    text.split_inclusive(char::is_whitespace).map(without_secret).collect()
}

fn without_secret(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let (url, removed) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    let (host, path) = url.split_at(url.find('/').unwrap_or(url.len()));
    let host = host.rsplit_once('@').map_or(host, |(_user, host)| host);
    let end: String = removed.chars().rev().take_while(|c| c.is_whitespace()).collect();
    format!("{scheme}://{host}{path}{end}")
}

/// Parameters of `POST /v1/log`. A record is in the response if all that is given applies to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogParams {
    /// The user, by name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The model, by name or by its digest's first digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The verb.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    /// The earliest time, RFC 3339 in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Only what failed or was refused.
    pub failed: bool,
    /// The most records: the latest ones. 1000 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Continue with the records that are written from now on, until the client disconnects.
    pub follow: bool,
}

/// One line of the response to `POST /v1/log`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LogEvent {
    /// The log cannot be read; nothing follows.
    Failed(ErrorResponse),
    /// A record.
    Record(Box<AuditRecord>),
    /// All records were sent; nothing follows.
    Done(LogEnd),
}

/// The last line of the response to `POST /v1/log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEnd {
    /// The number of lines that are no records, such as an incomplete one after a power cut.
    pub unreadable_lines: u64,
    /// Whether the response has the records of this user only, because it does not administer the store.
    pub own_only: bool,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> AuditRecord {
        AuditRecord { time: "t".into(), verb: "pull".into(), result: "ok".into(), ..AuditRecord::default() }
    }

    #[test]
    fn line_has_no_line_break_and_no_control_character_inside() {
        let model = Some("a\nb\u{1b}[31m\u{7f}\u{80}\u{9b}1m\u{9f}\u{a0}".to_owned());
        let line = AuditRecord { model: model.clone(), ..record() }.line();
        let text = String::from_utf8(line.clone()).unwrap();
        assert_eq!(text.chars().filter(|c| c.is_control()).count(), 1, "{text:?}");
        assert!(text.contains(r"\u007f\u0080\u009b1m\u009f"), "{text}");
        assert_eq!(AuditRecord::parse(&line).unwrap().model, model);
    }

    #[test]
    fn long_record_is_written_without_its_details() {
        let details = BTreeMap::from([("names".to_owned(), json!(vec!["x"; 10_000]))]);
        let line = AuditRecord { model: Some("m".repeat(5000)), details, ..record() }.line();
        assert!(line.len() <= MAX_LINE_BYTES);
        let parsed = AuditRecord::parse(&line).unwrap();
        assert_eq!(parsed.model.unwrap().len(), MAX_TEXT_CHARS);
        assert!(parsed.details.contains_key("omitted_bytes"));
    }

    #[test]
    fn details_lose_what_may_be_secret_too() {
        let details = BTreeMap::from([("from".to_owned(), json!("https://u:p@host/m.gguf?token=x"))]);
        let line = AuditRecord { details, ..record() }.line();
        assert_eq!(AuditRecord::parse(&line).unwrap().details["from"], "https://host/m.gguf");
    }

    #[test]
    fn urls_lose_what_may_be_secret() {
        for (text, left) in [
            ("https://u:p@host/a?token=x", "https://host/a"),
            ("get https://host/a?sig=1: refused", "get https://host/a refused"),
            ("https://host/a#f b?c", "https://host/a b?c"),
            ("https://host/a@b", "https://host/a@b"),
            ("llama3:8b?", "llama3:8b?"),
        ] {
            assert_eq!(without_secrets(text), left);
        }
    }

    #[test]
    fn part_of_a_line_is_no_record() {
        let line = record().line();
        for length in 0..line.len() - 1 {
            assert_eq!(AuditRecord::parse(&line[..length]), None, "{length}");
        }
        assert_eq!(AuditRecord::parse(&vec![b' '; MAX_LINE_BYTES + 1]), None);
    }

    proptest! {
        #[test]
        fn record_is_read_as_it_was_written(
            uid: u32, pid: Option<i32>, bytes: Option<u64>, verb in ".{0,20}", model in ".{0,50}",
            message in proptest::option::of("[^:/]{0,80}"), dry_run: bool,
        ) {
            prop_assume!(!model.contains("://"));
            let record = AuditRecord {
                uid, pid, bytes, verb, message, dry_run, model: Some(model),
                details: BTreeMap::from([("n".to_owned(), json!(bytes))]), ..record()
            };
            let line = record.line();
            prop_assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            prop_assert_eq!(AuditRecord::parse(&line), Some(record));
        }

        #[test]
        fn any_bytes_are_a_record_or_none(bytes: Vec<u8>) {
            if let Some(record) = AuditRecord::parse(&bytes) {
                prop_assert!(AuditRecord::parse(&record.line()).is_some());
            }
        }
    }
}
