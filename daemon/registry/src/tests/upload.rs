//! Uploads to a registry that keeps, loses or refuses them.

use blobd_fixtures::registry::{FakeRegistry, Fault};
use blobd_store_format::manifest::Manifest;
use bytes::Bytes;

use super::server::{Reply, Server, redirect, response};
use super::*;
use crate::{ConnectFailure, Delivery, Destination, UploadContent, UploadError};

const SIZE: usize = 1 << 20;
const CHUNK_BYTES: usize = 10_000;

/// A file in memory, with the offsets at which it was read.
struct InMemory {
    bytes: Bytes,
    offsets: Vec<u64>,
    fails_at: Option<u64>,
}

impl InMemory {
    fn new() -> Self {
        let bytes = (0..SIZE).map(|place| (place / 251).to_le_bytes()[0]).collect::<Vec<u8>>();
        Self { bytes: bytes.into(), offsets: Vec::new(), fails_at: None }
    }

    fn descriptor(&self) -> Descriptor {
        let media_type = MediaType::new(MediaType::OLLAMA_MODEL);
        Descriptor { media_type, digest: Digest::of(&self.bytes), size: SIZE as u64 }
    }

    /// Where reading began, and began again.
    fn starts(&self) -> Vec<u64> {
        let is_start = |place: &usize| {
            let before = place.checked_sub(1).map(|before| self.offsets[before]);
            before.is_none_or(|before| self.offsets[*place] != before + CHUNK_BYTES as u64)
        };
        (0..self.offsets.len()).filter(is_start).map(|place| self.offsets[place]).collect()
    }
}

impl UploadContent for InMemory {
    type Error = &'static str;

    async fn read(&mut self, offset: u64) -> Result<Bytes, Self::Error> {
        if self.fails_at.is_some_and(|place| offset >= place) {
            return Err("damaged");
        }
        self.offsets.push(offset);
        let start = usize::try_from(offset).unwrap();
        Ok(self.bytes.slice(start..SIZE.min(start + CHUNK_BYTES)))
    }
}

fn destination(client: &RegistryClient, registry: &FakeRegistry) -> Destination {
    client.destination(&registry.name("me/tiny:1").parse().unwrap(), false).unwrap()
}

async fn push(
    registry: &FakeRegistry,
    content: &mut InMemory,
) -> Result<Delivery, UploadError<&'static str>> {
    let (client, file) = (client(), content.descriptor());
    client.push_blob(&destination(&client, registry), &file, content).await
}

fn requests(registry: &FakeRegistry) -> Vec<String> {
    let request = |request: &blobd_fixtures::registry::Request| {
        let path = request.path.split('?').next().unwrap().replace("/v2/me/tiny/", "");
        format!("{} {path}", request.method)
    };
    registry.requests().iter().map(request).collect()
}

/// Whether the registry has exactly the content.
async fn has(registry: &FakeRegistry, content: &InMemory) -> bool {
    let (client, file) = (client(), content.descriptor());
    let destination = destination(&client, registry);
    client.has_blob(&destination, file.digest).await.unwrap()
}

#[tokio::test]
async fn file_is_one_request_after_the_upload_is_opened() {
    let registry = FakeRegistry::start().unwrap();
    let mut content = InMemory::new();
    assert!(!has(&registry, &content).await);
    assert_eq!(push(&registry, &mut content).await.unwrap(), Delivery::Sent);
    assert!(has(&registry, &content).await);
    assert_eq!(requests(&registry)[1..3], ["POST blobs/uploads/", "PUT blobs/uploads/0"]);
    assert_eq!(registry.bytes_uploaded(), SIZE as u64);
    assert_eq!(content.starts(), [0]);
    let put = &registry.requests()[2];
    assert_eq!(put.header("content-length"), Some(&*SIZE.to_string()));
    assert!(put.path.starts_with("/v2/me/tiny/blobs/uploads/0?_state=1&digest=sha256"), "{}", put.path);
}

#[tokio::test]
async fn empty_file_is_uploaded() {
    let registry = FakeRegistry::start().unwrap();
    let client = client();
    let file = Descriptor { digest: Digest::of(b""), size: 0, ..weights() };
    let destination = destination(&client, &registry);
    let mut content = InMemory::new();
    assert_eq!(client.push_blob(&destination, &file, &mut content).await.unwrap(), Delivery::Sent);
    assert!(client.has_blob(&destination, file.digest).await.unwrap() && content.offsets.is_empty());
}

