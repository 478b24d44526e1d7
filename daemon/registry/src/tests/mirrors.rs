//! Which error is reported when all mirrors of a host fail.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;

use super::server::{Reply, Server, ok, response};
use super::*;
use crate::{FailureKind, Sender};

/// How a mirror fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mirror {
    /// It has other tags of the model, and lists them.
    Tags,
    /// It has the tag `latest` of the model, and lists nothing.
    Unlisted,
    /// It has nothing, and lists nothing.
    Empty,
    Denied,
    /// It does not speak TLS, although its URL says so.
    Plain,
    /// Nothing listens.
    Down,
    Broken,
    LoginPage,
}
use Mirror::{Broken, Denied, Down, Empty, LoginPage, Plain, Tags, Unlisted};

async fn start(mirror: Mirror) -> Server {
    Server::start(move |seen, _| {
        Reply::Whole(match mirror {
            Tags if seen.path.contains("/tags/list") => ok(br#"{"tags":["8b-q4","8b-q8"]}"#),
            Unlisted if seen.path.contains("/manifests/latest?") => ok(manifest_json().as_bytes()),
            Tags | Unlisted | Empty | Plain | Down => response(404, "", b""),
            Denied => response(401, "", b""),
            Broken => response(503, "", b""),
            LoginPage => response(200, "Content-Type: text/html\r\n", b"<!doctype html>"),
        })
    })
    .await
}

/// The URL of a server that should speak TLS and does not.
fn plain_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(&response(400, "", b""));
            // The client closes the connection when it has seen the response.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        }
    });
    format!("https://{address}")
}

/// Asks the mirrors of a host in this order for a tag that none of them delivers.
async fn failure(mirrors: &[Mirror]) -> RegistryError {
    let (mut servers, mut bases) = (Vec::new(), Vec::new());
    for mirror in mirrors {
        let server = start(*mirror).await;
        bases.push(match mirror {
            Down => format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()),
            Plain => plain_server(),
            _ => server.url(""),
        });
        servers.push(server);
    }
    client_of([("registry.ollama.ai".to_owned(), bases)].into())
        .manifest(&"tiny:8b-q5".parse().unwrap())
        .await
        .unwrap_err()
}

fn client_of(mirrors: std::collections::BTreeMap<String, Vec<String>>) -> RegistryClient {
    let retry = RetryPolicy { backoff: Duration::from_millis(1), ..RetryPolicy::default() };
    let policy = RegistryPolicy { mirrors, retry, ..RegistryPolicy::default() };
    RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap()
}

