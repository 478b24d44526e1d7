//! Which records a request selects.

use std::time::SystemTime;

use blobd_client::protocol::audit::{AuditRecord, LogParams};
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;
use serde_json::Value;

use crate::names::Names;

#[derive(Clone, Debug, Default)]
pub(crate) struct Filter {
    /// The only user whose records the client may read.
    own_uid: Option<u32>,
    /// The uid, if there is one, and the text: it may be the name of a user that no longer exists.
    user: Option<(Option<u32>, String)>,
    model: Option<Model>,
    verbs: Vec<String>,
    results: Vec<String>,
    since: Option<SystemTime>,
    until: Option<SystemTime>,
    failed: bool,
}

#[derive(Clone, Debug)]
struct Model {
    text: String,
    name: Option<ModelName>,
    /// The first digits of a digest, in lower case, if it can be that.
    digits: Option<String>,
}

#[derive(Clone, Debug)]
enum ModelName {
    Name(Reference),
    Pattern(NamePattern),
}

impl Filter {
    /// `own_uid` is the only user whose records the client may read, unless it administers the store.
    pub(crate) fn new(params: &LogParams, own_uid: Option<u32>) -> Result<Self, String> {
        let user = params.user.as_ref().map(|user| (user_id(user), user.clone()));
        Ok(Self {
            own_uid,
            user,
            model: params.model.as_deref().map(Model::new),
            verbs: params.verbs.clone(),
            results: params.results.clone(),
            since: requested_time("since", params.since.as_deref())?,
            until: requested_time("until", params.until.as_deref())?,
            failed: params.failed,
        })
    }

    /// Restricts the filter to a user who no longer administers the store.
    pub(super) const fn restrict_to(&mut self, uid: u32) {
        self.own_uid = Some(uid);
    }

    pub(super) const fn since(&self) -> Option<SystemTime> {
        self.since
    }

    pub(super) fn matches(&self, record: &AuditRecord) -> bool {
        self.own_uid.is_none_or(|uid| record.uid == uid)
            && self.user.as_ref().is_none_or(|(uid, name)| {
                *uid == Some(record.uid) || record.user.as_ref().is_some_and(|user| user == name)
            })
            && (self.verbs.is_empty() || self.verbs.contains(&record.verb))
            && (self.results.is_empty() || self.results.contains(&record.result))
            && (!self.failed || is_failure(record))
            && self.since.is_none_or(|since| time(record).is_none_or(|time| time >= since))
            && self.until.is_none_or(|until| time(record).is_none_or(|time| time < until))
            && self.model.as_ref().is_none_or(|model| model.is_in(record))
    }
}

/// Switching the log on is not a failure.
fn is_failure(record: &AuditRecord) -> bool {
    !matches!(record.result.as_str(), "ok" | "on")
}

fn requested_time(name: &str, text: Option<&str>) -> Result<Option<SystemTime>, String> {
    let time = |text: &str| {
        let time = humantime::parse_rfc3339_weak(text);
        time.map_err(|error| format!("{name}: {error}: expected a time as in RFC 3339, found {text:?}"))
    };
    text.map(time).transpose()
}

/// Uses the name service, which may take seconds.
fn user_id(user: &str) -> Option<u32> {
    user.parse().ok().or_else(|| Names::system().uid_of(user).ok())
}

/// `None` if the record has no valid time.
pub(super) fn time(record: &AuditRecord) -> Option<SystemTime> {
    humantime::parse_rfc3339(&record.time).ok()
}

impl Model {
    fn new(text: &str) -> Self {
        /// Fewer would be in many digests by chance.
        const MIN_DIGITS: usize = 4;
        let digits = text.strip_prefix("sha256:").unwrap_or(text);
        let is_hex = digits.len() >= MIN_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let name = match NamePattern::is_pattern(text) {
            true => text.parse().ok().map(ModelName::Pattern),
            false => text.parse().ok().map(ModelName::Name),
        };
        Self { text: text.to_owned(), name, digits: is_hex.then(|| digits.to_ascii_lowercase()) }
    }

    /// Whether this is the record's model, its source, or a model that the request has removed or replaced.
    fn is_in(&self, record: &AuditRecord) -> bool {
        let has_digits = |digest: &str| {
            let hex = digest.strip_prefix("sha256:").unwrap_or(digest);
            self.digits.as_ref().is_some_and(|digits| hex.starts_with(digits.as_str()))
        };
        let names = record.model.iter().flat_map(|models| models.split(' '));
        names.chain(record.details.get("from").and_then(Value::as_str)).any(|name| self.is(name))
            || record.digest.is_some_and(|digest| has_digits(&digest.to_string()))
            || record.details.values().filter_map(Value::as_array).flatten().any(|entry| {
                let text = |key| entry.get(key).and_then(Value::as_str);
                let is_listed = |text: &str| self.is(text) || text.starts_with("sha256:") && has_digits(text);
                text("model").is_some_and(|name| self.is(name))
                    || text("digest").is_some_and(has_digits)
                    || entry.as_str().is_some_and(is_listed)
            })
    }

