//! Connections: TLS, proxies, mirrors, and address scopes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

use http_body_util::{BodyExt as _, Full};
use hyper::Method;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::server::{Reply, Server, ok, redirect, response};
use super::*;
use crate::ConnectFailure;
use crate::address_scope::AddressScope;
use crate::transport::Request;

pub(super) fn client_for(policy: &RegistryPolicy, proxies: Proxies) -> Result<RegistryClient> {
    RegistryClient::with_limits(policy, limits(), proxies)
}

pub(super) fn testdata(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "src/testdata", name].iter().collect()
}

/// A server with the certificate in `testdata/`; it responds to one request.
pub(super) fn tls_server(reply: Vec<u8>) -> SocketAddr {
    let certificate = CertificateDer::from_pem_file(testdata("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(testdata("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let connection = ServerConnection::new(Arc::new(config)).unwrap();
        let mut stream = StreamOwned::new(connection, listener.accept().unwrap().0);
        // A client that does not trust the certificate closes the connection here.
        if stream.read(&mut [0; 4096]).is_ok() {
            stream.write_all(&reply).unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
        }
    });
    address
}

pub(super) fn trusting() -> RegistryPolicy {
    RegistryPolicy { ca_files: vec![testdata("ca.pem")], ..RegistryPolicy::default() }
}

pub(super) fn over_tls(address: SocketAddr) -> Reference {
    format!("https://localhost:{}/library/tiny", address.port()).parse().unwrap()
}

#[tokio::test]
async fn added_authority_is_trusted() {
    let address = tls_server(ok(manifest_json().as_bytes()));
    let client = client_for(&trusting(), Proxies::default()).unwrap();
    client.manifest(&over_tls(address)).await.unwrap();
}

#[tokio::test]
async fn unknown_authority_is_not_trusted() {
    let address = tls_server(ok(manifest_json().as_bytes()));
    let error = client().manifest(&over_tls(address)).await.unwrap_err();
    assert!(
        matches!(error, RegistryError::Unreachable { reason: ConnectFailure::UnknownIssuer, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn redirect_out_of_tls_is_refused() {
    let plain = Server::always(ok(manifest_json().as_bytes())).await;
    let Reply::Whole(reply) = redirect(302, &plain.url("/login")) else { unreachable!() };
    let client = client_for(&trusting(), Proxies::default()).unwrap();
    let error = client.manifest(&over_tls(tls_server(reply))).await.unwrap_err();
    assert!(error.to_string().contains("from https to http"), "{error}");
    assert!(plain.seen().is_empty());
}

#[tokio::test]
async fn tls_is_used_unless_the_reference_says_http_or_names_this_machine() {
    let plain = Server::always(ok(manifest_json().as_bytes())).await;
    // Leads to this machine but does not name it.
    let reference = format!("0.0.0.0:{}/library/tiny", plain.address().port()).parse().unwrap();
    let error = client().manifest(&reference).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { reason: ConnectFailure::Other(_), .. }), "{error}");
    assert!(plain.seen().is_empty());
    for name in [format!("{}/tiny", plain.address()), format!("localhost:{}/tiny", plain.address().port())] {
        client().manifest(&name.parse().unwrap()).await.unwrap();
    }
    assert!(plain.seen().iter().all(|request| request.path == "/v2/tiny/manifests/latest"));
}

#[tokio::test]
async fn registry_on_this_machine_that_expects_tls_is_named_with_https() {
    let address = tls_server(ok(manifest_json().as_bytes()));
    let ask = async |port: u16| client().manifest(&format!("localhost:{port}/tiny").parse().unwrap()).await;
    let error = ask(address.port()).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { reason: ConnectFailure::NotHttp, .. }), "{error}");
    assert!(error.to_string().ends_with("if it expects TLS, put https:// before its name"), "{error}");
    // As Go's servers and nginx respond.
    let server = Server::always(response(400, "", b"")).await;
    let error = ask(server.address().port()).await.unwrap_err();
    assert!(error.to_string().ends_with("if it expects TLS, put https:// before its name"), "{error}");
}

#[tokio::test]
async fn unusable_certificate_files_are_named() {
    let policy = |name| RegistryPolicy { ca_files: vec![testdata(name)], ..RegistryPolicy::default() };
    for name in ["absent.pem", "server.key", "README.md"] {
        let error = client_for(&policy(name), Proxies::default()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[tokio::test]
async fn mirror_takes_the_place_of_a_registry() {
    let mirror = Server::always(ok(manifest_json().as_bytes())).await;
    let mirrors = [("Registry.Ollama.AI".to_owned(), vec![mirror.url("/cache/")])].into();
    let policy = RegistryPolicy { mirrors, ..RegistryPolicy::default() };
    let client = client_for(&policy, Proxies::default()).unwrap();
    client.manifest(&"tiny".parse().unwrap()).await.unwrap();
    assert_eq!(mirror.paths(), ["/cache/v2/library/tiny/manifests/latest?ns=registry.ollama.ai"]);
}

#[tokio::test]
async fn unusable_mirror_is_refused_at_start() {
    let mirrors = [("hf.co".to_owned(), vec!["127.0.0.1".to_owned()])].into();
    let policy = RegistryPolicy { mirrors, ..RegistryPolicy::default() };
    let error = client_for(&policy, Proxies::default()).unwrap_err();
    assert!(
        error.to_string().starts_with("mirror of hf.co: expected http")
            && error.to_string().ends_with("\"127.0.0.1\""),
        "{error}"
    );
}

#[tokio::test]
async fn names_have_the_scope_of_their_addresses() {
    let server = Server::always(ok(b"")).await;
    let transport = &client().shared.transport;
    let reached = async |host: &str, reach| {
        let url = format!("http://{host}:{}/", server.address().port()).parse().unwrap();
        transport.send(Request::get(&url, HeaderMap::new()), reach).await
    };
    for host in ["localhost", "127.0.0.1", "127.1", "2130706433", "[::ffff:127.0.0.1]"] {
        for reach in [AddressScope::Public, AddressScope::Private] {
            let error = reached(host, reach).await.unwrap_err();
            assert!(
                matches!(
                    error,
                    RegistryError::Unreachable { reason: ConnectFailure::ForbiddenAddress(_), .. }
                ),
                "{host}: {error}"
            );
        }
    }
    assert!(server.seen().is_empty());
    assert_eq!(reached("localhost", AddressScope::Loopback).await.unwrap().1, Some(AddressScope::Loopback));
}

#[tokio::test]
async fn request_body_is_sent_with_its_method_and_type() {
    let server = Server::always(response(201, "", b"")).await;
    let (url, client) = (server.url("/v2/library/tiny/blobs/uploads/").parse().unwrap(), client());
    let headers =
        [(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"))].into_iter().collect();
    let body = Full::from(WEIGHTS).map_err(|never| match never {}).boxed_unsync();
    let request = Request { method: Method::POST, url: &url, headers, body };
    let (response, _scope) = client.shared.transport.send(request, AddressScope::Loopback).await.unwrap();
    assert_eq!(response.status(), 201);
    let seen = server.seen().remove(0);
    assert!(seen.head.starts_with("POST /v2/library/tiny/blobs/uploads/ "), "{}", seen.head);
    assert_eq!(seen.header("content-type"), Some("application/octet-stream"));
    assert!(seen.header("user-agent").unwrap().starts_with("blobd/"));
    assert_eq!(seen.body, WEIGHTS);
}

#[tokio::test]
async fn closed_port_is_reported_with_its_cause() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = client().manifest(&format!("http://{address}/a/b").parse().unwrap()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{address}: connection refused; is the registry running, and is the port right?")
    );
}