#[tokio::test]
async fn most_relevant_error_of_several_mirrors_is_reported_and_the_others_are_in_its_hint() {
    use FailureKind::{Denied as Refused, NotFound, Upstream};
    const TAGS: &str = "the nearest names are 8b-q4, 8b-q8";
    const DOWN: &str = "connection refused";
    const LACKS: &str = "does not have it";
    for (mirrors, kind, message, hint) in [
        (&[Down, Tags][..], NotFound, TAGS, Some(DOWN)),
        (&[Tags, Down], NotFound, TAGS, Some(DOWN)),
        (&[Empty, Tags], NotFound, TAGS, Some(LACKS)),
        (&[Denied, Tags], NotFound, TAGS, Some("denies it")),
        (&[Plain, Tags], NotFound, TAGS, Some("does not speak TLS")),
        (&[Broken, Down, Tags], NotFound, TAGS, Some("status 503 (Service Unavailable); 127.")),
        // A mirror that lacks it says nothing about the others.
        (&[Empty, Down], Upstream, DOWN, Some(LACKS)),
        (&[Down, Empty], Upstream, DOWN, Some(LACKS)),
        (&[Empty, Broken], Upstream, "status 503", Some(LACKS)),
        (&[Empty, LoginPage], Upstream, "login page", Some(LACKS)),
        (&[Empty, Denied], Refused, "denied by", Some(LACKS)),
        (&[Down, Denied], Refused, "denied by", Some(DOWN)),
        (&[Denied, Plain], Refused, "denied by", Some("does not speak TLS")),
        (&[Down, Plain], Upstream, "does not speak TLS", Some(DOWN)),
        (&[Down, Broken], Upstream, DOWN, Some("status 503")),
        (&[Broken, Down], Upstream, "status 503", Some(DOWN)),
        (&[Empty, Empty], NotFound, "not found at", Some(LACKS)),
        (&[Empty], NotFound, "not found at", Some("https://ollama.com/library/tiny/tags lists")),
        (&[Unlisted], NotFound, "which has tiny:latest", Some("https://ollama.com/library/tiny/tags lists")),
        (&[Unlisted, Tags], NotFound, "which has tiny:latest", Some("but 8b-q4, 8b-q8")),
        (&[Empty, Unlisted], NotFound, "which has tiny:latest", Some(LACKS)),
        (&[LoginPage, Empty], Upstream, "login page", Some(LACKS)),
        (&[Down], Upstream, DOWN, None),
    ] {
        let error = failure(mirrors).await;
        assert_eq!(error.kind(), kind, "{mirrors:?}: {error}");
        assert!(error.to_string().contains(message), "{mirrors:?}: {error}");
        let found = error.hint();
        assert_eq!(found.is_some(), hint.is_some(), "{mirrors:?}: {found:?}");
        assert!(found.as_deref().unwrap_or_default().contains(hint.unwrap_or_default()), "{found:?}");
    }
}

/// Unlike a mirror, the host itself knows what it has.
#[tokio::test]
async fn not_found_at_the_host_takes_precedence_over_a_mirror_that_is_down() {
    let (own, down) = (start(Empty).await, TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let host = own.address().to_string();
    let mirrors = [(host.clone(), vec![format!("http://{down}"), own.url("")])].into();
    let reference = format!("http://{host}/library/tiny").parse().unwrap();
    let error = client_of(mirrors).manifest(&reference).await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::NotFound, "{error}");
    assert!(error.hint().unwrap().contains("connection refused"), "{error}");
}

/// After a mirror refuses or sends wrong data, the next one is tried.
#[tokio::test]
async fn next_mirror_is_tried_after_every_failure_of_a_server() {
    let good = Server::always(ok(manifest_json().as_bytes())).await;
    for mirror in [Tags, Empty, Denied, Broken, LoginPage] {
        let bad = start(mirror).await;
        let mirrors = [("registry.ollama.ai".to_owned(), vec![bad.url(""), good.url("")])].into();
        client_of(mirrors).manifest(&"tiny".parse().unwrap()).await.unwrap();
    }
}

#[tokio::test]
async fn avoided_servers_are_requested_last_and_over_other_connections() {
    let servers = [Server::always(ok(WEIGHTS)).await, Server::always(ok(WEIGHTS)).await];
    let [first, second] = servers.each_ref().map(|server| server.url("").replace("http://", ""));
    let bases = servers.each_ref().map(|server| server.url("")).to_vec();
    let client = client_of([("registry.ollama.ai".to_owned(), bases)].into());
    let file = RemoteFile::layer(&"tiny".parse().unwrap(), &weights());
    let stream = client.open(&file).await.unwrap();
    let sender = Arc::clone(stream.sender());
    assert_eq!((sender.server(), sender.to_string()), (&*first, first.clone()));
    let client = client.with_fresh_connections();
    let none: [&Sender; 0] = [];
    for avoiding in [file.avoiding(none), file.avoiding([&*sender])] {
        assert_eq!(client.open(&avoiding).await.unwrap().sender().server(), second);
    }
    let both = [sender, Arc::clone(client.open(&file.avoiding(none)).await.unwrap().sender())];
    let avoiding = file.avoiding(both.iter().map(|sender| &**sender));
    assert_eq!(client.open(&avoiding).await.unwrap().sender().server(), first, "one of them is needed");
}
