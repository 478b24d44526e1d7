use std::sync::Arc;

use blobd_client::client::Client;
use blobd_client::loopback::{MAX_CONNECTIONS, MAX_HEAD_BYTES};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;

struct Running {
    address: SocketAddr,
    token: Secret,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A server that has no daemon.
async fn start() -> Running {
    start_with(Mode::Act, HEAD_TIMEOUT).await
}

async fn start_with(mode: Mode, head_timeout: Duration) -> Running {
    let token = Secret::random().unwrap();
    let client = Client::with_connector(Arc::new(|| Err(io::ErrorKind::NotFound.into())));
    let server = WebServer::bind_with(0, token.clone(), (Relay::new(client), mode), head_timeout);
    let server = server.await.unwrap();
    let address = server.address().unwrap();
    assert!(address.ip().is_loopback());
    Running { address, token, task: tokio::spawn(async move { server.serve().await }) }
}

impl Running {
    async fn send(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        // A connection that the server closes while it receives may be reset; what has arrived counts.
        let _ = stream.read_to_end(&mut response).await;
        String::from_utf8_lossy(&response).into_owned()
    }

    async fn get(&self, path: &str, headers: &str) -> String {
        let host = self.address;
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n")).await
    }

    async fn redeem(&self, token: &str, headers: &str) -> String {
        let (host, length) = (self.address, token.len());
        let head = format!(
            "POST /session HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n"
        );
        self.send(&format!("{head}{headers}\r\n{token}")).await
    }

    /// Sends an action with the headers that a browser adds for the page itself, or with others.
    async fn act(&self, action: &str, body: &str, headers: &str) -> String {
        let (host, length) = (self.address, body.len());
        let head = format!(
            "POST /api/{action} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n"
        );
        self.send(&format!("{head}{headers}\r\n{body}")).await
    }

    /// Begins the session, and returns the headers that the page and its browser send with an action.
    async fn begin(&self) -> String {
        let session = self.redeem(self.token.as_str(), "").await;
        assert!(!session.to_ascii_lowercase().contains("set-cookie"), "{session}");
        let (key, host) = (key_in(&session), self.address);
        format!("X-Blobd-Key: {key}\r\nOrigin: http://{host}\r\nSec-Fetch-Site: same-origin\r\n{JSON}")
    }
}

const JSON: &str = "Content-Type: application/json\r\n";
const PIN: &str = r#"{"reference":"m","pinned":true}"#;

fn key_in(session: &str) -> &str {
    session.split("\"key\":\"").nth(1).unwrap().split('"').next().unwrap()
}

fn has_status(response: &str, status: u16) -> bool {
    response.starts_with(&format!("HTTP/1.1 {status} "))
}

#[tokio::test]
async fn token_is_exchanged_once_for_a_key_that_opens_the_data() {
    let running = start().await;
    assert!(has_status(&running.get("/api/df", "").await, 403));
    let wrong = running.redeem(&"0".repeat(Secret::LENGTH), "").await;
    assert!(has_status(&wrong, 403) && wrong.contains("\"refused\":true"), "{wrong}");
    let session = running.redeem(running.token.as_str(), "").await;
    assert!(has_status(&session, 200), "{session}");
    let key = key_in(&session);
    assert!(has_status(&running.redeem(running.token.as_str(), "").await, 403), "it works once");
    let header = format!("X-Blobd-Key: {key}\r\n");
    let answer = running.get("/api/df", &header).await;
    // No daemon runs, and the page gets the error that says so.
    assert!(has_status(&answer, 200) && answer.contains("\"error\""), "{answer}");
    for path in ["/api/remove", "/v1/df", "/session", "/../etc/passwd"] {
        assert!(has_status(&running.get(path, &header).await, 404), "{path}");
    }
    assert!(has_status(&running.get("/api/df", "X-Blobd-Key: 00\r\n").await, 403));
    assert!(has_status(&running.get("/api/df", &format!("Cookie: key={key}\r\n")).await, 403));
}

#[tokio::test]
async fn other_hosts_and_origins_are_refused_and_do_not_use_up_the_token() {
    let running = start().await;
    let token = running.token.as_str();
    for host in ["evil.example", "10.0.0.1", ""] {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert!(has_status(&running.send(&request).await, 403), "{host}");
    }
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
        let refused = running.redeem(token, &format!("Origin: {origin}\r\n")).await;
        assert!(has_status(&refused, 403), "{origin}: {refused}");
    }
    let own = format!("Origin: http://{}\r\n", running.address);
    assert!(has_status(&running.redeem(token, &own).await, 200));
}

