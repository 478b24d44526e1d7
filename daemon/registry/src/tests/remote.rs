//! Files at a URL: versions, parts and credentials.

use blobd_store_format::source::PullSource;

use super::server::{Reply, Seen, Server, ok, response};
use super::*;
use crate::RemoteModel;
use crate::credentials::{Credential, CredentialFile, CredentialPolicy, Secret};

const FILE: &[u8] = b"GGUF 0123456789";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Responds with the requested part of [`FILE`].
fn part(seen: &Seen, etag: &str) -> Vec<u8> {
    let range = seen.header("range").unwrap().trim_start_matches("bytes=");
    let (first, last) = range.split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let headers = format!("Content-Range: bytes {first}-{last}/{}\r\nETag: {etag}\r\n", FILE.len());
    response(206, &headers, &FILE[first..=last])
}

async fn file_at(server: &Server) -> RemoteFile {
    let source: PullSource = server.url("/m/tiny.gguf?signature=secret").parse().unwrap();
    let RemoteModel::Files { mut files, origin, .. } = client().resolve(&source).await.unwrap() else {
        panic!("no files")
    };
    assert_eq!((files.len(), origin), (1, None));
    files.remove(0)
}

async fn read(file: &RemoteFile, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
    let mut stream = client().open_range(file, range).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

#[tokio::test]
async fn file_tells_its_length_and_version_and_gives_its_parts() {
    let server = Server::start(|seen, _| Reply::Whole(part(seen, "\"1\""))).await;
    let file = file_at(&server).await;
    assert_eq!((file.size(), file.digest(), file.validator()), (FILE.len() as u64, None, Some("\"1\"")));
    assert_eq!(file.label(), server.url("/m/tiny.gguf"));
    assert!(!format!("{file:?}").contains("secret"));
    assert_eq!(read(&file, 5..9).await.unwrap(), b"0123");
    assert_eq!(server.paths(), ["/m/tiny.gguf?signature=secret"; 2]);
}

#[tokio::test]
async fn another_version_is_not_mixed_with_the_first() {
    let server =
        Server::start(|seen, earlier| Reply::Whole(part(seen, if earlier == 0 { "\"1\"" } else { "\"2\"" })))
            .await;
    let error = read(&file_at(&server).await, 5..9).await.unwrap_err();
    assert!(error.to_string().contains("changed at"), "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
}

#[tokio::test]
async fn server_without_ranges_sends_what_comes_before_too() {
    let server = Server::always(ok(FILE)).await;
    let file = file_at(&server).await;
    assert_eq!((file.size(), file.validator()), (FILE.len() as u64, None));
    assert_eq!(read(&file, 5..9).await.unwrap(), b"0123");
}

#[tokio::test]
async fn file_of_another_length_is_named_by_its_address() {
    let server = Server::start(|seen, earlier| {
        Reply::Whole(if earlier == 0 { part(seen, "\"1\"") } else { ok(b"GGUF and more than was announced") })
    })
    .await;
    let error = client().open(&file_at(&server).await).await.unwrap_err();
    let expected = format!(
        "{}: wrong size at {}: expected 15 bytes, found 32",
        server.url("/m/tiny.gguf"),
        server.address()
    );
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn file_of_unknown_length_and_web_page_are_refused() {
    let endless = Server::always(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nGGUF".to_vec()).await;
    let page =
        Server::always(response(200, "Content-Type: Text/HTML; charset=utf-8\r\n", b"<p>Welcome")).await;
    for (server, what) in [(endless, "does not say how long"), (page, "login page")] {
        let error = client().resolve(&server.url("/m/tiny.gguf").parse().unwrap()).await.unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}

#[tokio::test]
async fn private_repository_is_listed_and_fetched_with_its_token() {
    let server = Server::start(|seen, _| {
        let refs = format!(r#"{{"branches":[{{"name":"main","targetCommit":"{COMMIT}"}}]}}"#);
        let tree = format!(
            r#"[{{"type":"file","path":"a b.gguf","size":14,"lfs":{{"size":14,"oid":"{}"}}}}]"#,
            Digest::of(WEIGHTS).to_string().trim_start_matches("sha256:")
        );
        Reply::Whole(match seen.path.as_str() {
            _ if seen.header("authorization") != Some("Bearer token") => response(401, "", b""),
            path if path.ends_with("/refs") => ok(refs.as_bytes()),
            path if path.contains("/tree/") => ok(tree.as_bytes()),
            _ => ok(WEIGHTS),
        })
    })
    .await;
    let source: PullSource = "hf.co/me/x/a b.gguf".parse().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let credentials = CredentialFile::at(folder.path().join("credentials.json"));
    let mirrors = [("hf.co".to_owned(), vec![server.url("")])].into();
    let policy = RegistryPolicy {
        mirrors,
        credentials: CredentialPolicy { file: Some(credentials.clone()), ..CredentialPolicy::default() },
        ..RegistryPolicy::default()
    };
    let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
    let error = client.resolve(&source).await.unwrap_err();
    assert!(error.to_string().starts_with("hf.co/me/x: denied by"), "{error}");
    let token = Credential::Token(Secret::new("token"));
    credentials.set(&server.address().to_string().parse().unwrap(), &token).unwrap();
    let RemoteModel::Files { files, origin, .. } = client.resolve(&source).await.unwrap() else {
        panic!("no files")
    };
    assert_eq!(files[0].digest(), Some(Digest::of(WEIGHTS)));
    assert_eq!(files[0].validator(), None, "the digest decides");
    assert!(files[0].must_have_known_format());
    assert_eq!(origin, Some(format!("https://huggingface.co/me/x/resolve/{COMMIT}/a%20b.gguf")));
    assert_eq!(client.open(&files[0]).await.unwrap().next().await.unwrap().unwrap(), WEIGHTS);
    assert_eq!(server.paths().last().unwrap(), &format!("/me/x/resolve/{COMMIT}/a%20b.gguf"));
}

/// Transfers run in their own tasks.
#[test]
fn parts_can_be_fetched_in_tasks() {
    fn is_send<T: Send>(_: &T) {}
    let (client, reference) = (client(), "a/b".parse().unwrap());
    let file = RemoteFile::layer(&reference, &weights());
    is_send(&client.open_range(&file, 0..1));
    is_send(&client.open(&file));
    is_send(&client.resolve(&PullSource::Registry(reference.clone())));
}

#[test]
fn layers_of_the_hub_must_have_a_known_format() {
    let digest = Digest::of(b"x");
    let layer = |reference: &str, media_type: &str| {
        let file = Descriptor { media_type: MediaType::new(media_type), digest, size: 1 };
        RemoteFile::layer(&reference.parse().unwrap(), &file)
    };
    assert!(layer("hf.co/me/x:Q8_0", MediaType::OLLAMA_MODEL).must_have_known_format());
    assert!(!layer("llama3:8b", MediaType::OLLAMA_MODEL).must_have_known_format());
}
