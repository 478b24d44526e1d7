//! Proxies of every kind: which requests they get, and that no connection bypasses them.

use std::net::TcpListener;

use blobd_fixtures::proxy::{Proxy, ProxyBehaviour};

use super::server::{Server, ok, redirect};
use super::transport::{client_for, over_tls, tls_server, trusting};
use super::*;
use crate::ConnectFailure;

fn proxies(variables: &[(&str, String)]) -> Proxies {
    Proxies::from_variables(|name| {
        variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into())
    })
}

/// The error of a pull of a model at `host` with a proxy in `ALL_PROXY`.
async fn refused(host: &str, value: String) -> RegistryError {
    let client = client_for(&RegistryPolicy::default(), proxies(&[("ALL_PROXY", value)])).unwrap();
    client.manifest(&format!("{host}/library/tiny").parse().unwrap()).await.unwrap_err()
}

fn start(behaviour: ProxyBehaviour) -> Proxy {
    Proxy::start(behaviour).unwrap()
}

#[tokio::test]
async fn registry_over_tls_is_reached_through_every_kind_of_proxy() {
    for (value, asked) in [
        ("socks5h://PROXY", "SOCKS5 localhost:PORT"),
        ("SOCKS5H://PROXY/", "SOCKS5 localhost:PORT"),
        ("socks5://PROXY", "SOCKS5 127.0.0.1:PORT"),
        ("socks://PROXY", "SOCKS5 127.0.0.1:PORT"),
        ("socks4://PROXY", "SOCKS4 127.0.0.1:PORT"),
        ("socks4a://PROXY", "SOCKS4a localhost:PORT"),
        ("http://PROXY", "CONNECT localhost:PORT HTTP/1.1"),
        ("PROXY", "CONNECT localhost:PORT HTTP/1.1"),
    ] {
        let registry = tls_server(ok(manifest_json().as_bytes()));
        let proxy = start(ProxyBehaviour { to: Some(registry), ..ProxyBehaviour::default() });
        let value = value.replace("PROXY", &proxy.address().to_string());
        let client = client_for(&trusting(), proxies(&[("ALL_PROXY", value.clone())])).unwrap();
        client.manifest(&over_tls(registry)).await.expect(&value);
        let found = proxy.asked().join("\n");
        // A machine may have IPv6 addresses for its name.
        let found = found.replace("[::1]", "127.0.0.1");
        assert_eq!(found, asked.replace("PORT", &registry.port().to_string()), "{value}");
    }
}

#[tokio::test]
async fn users_and_passwords_reach_the_proxy() {
    let pair = |user: &str, password: &str| (user.to_owned(), password.to_owned());
    for (user, expected) in [
        ("dom\\user:p@ss", pair("dom\\user", "p@ss")),
        ("me:p%40ss%3A", pair("me", "p@ss:")),
        ("me:", pair("me", "")),
    ] {
        let registry = tls_server(ok(manifest_json().as_bytes()));
        let behaviour = ProxyBehaviour { to: Some(registry), user: Some(expected.clone()), is_silent: false };
        let proxy = start(behaviour);
        let value = format!("socks5h://{user}@{}", proxy.address());
        let client = client_for(&trusting(), proxies(&[("https_proxy", value)])).unwrap();
        client.manifest(&over_tls(registry)).await.expect(user);
        let asked = format!("SOCKS5 localhost:{} for {}:{}", registry.port(), expected.0, expected.1);
        assert_eq!(proxy.asked(), [asked]);
    }
    let proxy = start(ProxyBehaviour::default());
    refused("registry.example", format!("http://dom\\user:p@ss@{}", proxy.address())).await;
    let basic = "CONNECT registry.example:443 HTTP/1.1 Proxy-Authorization: Basic ZG9tXHVzZXI6cEBzcw==";
    assert_eq!(proxy.asked(), [basic]);
}

#[tokio::test]
async fn refusals_of_a_proxy_name_its_variable_and_no_secret() {
    let proxy = start(ProxyBehaviour::default());
    for (scheme, reason) in [
        ("socks5h", "connection not allowed"),
        ("socks4a", "server failed to execute command"),
        ("http", "unsuccessful"),
    ] {
        let error = refused("registry.example", format!("{scheme}://{}", proxy.address())).await.to_string();
        let expected = format!("registry.example: connection through the proxy failed: {reason}");
        assert!(
            error.to_lowercase().starts_with(&expected) && error.ends_with("; is ALL_PROXY right?"),
            "{error}"
        );
    }
    let user = Some(("me".to_owned(), "secret".to_owned()));
    let strict = start(ProxyBehaviour { user, ..ProxyBehaviour::default() });
    for value in
        [format!("socks5h://{}", strict.address()), format!("socks5h://me:wrong@{}", strict.address())]
    {
        let error = refused("registry.example", value).await.to_string();
        assert!(error.contains("connection through the proxy failed") && !error.contains("wrong"), "{error}");
    }
}

#[tokio::test]
async fn proxy_that_is_down_or_silent_is_reported() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for scheme in ["http", "socks4a", "socks5", "socks5h"] {
        let error = refused("registry.invalid", format!("{scheme}://{address}")).await.to_string();
        assert!(error.to_lowercase().contains("proxy failed: connection refused"), "{error}");
    }
    let silent = start(ProxyBehaviour { is_silent: true, ..ProxyBehaviour::default() });
    let limits = Limits { connect: Duration::from_millis(100), ..limits() };
    for scheme in ["http", "socks4a", "socks5h"] {
        let value = format!("{scheme}://{}", silent.address());
        let proxies = proxies(&[("ALL_PROXY", value)]);
        let client = RegistryClient::with_limits(&RegistryPolicy::default(), limits, proxies).unwrap();
        let error = client.manifest(&"registry.example/a/b".parse().unwrap()).await.unwrap_err();
        assert!(error.to_string().contains("proxy failed: no answer for"), "{error}");
    }
}

