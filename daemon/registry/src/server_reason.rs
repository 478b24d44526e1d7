//! A server's own reason for refusing a request: the sentence in its headers or body, made safe to print.
//!
//! Servers write it in many forms; [`ServerReason::from_response`] reads those of Hugging Face, OCI registries, object stores
//! and web servers. It is only quoted: blobd makes no decision based on it.

mod json;
mod markup;
mod text;

use std::fmt;

use hyper::header::{CONTENT_TYPE, HeaderValue, WARNING};
use hyper::{HeaderMap, StatusCode};

pub(super) use self::text::Secrets;
use self::text::decoded;
use super::challenge::{Challenges, split_value};

/// A server's own sentence about a refusal, without control characters and secrets. It may be absent.
///
/// It is displayed as the end of a message: `: "sentence"`, or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerReason {
    sentence: Option<Box<str>>,
}

impl fmt::Display for ServerReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sentence.as_ref().map_or(Ok(()), |sentence| write!(f, ": \"{sentence}\""))
    }
}

impl ServerReason {
    /// The sentence in a refusal with this status. The body may be cut off.
    pub(super) fn from_response(
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
        secrets: &Secrets,
    ) -> Self {
        let said = |text: String| secrets.clean(&text).filter(|text| !only_repeats(status, text));
        let message = header(headers, "x-error-message").and_then(said);
        let body = body_sentence(headers, body).and_then(said);
        let own = match (message, body) {
            // One is often a prefix of the other.
            (Some(short), Some(long)) | (Some(long), Some(short)) if long.contains(&short) => Some(long),
            (Some(message), Some(body)) => secrets.clean(&format!("{message}; {body}")),
            (message, body) => message.or(body),
        };
        let others = || {
            let challenge = Challenges::from_headers(headers).error.and_then(said);
            let code = || header(headers, "x-error-code").or_else(|| header(headers, "x-ms-error-code"));
            challenge.or_else(|| warning(headers).and_then(said)).or_else(|| code().and_then(said))
        };
        Self { sentence: own.or_else(others).map(String::into_boxed_str) }
    }

    /// The sentence of an error document that a server sent with a success status; `None` if it is not an error document.
    pub(super) fn in_place_of_document(document: &[u8], secrets: &Secrets) -> Option<Self> {
        let document = without_mark(std::str::from_utf8(document).ok()?);
        let sentence = json::sentence_of_error(document).and_then(|sentence| secrets.clean(&sentence))?;
        Some(Self { sentence: Some(sentence.into_boxed_str()) })
    }

    /// Drops the sentence if it must not be shown.
    pub(super) fn only_if(self, is_quotable: bool) -> Self {
        if is_quotable { self } else { Self::default() }
    }

    pub(super) fn sentence(&self) -> Option<&str> {
        self.sentence.as_deref()
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| decoded(value.as_bytes(), false))
}

/// The text of `Warning: 299 - "text"`, as in the OCI specification.
fn warning(headers: &HeaderMap) -> Option<String> {
    let quoted = |value: &HeaderValue| {
        let value = decoded(value.as_bytes(), false);
        let text = value.strip_prefix("299 ")?;
        split_value(text.get(text.find('"')?..)?).map(|(text, _date)| text)
    };
    headers.get_all(WARNING).iter().find_map(quoted)
}

fn body_sentence(headers: &HeaderMap, body: &[u8]) -> Option<String> {
    let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let content_type = content_type.to_ascii_lowercase();
    let is_latin = [&b"8859-1"[..], b"windows-1252", b"latin1"];
    let is_latin = is_latin.iter().any(|name| content_type.windows(name.len()).any(|part| part == *name));
    let text = decoded(body, is_latin);
    let text = without_mark(&text);
    // Servers often announce a wrong content type.
    match text.trim_start().chars().next()? {
        '{' | '[' | '"' => json::sentence(text),
        '<' => markup::sentence(text),
        _ if text::is_binary(text) => None,
        _ => Some(text.to_owned()),
    }
}

