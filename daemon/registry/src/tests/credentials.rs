//! Credentials: sent only to their host, and only when required.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::server::{Reply, Seen, Server, ok, redirect, response};
use super::*;
use crate::credentials::{Credential, CredentialError, CredentialFile, CredentialPolicy, Secret, is_signed};
use crate::error::Advice;

/// `me` and `hunter2` as a `Basic` header.
const BASIC: &str = "Basic bWU6aHVudGVyMg==";

fn password() -> Credential {
    Credential::Password { user: "me".to_owned(), password: Secret::new("hunter2") }
}

fn token() -> Credential {
    Credential::Token(Secret::new("hf_hunter2"))
}

/// A client whose credential file has these entries. The directory must outlive the pulls.
fn client_knowing(entries: &[(&str, Credential)]) -> (tempfile::TempDir, CredentialPolicy) {
    let dir = tempfile::tempdir().unwrap();
    let file = CredentialFile::at(dir.path().join("credentials.json"));
    for (host, credential) in entries {
        file.set(&host.parse().unwrap(), credential).unwrap();
    }
    (dir, CredentialPolicy { file: Some(file), ..CredentialPolicy::default() })
}

fn client_with_credentials(credentials: CredentialPolicy) -> RegistryClient {
    let policy = RegistryPolicy { credentials, ..RegistryPolicy::default() };
    RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap()
}

fn manifest() -> Reply {
    Reply::Whole(ok(manifest_json().as_bytes()))
}

fn refusal(challenge: &str) -> Reply {
    Reply::Whole(response(401, &format!("WWW-Authenticate: {challenge}\r\n"), b"{}"))
}

fn own_realm(seen: &Seen) -> Reply {
    let host = seen.header("host").unwrap();
    refusal(&format!("Bearer realm=\"http://{host}/token\",service=\"s\",scope=\"repository:x:pull\""))
}

/// A registry that requires exactly this header.
async fn wanting(header: &'static str, challenge: &'static str) -> Server {
    Server::start(move |seen, _| match seen.header("authorization") {
        Some(found) if found == header => manifest(),
        _ => refusal(challenge),
    })
    .await
}

