//! Manifests: requested, compared and refused.

use blobd_store_format::index::IndexError;
use blobd_store_format::manifest::Manifest;

use super::server::{Reply, Server, head, ok, response};
use super::*;
use crate::ConnectFailure;
use crate::manifest::MANIFEST_TYPES;

async fn manifest_from(reply: Vec<u8>) -> Result<Manifest> {
    let server = Server::always(reply).await;
    client().manifest(&tiny(&server)).await
}

#[test]
fn all_kinds_of_manifest_are_accepted() {
    let kinds = [
        MediaType::DOCKER_MANIFEST,
        MediaType::OCI_MANIFEST,
        MediaType::OCI_INDEX,
        MediaType::DOCKER_MANIFEST_LIST,
    ];
    assert_eq!(MANIFEST_TYPES, kinds.join(", "));
}

#[tokio::test]
async fn manifest_is_requested_uncompressed_without_credentials_and_its_bytes_are_kept() {
    let server =
        Server::always(response(200, "Content-Type: text/plain\r\n", manifest_json().as_bytes())).await;
    let manifest = client().manifest(&tiny(&server)).await.unwrap();
    assert_eq!(manifest.raw(), manifest_json().as_bytes());
    let seen = server.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].path, "/v2/library/tiny/manifests/latest");
    assert_eq!(seen[0].header("accept"), Some(MANIFEST_TYPES));
    assert!(seen[0].header("user-agent").unwrap().starts_with("blobd/"));
    assert_eq!(seen[0].header("accept-encoding"), Some("identity"));
    for absent in ["authorization", "cookie", "referer"] {
        assert_eq!(seen[0].header(absent), None, "{absent}");
    }
}

#[tokio::test]
async fn registry_that_contradicts_its_own_digest_is_refused() {
    let claim =
        |name: &str, value: &str| response(200, &format!("{name}: {value}\r\n"), manifest_json().as_bytes());
    let (truth, lie) = (Digest::of(manifest_json().as_bytes()).to_string(), Digest::of(b"lie").to_string());
    for name in ["Docker-Content-Digest", "Ollama-Content-Digest"] {
        assert!(manifest_from(claim(name, &truth)).await.is_ok());
        assert!(manifest_from(claim(name, &truth.replace("sha256:", ""))).await.is_ok());
        assert!(manifest_from(claim(name, "sha512:00")).await.is_ok());
        let error = manifest_from(claim(name, &lie)).await.unwrap_err();
        assert!(error.to_string().contains("manifest: wrong digest"), "{error}");
    }
}

#[tokio::test]
async fn pinned_manifest_is_requested_by_digest_then_by_tag() {
    let server = Server::start(|seen, _| {
        let found = !seen.path.contains("sha256:");
        Reply::Whole(if found { ok(manifest_json().as_bytes()) } else { response(404, "", b"") })
    })
    .await;
    let pinned = |bytes: &[u8]| format!("{}@{}", tiny(&server), Digest::of(bytes)).parse().unwrap();
    client().manifest(&pinned(manifest_json().as_bytes())).await.unwrap();
    let by_digest = format!("/v2/library/tiny/manifests/{}", Digest::of(manifest_json().as_bytes()));
    assert_eq!(server.paths(), [by_digest.as_str(), "/v2/library/tiny/manifests/latest"]);
    let error = client().manifest(&pinned(b"another")).await.unwrap_err();
    assert!(error.to_string().contains("manifest: wrong digest"), "{error}");
}

#[tokio::test]
async fn missing_model_is_named() {
    let server = Server::always(response(404, "", b"{}")).await;
    let error = client().manifest(&tiny(&server)).await.unwrap_err();
    let address = server.address();
    assert_eq!(
        error.to_string(),
        format!("model http://{address}/library/tiny:latest: not found at {address}")
    );
}

