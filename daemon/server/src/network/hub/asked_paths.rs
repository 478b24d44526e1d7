//! The paths that a client asks about in the body of a request: the only request that has one.
//!
//! JavaScript's client sends JSON, Python's a form: `huggingface_hub.HfApi.get_paths_info`, version 2.4.

use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use super::API;

/// In the extensions of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct AskedPaths(pub(super) Vec<String>);

pub(super) const PATHS_INFO: &str = "/paths-info";
/// For thousands of paths.
const MAX_BYTES: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a request for this path has a body with paths.
pub(in crate::network) fn has_paths(path: &str) -> bool {
    path.strip_prefix(API).is_some_and(|rest| rest.contains(PATHS_INFO))
}

/// Reads the paths from the body, and keeps them with the request. Returns what is wrong with the body.
pub(in crate::network) async fn receive_paths(request: &mut Parts, body: Incoming) -> Result<(), String> {
    let received = tokio::time::timeout(TIMEOUT, Limited::new(body, MAX_BYTES).collect()).await;
    let body = received
        .map_err(|_late| "the body does not arrive".to_owned())?
        .map_err(|error| format!("the body cannot be read: {error}"))?
        .to_bytes();
    let is_form = request
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/x-www-form-urlencoded"));
    let paths = if is_form { of_form(&body) } else { of_json(&body)? };
    request.extensions.insert(AskedPaths(paths));
    Ok(())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

fn of_json(body: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Body {
        paths: OneOrMany,
    }
    let body: Body =
        serde_json::from_slice(body).map_err(|error| format!("the body has no paths: {error}"))?;
    Ok(match body.paths {
        OneOrMany::One(path) => vec![path],
        OneOrMany::Many(paths) => paths,
    })
}

fn of_form(body: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(body);
    let values = text.split('&').filter_map(|pair| pair.strip_prefix("paths="));
    let decoded = |value: &str| percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned();
    values.map(decoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_json_or_a_form() {
        assert_eq!(of_json(br#"{"paths":["a/b","c"],"expand":true}"#).unwrap(), ["a/b", "c"]);
        assert_eq!(of_json(br#"{"paths":"a"}"#).unwrap(), ["a"]);
        assert!(of_json(b"{}").is_err() && of_json(b"").is_err() && of_json(br#"{"paths":[1]}"#).is_err());
        assert_eq!(of_form(b"paths=a%2Fb&paths=c+d&expand=False"), ["a/b", "c d"]);
        assert!(of_form(b"").is_empty() && of_form(b"path=a").is_empty());
        assert_eq!(of_form(b"paths=%ff"), ["\u{fffd}"]);
    }

    #[test]
    fn only_one_request_has_a_body() {
        assert!(has_paths("/api/models/me/m/paths-info/main"));
        assert!(!has_paths("/api/models/me/m/tree/main") && !has_paths("/me/m/resolve/main/paths-info"));
    }
}
