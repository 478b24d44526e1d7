//! Range requests: only the requested part is accepted.

use super::server::{Reply, Server, head, ok, redirect, response};
use super::*;
use crate::RemoteModel;

/// Fetches bytes 5 to 8 of [`WEIGHTS`], `and`.
async fn part_from(server: &Server) -> Result<(Vec<u8>, u64)> {
    let mut stream = client().open_range(&layer(server), 5..8).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, stream.received_bytes()))
}

async fn part(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Result<(Vec<u8>, u64)> {
    part_from(&Server::start(move |_, _| reply()).await).await
}

fn partial(content_range: &str, body: &[u8]) -> Reply {
    Reply::Whole(response(206, &format!("Content-Range: {content_range}\r\n"), body))
}

#[tokio::test]
async fn part_is_requested_by_a_range_even_after_a_redirect() {
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
async fn part_that_must_be_the_requested_one_is_accepted() {
    for content_range in
        ["bytes 5-7/14", "BYTES 5-7/14", "bytes=5-7/14", "bytes 5-7/*", "bytes 5-7", "5-7/14", ""]
    {
        let server = Server::start(move |_, _| partial(content_range, b"and")).await;
        assert_eq!(part_from(&server).await.unwrap(), (b"and".to_vec(), 3), "{content_range}");
        assert_eq!(server.seen().len(), 1, "{content_range}");
    }
    // The digest of the file is known, and so is the length of the part.
    assert_eq!(part(|| Reply::Whole(response(206, "", b"and"))).await.unwrap().0, b"and");
    let named = "Content-Range: bytes 5-7/14\r\n";
    assert_eq!(part(move || Reply::Whole(response(200, named, b"and"))).await.unwrap().0, b"and");
    let until_closed = "HTTP/1.1 206 X\r\nContent-Range: bytes 5-7/14\r\nConnection: close\r\n\r\nand";
    assert_eq!(part(move || Reply::Whole(until_closed.into())).await.unwrap().0, b"and");
    let chunked = "HTTP/1.1 206 X\r\nContent-Range: bytes 5-7/14\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nand\r\n0\r\n\r\n";
    assert_eq!(part(move || Reply::Whole(chunked.into())).await.unwrap().0, b"and");
    let labelled = "Content-Range: bytes 5-7/14\r\nContent-Encoding: aws-chunked, gzip\r\n";
    assert_eq!(part(move || Reply::Whole(response(206, labelled, b"and"))).await.unwrap().0, b"and");
    assert_eq!(part(|| partial("bytes 0-13/14", WEIGHTS)).await.unwrap().0, b"and");
}

/// Responds to requests with a range as `reply` says, and to others with the whole file.
async fn without_ranges(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Server {
    Server::start(move |seen, _| match seen.header("range") {
        Some(_) => reply(),
        None => Reply::Whole(ok(WEIGHTS)),
    })
    .await
}

#[tokio::test]
async fn file_is_requested_without_a_range_if_it_is_unclear_which_part_was_sent() {
    let twice = "Content-Range: bytes 5-7/14\r\nContent-Range: bytes 0-2/14\r\n";
    let parts = "Content-Type: multipart/byteranges; boundary=x\r\nContent-Range: bytes 5-7/14\r\n";
    let until_closed = "HTTP/1.1 206 X\r\nConnection: close\r\n\r\nand";
    let replies = [
        response(206, "Content-Range: rows 5-7/14\r\n", b"and"),
        response(206, "", b"an"),
        response(206, twice, b"and"),
        response(206, parts, b"--x\r\nContent-Range: bytes 5-7/14\r\n\r\nand\r\n--x--\r\n"),
        response(416, "Content-Range: bytes */14\r\n", b""),
        response(501, "", b""),
        until_closed.into(),
    ];
    for reply in replies {
        let text = String::from_utf8_lossy(&reply).into_owned();
        let server = without_ranges(move || Reply::Whole(reply.clone())).await;
        assert_eq!(part_from(&server).await.expect(&text).0, b"and", "{text}");
        assert_eq!(server.seen().len(), 2, "{text}");
    }
}

#[tokio::test]
async fn file_is_requested_without_a_range_after_several_wrong_parts() {
    let replies = [
        response(206, "Content-Range: bytes 4-6/14\r\n", b" an"),
        response(206, "Content-Range: bytes 5-7/15\r\n", b"and"),
        response(206, "Content-Range: bytes 5-6/14\r\n", b"an"),
        response(206, "Content-Range: bytes 5-7/14\r\n", b"an"),
        response(206, "Content-Range: bytes 5-7/14\r\nContent-Encoding: gzip\r\n", &gzip(b"and")),
    ];
    for reply in replies {
        let text = String::from_utf8_lossy(&reply).into_owned();
        let server = without_ranges(move || Reply::Whole(reply.clone())).await;
        assert_eq!(part_from(&server).await.expect(&text).0, b"and", "{text}");
        assert_eq!(server.seen().len(), 4, "{text}");
    }
}

/// Without a digest, a part without `Content-Range` could be any.
#[tokio::test]
async fn part_of_a_file_without_a_digest_must_be_named() {
    let server = without_ranges(|| Reply::Whole(response(206, "", b"GGUF"))).await;
    let source = server.url("/tiny.gguf").parse().unwrap();
    let RemoteModel::Files { files, .. } = client().resolve(&source).await.unwrap() else { unreachable!() };
    assert_eq!((files[0].size(), files[0].digest()), (14, None));
    let part = client().open_part(&files[0], 0..4).await.unwrap();
    assert!(part.is_whole());
}

#[tokio::test]
async fn server_that_sends_another_part_whatever_is_requested_is_refused() {
    for content_range in ["bytes 5-7/15", "bytes 4-6/14", "rows 5-7/14"] {
        let error = part(move || partial(content_range, b"and")).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{content_range}: {error}");
    }
    let error = part(|| Reply::Whole(response(206, "", b"an"))).await.unwrap_err();
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
async fn missing_and_unsatisfiable_parts_are_refused() {
    let error = part(|| Reply::Whole(response(404, "", b""))).await.unwrap_err();
    assert!(matches!(error, RegistryError::BlobMissing { .. }), "{error}");
    let error = part(|| Reply::Whole(response(416, "Content-Range: bytes */3\r\n", b""))).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { status: 416, .. }), "{error}");
}

#[tokio::test]
async fn range_outside_the_file_is_not_requested() {
    let server = Server::always(ok(WEIGHTS)).await;
    for range in [5..5, 5..15, 14..15, 0..u64::MAX] {
        let error = client().open_range(&layer(&server), range.clone()).await.unwrap_err();
        assert!(matches!(error, RegistryError::RangeDiffers { .. }), "{range:?}: {error}");
    }
    assert!(server.seen().is_empty());
}