#[tokio::test]
async fn broken_upload_goes_on_where_the_registry_has_kept_it() {
    for tenth in 1..10 {
        let registry = FakeRegistry::start().unwrap();
        registry.keep_broken_uploads(true);
        let at = (SIZE * tenth / 10) as u64;
        registry.break_uploads([at]);
        let mut content = InMemory::new();
        assert_eq!(push(&registry, &mut content).await.unwrap(), Delivery::Sent);
        assert!(has(&registry, &content).await);
        assert_eq!(registry.bytes_uploaded(), SIZE as u64, "no byte twice");
        assert_eq!(content.starts(), [0, at]);
        let last = ["GET blobs/uploads/0", "PATCH blobs/uploads/0", "PUT blobs/uploads/0"];
        assert_eq!(requests(&registry)[2..5], last);
    }
}

#[tokio::test]
async fn broken_upload_starts_again_where_the_registry_keeps_nothing() {
    for tenth in 1..10 {
        let registry = FakeRegistry::start().unwrap();
        registry.break_uploads([(SIZE * tenth / 10) as u64]);
        let mut content = InMemory::new();
        assert_eq!(push(&registry, &mut content).await.unwrap(), Delivery::Sent);
        assert!(has(&registry, &content).await);
        assert_eq!(content.starts(), [0, 0]);
        assert_eq!(requests(&registry)[2], "GET blobs/uploads/0");
    }
}

#[tokio::test]
async fn uploads_that_break_again_and_again_end_if_each_part_is_kept() {
    let registry = FakeRegistry::start().unwrap();
    registry.keep_broken_uploads(true);
    // Each body is the rest of the file.
    registry.break_uploads([100_000; 10]);
    let mut content = InMemory::new();
    assert_eq!(push(&registry, &mut content).await.unwrap(), Delivery::Sent);
    assert!(has(&registry, &content).await);
    assert_eq!(registry.bytes_uploaded(), SIZE as u64);
}

#[tokio::test]
async fn uploads_that_lose_everything_again_and_again_are_given_up() {
    let registry = FakeRegistry::start().unwrap();
    registry.break_uploads([SIZE as u64 / 2; 100]);
    let error = push(&registry, &mut InMemory::new()).await.unwrap_err();
    assert!(matches!(error, UploadError::Registry(RegistryError::BrokenUpload { .. })), "{error:?}");
    let posts = requests(&registry).iter().filter(|request| request.starts_with("POST")).count();
    assert_eq!(posts, 7, "six failures are tolerated");
}

#[tokio::test]
async fn lost_response_does_not_send_the_file_again() {
    let registry = FakeRegistry::start().unwrap();
    // The file is stored, and then the connection breaks before the response.
    registry.add_fault("digest=", 1, Fault::Status(503));
    let content = &mut InMemory::new();
    registry.add_blob(content.bytes.to_vec());
    assert_eq!(push(&registry, content).await.unwrap(), Delivery::Present);
    assert_eq!(content.starts(), [0]);
}

#[tokio::test]
async fn refusal_is_final_and_quotes_the_registry() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_fault("/blobs/uploads/", 1, Fault::Refusal(403, "push is not allowed here"));
    let error = push(&registry, &mut InMemory::new()).await.unwrap_err();
    let UploadError::Registry(error) = error else { panic!("{error:?}") };
    let text = error.to_string();
    assert!(text.starts_with("push to ") && text.contains("\"push is not allowed here\""), "{text}");
    assert_eq!(registry.requests().len(), 1);
}

#[tokio::test]
async fn refusal_that_comes_before_the_end_of_the_file_is_quoted() {
    let body = br#"{"errors":[{"code":"SIZE_INVALID","message":"files may have 1 MB"}]}"#;
    let server = Server::start(|seen, _| match seen.method.as_str() {
        "POST" => Reply::Whole(response(202, "Location: /upload?a=b\r\n", b"")),
        _ => Reply::Whole(response(413, "", body)),
    })
    .await;
    let (client, mut content) = (client(), InMemory::new());
    let destination = client.destination(&tiny(&server), false).unwrap();
    let file = content.descriptor();
    let error = client.push_blob(&destination, &file, &mut content).await.unwrap_err();
    let UploadError::Registry(error) = error else { panic!("{error:?}") };
    assert!(error.to_string().contains("413: \"files may have 1 MB\""), "{error}");
}

