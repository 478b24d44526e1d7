//! Metrics and health on a port of loopback.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::DEADLINE;

use super::samples::Samples;

fn start() -> (TestDaemon, SocketAddr) {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "[metrics]\nlisten = \"127.0.0.1:0\"\n").unwrap();
    let daemon = TestDaemon::start_under(&["env", &format!("BLOBD_CONFIG={}", config.display())], folder);
    let log = daemon.log();
    let url = log.split("metrics on http://").nth(1).unwrap_or_else(|| panic!("{log}"));
    let address = url.split('/').next().unwrap().parse().unwrap();
    (daemon, address)
}

fn send(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    // A connection that the server closes while it receives may be reset; what has arrived counts.
    let _ = stream.read_to_end(&mut response);
    String::from_utf8(response).unwrap()
}

fn get(address: SocketAddr, path: &str, host: &str) -> String {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
}

#[test]
fn port_of_loopback_has_metrics_and_health_and_nothing_else() {
    let (_daemon, address) = start();
    let host = address.to_string();
    let metrics = get(address, "/metrics", &host);
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    assert!(metrics.contains("content-type: text/plain; version=0.0.4"), "{metrics}");
    let (_, body) = metrics.split_once("\r\n\r\n").unwrap();
    assert!(Samples::parse(body).families().contains("blobd_build_info"));
    let health = get(address, "/health", "localhost");
    assert!(health.starts_with("HTTP/1.1 200") && health.contains("\"status\":\"ok\""), "{health}");
    for path in ["/", "/v1/models", "/v1/metrics", "/metrics/"] {
        assert!(get(address, path, &host).starts_with("HTTP/1.1 404"), "{path}");
    }
    let post =
        format!("POST /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    assert!(send(address, &post).starts_with("HTTP/1.1 404"));
}

#[test]
fn requests_from_other_sites_and_long_heads_are_refused() {
    let (_daemon, address) = start();
    assert!(get(address, "/metrics", "evil.example").starts_with("HTTP/1.1 403"));
    let host = address.to_string();
    let origin = format!("{host}\r\nOrigin: http://evil.example");
    assert!(get(address, "/metrics", &origin).starts_with("HTTP/1.1 403"));
    let long = format!("{host}\r\nX-Long: {}", "x".repeat(16 << 10));
    assert!(!get(address, "/metrics", &long).starts_with("HTTP/1.1 200"));
}

#[test]
fn daemon_that_cannot_listen_ends_with_the_reason() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    let address = taken.local_addr().unwrap();
    fs::write(&config, format!("[metrics]\nlisten = \"{address}\"\n")).unwrap();
    let blobd = blobd_tests::command::Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let run = blobd.line("serve").exits_with(4);
    assert!(run.stderr.contains(&format!("metrics.listen: cannot listen on {address}")), "{}", run.stderr);
}
