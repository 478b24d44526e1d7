//! Range requests: only the requested part is accepted.

use super::server::{Reply, Server, head, ok, redirect, response};
use super::*;

/// Fetches bytes 5 to 8 of [`WEIGHTS`], `and`.
async fn part_from(server: &Server) -> Result<(Vec<u8>, u64), RegistryError> {
    let mut stream = client().open_range(&layer(server), 5..8).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, stream.received_bytes()))
}

async fn part(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Result<(Vec<u8>, u64), RegistryError> {
    part_from(&Server::start(move |_, _| reply()).await).await
}

fn partial(content_range: &str, body: &[u8]) -> Reply {
    Reply::Whole(response(206, &format!("Content-Range: {content_range}\r\n"), body))
}

#[tokio::test]
async fn part_is_asked_for_by_a_range_also_behind_a_redirect() {
    let cdn = Server::start(|_, _| partial("bytes 5-7/14", b"and")).await;
    let target = cdn.url("/file?X-Signature=s");
    let server = Server::start(move |_, _| redirect(307, &target)).await;
    assert_eq!(part_from(&server).await.unwrap(), (b"and".to_vec(), 3));
    assert_eq!(cdn.seen()[0].header("range"), Some("bytes=5-7"));
    assert_eq!(server.paths(), [format!("/v2/library/tiny/blobs/{}", Digest::of(WEIGHTS))]);
}

#[tokio::test]
async fn whole_file_in_place_of_a_part_is_read_no_further_than_needed() {
    assert_eq!(part(|| Reply::Whole(ok(WEIGHTS))).await.unwrap().0, b"and");
    // The bytes after the range are neither checked nor awaited.
    let start = || [&head("Content-Length: 14\r\n"), &WEIGHTS[..9]].concat();
    assert_eq!(part(move || Reply::ThenSilence(start())).await.unwrap().0, b"and");
    let error = part(|| Reply::Whole(ok(b"GGUF and"))).await.unwrap_err();
    assert!(
        matches!(error, RegistryError::SizeDiffers { found_bytes: 8, expected_bytes: 14, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn part_that_is_not_the_one_asked_for_is_refused() {
    for content_range in ["bytes 5-7/15", "bytes 4-6/14", "bytes 5-7/*", "bytes 0-13/14", "5-7/14", ""] {
        let error = part(move || partial(content_range, b"and")).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{content_range}: {error}");
    }
    let error = part(|| Reply::Whole(response(206, "", b"and"))).await.unwrap_err();
    assert!(error.to_string().contains("without Content-Range"), "{error}");
    let twice = "Content-Range: bytes 5-7/14\r\nContent-Range: bytes 0-2/14\r\n";
    let error = part(move || Reply::Whole(response(206, twice, b"and"))).await.unwrap_err();
    assert!(error.to_string().contains("several parts"), "{error}");
}

#[tokio::test]
async fn part_of_another_length_is_refused() {
    for body in [&b"an"[..], b"and!", b""] {
        let error = part(move || partial("bytes 5-7/14", body)).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{error}");
        let chunked = move || {
            let fields = "Content-Range: bytes 5-7/14\r\nConnection: close\r\n\r\n";
            let head = format!("HTTP/1.1 206 X\r\n{fields}");
            Reply::Whole([head.as_bytes(), body].concat())
        };
        let error = part(chunked).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{error}");
    }
}

#[tokio::test]
async fn compressed_missing_and_unsatisfiable_parts_are_refused() {
    let gzip = "Content-Range: bytes 5-7/14\r\nContent-Encoding: gzip\r\n";
    let error = part(move || Reply::Whole(response(206, gzip, b"and"))).await.unwrap_err();
    assert!(error.to_string().contains("content encoding"), "{error}");
    let error = part(|| Reply::Whole(response(404, "", b""))).await.unwrap_err();
    assert!(matches!(error, RegistryError::BlobMissing { .. }), "{error}");
    let error = part(|| Reply::Whole(response(416, "Content-Range: bytes */3\r\n", b""))).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { status: 416, .. }), "{error}");
}

#[tokio::test]
async fn range_outside_the_file_is_not_asked_for() {
    let server = Server::always(ok(WEIGHTS)).await;
    for range in [5..5, 5..15, 14..15, 0..u64::MAX] {
        let error = client().open_range(&layer(&server), range.clone()).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{range:?}: {error}");
    }
    assert!(server.seen().is_empty());
}
