//! Blobs: redirects and lengths.

use super::server::{Reply, Server, head, ok, redirect, response};
use super::*;
use crate::ConnectFailure;

async fn fetch_from(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Result<Vec<u8>> {
    let server = Server::start(move |_, _| reply()).await;
    fetch(&client(), &server).await
}

fn found_bytes(result: Result<Vec<u8>>) -> u64 {
    match result.unwrap_err() {
        RegistryError::SizeDiffers { found_bytes, expected_bytes, .. } => {
            assert_eq!(expected_bytes, WEIGHTS.len() as u64);
            found_bytes
        }
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn blob_comes_from_the_registry_itself() {
    let server = Server::always(ok(WEIGHTS)).await;
    assert_eq!(fetch(&client(), &server).await.unwrap(), WEIGHTS);
    assert_eq!(server.paths(), [format!("/v2/library/tiny/blobs/{}", Digest::of(WEIGHTS))]);
}

#[tokio::test]
async fn body_of_a_response_with_a_location_is_used() {
    let reply = response(200, "Location: ?__sign=abc\r\n", WEIGHTS);
    let server = Server::always(reply).await;
    assert_eq!(fetch(&client(), &server).await.unwrap(), WEIGHTS);
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn every_kind_of_redirect_is_followed() {
    for status in [301, 302, 303, 307, 308] {
        let cdn = Server::always(ok(WEIGHTS)).await;
        let target = cdn.url("/file?X-Signature=s");
        let server = Server::start(move |_, _| redirect(status, &target)).await;
        assert_eq!(fetch(&client(), &server).await.unwrap(), WEIGHTS);
    }
}

#[tokio::test]
async fn redirects_are_counted() {
    let hops = |count: usize| async move {
        let server = Server::start(move |_, earlier| match earlier {
            earlier if earlier < count => redirect(307, &format!("?hop={earlier}")),
            _ => Reply::Whole(ok(WEIGHTS)),
        });
        let server = server.await;
        (fetch(&client(), &server).await, server.seen().len())
    };
    assert!(matches!(hops(5).await, (Ok(_), 6)));
    let (error, requests) = hops(usize::MAX).await;
    assert!(error.unwrap_err().to_string().contains("more than 5 redirects"));
    assert_eq!(requests, 6);
}

/// For every kind of request, since each goes through the same code.
#[tokio::test]
async fn no_kind_of_request_is_redirected_to_a_narrower_scope() {
    let server = Server::start(|_, _| redirect(307, "http://169.254.169.254/latest")).await;
    let mirrors = ["registry.ollama.ai", "hf.co"].map(|host| (host.to_owned(), vec![server.url("")]));
    let policy = RegistryPolicy { mirrors: mirrors.into(), ..RegistryPolicy::default() };
    let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
    let reference = "a/b:c".parse().unwrap();
    let license = Descriptor {
        media_type: MediaType::new("application/vnd.ollama.image.license"),
        digest: Digest::of(b"license"),
        size: 7,
    };
    let license = RemoteFile::layer(&reference, &license);
    let source = |text: &str| text.parse().unwrap();
    let errors = [
        client.manifest(&reference).await.unwrap_err(),
        client.open(&license).await.unwrap_err(),
        client.open_part(&license, 0..3).await.unwrap_err(),
        client.resolve(&source(&server.url("/file.gguf"))).await.unwrap_err(),
        client.resolve(&source("hf.co/u/r:Q4_K_M")).await.unwrap_err(),
        client.resolve(&source("https://huggingface.co/u/r/blob/main/m.gguf")).await.unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("is a link-local or reserved address, and the registry is not"), "{text}");
    }
}

/// A service that only the daemon can reach may be in the same network as the registry of a user.
#[tokio::test]
async fn text_of_another_host_that_is_not_on_the_internet_is_never_quoted() {
    const SECRET: &str = "secret of a service that only the daemon can reach";
    let document =
        format!(r#"{{"error":"{SECRET}","message":"{SECRET}","errors":[{{"message":"{SECRET}"}}]}}"#);
    for status in [200, 400, 401, 403, 404, 418, 429, 500, 503] {
        let headers = format!("Content-Type: application/json\r\nx-error-message: {SECRET}\r\n");
        let reply = response(status, &headers, document.as_bytes());
        let other = Server::start(move |_, _| Reply::Whole(reply.clone())).await;
        let (target, realm) = (other.url("/internal"), other.url("/token"));
        let redirecting = Server::start(move |_, _| redirect(307, &target)).await;
        let challenge = format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n");
        let challenging = Server::start(move |_, _| Reply::Whole(response(401, &challenge, b"{}"))).await;
        for server in [redirecting, challenging] {
            let mirrors = ["registry.ollama.ai", "hf.co"].map(|host| (host.to_owned(), vec![server.url("")]));
            let retry = RetryPolicy { backoff: Duration::from_millis(1), ..RetryPolicy::default() };
            let policy = RegistryPolicy { mirrors: mirrors.into(), retry, ..RegistryPolicy::default() };
            let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
            let source = |text: &str| text.parse().unwrap();
            let refused = [
                client.manifest(&"a/b:c".parse().unwrap()).await.map(drop),
                client.open(&layer(&server)).await.map(drop),
                client.open_part(&layer(&server), 0..3).await.map(drop),
                client.resolve(&source(&server.url("/file.gguf"))).await.map(drop),
                client.resolve(&source("hf.co/u/r:Q4_K_M")).await.map(drop),
            ];
            for error in refused.into_iter().filter_map(Result::err) {
                let text = format!("{error} {error:?} {:?}", error.hint());
                assert!(!text.contains("secret of"), "{status}: {text}");
            }
        }
        // The registry that the user has named is quoted.
        let own = client().manifest(&tiny(&other)).await.unwrap_err().to_string();
        assert!(own.contains(SECRET), "{status}: {own}");
    }
}

#[tokio::test]
async fn redirects_to_narrower_scopes_are_refused() {
    for target in
        ["http://169.254.169.254/latest", "http://[fe80::1]/", "http://0.0.0.0:80/", "//100.100.100.200/"]
    {
        let error = fetch_from(move || redirect(307, target)).await.unwrap_err();
        assert!(
            matches!(error, RegistryError::Unreachable { reason: ConnectFailure::ForbiddenAddress(_), .. }),
            "{target}: {error}"
        );
    }
}

#[tokio::test]
async fn redirects_without_a_target_are_refused() {
    let error = fetch_from(|| Reply::Whole(response(307, "", b""))).await.unwrap_err();
    assert!(error.to_string().contains("redirect refused: target is not a URL"), "{error}");
}

#[tokio::test]
async fn announced_length_must_be_the_manifests() {
    let longer = [WEIGHTS, b"!"].concat();
    assert_eq!(found_bytes(fetch_from(move || Reply::Whole(ok(&longer))).await), 15);
    assert_eq!(found_bytes(fetch_from(|| Reply::Whole(ok(b"<html>"))).await), 6);
    // The head alone is enough: the body is never sent.
    assert_eq!(found_bytes(fetch_from(|| Reply::ThenSilence(head("Content-Length: 13\r\n"))).await), 13);
}

#[tokio::test]
async fn bodies_of_unannounced_length_are_counted() {
    let plain = |body: &[u8]| Reply::Whole([&head("Connection: close\r\n"), body].concat());
    assert_eq!(fetch_from(move || plain(WEIGHTS)).await.unwrap(), WEIGHTS);
    assert_eq!(found_bytes(fetch_from(move || plain(&WEIGHTS[1..])).await), 13);
    assert_eq!(found_bytes(fetch_from(move || plain(b"")).await), 0);
    let flood = fetch_from(|| Reply::ThenFlood([&head("Connection: close\r\n"), WEIGHTS].concat())).await;
    let found = found_bytes(flood);
    assert!((15..1 << 20).contains(&found), "{found} bytes were read");
}

#[tokio::test]
async fn stream_fails_again_after_an_error() {
    let chunks = b"e\r\nGGUF and so on\r\n1\r\n!\r\n0\r\n\r\n".as_slice();
    let reply = [&head("Transfer-Encoding: chunked\r\n"), chunks].concat();
    let server = Server::always(reply).await;
    let mut stream = client().blob(&tiny(&server), &weights()).await.unwrap();
    while let Ok(chunk) = stream.next().await {
        assert!(chunk.is_some(), "the excess was not seen");
    }
    assert!(stream.next().await.is_err());
}

#[tokio::test]
async fn broken_connection_differs_from_a_short_file() {
    let cut = [&head("Content-Length: 14\r\n"), b"GGUF".as_slice()].concat();
    let error = fetch_from(move || Reply::Whole(cut.clone())).await.unwrap_err();
    assert!(matches!(error, RegistryError::Broken { received_bytes: 4, .. }), "{error}");
}

#[tokio::test]
async fn silent_and_trickling_bodies_stall() {
    let started = || [&head("Content-Length: 1000000\r\n"), b"GGUF".as_slice()].concat();
    let big = Descriptor { size: 1_000_000, ..weights() };
    for reply in [|bytes| Reply::ThenSilence(bytes), |bytes| Reply::ThenDrip(bytes)] {
        let server = Server::start(move |_, _| reply(started())).await;
        let client = client_with_short_limit(|limits| &mut limits.stall);
        let mut stream = client.blob(&tiny(&server), &big).await.unwrap();
        let error = loop {
            match stream.next().await {
                Ok(chunk) => assert!(chunk.is_some()),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, RegistryError::Stalled { .. }), "{error}");
    }
}

/// The start arrived fast, which must not extend the time limit.
#[tokio::test]
async fn body_that_stops_in_the_middle_stalls_at_the_shorter_limit() {
    let start = [head("Content-Length: 1000000\r\n"), vec![b'x'; 100_000]].concat();
    let server = Server::start(move |_, _| Reply::ThenSilence(start.clone())).await;
    let limits = Limits { silence: Duration::from_millis(1500), ..limits() };
    let big = Descriptor { size: 1_000_000, ..weights() };
    let mut stream = client_with(limits).blob(&tiny(&server), &big).await.unwrap();
    let error = loop {
        match stream.next().await {
            Ok(chunk) => assert!(chunk.is_some()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RegistryError::Stalled { seconds: 1, .. }), "{error}");
}

#[tokio::test]
async fn file_whose_server_does_not_respond_stalls_at_the_shorter_limit() {
    let server = Server::start(|_, _| Reply::ThenSilence(Vec::new())).await;
    let limits = Limits { silence: Duration::from_millis(1500), ..limits() };
    let error = client_with(limits).blob(&tiny(&server), &weights()).await.unwrap_err();
    assert!(matches!(error, RegistryError::Stalled { seconds: 1, .. }), "{error}");
}

#[tokio::test]
async fn slow_but_steady_body_does_not_stall() {
    let server = Server::start(|_, _| Reply::ThenDrip(head("Content-Length: 40\r\n"))).await;
    let file = Descriptor { size: 40, ..weights() };
    // Shorter than the whole transfer, longer than scheduling delays.
    let limits = Limits { stall: Duration::from_millis(300), slowest_bytes: 1, ..limits() };
    let mut stream = client_with(limits).blob(&tiny(&server), &file).await.unwrap();
    while stream.next().await.unwrap().is_some() {}
}

#[tokio::test]
async fn slow_reader_does_not_stall() {
    let server = Server::always(ok(WEIGHTS)).await;
    let client = client_with_short_limit(|limits| &mut limits.stall);
    let mut stream = client.blob(&tiny(&server), &weights()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(150)).await;
    while stream.next().await.unwrap().is_some() {}
}

#[tokio::test]
async fn partial_and_missing_blobs_are_refused() {
    let error = fetch_from(|| Reply::Whole(response(206, "Content-Range: bytes 0-13/14\r\n", WEIGHTS))).await;
    assert!(matches!(error, Err(RegistryError::Status { status: 206, .. })));
    let error = fetch_from(|| Reply::Whole(response(404, "", b""))).await;
    assert!(matches!(error, Err(RegistryError::BlobMissing { .. })));
}

#[tokio::test]
async fn wrong_encoding_labels_do_not_affect_correct_bytes() {
    for label in ["aws-chunked", "gzip", "br", "aws-chunked, gzip", "zstd"] {
        let announced = move || response(200, &format!("Content-Encoding: {label}\r\n"), WEIGHTS);
        assert_eq!(fetch_from(move || Reply::Whole(announced())).await.unwrap(), WEIGHTS, "{label}");
        let head = move || head(&format!("Connection: close\r\nContent-Encoding: {label}\r\n"));
        let until_closed = move || Reply::Whole([head(), WEIGHTS.to_vec()].concat());
        assert_eq!(fetch_from(until_closed).await.unwrap(), WEIGHTS, "{label}");
    }
}

#[tokio::test]
async fn file_that_is_sent_in_gzip_is_decompressed() {
    let announced = || Reply::Whole(response(200, "Content-Encoding: gzip\r\n", &gzip(WEIGHTS)));
    assert_eq!(fetch_from(announced).await.unwrap(), WEIGHTS);
    let head = || head("Connection: close\r\nContent-Encoding: aws-chunked, x-gzip\r\n");
    let until_closed = move || Reply::Whole([head(), gzip(WEIGHTS)].concat());
    assert_eq!(fetch_from(until_closed).await.unwrap(), WEIGHTS);
    for wrong in [gzip(&[WEIGHTS, b"!"].concat()), gzip(&WEIGHTS[1..]), gzip(&vec![0; 1 << 20])] {
        let reply = move || Reply::Whole(response(200, "Content-Encoding: gzip\r\n", &wrong));
        assert!(fetch_from(reply).await.is_err());
    }
    let error = fetch_from(|| Reply::Whole(response(200, "Content-Encoding: br\r\n", b"other bytes"))).await;
    assert!(error.unwrap_err().to_string().contains("content encoding \"br\": expected none"));
}

/// Such a file is compressed itself, and servers label it so.
#[tokio::test]
async fn archive_in_gzip_is_not_decompressed() {
    let packed = gzip(WEIGHTS);
    let file = Descriptor {
        media_type: MediaType::new("application/vnd.cncf.model.weight.v1.tar+gzip"),
        digest: Digest::of(&packed),
        size: packed.len() as u64,
    };
    let reply = [head("Connection: close\r\nContent-Encoding: gzip\r\n"), packed.clone()].concat();
    let server = Server::always(reply).await;
    let mut stream = client().blob(&tiny(&server), &file).await.unwrap();
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await.unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes, packed);
}

#[tokio::test]
async fn empty_blob_is_whole() {
    let server = Server::always(ok(b"")).await;
    let empty = Descriptor { digest: Digest::of(b""), size: 0, ..weights() };
    let mut stream = client().blob(&tiny(&server), &empty).await.unwrap();
    assert!(stream.next().await.unwrap().is_none());
}
