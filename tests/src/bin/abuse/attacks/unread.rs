//! Large answers that nobody reads: `show` and `open` of a model of as many tensors as a header may have.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use blobd_tests::raw_gguf::{RawGguf, id};

use super::Begin;
use crate::Outcome;
use crate::ground::{Ground, request};

/// The limit of the format's parser. The header has 5 MB.
const TENSORS: u64 = 131_072;
const MODEL: &str = "attack/large";
const SHOWS: usize = 100;
const OPENS: usize = 20;
/// The daemon closes such connections at some time; then they are made again.
const PERIOD: Duration = Duration::from_secs(15);

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let name = |number: u64| format!("t{number}");
    let header = (0..TENSORS).fold(RawGguf::new(), |raw, n| raw.tensor(name(n), id::F32, &[0], 0));
    ground.import(MODEL, &header.with_data(&[]))?;
    let ground = ground.clone();
    Ok(Box::new(move || {
        let mut held: Vec<UnixStream> = Vec::new();
        ground.repeat(PERIOD, move |ground| {
            held.clear();
            for number in 0..SHOWS + OPENS {
                match ask(ground, number) {
                    Ok(stream) => held.push(stream),
                    Err(_refused) => ground.count("refused"),
                }
            }
            ground.note("unread", held.len() as u64);
            Ok(())
        });
        Ok(())
    }))
}

/// Sends a request whose answer stays where it is.
fn ask(ground: &Ground, number: usize) -> Outcome<UnixStream> {
    if number < SHOWS {
        return Ok(ground.send(&format!("GET /v1/models/{MODEL} HTTP/1.1"), "")?);
    }
    let head = "POST /v1/open HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: blobd-fd/1";
    let stream = ground.connect()?;
    std::io::Write::write_all(
        &mut &stream,
        request(head, &format!(r#"{{"reference":"{MODEL}"}}"#)).as_bytes(),
    )?;
    Ok(stream)
}