/// A registry whose token service issues `Bearer secret` to `me`.
async fn with_token_service(expires_in: u32) -> Server {
    Server::start(move |seen, _| match seen.header("authorization") {
        Some(BASIC) if seen.path.starts_with("/token") => {
            Reply::Whole(ok(format!(r#"{{"token":"secret","expires_in":{expires_in}}}"#).as_bytes()))
        }
        _ if seen.path.starts_with("/token") => Reply::Whole(response(401, "", b"")),
        Some("Bearer secret") => manifest(),
        _ => own_realm(seen),
    })
    .await
}

fn shown(server: &Server) -> Vec<Option<String>> {
    server.seen().iter().map(|seen| seen.header("authorization").map(str::to_owned)).collect()
}

#[tokio::test]
async fn password_is_sent_only_after_a_challenge() {
    let server = wanting(BASIC, "Basic realm=\"x\"").await;
    let (_dir, policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let client = client_with_credentials(policy);
    client.manifest(&tiny(&server)).await.unwrap();
    client.manifest(&tiny(&server)).await.unwrap();
    let basic = Some(BASIC.to_owned());
    assert_eq!(shown(&server), [None, basic.clone(), basic]);
    let open = Server::always(ok(manifest_json().as_bytes())).await;
    let (_dir, policy) = client_knowing(&[(&open.address().to_string(), password())]);
    client_with_credentials(policy).manifest(&tiny(&open)).await.unwrap();
    assert_eq!(shown(&open), [None]);
}

#[tokio::test]
async fn credentials_of_another_host_are_not_sent() {
    let server = wanting(BASIC, "Basic realm=\"x\"").await;
    let other_port = format!("127.0.0.1:{}", server.address().port() ^ 1);
    let (_dir, policy) = client_knowing(&[("127.0.0.1", password()), (&other_port, password())]);
    let error = client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    let login = format!("`blobd login {}`", server.address());
    assert!(error.to_string().contains(&login), "{error}");
    assert_eq!(shown(&server), [None]);
}

#[tokio::test]
async fn refused_credentials_are_named_and_not_repeated() {
    let server = Server::always(response(401, "WWW-Authenticate: Basic realm=\"x\"\r\n", b"")).await;
    let (_dir, policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let client = client_with_credentials(policy);
    let error = client.manifest(&tiny(&server)).await.unwrap_err();
    assert!(error.to_string().contains("credentials.json do not suffice"), "{error}");
    assert_eq!(server.seen().len(), 2);
    let printed = format!("{error:?} {client:?}");
    assert!(!printed.contains("hunter2") && !printed.contains(BASIC), "{printed}");
}

#[tokio::test]
async fn token_service_gets_the_password_and_the_registry_the_token() {
    let server = with_token_service(300).await;
    let (_dir, policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let client = client_with_credentials(policy);
    client.manifest(&tiny(&server)).await.unwrap();
    client.manifest(&tiny(&server)).await.unwrap();
    let bearer = Some("Bearer secret".to_owned());
    assert_eq!(shown(&server), [None, Some(BASIC.to_owned()), bearer.clone(), bearer]);
    assert_eq!(server.paths()[1], "/token?service=s&scope=repository%3Ax%3Apull");
}

#[tokio::test]
async fn expired_token_is_fetched_anew() {
    let server = with_token_service(0).await;
    let (_dir, policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let client = client_with_credentials(policy);
    client.manifest(&tiny(&server)).await.unwrap();
    client.manifest(&tiny(&server)).await.unwrap();
    let once = [None, Some(BASIC.to_owned()), Some("Bearer secret".to_owned())];
    assert_eq!(shown(&server), [once.clone(), once].concat());
}

#[tokio::test]
async fn foreign_token_service_gets_no_request() {
    let thief = Server::always(ok(br#"{"token":"x"}"#)).await;
    let realm = format!("http://localhost:{}/token", thief.address().port());
    let server = Server::start(move |_, _| refusal(&format!("Bearer realm=\"{realm}\""))).await;
    let (_dir, mut policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let error = client_with_credentials(policy.clone()).manifest(&tiny(&server)).await.unwrap_err();
    assert!(error.to_string().contains("token service refused"), "{error}");
    assert!(thief.seen().is_empty());
    let service = format!("localhost:{}", thief.address().port());
    policy.token_services = [(server.address().to_string(), service)].into();
    client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    assert_eq!(shown(&thief), [Some(BASIC.to_owned())]);
}

#[tokio::test]
async fn redirect_to_another_host_gets_no_credentials() {
    for location in ["/x", "/token?x"] {
        let cdn = Server::start(move |seen, _| match seen.header("authorization") {
            None => Reply::Whole(ok(WEIGHTS)),
            Some(_) => Reply::Whole(response(400, "", b"")),
        })
        .await;
        let elsewhere = cdn.url(location);
        let server = Server::start(move |seen, _| match seen.header("authorization") {
            Some(BASIC) => redirect(307, &elsewhere),
            _ => refusal("Basic realm=\"x\""),
        })
        .await;
        let hosts = [server.address().to_string(), cdn.address().to_string()];
        let (_dir, policy) = client_knowing(&[(&hosts[0], password()), (&hosts[1], token())]);
        assert_eq!(fetch(&client_with_credentials(policy), &server).await.unwrap(), WEIGHTS);
        assert_eq!(shown(&cdn), [None]);
    }
}

#[tokio::test]
async fn challenge_of_a_redirects_target_is_not_answered() {
    let cdn = wanting(BASIC, "Basic realm=\"x\"").await;
    let elsewhere = cdn.url("/x");
    let server = Server::start(move |_, _| redirect(307, &elsewhere)).await;
    let hosts = [server.address().to_string(), cdn.address().to_string()];
    let (_dir, policy) = client_knowing(&[(&hosts[0], password()), (&hosts[1], password())]);
    let error = fetch(&client_with_credentials(policy), &server).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { status: 401, .. }), "{error}");
    assert_eq!(shown(&cdn), [None]);
}

#[tokio::test]
async fn plain_http_is_refused_outside_this_machine_unless_named() {
    let bearer = |seen: &Seen| own_realm(seen);
    for (credential, challenge) in [(password(), None), (password(), Some(bearer)), (token(), None)] {
        let server = Server::start(move |seen, _| match (seen.header("authorization"), challenge) {
            (Some(_), _) => manifest(),
            (None, Some(challenge)) => challenge(seen),
            (None, None) => refusal("Basic realm=\"x\""),
        })
        .await;
        // An address that reaches this machine but is not a loopback address.
        let host = format!("0.0.0.0:{}", server.address().port());
        let reference: Reference = format!("http://{host}/library/tiny").parse().unwrap();
        let (_dir, mut policy) = client_knowing(&[(&host, credential.clone())]);
        let error = client_with_credentials(policy.clone()).manifest(&reference).await.unwrap_err();
        let refused = matches!(error, RegistryError::Credentials(CredentialError::PlainHttp { .. }));
        assert!(refused, "{error}");
        assert_eq!(shown(&server), [None]);
        policy.insecure_hosts = vec![host];
        // A token service may not be at such an address at all.
        if challenge.is_none() {
            client_with_credentials(policy).manifest(&reference).await.unwrap();
            assert!(shown(&server)[2].is_some());
        }
    }
}

#[tokio::test]
async fn token_is_sent_as_it_is() {
    for challenge in ["Basic realm=\"https://huggingface.co/api/x/ssh-auth\"", "Bearer realm=\"https://x/\""]
    {
        let server = wanting("Bearer hf_hunter2", challenge).await;
        let (_dir, policy) = client_knowing(&[(&server.address().to_string(), token())]);
        client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap();
        assert_eq!(shown(&server), [None, Some("Bearer hf_hunter2".to_owned())]);
    }
}

#[tokio::test]
async fn gated_model_says_where_its_terms_are() {
    for status in [401, 403] {
        let server = Server::always(response(status, "X-Error-Code: GatedRepo\r\n", b"")).await;
        let mirrors = [("hf.co".to_owned(), vec![server.url("")])].into();
        for entries in [vec![], vec![(server.address().to_string(), token())]] {
            let entries: Vec<_> =
                entries.iter().map(|(host, token)| (host.as_str(), token.clone())).collect();
            let (_dir, mut credentials) = client_knowing(&entries);
            // Only for hf.co; the mirror must not receive it.
            credentials.hugging_face_token = Some(Secret::new("hf_other"));
            let policy = RegistryPolicy {
                mirrors: std::collections::BTreeMap::clone(&mirrors),
                credentials,
                ..Default::default()
            };
            let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
            let error = client.manifest(&"hf.co/org/Model".parse().unwrap()).await.unwrap_err().to_string();
            assert!(error.contains("accept its terms at https://huggingface.co/org/Model"), "{error}");
            assert!(error.contains("`blobd login"), "{error}");
        }
        let shown = shown(&server);
        assert_eq!(shown, [None, None, Some("Bearer hf_hunter2".to_owned())]);
    }
}

#[tokio::test]
async fn file_that_others_can_read_stops_the_pull() {
    use std::os::unix::fs::PermissionsExt as _;
    let server = wanting(BASIC, "Basic realm=\"x\"").await;
    let (dir, policy) = client_knowing(&[(&server.address().to_string(), password())]);
    let path = dir.path().join("credentials.json");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    assert!(error.to_string().contains("wrong mode: expected 0600, found 0644"), "{error}");
    assert_eq!(shown(&server), [None]);
}

#[tokio::test]
async fn dockers_credentials_are_used() {
    let server = wanting(BASIC, "Basic realm=\"x\"").await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let auth = STANDARD.encode("me:hunter2");
    let write = |json: String| std::fs::write(&path, json).unwrap();
    write(format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, server.address()));
    let policy = CredentialPolicy { docker_config: Some(path.clone()), ..CredentialPolicy::default() };
    client_with_credentials(policy.clone()).manifest(&tiny(&server)).await.unwrap();
    write(r#"{"credsStore":"desktop"}"#.to_owned());
    let error = client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    let RegistryError::Denied { advice, .. } = &error else { panic!("{error}") };
    assert!(matches!(&**advice, Advice::Helper { name, .. } if name == "desktop"), "{error}");
}

fn ollama_key() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "src/testdata/id_ed25519"].iter().collect()
}

/// A registry that checks signatures as Ollama's does.
async fn checking_signatures() -> Server {
    Server::start(|seen, _| {
        let url = format!("http://{}{}", seen.header("host").unwrap(), seen.path);
        match seen.header("authorization") {
            Some("Bearer secret") => manifest(),
            Some(header) if seen.path.starts_with("/token?nonce=") && is_signed(header, &url) => {
                Reply::Whole(ok(br#"{"token":"secret"}"#))
            }
            _ if seen.path.starts_with("/token") => Reply::Whole(response(401, "", b"")),
            _ => own_realm(seen),
        }
    })
    .await
}

#[tokio::test]
async fn ollamas_key_signs_token_requests_of_configured_hosts() {
    let server = checking_signatures().await;
    let ollama_key_hosts = vec![server.address().to_string()];
    let policy = CredentialPolicy { ollama_key: Some(ollama_key()), ollama_key_hosts, ..Default::default() };
    client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap();
    let seen = server.seen();
    assert_eq!(seen.len(), 3);
    assert!(seen[1].path.contains("&scope=repository%3Ax%3Apull&service=s&ts="), "{}", seen[1].path);
}

#[tokio::test]
async fn ollamas_key_signs_for_no_other_host() {
    let server = checking_signatures().await;
    let policy = CredentialPolicy { ollama_key: Some(ollama_key()), ..CredentialPolicy::default() };
    let error = client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    assert_eq!(shown(&server), [None, None]);
}

#[tokio::test]
async fn absent_key_is_named() {
    let server = checking_signatures().await;
    let policy = CredentialPolicy {
        ollama_key: Some("/nonexistent/id_ed25519".into()),
        ollama_key_hosts: vec![server.address().to_string()],
        ..CredentialPolicy::default()
    };
    let error = client_with_credentials(policy).manifest(&tiny(&server)).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/id_ed25519"), "{error}");
}
