//! Slow registries: `pull --dry-run` from servers that accept connections and never respond, or send a byte
//! per second, and pulls from one that responds 429 with `Retry-After: 120`.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use blobd_tests::registry::{FakeRegistry, Fault};

use super::Begin;
use crate::Outcome;
use crate::context::AttackContext;

/// The number of servers that never respond, and of those that respond slowly.
const SERVERS: usize = 4;
/// Dry runs on each of them, and descriptions of models there.
const PLANS: usize = 8;
/// The number of pulls from the registry that asks to wait, and of dry runs and descriptions on it.
const WAITING: usize = 16;
const RETRY_AFTER_SECONDS: u64 = 120;
/// How long each client stays connected.
const LIFE: Duration = Duration::from_secs(5);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let mut requests = Vec::new();
    for number in 0..SERVERS * 2 {
        let url = tarpit(number % 2 == 0)?;
        for path in ["/v1/pull/plan", "/v1/resolve", "/v1/inspect"] {
            requests.extend((0..PLANS).map(|plan| (path, format!("{url}/library/m{plan}"))));
        }
    }
    let registry = FakeRegistry::start()?;
    registry.add_fault("/v2/", usize::MAX, Fault::TooManyRequests(RETRY_AFTER_SECONDS));
    for number in 0..WAITING {
        let name = registry.name(&format!("library/m{number}"));
        requests.extend(["/v1/pull", "/v1/pull/plan", "/v1/inspect"].map(|path| (path, name.clone())));
    }
    let context = context.clone();
    Ok(Box::new(move || {
        let mut held: Vec<UnixStream> = Vec::new();
        context.repeat(LIFE, move |context| {
            let _keeps_running = &registry;
            held.clear();
            for (path, name) in &requests {
                let body = format!(r#"{{"reference":"{name}"}}"#);
                held.push(context.send(&format!("POST {path} HTTP/1.1"), &body)?);
                context.count("requests");
            }
            Ok(())
        });
        Ok(())
    }))
}

/// Starts a server that accepts connections, and returns its URL. With `drips` it sends a byte per second.
fn tarpit(drips: bool) -> Outcome<String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let url = format!("http://{}", listener.local_addr()?);
    listener.set_nonblocking(true)?;
    thread::spawn(move || {
        let mut held: Vec<TcpStream> = Vec::new();
        for byte in b"HTTP/1.1 200 OK\r\nX-Header: ".iter().chain(std::iter::repeat(&b'x')) {
            held.extend(std::iter::from_fn(|| listener.accept().ok()).map(|(stream, _)| stream));
            if drips {
                held.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
            }
            // Old connections, whose clients have disconnected, are closed.
            let excess = held.len().saturating_sub(PLANS * 8);
            held.drain(..excess);
            thread::sleep(Duration::from_secs(1));
        }
    });
    Ok(url)
}