#[tokio::test]
async fn documents_that_are_not_manifests_are_refused() {
    let html = manifest_from(ok(b"\r\n<!doctype html><title>Welcome</title>")).await.unwrap_err();
    assert!(html.to_string().contains("web page"), "{html}");
    let traversal = manifest_json().replace("sha256:", "sha256:../../");
    for body in ["", "{", "not json", traversal.as_str()] {
        let error = manifest_from(ok(body.as_bytes())).await.unwrap_err();
        assert!(matches!(error, RegistryError::UnusableModel { .. }), "{error}");
    }
    let index = manifest_from(ok(br#"{"schemaVersion":2,"manifests":[]}"#)).await.unwrap_err();
    assert!(index.to_string().contains(&IndexError::Empty.to_string()), "{index}");
}

#[tokio::test]
async fn endless_manifest_is_cut_off() {
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n".to_vec();
    for head in [head("Content-Length: 10000000\r\n"), head("Connection: close\r\n"), chunked] {
        let server = Server::start(move |_, _| Reply::ThenFlood(head.clone())).await;
        let error = client().manifest(&tiny(&server)).await.unwrap_err();
        assert!(matches!(error, RegistryError::TooLong { what: "manifest", .. }), "{error}");
    }
}

#[tokio::test]
async fn endless_head_is_cut_off() {
    let server = Server::start(|_, _| Reply::ThenFlood(b"HTTP/1.1 200 OK\r\nX-Fill: ".to_vec())).await;
    let error = client().manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { reason: ConnectFailure::Other(_), .. }), "{error}");
}

#[tokio::test]
async fn announced_length_alone_is_enough_to_refuse_a_manifest() {
    let server = Server::start(|_, _| Reply::ThenSilence(head("Content-Length: 10000000\r\n"))).await;
    let error = client().manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn silent_heads_and_trickling_manifests_stall() {
    for silence in ["HTTP/1.1 200 OK\r\n", ""] {
        let server = Server::start(move |_, _| Reply::ThenSilence(silence.into())).await;
        let client = client_with_short_limit(|limits| &mut limits.head);
        let error = client.manifest(&tiny(&server)).await.unwrap_err();
        assert!(matches!(error, RegistryError::Stalled { .. }), "{error}");
    }
    let server = Server::start(|_, _| Reply::ThenDrip(head("Connection: close\r\n"))).await;
    let client = client_with_short_limit(|limits| &mut limits.document);
    let error = client.manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Stalled { .. }), "{error}");
}

#[tokio::test]
async fn compressed_manifests_are_decompressed_and_wrong_labels_are_ignored() {
    let manifest = manifest_json();
    let (plain, packed) = (manifest.as_bytes(), gzip(manifest.as_bytes()));
    for (label, body) in [
        ("gzip", &packed[..]),
        ("x-gzip, aws-chunked", &packed),
        ("identity", &packed),
        ("identity", plain),
        ("gzip", plain),
        ("aws-chunked", plain),
        ("br", plain),
    ] {
        let reply = response(200, &format!("Content-Encoding: {label}\r\n"), body);
        assert_eq!(manifest_from(reply).await.unwrap().raw(), plain, "{label}");
    }
    let error = manifest_from(response(200, "Content-Encoding: br\r\n", b"\x0b\x02\x80")).await.unwrap_err();
    assert!(error.to_string().contains("content encoding \"br\": expected none, gzip or zstd"), "{error}");
    let bomb = gzip(&vec![b'['; 8 << 20]);
    let error = manifest_from(response(200, "Content-Encoding: gzip\r\n", &bomb)).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLong { what: "manifest", .. }), "{error}");
    let error = manifest_from(response(200, "Content-Encoding: gzip\r\n", &packed[..40])).await.unwrap_err();
    assert!(error.to_string().ends_with("compressed manifest is damaged or cut off"), "{error}");
}

#[tokio::test]
async fn transient_failures_are_repeated_a_few_times() {
    for status in [429, 500, 502, 503, 504] {
        let busy = response(status, "Retry-After: 3600\r\n", b"");
        let server = Server::start(move |_, earlier| {
            Reply::Whole(if earlier < 2 { busy.clone() } else { ok(manifest_json().as_bytes()) })
        })
        .await;
        client().manifest(&tiny(&server)).await.unwrap();
    }
    let server = Server::always(response(503, "", b"")).await;
    let error = client().manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { status: 503, .. }), "{error}");
    assert_eq!(server.seen().len(), 3);
    let error = manifest_from(response(429, "", b"")).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooManyRequests { .. }), "{error}");
}

#[tokio::test]
async fn other_responses_are_final() {
    for status in [201, 204, 206, 400, 410, 501] {
        let server = Server::always(response(status, "", b"")).await;
        let error = client().manifest(&tiny(&server)).await.unwrap_err();
        assert!(matches!(error, RegistryError::Status { status: found, .. } if found == status), "{error}");
        assert_eq!(server.seen().len(), 1);
    }
}
