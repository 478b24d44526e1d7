//! The sentence in a JSON document about an error.

use serde_json::{Map, Value};

/// Keys of the sentence, the most informative first. Case and underscores do not matter.
const SENTENCES: [&str; 11] = [
    "errordescription",
    "errormessage",
    "errormsg",
    "message",
    "msg",
    "detail",
    "details",
    "description",
    "reason",
    "errordetail",
    "faultstring",
];
/// Keys of the kind of error, which is often a sentence too.
const KINDS: [&str; 2] = ["error", "title"];
/// Keys of an error code, which is quoted only if there is nothing else.
const CODES: [&str; 3] = ["code", "errorcode", "status"];
/// Keys whose values may contain the error object.
const INNER: [&str; 7] = ["error", "errors", "message", "messages", "detail", "fault", "response"];
/// How deep the sentence may be nested.
const MAX_DEPTH: usize = 4;
/// How many errors are quoted at most.
const MAX_ERRORS: usize = 3;

pub(super) fn sentence(json: &str) -> Option<String> {
    let mut value = first_value(json).or_else(|| first_value(&without_lone_surrogates(json)))?;
    for depth in 0..MAX_DEPTH {
        let inner = match &mut value {
            Value::String(text) => return Some(std::mem::take(text)),
            Value::Array(errors) if errors.iter().all(|error| own_sentence(error).is_some()) => {
                let sentences = errors.iter().filter_map(own_sentence).take(MAX_ERRORS);
                return Some(without_repetition(sentences)).filter(|all| !all.is_empty());
            }
            Value::Array(errors) => errors.first_mut(),
            Value::Object(object) => match own_sentence_of(object) {
                Some(sentence) => return Some(sentence),
                None if depth > 0 && inner_mut(object).is_none() => return sentence_of_fields(object),
                None => inner_mut(object),
            },
            _ => None,
        };
        value = inner.map(Value::take)?;
    }
    None
}

/// The first JSON value of a text, whatever follows it. The parser limits the depth.
fn first_value(json: &str) -> Option<Value> {
    serde_json::Deserializer::from_str(json).into_iter().next()?.ok()
}

/// Replaces escaped lone surrogates, which the parser refuses, by U+FFFD.
fn without_lone_surrogates(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let mut rest = json;
    while let Some((before, escape)) = rest.split_once('\\') {
        text.push_str(before);
        let second = || escape.get(5..)?.strip_prefix('\\').and_then(code_unit);
        let (copied, after) = match code_unit(escape) {
            Some(0xd800..=0xdbff) if matches!(second(), Some(0xdc00..=0xdfff)) => escape.split_at(11),
            Some(0xd800..=0xdfff) => ("ufffd", escape.get(5..).unwrap_or_default()),
            // The escaped character may itself be a backslash.
            _ => escape.split_at(escape.chars().next().map_or(0, char::len_utf8)),
        };
        text.push('\\');
        text.push_str(copied);
        rest = after;
    }
    text + rest
}

/// The code unit of an escape, after its backslash: `ud800`.
fn code_unit(escape: &str) -> Option<u16> {
    let digits = escape.strip_prefix('u')?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

/// The sentence of a document that contains only an error, under a key that no other document has.
pub(super) fn sentence_of_error(json: &str) -> Option<String> {
    let parsed = serde_json::from_str(json).or_else(|_| serde_json::from_str(&without_lone_surrogates(json)));
    let document: Map<String, Value> = parsed.ok()?;
    let is_error = ["error", "errors"].iter().filter_map(|key| document.get(*key)).any(|error| match error {
        Value::String(text) => !text.is_empty(),
        Value::Array(errors) => !errors.is_empty(),
        error => error.is_object(),
    });
    is_error.then(|| sentence(json)).flatten()
}

fn without_repetition(sentences: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = Vec::new();
    for sentence in sentences {
        if !all.contains(&sentence) {
            all.push(sentence);
        }
    }
    all.join("; ")
}

/// The errors of each field of a request, as in `{"tag":["is invalid"]}`.
fn sentence_of_fields(fields: &Map<String, Value>) -> Option<String> {
    let faults = fields.iter().flat_map(|(field, faults)| {
        let faults = faults.as_array().into_iter().flatten().filter_map(Value::as_str);
        faults.map(move |fault| format!("{field}: {fault}"))
    });
    Some(without_repetition(faults.take(MAX_ERRORS))).filter(|all| !all.is_empty())
}

fn own_sentence(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(object) => own_sentence_of(object),
        _ => None,
    }
}

/// The object's own text: the kind of error and the sentence if both are informative, or else a code.
fn own_sentence_of(object: &Map<String, Value>) -> Option<String> {
    let kind = text_of(object, &KINDS);
    let sentence = text_of(object, &SENTENCES);
    match (kind, sentence) {
        // `invalid_token` and `Not Found` say less than the sentence.
        (Some(kind), Some(sentence)) if kind.split_whitespace().count() > 2 && !sentence.contains(kind) => {
            Some(format!("{}: {sentence}", kind.trim_end_matches(['.', ':', ' '])))
        }
        (_, Some(sentence)) => Some(sentence.to_owned()),
        (Some(kind), None) => Some(kind.to_owned()),
        (None, None) if INNER.iter().any(|key| has_error(object, key)) => None,
        (None, None) => text_of(object, &CODES).map(str::to_owned),
    }
}