/// The text after a byte order mark.
fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Whether a text says no more than the status: `404 Not Found`.
fn only_repeats(status: StatusCode, text: &str) -> bool {
    let words = |text: &str| -> String {
        let words = text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
        let is_said = |word: &String| {
            !matches!(word.as_str(), "" | "error" | "http" | "status" | "code") && word != status.as_str()
        };
        words.filter(is_said).collect()
    };
    let found = words(text);
    found.is_empty() || status.canonical_reason().is_some_and(|phrase| words(phrase) == found)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderName;

    use super::*;

    fn said(status: u16, headers: &[(&'static str, &str)], body: &[u8]) -> String {
        let header = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        };
        let headers = headers.iter().map(header).collect();
        let secrets = Secrets::new(None, &"https://h.example/".parse().unwrap());
        ServerReason::from_response(StatusCode::from_u16(status).unwrap(), &headers, body, &secrets)
            .to_string()
    }

    #[test]
    fn sentence_is_found_in_the_headers_of_hubs_and_registries() {
        for (headers, sentence) in [
            (
                &[("x-error-message", "Repository not found"), ("x-error-code", "RepoNotFound")][..],
                "Repository not found",
            ),
            (&[("x-error-code", "RepoNotFound")], "RepoNotFound"),
            (&[("x-ms-error-code", "AuthenticationFailed")], "AuthenticationFailed"),
            (
                &[("warning", r#"299 - "this repository \"x\" is frozen""#)],
                r#"this repository "x" is frozen"#,
            ),
            (&[("warning", r#"299 h.example "moved" "Sat, 01 Jan 2000 00:00:00 GMT""#)], "moved"),
            (
                &[(
                    "www-authenticate",
                    r#"Bearer realm="https://h/t",error="invalid_token",error_description="The token has expired""#,
                )],
                "The token has expired",
            ),
            (&[("www-authenticate", r#"Bearer error="insufficient_scope""#)], "insufficient_scope"),
            (&[("x-error-message", "Modèle privé")], "Modèle privé"),
        ] {
            assert_eq!(said(403, headers, b""), format!(": \"{sentence}\""), "{headers:?}");
        }
    }

    #[test]
    fn sentence_in_header_and_body_is_quoted_once() {
        let message = [("x-error-message", "Access is restricted")];
        let body = br#"{"error":"Access is restricted. Log in."}"#;
        assert_eq!(said(403, &message, body), ": \"Access is restricted. Log in.\"");
        assert_eq!(said(403, &message, br#"{"error":"Access"}"#), ": \"Access is restricted\"");
        assert_eq!(said(403, &message, b"Ask Bob"), ": \"Access is restricted; Ask Bob\"");
    }

    #[test]
    fn texts_that_only_repeat_the_status_are_not_quoted() {
        for (status, body) in [
            (404, "Not Found"),
            (404, "404 Not Found\n"),
            (404, r#"{"detail":"Not Found"}"#),
            (401, r#"{"error":"Unauthorized","status":401}"#),
            (500, "<html><head><title>500 Internal Server Error</title></head></html>"),
            (503, "HTTP Error 503: Service Unavailable"),
            (400, ""),
            (400, " \r\n"),
        ] {
            assert_eq!(said(status, &[], body.as_bytes()), "", "{body}");
        }
        assert_eq!(said(404, &[], b"404 page not found"), ": \"404 page not found\"");
    }

    #[test]
    fn type_of_the_body_is_seen_from_its_beginning() {
        let json = br#" {"error":"no such model"}"#;
        for kind in ["text/html", "application/octet-stream", "application/json", ""] {
            assert_eq!(said(400, &[("content-type", kind)], json), ": \"no such model\"", "{kind}");
        }
        assert_eq!(
            said(400, &[("content-type", "application/json")], b"upstream is down"),
            ": \"upstream is down\""
        );
        assert_eq!(said(400, &[], "\u{feff}{\"error\":\"no such model\"}".as_bytes()), ": \"no such model\"");
        let latin = [("content-type", "text/plain; charset=ISO-8859-1")];
        assert_eq!(said(400, &latin, b"mod\xe8le priv\xe9"), ": \"modèle privé\"");
        assert_eq!(said(400, &[], b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\xfe\xfd"), "");
    }
}
