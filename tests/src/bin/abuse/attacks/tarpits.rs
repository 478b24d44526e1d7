//! Slow registries: `pull --dry-run` from servers that accept and never answer, or send a byte per second,
//! and pulls from one that answers 429 with `Retry-After: 120`.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use blobd_tests::registry::{FakeRegistry, Fault};

use super::Begin;
use crate::Outcome;
use crate::ground::Ground;

/// Servers that never answer, and as many that answer slowly.
const SERVERS: usize = 4;
/// Dry runs at each of them.
const PLANS: usize = 8;
/// Pulls at the registry that asks to wait, and as many dry runs.
const WAITING: usize = 16;
const RETRY_AFTER_SECONDS: u64 = 120;
/// How long each client lives.
const LIFE: Duration = Duration::from_secs(5);

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let mut asked = Vec::new();
    for number in 0..SERVERS * 2 {
        let url = tarpit(number % 2 == 0)?;
        asked.extend((0..PLANS).map(|plan| ("/v1/pull/plan", format!("{url}/library/m{plan}"))));
    }
    let registry = FakeRegistry::start()?;
    registry.add_fault("/v2/", usize::MAX, Fault::TooManyRequests(RETRY_AFTER_SECONDS));
    for number in 0..WAITING {
        let name = registry.name(&format!("library/m{number}"));
        asked.extend(["/v1/pull", "/v1/pull/plan"].map(|path| (path, name.clone())));
    }
    let ground = ground.clone();
    Ok(Box::new(move || {
        let mut held: Vec<UnixStream> = Vec::new();
        ground.repeat(LIFE, move |ground| {
            let _keeps_running = &registry;
            held.clear();
            for (path, name) in &asked {
                let body = format!(r#"{{"reference":"{name}"}}"#);
                held.push(ground.send(&format!("POST {path} HTTP/1.1"), &body)?);
                ground.count("asked");
            }
            Ok(())
        });
        Ok(())
    }))
}

/// A server that accepts; its URL.
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
            // Those that have gone are let go in the end.
            let excess = held.len().saturating_sub(PLANS * 8);
            held.drain(..excess);
            thread::sleep(Duration::from_secs(1));
        }
    });
    Ok(url)
}