#[tokio::test]
async fn content_that_cannot_be_read_ends_the_upload() {
    let registry = FakeRegistry::start().unwrap();
    let mut content = InMemory { fails_at: Some(500_000), ..InMemory::new() };
    let error = push(&registry, &mut content).await.unwrap_err();
    assert!(matches!(error, UploadError::Content("damaged")), "{error:?}");
    assert!(!has(&registry, &content).await);
}

#[tokio::test]
async fn token_is_asked_for_with_the_right_to_push() {
    let registry = FakeRegistry::start().unwrap();
    registry.require_token();
    let mut content = InMemory::new();
    assert_eq!(push(&registry, &mut content).await.unwrap(), Delivery::Sent);
    let token = &registry.requests()[1].path;
    assert!(token.contains("scope=repository%3Ame%2Ftiny%3Apull%2Cpush"), "{token}");
    assert_eq!(requests(&registry).len(), 4, "challenge, token, upload, file");
    assert!(!registry.credentials_leaked());
}

/// A registry whose uploads are at `location`.
async fn located_at(location: impl Fn() -> String + Send + Sync + 'static) -> Server {
    Server::start(move |seen, _| match seen.method.as_str() {
        "POST" => Reply::Whole(response(202, &format!("Location: {}\r\n", location()), b"")),
        "PUT" => Reply::Whole(response(201, "", b"")),
        _ => Reply::Whole(response(404, "", b"")),
    })
    .await
}

async fn push_to(server: &Server) -> Result<Delivery, UploadError<&'static str>> {
    let (client, mut content) = (client(), InMemory::new());
    let destination = client.destination(&tiny(server), false).unwrap();
    let file = content.descriptor();
    client.push_blob(&destination, &file, &mut content).await
}

#[tokio::test]
async fn location_may_be_relative_absolute_and_at_another_host() {
    for (location, path) in
        [("/up/1?a=b%2Fc", "/up/1?a=b%2Fc&digest="), ("1", "/v2/library/tiny/blobs/uploads/1?digest=")]
    {
        let server = located_at(|| location.to_owned()).await;
        assert_eq!(push_to(&server).await.unwrap(), Delivery::Sent);
        let put = server.paths().pop().unwrap();
        assert!(put.starts_with(path), "{put}");
    }
    let storage = Server::always(response(201, "", b"")).await;
    let elsewhere = storage.url("/up?sig=1");
    let server = located_at(move || elsewhere.clone()).await;
    assert_eq!(push_to(&server).await.unwrap(), Delivery::Sent);
    assert!(storage.paths()[0].starts_with("/up?sig=1&digest="), "{:?}", storage.paths());
    assert_eq!(storage.seen()[0].header("authorization"), None);
}

#[tokio::test]
async fn upload_is_not_sent_to_an_address_of_narrower_scope() {
    let server = located_at(|| "http://169.254.169.254/up".to_owned()).await;
    let error = push_to(&server).await.unwrap_err();
    let is_forbidden = |error: &RegistryError| {
        matches!(error, RegistryError::Unreachable { reason: ConnectFailure::ForbiddenAddress(_), .. })
    };
    assert!(matches!(&error, UploadError::Registry(error) if is_forbidden(error)), "{error:?}");
    for location in ["http://user@127.0.0.1/up", "ftp://127.0.0.1/up"] {
        let server = located_at(|| location.to_owned()).await;
        let error = push_to(&server).await.unwrap_err();
        let UploadError::Registry(error) = error else { panic!("{error:?}") };
        assert!(error.to_string().contains("address of the upload refused"), "{error}");
        assert_eq!(server.paths().len(), 1);
    }
}

#[tokio::test]
async fn redirected_file_is_sent_to_the_target() {
    let storage = Server::always(response(201, "", b"")).await;
    let elsewhere = storage.url("/store?sig=1");
    let server = Server::start(move |seen, _| match seen.method.as_str() {
        "POST" => Reply::Whole(response(202, "Location: /up\r\n", b"")),
        _ => redirect(307, &elsewhere),
    })
    .await;
    assert_eq!(push_to(&server).await.unwrap(), Delivery::Sent);
    assert_eq!(storage.seen()[0].method, "PUT");
    assert_eq!(storage.seen()[0].body.len(), SIZE);
}

