//! Every route of the daemon, requested by clients that read nothing of the response, or a little at a time.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blobd_tests::registry::FakeRegistry;
use blobd_tests::routes::{Models, all_routes, longest_requests, model_with_large_header, request};

use super::Begin;
use crate::Outcome;
use crate::context::AttackContext;

/// Connections for each route: of clients that read nothing, and of slow ones.
const UNREAD: usize = 16;
const SLOW: usize = 4;
/// The numbers for each user if several attack.
const UNREAD_OF_EACH: usize = 8;
const SLOW_OF_EACH: usize = 2;

/// The headers are a little below the limit of the format.
const HEADER_MIB: usize = 31;
const MODEL: &str = "attack/heads";
const LAYER: &str = "application/vnd.ollama.image.model";
/// The daemon closes connections that read nothing after some time; the attacker then connects again.
const PERIOD: Duration = Duration::from_secs(15);
/// From one read of a slow client to the next, and how much it reads.
const READ_PERIOD: Duration = Duration::from_millis(500);
const READ_BYTES: usize = 512;
/// How long a client waits for the daemon to receive its request.
const SENDING: Duration = Duration::from_millis(20);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    prepare_with(context, UNREAD, SLOW)
}

pub(crate) fn prepare_each(context: &AttackContext) -> Outcome<Begin> {
    prepare_with(context, UNREAD_OF_EACH, SLOW_OF_EACH)
}

fn prepare_with(context: &AttackContext, unread: usize, slow: usize) -> Outcome<Begin> {
    let registry = FakeRegistry::start()?;
    let model = model_with_large_header(HEADER_MIB);
    context.import(MODEL, &model)?;
    registry
        .add_model("library/heads:latest", b"{}", &[(LAYER, &model)])
        .map_err(|error| error.to_string())?;
    drop(model);
    let source = registry.name("library/heads");
    let models = Models { stored: MODEL, source: &source };
    let of_route = |route: &String| {
        let longest = longest_requests(route, models);
        std::iter::once(request(route, models)).chain(longest).collect::<Vec<_>>()
    };
    let requests: Vec<_> = all_routes().iter().flat_map(of_route).collect();
    let context = context.clone();
    Ok(Box::new(move || {
        let mut held = Vec::new();
        let all = requests.clone();
        context.repeat(PERIOD, move |context| {
            let _keeps_running = &registry;
            held.clear();
            for text in all.iter().flat_map(|text| std::iter::repeat_n(text, unread)) {
                match ask(context, text) {
                    Ok(stream) => held.push(stream),
                    Err(_refused) => context.count("refused"),
                }
            }
            context.set("unread", held.len() as u64);
            Ok(())
        });
        let mut reading: Vec<UnixStream> = Vec::new();
        context.repeat(READ_PERIOD, move |context| {
            if reading.is_empty() {
                let wanted = requests.iter().flat_map(|text| std::iter::repeat_n(text, slow));
                reading = wanted.filter_map(|text| ask(context, text).ok()).collect();
                context.set("slow", reading.len() as u64);
            }
            // Those that the daemon has closed are left out.
            reading.retain_mut(|stream| {
                let read = stream.read(&mut [0; READ_BYTES]);
                read.as_ref().is_ok_and(|read| *read > 0)
                    || read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
            });
            Ok(())
        });
        Ok(())
    }))
}

/// Sends a request, and reads nothing yet. Of a body that the daemon does not receive, only the beginning is sent: it waits
/// for memory of its user, which other clients of this attack use.
fn ask(context: &AttackContext, text: &str) -> Outcome<UnixStream> {
    let mut stream = context.connect()?;
    stream.set_write_timeout(Some(SENDING))?;
    match stream.write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => context.count("sent in part"),
        sent => sent?,
    }
    stream.set_nonblocking(true)?;
    Ok(stream)
}