#[tokio::test]
async fn page_has_a_policy_and_needs_no_key() {
    let running = start().await;
    for path in ["/", "/app.js", "/style.css", "/icon.svg", "/treemap.js"] {
        let page = running.get(path, "").await;
        assert!(has_status(&page, 200), "{path}: {page}");
        let head = page.split("\r\n\r\n").next().unwrap();
        for part in ["default-src 'none'", "nosniff", "no-store", "no-referrer", "DENY", "same-origin"] {
            assert!(head.contains(part), "{path}: {part}: {head}");
        }
        assert!(!head.contains("unsafe") && !head.contains("access-control"), "{head}");
    }
    assert!(!running.get("/", "").await.contains(running.token.as_str()));
}

#[tokio::test]
async fn requests_that_are_too_long_or_of_another_method_are_refused() {
    let running = start().await;
    let long = "x".repeat(MAX_HEAD_BYTES);
    let response = running.get("/", &format!("X-Long: {long}\r\n")).await;
    assert!(has_status(&response, 431), "{response}");
    let response = running.redeem(&"x".repeat(MAX_BODY_BYTES + 1), "").await;
    assert!(has_status(&response, 400), "{response}");
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let host = running.address;
        let request = format!("{method} /api/df HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert!(has_status(&running.send(&request).await, 404), "{method}");
    }
}

#[tokio::test]
async fn clients_that_send_nothing_are_disconnected_and_others_are_served_then() {
    let running = start_with(Mode::Act, Duration::from_millis(50)).await;
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        silent.push(TcpStream::connect(running.address).await.unwrap());
    }
    // On a busy machine, this client may be too slow as well.
    let mut attempts = 0;
    while !has_status(&running.get("/", "").await, 200) {
        attempts += 1;
        assert!(attempts < 1000);
    }
    for mut stream in silent {
        let mut rest = Vec::new();
        // Closed or reset by the server.
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!has_status(&String::from_utf8_lossy(&rest), 200));
    }
}

#[tokio::test]
async fn actions_of_other_sites_are_refused_even_with_the_key() {
    let running = start().await;
    let own = running.begin().await;
    // No daemon runs, and the page gets the error that says so: it was not refused.
    let relayed = running.act("pin", PIN, &own).await;
    assert!(has_status(&relayed, 200) && relayed.contains("\"error\""), "{relayed}");
    let host = running.address;
    let origin = format!("Origin: http://{host}\r\n");
    for (what, other) in [
        ("another origin", own.replace(&origin, "Origin: http://evil.example\r\n")),
        ("another port", own.replace(&origin, "Origin: http://127.0.0.1:1\r\n")),
        ("a sandboxed frame", own.replace(&origin, "Origin: null\r\n")),
        ("no origin", own.replace(&origin, "")),
        ("another site", own.replace("same-origin", "cross-site")),
        ("another port of the site", own.replace("same-origin", "same-site")),
        ("a form", own.replace(JSON, "Content-Type: application/x-www-form-urlencoded\r\n")),
        ("a form of texts", own.replace(JSON, "Content-Type: text/plain\r\n")),
        ("no key", own.replace("X-Blobd-Key", "X-Other")),
        ("a cookie in place of the key", own.replace("X-Blobd-Key: ", "Cookie: key=")),
    ] {
        let refused = running.act("pin", PIN, &other).await;
        assert!(other != own && has_status(&refused, 403), "{what}: {refused}");
    }
    let rebound = format!("POST /api/pin HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n{own}\r\n");
    assert!(has_status(&running.send(&rebound).await, 403), "another name of this address");
}

#[tokio::test]
async fn actions_are_neither_questions_nor_more_than_the_page_needs() {
    let running = start().await;
    let own = running.begin().await;
    for action in ["pin", "remove", "undelete", "pull", "pull/plan", "release"] {
        assert!(has_status(&running.get(&format!("/api/{action}"), &own).await, 404), "GET {action}");
    }
    for action in ["reindex", "edit", "push", "open", "import", "rename", "v1/pin", "../v1/pin", "stop"] {
        assert!(has_status(&running.act(action, "{}", &own).await, 404), "{action}");
    }
    let for_good = running.act("remove", r#"{"references":["m"]}"#, &own).await;
    assert!(has_status(&for_good, 403) && for_good.contains("removes nothing at once"), "{for_good}");
    let long = running.act("pin", &"x".repeat(MAX_BODY_BYTES + 1), &own).await;
    assert!(has_status(&long, 400), "{long}");
}

#[tokio::test]
async fn page_that_only_shows_refuses_every_action() {
    let running = start_with(Mode::ReadOnly, HEAD_TIMEOUT).await;
    assert!(running.get("/", "").await.contains("data-mode=\"read-only\""));
    let own = running.begin().await;
    for route in Route::ALL.iter().filter(|route| route.is_action_of_page()) {
        let refused = running.act(route.path().trim_start_matches("/v1/"), PIN, &own).await;
        assert!(has_status(&refused, 403) && refused.contains("--read-only"), "{route}: {refused}");
    }
    for path in ["/api/df", "/begun"] {
        assert!(has_status(&running.get(path, &own).await, 200), "{path}: it shows");
        assert!(has_status(&running.get(path, "").await, 403), "{path}: without the key");
    }
}