    fn is(&self, name: &str) -> bool {
        let is_meant = |found: Reference| match &self.name {
            Some(ModelName::Name(name)) => name.same_model(&found),
            Some(ModelName::Pattern(pattern)) => pattern.matches(&found),
            None => false,
        };
        name == self.text || name.parse().is_ok_and(is_meant)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record() -> AuditRecord {
        AuditRecord {
            time: "2026-11-24T10:00:00.500Z".to_owned(),
            uid: 70001,
            user: Some("ann".to_owned()),
            verb: "rm".to_owned(),
            model: Some("llama3:8b".to_owned()),
            digest: Some(blobd_store_format::digest::Digest::of(b"m")),
            result: "ok".to_owned(),
            ..AuditRecord::default()
        }
    }

    fn matches(params: &LogParams) -> bool {
        Filter::new(params, None).unwrap().matches(&record())
    }

    /// Whether a filter for this model matches.
    fn is_in(model: &str, record: &AuditRecord) -> bool {
        let params = LogParams { model: Some(model.to_owned()), ..LogParams::default() };
        Filter::new(&params, None).unwrap().matches(record)
    }

    #[test]
    fn all_given_conditions_must_apply() {
        let text = |text: &str| Some(text.to_owned());
        let user = |user| LogParams { user: text(user), ..LogParams::default() };
        assert!(matches(&user("ann")) && matches(&user("70001")) && !matches(&user("bob")));
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let verbs = |verbs| LogParams { verbs: list(verbs), ..user("ann") };
        assert!(matches(&verbs(&["rm"])) && matches(&verbs(&["pull", "rm"])) && !matches(&verbs(&["pull"])));
        let results = |results| LogParams { results: list(results), ..user("ann") };
        assert!(matches(&results(&["denied", "ok"])) && !matches(&results(&["denied"])));
        let since = |since| LogParams { since: text(since), ..LogParams::default() };
        assert!(matches(&since("2026-11-24T10:00:00Z")) && !matches(&since("2026-11-24T10:00:01Z")));
        let until = |until| LogParams { until: text(until), ..LogParams::default() };
        assert!(matches(&until("2026-11-24T10:00:01Z")) && !matches(&until("2026-11-24T10:00:00.500Z")));
        assert!(!matches(&LogParams { failed: true, ..LogParams::default() }));
        let refusal = Filter::new(&since("soon"), None).unwrap_err();
        assert!(refusal.contains("\"soon\""), "{refusal}");
    }

    #[test]
    fn model_is_found_by_its_name_in_any_form_and_by_its_digest() {
        let model = |model: &str| is_in(model, &record());
        let digest = record().digest.unwrap();
        for name in [
            "llama3:8b",
            "LLAMA3:8B",
            "llama*",
            "registry.ollama.ai/library/llama3:8b",
            &digest.to_string(),
            &digest.short(),
        ] {
            assert!(model(name), "{name}");
        }
        assert!(!model("llama3") && !model("llama") && !model("qwen*") && !model("0000"));
    }

    #[test]
    fn model_is_found_among_those_that_were_removed() {
        let details = [("removed".to_owned(), json!([{ "model": "a:b" }, { "more": 1 }]))].into();
        let record = AuditRecord { model: None, details, ..record() };
        assert!(is_in("a:b", &record) && !is_in("a:c", &record));
    }

    #[test]
    fn model_is_found_among_plain_names_and_digests_and_as_a_source() {
        let digest = blobd_store_format::digest::Digest::of(b"blob").to_string();
        let details = |name: &str, value| AuditRecord {
            model: None,
            details: [(name.to_owned(), value)].into(),
            ..record()
        };
        let list = details("names", json!(["a:b", digest, "abcdef"]));
        let source = details("from", json!("registry.ollama.ai/library/a:b"));
        assert!(is_in("a:b", &list) && is_in(&digest[..20], &list) && is_in("a:b", &source));
        assert!(!is_in("a:c", &list) && !is_in("a:c", &source));
        assert!(!is_in("abcd", &list), "the beginning of a name is not that of a digest");
    }

    #[test]
    fn client_that_does_not_administer_gets_its_own_records_only() {
        let filter = |uid| Filter::new(&LogParams::default(), Some(uid)).unwrap();
        assert!(filter(70001).matches(&record()) && !filter(70002).matches(&record()));
    }
}
