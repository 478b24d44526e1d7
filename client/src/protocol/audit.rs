//! The audit log: its records, and the request that reads them.
//!
//! A record is one line of a file and one line of the response to `Route::Log`.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Time;
use super::lists::one_or_several;

/// The longest line of the audit log, with its line break. A longer record is written without its details.
pub const MAX_LINE_BYTES: usize = 16 << 10;

/// What `"seq":18446744073709551615,` adds to a line.
const SEQ_BYTES: usize = 27;

/// The most characters of a name, and of a message, in a record.
const MAX_TEXT_CHARS: usize = 1000;

/// How many entries of each list a record keeps if it would be too long otherwise: the first number that fits.
const LIST_LENGTHS: [usize; 6] = [usize::MAX, 50, 24, 12, 4, 1];

/// What a request, or the daemon itself, has done or was refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// Its number in the log, higher than those of earlier records, whatever the clock says. Records of earlier
    /// versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// When it ended, with milliseconds.
    pub time: Time,
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
    /// What was requested, such as `pull` or `rm`; `evict`, `scrub`, `start`, `stop`, `reload` and `audit` for what the
    /// daemon did by itself.
    pub verb: String,
    /// The model's short name, several separated by spaces; if it is not stored, as it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The digest of its manifest; for `scrub`, the digest of the blob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The bytes that were downloaded, written, freed, verified or opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// `ok`, `cancelled`, `unacknowledged`, or the code of the error; of the verb `audit`, `dropped`, `omitted`, `on` or
    /// `off`.
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
    /// More facts, by name: `from` is the source of an edit, a tag or a rename.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, Value>,
}

impl AuditRecord {
    /// The record as a line of the log, at most [`MAX_LINE_BYTES`] long with the number that [`Self::numbered`] adds.
    /// All control characters are escaped; what follows `?` in a URL, and users and passwords in it, are removed.
    pub fn line(&self) -> Vec<u8> {
        let record = Self {
            model: self.model.as_deref().map(short),
            message: self.message.as_deref().map(short),
            command: self.command.as_deref().map(short),
            ..self.clone()
        };
        // Long names must not remove the list of what was done: it is shortened instead.
        for entries in LIST_LENGTHS {
            let details =
                self.details.iter().map(|(name, value)| (name.clone(), short_detail(value, entries)));
            let line = Self { details: details.collect(), ..record.clone() }.json_line();
            if line.len() + SEQ_BYTES <= MAX_LINE_BYTES {
                return line;
            }
        }
        let bytes = serde_json::to_string(&self.details).unwrap_or_default().len();
        let details = BTreeMap::from([("omitted_bytes".to_owned(), json!(bytes))]);
        Self { details, ..record }.json_line()
    }

    /// The line of a record without a number, with this one.
    pub fn numbered(line: &[u8], seq: u64) -> Vec<u8> {
        let mut numbered = format!("{{\"seq\":{seq},").into_bytes();
        numbered.extend_from_slice(line.get(1..).unwrap_or_default());
        numbered
    }

    fn json_line(&self) -> Vec<u8> {
        // Strings and numbers can always be serialised.
        let mut line = escape_controls(serde_json::to_string(self).unwrap_or_default()).into_bytes();
        line.push(b'\n');
        line
    }

    /// The record of a line, with or without its line break; `None` if it is not one, as the rest of a line that was
    /// being written when the machine failed.
    pub fn parse(line: &[u8]) -> Option<Self> {
        if line.len() > MAX_LINE_BYTES {
            return None;
        }
        serde_json::from_slice(line).ok()
    }
}

/// JSON with DEL and the C1 control characters escaped too, which JSON does not require: some terminals take U+009B for
/// the start of an escape sequence.
pub fn escape_controls(json: String) -> String {
    let is_raw = |c: char| matches!(c, '\u{7f}'..='\u{9f}');
    // JSON has these in strings only.
    if !json.contains(is_raw) {
        return json;
    }
    let escaped = |c: char| if is_raw(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    json.chars().map(escaped).collect()
}

fn short(text: &str) -> String {
    without_secrets(text).chars().take(MAX_TEXT_CHARS).collect()
}

/// The value with short texts, and at most `entries` of a list. The daemon makes these values, so they are not deep.
fn short_detail(value: &Value, entries: usize) -> Value {
    match value {
        Value::String(text) => short(text).into(),
        Value::Array(list) => {
            let left = list.len().saturating_sub(entries);
            let more = (left > 0).then(|| json!({ "more": left.saturating_add(already_left(list)) }));
            list.iter().take(entries).map(|entry| short_detail(entry, entries)).chain(more).collect()
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (short(name), short_detail(value, entries)));
            Value::Object(fields.collect())
        }
        value => value.clone(),
    }
}

