//! Almost as many concurrent requests as one user may have connections.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::Begin;
use crate::Outcome;
use crate::context::AttackContext;
use crate::environment::MODEL;

const CONNECTIONS: usize = 1000;
/// From one flood to the next.
const PERIOD: Duration = Duration::from_secs(3);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let context = context.clone();
    Ok(Box::new(move || {
        context.repeat(PERIOD, |context| {
            let streams: Vec<_> = (0..CONNECTIONS).map(|number| send_request(context, number)).collect();
            for stream in streams {
                context.count(&stream.and_then(read_status).unwrap_or("no response".to_owned()));
            }
            Ok(())
        });
        Ok(())
    }))
}

fn send_request(context: &AttackContext, number: usize) -> Outcome<UnixStream> {
    let path = match number % 3 {
        0 => "/v1/models".to_owned(),
        1 => format!("/v1/models/{MODEL}"),
        _ => "/v1/metrics".to_owned(),
    };
    Ok(context.send(&format!("GET {path} HTTP/1.1\r\nConnection: close"), "")?)
}

/// Reads a whole response and returns its status.
fn read_status(mut stream: UnixStream) -> Outcome<String> {
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    let text = String::from_utf8_lossy(&response);
    Ok(format!("status {}", text.split(' ').nth(1).unwrap_or("unknown")))
}
