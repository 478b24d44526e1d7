//! Every request that the daemon accepts, with parameters that make the response as long as possible.

use std::collections::BTreeMap;

use blobd_client::protocol::lists::{
    MAX_EDITED_KEYS, MAX_EXPERTS, MAX_LOG_CHOICES, MAX_PARTIAL_TARGETS, MAX_PATTERNS, MAX_REMOVED_NAMES,
    MAX_SIDECARS, MAX_TENSOR_NAMES,
};
use blobd_client::protocol::route::Route;
use blobd_client::protocol::signatures::SignaturesParams;

use crate::raw_gguf::{RawGguf, id, string};

/// The requests in the table of a section of `docs/PROTOCOL.md`, with the second column. A test of the daemon compares the
/// tables with the requests that exist.
///
/// # Panics
/// When there is no such section.
#[must_use]
pub fn documented_table(title: &str) -> BTreeMap<String, String> {
    let document = include_str!("../../docs/PROTOCOL.md");
    let section = document.split(&format!("\n### {title}\n")).nth(1).unwrap().split("\n### ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `GET ") || line.starts_with("| `POST "));
    let row = |row: &str| {
        let (request, right) = row.trim_matches('|').split_once('|').unwrap();
        let trim = |cell: &str| cell.trim().trim_matches('`').to_owned();
        (trim(request), trim(right))
    };
    rows.map(row).collect()
}

/// All requests, such as `GET /v1/models/{reference}`.
#[must_use]
pub fn all_routes() -> Vec<String> {
    Route::ALL.iter().map(ToString::to_string).collect()
}

/// A model that is stored, and the name of one at a registry.
#[derive(Clone, Copy, Debug)]
pub struct Models<'m> {
    /// The name of a model in the store.
    pub stored: &'m str,
    /// A source that the daemon can pull from.
    pub source: &'m str,
}