/// How many entries the list has lost before, apart from the entry that says so.
fn already_left(list: &[Value]) -> usize {
    let more = list.last().and_then(|last| last.get("more")?.as_u64());
    more.map_or(0, |more| usize::try_from(more).unwrap_or(usize::MAX).saturating_sub(1))
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

/// Parameters of `Route::Log`. The response has the records to which all given conditions apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogParams {
    /// The user, by name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The model, by name or by its digest's first digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The verb, or one of several.
    #[serde(rename = "verb", with = "one_or_several", skip_serializing_if = "Vec::is_empty")]
    pub verbs: Vec<String>,
    /// The result, or one of several.
    #[serde(rename = "result", with = "one_or_several", skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<String>,
    /// The earliest time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// The time after the latest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
    /// Only what failed or was refused.
    pub failed: bool,
    /// The most records: the latest ones. 1000 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Continue with the records that are written from now on, until the client disconnects.
    pub follow: bool,
}

/// The last line of the response to `Route::Log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEnd {
    /// The number of lines that are not records, such as an incomplete one after a power cut.
    pub unreadable_lines: u64,
    /// Whether the response has the records of this user only, because it does not administer the store.
    pub own_only: bool,
    /// How many earlier records match that the limit has left out, counted up to
    /// [`MAX_EARLIER`](Self::MAX_EARLIER).
    #[serde(default)]
    pub earlier_records: u64,
}

impl LogEnd {
    /// The highest number of earlier records that is counted: there may be more.
    pub const MAX_EARLIER: u64 = 10_000;
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
    fn long_record_is_written_without_details_that_cannot_be_shortened() {
        let many = (0..10_000).map(|number| (format!("n{number}"), json!(number)));
        let line = AuditRecord { model: Some("m".repeat(5000)), details: many.collect(), ..record() }.line();
        assert!(line.len() <= MAX_LINE_BYTES);
        let parsed = AuditRecord::parse(&line).unwrap();
        assert_eq!(parsed.model.unwrap().len(), MAX_TEXT_CHARS);
        assert!(parsed.details.contains_key("omitted_bytes"));
    }

    #[test]
    fn long_names_shorten_the_list_of_what_was_done_and_do_not_remove_it() {
        let entry = |number| json!({ "model": format!("{number}{}", "x".repeat(2000)), "freed_bytes": 1 });
        let list = (0..50).map(entry).chain([json!({ "more": 7 })]).collect::<Vec<_>>();
        let line = AuditRecord { details: [("removed".to_owned(), json!(list))].into(), ..record() }.line();
        assert!(line.len() <= MAX_LINE_BYTES);
        let removed = AuditRecord::parse(&line).unwrap().details["removed"].as_array().unwrap().clone();
        let (more, listed) = removed.split_last().unwrap();
        assert!(!listed.is_empty() && listed[0]["model"].as_str().unwrap().starts_with("0xx"));
        assert_eq!(more["more"].as_u64(), Some(57 - listed.len() as u64));
    }

    #[test]
    fn number_is_added_to_a_line() {
        let line = AuditRecord::numbered(&record().line(), u64::MAX);
        assert_eq!(AuditRecord::parse(&line), Some(AuditRecord { seq: Some(u64::MAX), ..record() }));
        let details = BTreeMap::from([("text".to_owned(), json!(vec!["x"; 10_000]))]);
        let longest = AuditRecord { details, ..record() }.line();
        assert!(AuditRecord::numbered(&longest, u64::MAX).len() <= MAX_LINE_BYTES);
    }

    #[test]
    fn verbs_and_results_are_one_text_or_a_list() {
        let parse = |json: &str| serde_json::from_str::<LogParams>(json).unwrap();
        assert_eq!(parse(r#"{"verb":"rm"}"#).verbs, ["rm"]);
        assert_eq!(parse(r#"{"verb":["rm","pull"],"result":"denied"}"#).verbs, ["rm", "pull"]);
        assert_eq!(parse("{}").verbs, parse(r#"{"verb":null}"#).verbs);
        // As daemons of earlier versions read it.
        let one = LogParams { verbs: vec!["rm".to_owned()], ..LogParams::default() };
        assert_eq!(serde_json::to_value(&one).unwrap()["verb"], "rm");
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
    fn part_of_a_line_is_not_a_record() {
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