/// The connection must not bypass the proxy.
#[tokio::test]
async fn value_that_is_not_understood_ends_the_request() {
    let registry = tls_server(ok(manifest_json().as_bytes()));
    for value in ["quic://me:secret@h", "http://me:secret@h:port", "http://me:secret@h/proxy.pac"] {
        let client = client_for(&trusting(), proxies(&[("HTTPS_PROXY", value.to_owned())])).unwrap();
        let error = client.manifest(&over_tls(registry)).await.unwrap_err();
        assert!(matches!(error, RegistryError::Proxy(_)), "{error}");
        let text = error.to_string();
        assert!(
            text.starts_with("HTTPS_PROXY: not understood: expected ") && !text.contains("secret"),
            "{text}"
        );
    }
    let direct = proxies(&[("HTTPS_PROXY", "quic://h".to_owned()), ("NO_PROXY", "localhost".to_owned())]);
    client_for(&trusting(), direct).unwrap().manifest(&over_tls(registry)).await.unwrap();
}

#[tokio::test]
async fn registry_over_plain_http_is_reached_through_a_proxy_unless_it_is_on_this_machine() {
    let registry = Server::always(ok(manifest_json().as_bytes())).await;
    let reference: Reference = "http://lan.example:5000/library/tiny".parse().unwrap();
    for (variable, value, asked) in [
        (
            "HTTP_PROXY",
            "http://PROXY",
            "GET http://lan.example:5000/v2/library/tiny/manifests/latest HTTP/1.1",
        ),
        ("ALL_PROXY", "socks5h://PROXY", "SOCKS5 lan.example:5000"),
        ("http_proxy", "socks4a://PROXY", "SOCKS4a lan.example:5000"),
    ] {
        let proxy = start(ProxyBehaviour { to: Some(registry.address()), ..ProxyBehaviour::default() });
        let value = value.replace("PROXY", &proxy.address().to_string());
        let client = client_for(&RegistryPolicy::default(), proxies(&[(variable, value)])).unwrap();
        client.manifest(&reference).await.unwrap();
        assert_eq!(proxy.asked(), [asked]);
        client.manifest(&tiny(&registry)).await.unwrap();
        assert_eq!(proxy.asked().len(), 1);
    }
    let proxy = start(ProxyBehaviour { to: Some(registry.address()), ..ProxyBehaviour::default() });
    let value = format!("http://me:pw@{}", proxy.address());
    let client = client_for(&RegistryPolicy::default(), proxies(&[("ALL_PROXY", value)])).unwrap();
    client.manifest(&reference).await.unwrap();
    assert!(
        proxy.asked()[0].ends_with(" HTTP/1.1 proxy-authorization: Basic bWU6cHc="),
        "{:?}",
        proxy.asked()
    );
    assert!(registry.seen().iter().all(|seen| seen.header("authorization").is_none()));
}

#[tokio::test]
async fn proxy_may_be_reached_over_tls() {
    let address = tls_server(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n".to_vec());
    let value = format!("https://localhost:{}", address.port());
    let client = client_for(&trusting(), proxies(&[("HTTPS_PROXY", value)])).unwrap();
    let error = client.manifest(&"registry.example/a/b".parse().unwrap()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("proxy failed: proxy authorization required; is HTTPS_PROXY right?"), "{text}");
}

/// A registry cannot redirect to an address of a narrower scope than its own. Behind a proxy, the registry's address
/// counts as public.
#[tokio::test]
async fn redirects_of_a_registry_behind_a_proxy_lead_to_public_addresses_only() {
    let near = Server::always(ok(manifest_json().as_bytes())).await;
    for target in
        [near.url("/x"), near.url("/x").replace("127.0.0.1", "localhost"), "http://10.0.0.1/x".to_owned()]
    {
        let registry = Server::start(move |_, _| redirect(307, &target)).await;
        for scheme in ["socks5h", "socks5", "http"] {
            let proxy = start(ProxyBehaviour { to: Some(registry.address()), ..ProxyBehaviour::default() });
            let value = format!("{scheme}://{}", proxy.address());
            let client = client_for(&RegistryPolicy::default(), proxies(&[("ALL_PROXY", value)])).unwrap();
            let error = client.manifest(&"http://registry.invalid/a/b".parse().unwrap()).await.unwrap_err();
            let is_forbidden = matches!(
                error.main(),
                RegistryError::Unreachable { reason: ConnectFailure::ForbiddenAddress(_), .. }
            );
            assert!(is_forbidden, "{scheme}: {error}");
        }
    }
    assert!(near.seen().is_empty());
}

/// A name that the machine resolves is checked before the proxy is asked.
#[tokio::test]
async fn names_that_this_machine_resolves_for_a_proxy_have_their_scope() {
    let registry = Server::start(move |_, _| redirect(307, "https://localhost:9/x")).await;
    let proxy = start(ProxyBehaviour { to: Some(registry.address()), ..ProxyBehaviour::default() });
    let value = format!("socks5://{}", proxy.address());
    let client = client_for(&RegistryPolicy::default(), proxies(&[("ALL_PROXY", value)])).unwrap();
    let error = client.manifest(&"http://registry.invalid/a/b".parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("is a loopback address, and the registry is not"), "{error}");
    assert_eq!(proxy.asked(), ["SOCKS5 registry.invalid:80"]);
}