/// The bytes of a request of a route of [`all_routes`]. Requests that change something change nothing that others need.
///
/// # Panics
/// When no request is defined for the route: a new route must be added here.
#[must_use]
pub fn request(route: &str, models: Models<'_>) -> String {
    let Models { stored, source } = models;
    let nobody = r#""no-such-model""#;
    let body = match route {
        "GET /v1/df" => return get("/v1/df?detail=1000"),
        "GET /v1/ps" => return get("/v1/ps?residency=true"),
        "GET /v1/eviction" => return get("/v1/eviction?bytes=1000000000000"),
        _ if route.starts_with("GET ") => return get(&route["GET ".len()..].replace("{reference}", stored)),
        "POST /v1/open" => return upgrade("/v1/open", &format!(r#"{{"reference":"{stored}"}}"#)),
        "POST /v1/import" => return upgrade("/v1/import", r#"{"file_name":"never-sent.gguf"}"#),
        "POST /v1/log" => r#"{"limit":100000}"#.to_owned(),
        "POST /v1/verify" | "POST /v1/reindex" => "{}".to_owned(),
        "POST /v1/gc" => r#"{"dry_run":true}"#.to_owned(),
        "POST /v1/limit" => r#"{"bytes_per_second":null}"#.to_owned(),
        "POST /v1/pull" | "POST /v1/pull/plan" | "POST /v1/resolve" | "POST /v1/inspect" => {
            format!(r#"{{"reference":"{source}"}}"#)
        }
        // Nothing listens on that port.
        "POST /v1/push" => format!(r#"{{"reference":"{stored}","destination":"http://127.0.0.1:1/a/b"}}"#),
        "POST /v1/transfer" => format!(r#"{{"source":"{source}","destination":"http://127.0.0.1:1/a/b"}}"#),
        "POST /v1/edit" => {
            let key = r#"{"key":"general.name","value":"other"}"#;
            format!(r#"{{"source":"{stored}","target":"edited","keys":[{key}],"dry_run":true}}"#)
        }
        "POST /v1/signatures" => format!(r#"{{"reference":"{stored}"}}"#),
        "POST /v1/sign" => format!(r#"{{"reference":"{stored}","bundle":"{{}}"}}"#),
        "POST /v1/promote" => format!(r#"{{"reference":"{stored}","dry_run":true}}"#),
        "POST /v1/partials/remove" => r#"{"targets":["no-such-download"]}"#.to_owned(),
        "POST /v1/remove" => format!(r#"{{"references":[{nobody}]}}"#),
        "POST /v1/pin" => format!(r#"{{"reference":{nobody},"pinned":true}}"#),
        "POST /v1/undelete" | "POST /v1/undo" | "POST /v1/release" => format!(r#"{{"reference":{nobody}}}"#),
        "POST /v1/tag" | "POST /v1/rename" => format!(r#"{{"source":{nobody},"target":"other"}}"#),
        _ => panic!("{route}: no request is defined for it: add one to tests/src/routes.rs"),
    };
    let (method, path) = route.split_once(' ').unwrap();
    format!("{method} {path} HTTP/1.1\r\nHost: blobd\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// The longest body that the daemon accepts.
const MAX_BODY_BYTES: usize = 1 << 20;

/// Requests of a route of [`all_routes`] with the longest possible bodies: with its longest list or text, both with
/// as many entries as a body has room for and with as many as the list may have. None for a route without a body.
///
/// # Panics
/// When no longest request is defined for the route: a new route must be added here.
#[must_use]
pub fn longest_requests(route: &str, models: Models<'_>) -> Vec<String> {
    let Models { stored, source } = models;
    if route.starts_with("GET ") {
        return Vec::new();
    }
    let name: fn(usize) -> String = |place| format!(r#""n{place}""#);
    let pattern: fn(usize) -> String = |place| format!(r#""{place}*""#);
    let text = "x".repeat(MAX_BODY_BYTES - 100);
    let bodies = match route {
        "POST /v1/remove" => [
            lists(r#"{"dry_run":true,"go_on":true,"references":["#, name, MAX_REMOVED_NAMES, "]}"),
            lists(r#"{"dry_run":true,"go_on":true,"patterns":["#, pattern, MAX_PATTERNS, "]}"),
        ]
        .concat(),
        "POST /v1/log" => [
            lists(r#"{"verb":["#, |_| r#""undelete""#.to_owned(), MAX_LOG_CHOICES, "]}").to_vec(),
            lists(r#"{"result":["#, name, MAX_LOG_CHOICES, "]}").to_vec(),
            vec![format!(r#"{{"verb":"{text}"}}"#), format!(r#"{{"model":"{text}"}}"#)],
            vec![format!(r#"{{"model":"{}b"}}"#, "*a".repeat(text.len() / 2))],
        ]
        .concat(),
        "POST /v1/partials/remove" => [
            lists(r#"{"targets":["#, name, MAX_PARTIAL_TARGETS, "]}").to_vec(),
            vec![format!(r#"{{"targets":["{text}"]}}"#)],
        ]
        .concat(),
        "POST /v1/edit" => edited_keys(stored).to_vec(),
        "POST /v1/open" => {
            let before = |list| format!(r#"{{"reference":"{stored}","tensors":{{{list}:["#);
            let number: fn(usize) -> String = |place| place.to_string();
            [
                lists(&before(r#""names""#), name, MAX_TENSOR_NAMES, "]}}"),
                lists(&before(r#""experts":{"numbers""#), number, MAX_EXPERTS, "]}}}"),
            ]
            .concat()
        }
        "POST /v1/import" => {
            let sidecar: fn(usize) -> String =
                |place| format!(r#"{{"component":"draft","file_name":"{place}.gguf"}}"#);
            let before = r#"{"file_name":"never-sent.gguf","sidecars":["#;
            lists(before, sidecar, MAX_SIDECARS, "]}").to_vec()
        }
        "POST /v1/pull" | "POST /v1/pull/plan" | "POST /v1/resolve" | "POST /v1/inspect" => vec![
            format!(r#"{{"reference":"{text}"}}"#),
            format!(r#"{{"reference":"{source}","components":{{"projector":{{"named":"{text}"}}}}}}"#),
        ],
        "POST /v1/signatures" => keys(stored).to_vec(),
        "POST /v1/sign" => vec![format!(r#"{{"reference":"{stored}","bundle":"{text}"}}"#)],
        "POST /v1/tag" | "POST /v1/rename" => vec![format!(r#"{{"source":"{stored}","target":"{text}"}}"#)],
        "POST /v1/pin" => vec![format!(r#"{{"pinned":true,"reference":"{text}"}}"#)],
        "POST /v1/push" => vec![format!(r#"{{"reference":"{stored}","destination":"{text}"}}"#)],
        "POST /v1/transfer" => vec![format!(r#"{{"source":"{source}","destination":"{text}"}}"#)],
        "POST /v1/verify" | "POST /v1/promote" | "POST /v1/undelete" | "POST /v1/undo"
        | "POST /v1/release" => {
            vec![format!(r#"{{"reference":"{text}"}}"#)]
        }
        "POST /v1/gc" | "POST /v1/limit" | "POST /v1/reindex" => vec![format!(r#"{{"{text}":1}}"#)],
        _ => panic!("{route}: no longest request is defined for it: add one to tests/src/routes.rs"),
    };
    let path = route.split_once(' ').unwrap().1;
    let request = |body: &String| match route {
        "POST /v1/open" | "POST /v1/import" => upgrade(path, body),
        _ => format!(
            "{route} HTTP/1.1\r\nHost: blobd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ),
    };
    bodies.iter().map(request).collect()
}

fn edited_keys(stored: &str) -> [String; 2] {
    let before = format!(r#"{{"source":"{stored}","target":"edited","dry_run":true,"keys":["#);
    let key = |place| format!(r#"{{"key":"{place}","value":"1"}}"#);
    lists(&before, key, MAX_EDITED_KEYS, "]}")
}

fn keys(stored: &str) -> [String; 2] {
    let key = |place| format!(r#"{{"name":"{place}","pem":""}}"#);
    lists(&format!(r#"{{"reference":"{stored}","keys":["#), key, SignaturesParams::MAX_KEYS, "]}")
}

/// A body with as many entries as it has room for, and one with `limit`.
fn lists(before: &str, entry: impl Fn(usize) -> String, limit: usize, after: &str) -> [String; 2] {
    let list = |entries: &mut dyn Iterator<Item = usize>| {
        let mut body = before.to_owned();
        for (place, number) in entries.enumerate() {
            let entry = entry(number);
            if body.len() + entry.len() + after.len() >= MAX_BODY_BYTES {
                break;
            }
            body.push_str(if place == 0 { "" } else { "," });
            body.push_str(&entry);
        }
        body + after
    };
    [list(&mut (0..)), list(&mut (0..limit))]
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: blobd\r\n\r\n")
}

fn upgrade(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: blobd\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A model whose header has `mib` MiB of texts.
#[must_use]
pub fn model_with_large_header(mib: usize) -> Vec<u8> {
    let text = "x".repeat(1 << 20);
    let architecture = RawGguf::new().key("general.architecture", id::STRING, string("llama"));
    let with_text =
        |raw: RawGguf, number| raw.key(format!("general.text.{number}"), id::STRING, string(&text));
    let header = (0..mib).fold(architecture, with_text);
    header.tensor("output.weight", id::I8, &[32], 0).with_data(&[7; 32])
}