#[tokio::test]
async fn file_is_mounted_from_a_repository_that_has_it() {
    for mounts in [true, false] {
        let server = Server::start(move |seen, _| match seen.method.as_str() {
            "POST" if seen.path.contains("?mount=") && mounts => Reply::Whole(response(201, "", b"")),
            "POST" if seen.path.contains("?mount=") => Reply::Whole(response(403, "", b"")),
            "POST" => Reply::Whole(response(202, "Location: /up\r\n", b"")),
            _ => Reply::Whole(response(201, "", b"")),
        })
        .await;
        let (client, mut content) = (client(), InMemory::new());
        let destination = client.destination(&tiny(&server), false).unwrap();
        let destination = destination.mounting_from("team/base".to_owned());
        let file = content.descriptor();
        let delivery = client.push_blob(&destination, &file, &mut content).await.unwrap();
        assert_eq!(delivery, if mounts { Delivery::Mounted } else { Delivery::Sent });
        assert!(server.paths()[0].ends_with("&from=team%2Fbase"), "{:?}", server.paths());
        assert_eq!(server.paths().len(), if mounts { 1 } else { 3 });
    }
}

#[tokio::test]
async fn manifest_is_published_with_its_own_bytes_and_type() {
    let registry = FakeRegistry::start().unwrap();
    let client = client();
    let destination = destination(&client, &registry);
    registry.add_blob(WEIGHTS);
    let manifest = Manifest::compose(weights(), vec![weights()]).unwrap();
    assert_eq!(client.pushed_manifest(&destination).await.unwrap(), None);
    client.push_manifest(&destination, &manifest).await.unwrap();
    let put = &registry.requests()[1];
    assert_eq!((put.method.as_str(), &*put.body), ("PUT", manifest.raw()));
    assert_eq!(put.header("content-type"), Some(MediaType::DOCKER_MANIFEST));
    assert_eq!(client.pushed_manifest(&destination).await.unwrap(), Some(manifest.digest()));
    registry.add_fault("/manifests/", 1, Fault::Status(415));
    let error = client.push_manifest(&destination, &manifest).await.unwrap_err();
    assert!(error.hint().unwrap().contains("docker2s2"), "{error}");
}

#[tokio::test]
async fn registry_that_stores_something_else_is_an_error() {
    let other = Digest::of(b"other");
    let header = format!("Docker-Content-Digest: {other}\r\n");
    let server = Server::always(response(201, &header, b"")).await;
    let client = client();
    let destination = client.destination(&tiny(&server), false).unwrap();
    let manifest = Manifest::compose(weights(), vec![weights()]).unwrap();
    let error = client.push_manifest(&destination, &manifest).await.unwrap_err();
    assert!(error.to_string().contains("stored another manifest: expected"), "{error}");
}

#[tokio::test]
async fn silent_registry_is_given_up() {
    let server = Server::start(|seen, _| match seen.method.as_str() {
        "POST" => Reply::Whole(response(202, "Location: /up\r\n", b"")),
        "PUT" => Reply::ThenSilence(Vec::new()),
        _ => Reply::Whole(response(404, "", b"")),
    })
    .await;
    let client = client_with_short_limit(|limits| &mut limits.commit);
    let mut content = InMemory::new();
    let destination = client.destination(&tiny(&server), false).unwrap();
    let file = content.descriptor();
    let error = client.push_blob(&destination, &file, &mut content).await.unwrap_err();
    assert!(matches!(error, UploadError::Registry(RegistryError::Stalled { .. })), "{error:?}");
}

#[test]
fn hub_takes_no_uploads_and_mirrors_get_none() {
    let name: Reference = "hf.co/me/tiny".parse().unwrap();
    let error = client().destination(&name, false).unwrap_err();
    assert!(error.to_string().contains("hf upload"), "{error}");
    let mirrors = [("lan:5000".to_owned(), vec!["http://mirror:1".to_owned()])].into();
    let policy = RegistryPolicy { mirrors, ..RegistryPolicy::default() };
    let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
    let url = |is_plain_http| {
        let destination = client.destination(&"lan:5000/me/tiny".parse().unwrap(), is_plain_http).unwrap();
        format!("{destination:?}")
    };
    assert!(url(false).contains("https://lan:5000") && url(true).contains("http://lan:5000"));
}
