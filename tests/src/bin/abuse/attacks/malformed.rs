//! Sessions that break the protocol as soon as they begin: an attack on the log.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use super::Begin;
use crate::Outcome;
use crate::context::AttackContext;
use crate::environment::MODEL;

const THREADS: usize = 4;
/// From one session of a thread to its next: 200 sessions per second in total.
const PERIOD: Duration = Duration::from_millis(20);

/// Bytes that are not valid frames here.
const GARBAGE: [&[u8]; 5] = [
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x05\x00\x00\x00hello",
    b"\x10\x00\x00\x00[[[[[[[[[[[[[[[[",
    b"\x19\x00\x00\x00{\"ack\":{\"received\":9999}}",
];

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let context = context.clone();
    Ok(Box::new(move || {
        let open = ("/v1/open", format!(r#"{{"reference":"{MODEL}"}}"#));
        let import = ("/v1/import", r#"{"file_name":"garbage.gguf"}"#.to_owned());
        for number in 0..THREADS {
            let (path, body) = if number % 2 == 0 { open.clone() } else { import.clone() };
            let mut garbage = GARBAGE.iter().cycle();
            context.repeat(PERIOD, move |context| {
                let mut stream = context.upgrade(path, &body)?;
                stream.write_all(garbage.next().copied().unwrap_or_default())?;
                // Until the daemon closes it.
                while stream.read(&mut [0; 4096])? > 0 {}
                context.count("sessions");
                Ok(())
            });
        }
        Ok(())
    }))
}
