//! Anonymous tokens: requested once, sent only to their registry.

use super::server::{Reply, Seen, Server, head, ok, redirect, response};
use super::*;
use crate::error::Advice;
use crate::token_cache::Authorization;

/// A 401 whose realm is on the same server, or at `realm`.
fn challenge(seen: &Seen, realm: Option<&str>) -> Reply {
    let own = format!("http://{}/token", seen.header("host").unwrap());
    let realm = realm.unwrap_or(&own);
    let header =
        format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s\",scope=\"repository:x:pull\"\r\n");
    Reply::Whole(response(401, &header, b"{}"))
}

/// A registry that issues tokens by `token` and requires `Bearer secret`.
async fn guarded(token: impl Fn() -> Reply + Send + Sync + 'static) -> Server {
    Server::start(move |seen, _| match seen.header("authorization") {
        _ if seen.path.starts_with("/token?") => token(),
        Some("Bearer secret") => Reply::Whole(ok(manifest_json().as_bytes())),
        _ => challenge(seen, None),
    })
    .await
}

#[tokio::test]
async fn anonymous_token_is_requested_once_and_reused() {
    let server = guarded(|| Reply::Whole(ok(br#"{"token":"secret"}"#))).await;
    let client = client();
    client.manifest(&tiny(&server)).await.unwrap();
    client.clone().manifest(&tiny(&server)).await.unwrap();
    let manifest = "/v2/library/tiny/manifests/latest";
    let token = "/token?service=s&scope=repository%3Ax%3Apull";
    assert_eq!(server.paths(), [manifest, token, manifest, manifest]);
    assert_eq!(server.seen()[1].header("authorization"), None);
    let other = format!("http://{}/library/other", server.address()).parse().unwrap();
    client.manifest(&other).await.unwrap();
    assert_eq!(server.seen()[4].header("authorization"), None);
}

#[tokio::test]
async fn expired_token_is_replaced() {
    let server = guarded(|| Reply::Whole(ok(br#"{"access_token":"secret"}"#))).await;
    let client = client();
    let origin = super::super::origin::Registry::at(&server.url("")).unwrap().origin().clone();
    let old = Authorization::lasting("Bearer old".parse().unwrap(), Advice::LogIn { host: String::new() });
    client.shared.tokens.insert(&origin, "library/tiny", old);
    client.manifest(&tiny(&server)).await.unwrap();
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn second_refusal_is_final() {
    let server = guarded(|| Reply::Whole(ok(br#"{"token":"useless"}"#))).await;
    let error = client().manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("useless"));
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn refusals_without_a_usable_challenge_are_final() {
    let basic = "WWW-Authenticate: Basic realm=\"x\"\r\n";
    for (status, headers) in [(401, basic), (401, ""), (403, "")] {
        let server = Server::always(response(status, headers, b"")).await;
        let error = client().manifest(&tiny(&server)).await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
        assert_eq!(server.seen().len(), 1);
    }
}

#[tokio::test]
async fn foreign_realm_is_not_requested() {
    for realm in
        ["http://localhost:9/token", "http://169.254.169.254/latest/meta-data", "https://evil.example/"]
    {
        let server = Server::start(move |seen, _| challenge(seen, Some(realm))).await;
        let error = client().manifest(&tiny(&server)).await.unwrap_err();
        assert!(error.to_string().contains("token service refused"), "{error}");
        assert_eq!(server.seen().len(), 1);
    }
}

#[tokio::test]
async fn unusable_token_responses_end_the_pull() {
    let replies: [fn() -> Reply; 4] = [
        || Reply::Whole(ok(b"{}")),
        || Reply::Whole(response(500, "", b"")),
        || redirect(307, "http://169.254.169.254/"),
        || Reply::Whole(ok(br#"{"token":"a\r\nX-Injected: b"}"#)),
    ];
    for reply in replies {
        let error = client().manifest(&tiny(&guarded(reply).await)).await.unwrap_err();
        assert!(error.to_string().contains("token service "), "{error}");
    }
    let flood = guarded(|| Reply::ThenFlood(head("Connection: close\r\n"))).await;
    let error = client().manifest(&tiny(&flood)).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLong { what: "token", .. }), "{error}");
    let encoded = guarded(|| Reply::Whole(response(200, "Content-Encoding: br\r\n", b"\x0b"))).await;
    let error = client().manifest(&tiny(&encoded)).await.unwrap_err();
    assert!(error.to_string().contains("content encoding"), "{error}");
}

#[tokio::test]
async fn token_does_not_leave_its_registry() {
    let cdn = Server::always(ok(WEIGHTS)).await;
    let elsewhere = cdn.url("/x?signature=1");
    let server = Server::start(move |seen, _| match seen.path.as_str() {
        path if path.starts_with("/token") => Reply::Whole(ok(br#"{"token":"secret"}"#)),
        _ if seen.header("authorization").is_none() => challenge(seen, None),
        "/here" => redirect(302, &elsewhere),
        _ => redirect(307, "/here"),
    })
    .await;
    assert_eq!(fetch(&client(), &server).await.unwrap(), WEIGHTS);
    assert_eq!(server.seen().last().unwrap().header("authorization"), Some("Bearer secret"));
    assert_eq!(cdn.paths(), ["/x?signature=1"]);
    assert_eq!(cdn.seen()[0].header("authorization"), None);
}

#[tokio::test]
async fn token_is_not_sent_after_a_redirect_back() {
    let detour =
        Server::start(|seen, _| redirect(307, &format!("http://{}/back", seen.path.trim_start_matches('/'))))
            .await;
    let away = detour.url("/");
    let server = Server::start(move |seen, _| match seen.path.as_str() {
        "/back" => Reply::Whole(ok(WEIGHTS)),
        path if path.starts_with("/token") => Reply::Whole(ok(br#"{"token":"secret"}"#)),
        _ if seen.header("authorization").is_none() => challenge(seen, None),
        _ => redirect(307, &format!("{away}{}", seen.header("host").unwrap())),
    })
    .await;
    fetch(&client(), &server).await.unwrap();
    assert_eq!(server.seen().last().unwrap().path, "/back");
    assert_eq!(server.seen().last().unwrap().header("authorization"), None);
}

#[tokio::test]
async fn refusal_of_a_content_network_is_not_the_users_fault() {
    for status in [401, 403] {
        let cdn = Server::start(move |seen, _| match challenge(seen, None) {
            Reply::Whole(_) if status == 403 => Reply::Whole(response(403, "", b"")),
            challenge => challenge,
        })
        .await;
        let elsewhere = cdn.url("/x");
        let server = Server::start(move |_, _| redirect(307, &elsewhere)).await;
        let error = fetch(&client(), &server).await.unwrap_err();
        assert!(matches!(error, RegistryError::Status { .. }), "{error}");
        assert_eq!(cdn.seen().len(), 1);
    }
}
