//! Tests of the client against servers that respond byte for byte as a test says.

mod auth;
mod blob;
mod credentials;
mod listing;
mod manifest;
mod mirrors;
mod proxies;
mod range;
mod refusals;
mod remote;
mod server;
mod tensor_index;
mod transport;
mod upload;

use std::io::Write as _;
use std::time::Duration;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use flate2::Compression;
use flate2::write::GzEncoder;

use self::server::Server;
use super::error::Result;
use super::{Limits, Proxies, RegistryClient, RegistryError, RegistryPolicy, RemoteFile, RetryPolicy};

const WEIGHTS: &[u8] = b"GGUF and so on";

/// No test reaches these limits; tests of a limit shorten it.
fn limits() -> Limits {
    let long = Duration::from_secs(20);
    let refusal = Duration::from_millis(200);
    Limits {
        connect: long,
        head: long,
        document: long,
        refusal,
        silence: long,
        commit: long,
        stall: long,
        slowest_bytes: 64,
    }
}

fn client_with(limits: Limits) -> RegistryClient {
    let retry = RetryPolicy {
        backoff: Duration::from_millis(1),
        longest_first_retry_after: Duration::from_millis(20),
        ..RetryPolicy::default()
    };
    let policy = RegistryPolicy { retry, ..RegistryPolicy::default() };
    RegistryClient::with_limits(&policy, limits, Proxies::default()).unwrap()
}

fn client() -> RegistryClient {
    client_with(limits())
}

/// A client with a short limit, the one that `limit` selects.
fn client_with_short_limit(limit: fn(&mut Limits) -> &mut Duration) -> RegistryClient {
    let mut limits = limits();
    *limit(&mut limits) = Duration::from_millis(100);
    client_with(limits)
}

/// `library/tiny:latest` at a server.
fn tiny(server: &Server) -> Reference {
    format!("http://{}/library/tiny", server.address()).parse().unwrap()
}

fn weights() -> Descriptor {
    let size = WEIGHTS.len() as u64;
    Descriptor { media_type: MediaType::new(MediaType::OLLAMA_MODEL), digest: Digest::of(WEIGHTS), size }
}

/// [`WEIGHTS`] at a server.
fn layer(server: &Server) -> RemoteFile {
    RemoteFile::layer(&tiny(server), &weights())
}

/// The manifest of a model with one layer, [`WEIGHTS`].
fn manifest_json() -> String {
    let layer = serde_json::to_string(&weights()).unwrap();
    format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{layer}]}}"#)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Fetches [`WEIGHTS`] to the end.
async fn fetch(client: &RegistryClient, server: &Server) -> Result<Vec<u8>> {
    let mut stream = client.blob(&tiny(server), &weights()).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}
