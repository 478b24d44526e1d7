//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which JSON does not have.
//!
//! Configurations of models have them where a number is unlimited, such as `time_step_limit`. Only what describes a model
//! is read this way. Indexes and manifests, which decide what is stored, must be JSON.

use serde_json::{Error, Value};

const NOT_FINITE: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];

/// Parses a document. Numbers that are not finite become null.
///
/// # Errors
/// As [`serde_json::from_slice`].
///
/// ```
/// use blobd_store_format::python_json::parse;
///
/// let config = parse(br#"{"limit": [0.5, Infinity], "name": "NaN"}"#)?;
/// assert_eq!(config.to_string(), r#"{"limit":[0.5,null],"name":"NaN"}"#);
/// assert!(parse(b"{\"limit\": nan}").is_err());
/// # Ok::<(), serde_json::Error>(())
/// ```
pub fn parse(document: &[u8]) -> Result<Value, Error> {
    serde_json::from_slice(document)
        .or_else(|error| serde_json::from_slice(&finite(document)).map_err(|_same| error))
}

/// The document, with null instead of each number that is not finite.
fn finite(document: &[u8]) -> Vec<u8> {
    let mut finite = Vec::with_capacity(document.len());
    let (mut rest, mut is_text) = (document, false);
    while let [byte, after @ ..] = rest {
        let number = NOT_FINITE.iter().find(|number| !is_text && rest.starts_with(number));
        if let Some(after) = number.and_then(|number| rest.strip_prefix(*number)) {
            finite.extend(b"null");
            rest = after;
            continue;
        }
        finite.push(*byte);
        rest = after;
        match (byte, after) {
            (b'"', _) => is_text = !is_text,
            (b'\\', [escaped, after @ ..]) if is_text => {
                finite.push(*escaped);
                rest = after;
            }
            _ => {}
        }
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_null_outside_of_texts() {
        for (document, expected) in [
            (r#"{"a":NaN,"b":[-Infinity,Infinity]}"#, r#"{"a":null,"b":[null,null]}"#),
            (r#"{"a":"NaN \" NaN","b":NaN}"#, r#"{"a":"NaN \" NaN","b":null}"#),
            (r#"{"a\\":NaN}"#, r#"{"a\\":null}"#),
            ("1.5", "1.5"),
        ] {
            assert_eq!(parse(document.as_bytes()).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn other_names_and_broken_documents_are_errors() {
        for document in ["", "nan", "+Infinity", "Infinit", "{\"a\":NaNa}", "{\"a\":\"NaN", "NaN NaN", "\"\\"]
        {
            assert!(parse(document.as_bytes()).is_err(), "{document}");
        }
    }
}
