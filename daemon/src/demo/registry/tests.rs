use std::io::Write;

use blobd_registry::{RegistryClient, RegistryPolicy};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const WEIGHTS: &[u8] = b"0123456789";

fn descriptor(bytes: &[u8]) -> Descriptor {
    let media_type = MediaType::new(MediaType::OLLAMA_MODEL);
    Descriptor { media_type, digest: Digest::of(bytes), size: bytes.len() as u64 }
}

fn tiny() -> Reference {
    "tiny:1b".parse().unwrap()
}

/// A registry with one model, whose weights are in memory and whose configuration is a file.
async fn registry() -> LoopbackRegistry {
    let mut config = tempfile::NamedTempFile::new().unwrap();
    config.write_all(&big()).unwrap();
    let layer = serde_json::to_string(&descriptor(WEIGHTS)).unwrap();
    let config_json = serde_json::to_string(&descriptor(&big())).unwrap();
    let mut catalogue = Catalogue::default();
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config_json},"layers":[{layer}]}}"#);
    catalogue.add_manifest(&tiny(), manifest);
    catalogue.add_blob(WEIGHTS);
    catalogue.add_file(Digest::of(&big()), config.path()).unwrap();
    LoopbackRegistry::start(catalogue).await.unwrap()
}

/// More than fits in the chunks that are read ahead.
fn big() -> Vec<u8> {
    [0, 1, 2, 3, 4].map(|byte| vec![byte; 1 << 20]).concat()
}

/// The answer to a request, head and body as they come.
async fn ask(registry: &LoopbackRegistry, method: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(registry.address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// The path and query under `/cdn/` of the weights.
async fn signed_path(registry: &LoopbackRegistry) -> String {
    let answer = ask(registry, "GET", &format!("/v2/library/tiny/blobs/{}", Digest::of(WEIGHTS)), "").await;
    assert!(answer.starts_with("HTTP/1.1 307"), "{answer}");
    let location = answer.lines().find_map(|line| line.strip_prefix("location: ")).unwrap();
    location.strip_prefix(&registry.url()).unwrap().to_owned()
}

#[tokio::test]
async fn whole_model_is_pulled_through_the_client() {
    let registry = registry().await;
    let mut policy = RegistryPolicy::default();
    policy.mirrors.insert(Reference::DEFAULT_HOST.to_owned(), vec![registry.url()]);
    let client = RegistryClient::new(&policy).unwrap();
    let manifest = client.manifest(&tiny()).await.unwrap();
    let mut bytes_fetched = 0;
    for file in manifest.files() {
        let mut stream = client.blob(&tiny(), file).await.unwrap();
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await.unwrap() {
            bytes.extend_from_slice(&chunk);
        }
        assert_eq!(Digest::of(&bytes), file.digest);
        bytes_fetched += file.size;
    }
    assert_eq!(registry.bytes_served(), bytes_fetched);
}

#[tokio::test]
async fn manifest_is_served_as_ollama_serves_it() {
    let registry = registry().await;
    let answer = ask(&registry, "GET", "/v2/library/tiny/manifests/1b", "").await;
    let (head, raw) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("content-type: text/plain"), "{head}");
    assert!(
        head.contains(&format!("ollama-content-digest: {}", Digest::of(raw.as_bytes()).to_hex())),
        "{head}"
    );
    let by_digest = format!("/v2/library/tiny/manifests/{}", Digest::of(raw.as_bytes()));
    assert!(ask(&registry, "GET", &by_digest, "").await.ends_with(raw));
    let head_only = ask(&registry, "HEAD", "/v2/library/tiny/manifests/1b", "").await;
    assert!(head_only.contains(&format!("content-length: {}\r\n", raw.len())), "{head_only}");
    assert!(head_only.ends_with("\r\n\r\n"), "{head_only}");
}

#[tokio::test]
async fn ranges_are_honoured_and_counted() {
    let registry = registry().await;
    let path = signed_path(&registry).await;
    for (range, status, body) in [
        ("bytes=2-4", "206", "234"),
        ("bytes=7-", "206", "789"),
        ("bytes=7-99", "206", "789"),
        ("bytes=-2", "206", "89"),
        ("bytes=10-", "416", ""),
        ("bytes=5-2", "416", ""),
        ("lines=1-2", "200", "0123456789"),
    ] {
        let before = registry.bytes_served();
        let answer = ask(&registry, "GET", &path, &format!("Range: {range}\r\n")).await;
        let (head, found) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{range}: {head}");
        assert_eq!(found, body, "{range}");
        assert_eq!(registry.bytes_served() - before, body.len() as u64, "{range}");
    }
    let answer = ask(&registry, "GET", &path, "Range: bytes=2-4\r\n").await;
    assert!(answer.contains("content-range: bytes 2-4/10\r\n"), "{answer}");
}

#[tokio::test]
async fn anything_else_is_refused() {
    let registry = registry().await;
    let unsigned = format!("/cdn/{}?X-Amz-Signature=0", Digest::of(WEIGHTS));
    for (method, path, status) in [
        ("GET", unsigned.as_str(), "403"),
        ("GET", "/v2/library/tiny/manifests/2b", "404"),
        ("GET", "/v2/library/tiny/blobs/sha256:../../etc/passwd", "404"),
        ("GET", "/cdn/..", "404"),
        ("GET", "/", "404"),
        ("POST", "/v2/library/tiny/manifests/1b", "405"),
    ] {
        let answer = ask(&registry, method, path, "").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
    }
    assert_eq!(registry.bytes_served(), 0);
}

#[tokio::test]
async fn registry_stops_when_dropped() {
    let registry = registry().await;
    let address = registry.address;
    let mut open = TcpStream::connect(address).await.unwrap();
    open.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    open.read_u8().await.unwrap();
    drop(registry);
    while open.read_u8().await.is_ok() {}
    assert!(TcpStream::connect(address).await.is_err());
}
