//! The sentence in a JSON document about an error.

use serde_json::{Map, Value};

/// Keys of the sentence, the most telling first. Case and underscores do not matter.
const SENTENCES: [&str; 10] = [
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
];
/// Keys of the kind of error, which is often a sentence too.
const KINDS: [&str; 2] = ["error", "title"];
/// Keys of a code, quoted if there is nothing else.
const CODES: [&str; 3] = ["code", "errorcode", "status"];
/// Keys under which the error itself may be.
const INNER: [&str; 6] = ["error", "errors", "message", "detail", "fault", "response"];
/// How many objects may be inside each other around the sentence.
const MAX_DEPTH: usize = 4;
/// How many of several errors are quoted.
const MAX_ERRORS: usize = 3;

pub(super) fn sentence(json: &str) -> Option<String> {
    // The parser limits the depth. Something may follow the document, or be cut off.
    let mut value = serde_json::Deserializer::from_str(json).into_iter::<Value>().next()?.ok()?;
    for _ in 0..MAX_DEPTH {
        let inner = match &mut value {
            Value::String(text) => return Some(std::mem::take(text)),
            Value::Array(errors) if errors.iter().all(|error| own_sentence(error).is_some()) => {
                let sentences = errors.iter().filter_map(own_sentence).take(MAX_ERRORS);
                return Some(without_repetition(sentences)).filter(|all| !all.is_empty());
            }
            Value::Array(errors) => errors.first_mut(),
            Value::Object(object) => match own_sentence_of(object) {
                Some(sentence) => return Some(sentence),
                None => inner_mut(object),
            },
            _ => None,
        };
        value = inner.map(Value::take)?;
    }
    None
}

/// The sentence of a document that has nothing but an error, which no other document names so.
pub(super) fn sentence_of_error(json: &str) -> Option<String> {
    let document: Map<String, Value> = serde_json::from_str(json).ok()?;
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

fn own_sentence(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(object) => own_sentence_of(object),
        _ => None,
    }
}

/// The texts of an object itself: the kind of the error and the sentence if both say something, or a code.
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
            (r#"{"error":{"errors":[{"reason":"dailyLimit"}]}}"#, "dailyLimit"),
        ] {
            assert_eq!(sentence(json).as_deref(), Some(expected), "{json}");
        }
    }

    #[test]
    fn errors_are_told_from_other_documents() {
        for json in [
            r#"{"error":"no"}"#,
            r#"{"errors":[{"message":"no"}]}"#,
            r#"{"error":{"message":"no"},"schemaVersion":2}"#,
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
            "{\"error\":",
            &deep,
            &too_deep,
            r#"{"error":""}"#,
        ] {
            assert_eq!(sentence(json), None, "{}", json.chars().take(50).collect::<String>());
        }
    }
}
