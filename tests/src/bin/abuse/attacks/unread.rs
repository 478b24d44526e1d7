//! Large responses that the client does not read: `show` and `open` of a model with the maximum number of
//! tensors.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use blobd_tests::raw_gguf::{RawGguf, id};

use super::Begin;
use crate::Outcome;
use crate::context::{AttackContext, request};

/// The limit of the format's parser. The header has 5 MB.
const TENSORS: u64 = 131_072;
const MODEL: &str = "attack/large";
const SHOWS: usize = 100;
const OPENS: usize = 20;
/// The daemon closes such connections after some time; the attacker then connects again.
const PERIOD: Duration = Duration::from_secs(15);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let name = |number: u64| format!("t{number}");
    let header = (0..TENSORS).fold(RawGguf::new(), |raw, n| raw.tensor(name(n), id::F32, &[0], 0));
    context.import(MODEL, &header.with_data(&[]))?;
    let context = context.clone();
    Ok(Box::new(move || {
        let mut held: Vec<UnixStream> = Vec::new();
        context.repeat(PERIOD, move |context| {
            held.clear();
            for number in 0..SHOWS + OPENS {
                match send_request(context, number) {
                    Ok(stream) => held.push(stream),
                    Err(_refused) => context.count("refused"),
                }
            }
            context.set("unread", held.len() as u64);
            Ok(())
        });
        Ok(())
    }))
}

/// Sends a request without reading the response.
fn send_request(context: &AttackContext, number: usize) -> Outcome<UnixStream> {
    if number < SHOWS {
        return Ok(context.send(&format!("GET /v1/models/{MODEL} HTTP/1.1"), "")?);
    }
    let head = "POST /v1/open HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1";
    let stream = context.connect()?;
    std::io::Write::write_all(
        &mut &stream,
        request(head, &format!(r#"{{"reference":"{MODEL}"}}"#)).as_bytes(),
    )?;
    Ok(stream)
}
