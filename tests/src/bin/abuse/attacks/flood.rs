//! Almost as many requests at once as one user may have connections.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::Begin;
use crate::Outcome;
use crate::arena::MODEL;
use crate::ground::Ground;

const CONNECTIONS: usize = 1000;
/// From one flood to the next.
const PERIOD: Duration = Duration::from_secs(3);

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let ground = ground.clone();
    Ok(Box::new(move || {
        ground.repeat(PERIOD, |ground| {
            let asked: Vec<_> = (0..CONNECTIONS).map(|number| ask(ground, number)).collect();
            for stream in asked {
                ground.count(&stream.and_then(read_status).unwrap_or("no answer".to_owned()));
            }
            Ok(())
        });
        Ok(())
    }))
}

fn ask(ground: &Ground, number: usize) -> Outcome<UnixStream> {
    let path = if number.is_multiple_of(2) { "/v1/models".to_owned() } else { format!("/v1/models/{MODEL}") };
    Ok(ground.send(&format!("GET {path} HTTP/1.1\r\nConnection: close"), "")?)
}

/// Reads a whole answer; its status.
fn read_status(mut stream: UnixStream) -> Outcome<String> {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    Ok(format!("status {}", text.split(' ').nth(1).unwrap_or("unknown")))
}