fn has_error(object: &Map<String, Value>, key: &str) -> bool {
    object.iter().any(|(name, value)| is(name, key) && (value.is_object() || value.is_array()))
}

fn inner_mut<'v>(object: &'v mut Map<String, Value>) -> Option<&'v mut Value> {
    let key = INNER.iter().find(|key| has_error(object, key))?;
    let is_inner =
        |(name, value): &(&String, &'v mut Value)| is(name, key) && (value.is_object() || value.is_array());
    object.iter_mut().find(is_inner).map(|(_, value)| value)
}

/// The first text under one of the keys, in the order of the keys.
fn text_of<'v>(object: &'v Map<String, Value>, keys: &[&str]) -> Option<&'v str> {
    let text = |key: &&str| {
        let named = object.iter().filter(|(name, _)| is(name, key));
        named.filter_map(|(_, value)| value.as_str()).find(|text| !text.trim().is_empty())
    };
    keys.iter().find_map(text)
}

fn is(name: &str, key: &str) -> bool {
    let plain = name.chars().filter(|c| !matches!(c, '_' | '-'));
    plain.map(|c| c.to_ascii_lowercase()).eq(key.chars())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_is_found_in_every_form_that_servers_use() {
        for (json, expected) in [
            (r#"{"error":"Repository not found"}"#, "Repository not found"),
            (r#""just a text""#, "just a text"),
            ("{\"error\":\"first\"}\n{\"error\":\"second", "first"),
            (r#"{"error":{"code":403,"message":"quota exceeded","status":"DENIED"}}"#, "quota exceeded"),
            (
                r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown","detail":{"Tag":"x"}}]}"#,
                "manifest unknown",
            ),
            (r#"{"errors":[{"code":"DENIED","message":""}]}"#, "DENIED"),
            (r#"{"errors":[{"message":"a"},{"message":"b"},{"message":"a"},{"message":"c"}]}"#, "a; b"),
            (r#"{"errors":["first","second"]}"#, "first; second"),
            (
                r#"{"message":"You have reached your pull rate limit"}"#,
                "You have reached your pull rate limit",
            ),
            (r#"{"Code":10010205001,"Message":"not exist: a/b","Success":false}"#, "not exist: a/b"),
            (r#"{"detail":"Invalid revision"}"#, "Invalid revision"),
            (r#"{"detail":[{"loc":["q"],"msg":"field required","type":"missing"}]}"#, "field required"),
            (
                r#"{"type":"about:blank","title":"Your account is frozen.","status":403,"detail":"Pay the bill of May."}"#,
                "Your account is frozen: Pay the bill of May.",
            ),
            (
                r#"{"error":"invalid_token","error_description":"The token has expired"}"#,
                "The token has expired",
            ),
            (r#"{"status":404,"error":"Not Found","message":"no model x","path":"/x"}"#, "no model x"),
            (
                r#"{"message":{"base":["is locked"]},"error":{"message":"locked by its owner"}}"#,
                "locked by its owner",
            ),
            (r#"{"error_code":31045,"error_msg":"access denied"}"#, "access denied"),
            (r#"{"code":"NAME_UNKNOWN"}"#, "NAME_UNKNOWN"),
            (r#"{"errors":{"tag":["is invalid","is long"]}}"#, "tag: is invalid; tag: is long"),
            (r#"{"messages":["no such model"]}"#, "no such model"),
            (r#"{"fault":{"faultstring":"quota exceeded"}}"#, "quota exceeded"),
            (r#"{"error":"caf\ud800 \\ud800 \ud83d\ude00 \udc00x\n"}"#, "caf\u{fffd} \\ud800 😀 \u{fffd}x\n"),
            (r#"{"error":{"errors":[{"reason":"dailyLimit"}]}}"#, "dailyLimit"),
        ] {
            assert_eq!(sentence(json).as_deref(), Some(expected), "{json}");
        }
    }

    #[test]
    fn errors_are_distinguished_from_other_documents() {
        for json in [
            r#"{"error":"no"}"#,
            r#"{"errors":[{"message":"no"}]}"#,
            r#"{"error":{"message":"no"},"schemaVersion":2}"#,
            r#"{"error":"no","path":"\ud800"}"#,
        ] {
            assert_eq!(sentence_of_error(json).as_deref(), Some("no"), "{json}");
        }
        for json in [
            r#"{"schemaVersion":2,"layers":[],"message":"x"}"#,
            r#"{"token":"x","error":null,"errors":[]}"#,
            r#"{"error":""}"#,
            r#"[{"error":"x"}]"#,
            "",
        ] {
            assert_eq!(sentence_of_error(json), None, "{json}");
        }
    }

    #[test]
    fn documents_without_a_sentence_are_not_quoted() {
        let deep = format!("{}\"x\"{}", "[".repeat(20), "]".repeat(20));
        let too_deep = "{\"error\":".repeat(100_000);
        for json in [
            "{}",
            "[]",
            "null",
            "17",
            r#"{"token":"secret"}"#,
            r#"{"tokens":["secret"]}"#,
            r#"{"error":{"token":"secret"}}"#,
            r#"{"error":"\ud800"#,
            r#"{"error":"\"#,
            "{\"error\":",
            &deep,
            &too_deep,
            r#"{"error":""}"#,
        ] {
            assert_eq!(sentence(json), None, "{}", json.chars().take(50).collect::<String>());
        }
    }
}
