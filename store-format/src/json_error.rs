//! Why a document is not the JSON expected, without its content.
//!
//! A registry can redirect a request for a manifest to any document that only the daemon may read. The parser's messages
//! quote what they find, so they would show parts of that document to whoever asked for the model.

use serde_json::Error;

/// The parser's message, except for what it quotes of the document.
///
/// ```
/// use blobd_store_format::json_error::reason;
/// let error = serde_json::from_str::<u8>("\"password\"").unwrap_err();
/// assert_eq!(reason(&error), "wrong value: expected u8 at line 1 column 10");
/// ```
pub fn reason(error: &Error) -> String {
    let text = error.to_string();
    if !error.is_data() || ["missing field ", "duplicate field "].iter().any(|known| text.starts_with(known))
    {
        return text;
    }
    // The last one: a text in the document may contain these words too.
    let quotes =
        ["invalid type: ", "invalid value: ", "invalid length ", "unknown variant ", "unknown field "];
    match text.rfind(", expected ") {
        Some(end) if quotes.iter().any(|known| text.starts_with(known)) => {
            format!("wrong value: {}", without_type(text.get(end.saturating_add(2)..).unwrap_or_default()))
        }
        _ => format!("wrong value at line {} column {}", error.line(), error.column()),
    }
}

/// Replaces the name of a type of this program, `struct Document with 4 elements`, by what it is in JSON.
fn without_type(expected: &str) -> String {
    let Some(named) = expected.strip_prefix("expected struct ") else { return expected.to_owned() };
    match named.find(" at line ") {
        Some(place) => format!("expected an object{}", named.get(place..).unwrap_or_default()),
        None => "expected an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::digest::Digest;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only errors are looked at")]
    struct Document {
        number: u64,
        list: Vec<bool>,
        digest: Digest,
        map: BTreeMap<String, ()>,
    }

    #[test]
    fn no_reason_quotes_the_document() {
        for json in [
            r#""secret""#,
            r#""secret, expected secret""#,
            r#"{"number":"secret"}"#,
            r#"{"secret":1}"#,
            r#"{"number":7,"list":["secret"]}"#,
            r#"{"digest":"secret"}"#,
            r#"{"digest":"sha256:secret"}"#,
            r#"{"digest":"x, expected secret"}"#,
            r#"{"map":{"secret":"secret"}}"#,
            r#"{"number":1,"number":2,"x":"secret"}"#,
            r#"secret"#,
            r#"{"number":1} secret"#,
            r#"{"number": secret}"#,
            "{\"secret",
        ] {
            let error = serde_json::from_str::<Document>(json).unwrap_err();
            assert!(!reason(&error).contains("secret"), "{json}: {}", reason(&error));
            assert!(reason(&error).contains("line 1"), "{json}: {}", reason(&error));
        }
        for json in ["[]", "[1]", "7"] {
            let error = serde_json::from_str::<Document>(json).unwrap_err();
            assert!(
                reason(&error).starts_with("wrong value: expected an object at line 1"),
                "{}",
                reason(&error)
            );
        }
        let missing = serde_json::from_str::<Document>("{}").unwrap_err();
        assert_eq!(reason(&missing), "missing field `number` at line 1 column 2");
    }
}
