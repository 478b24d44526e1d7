//! The requests that the page may make: each is one question to the daemon, and none changes anything.

use blobd_client::client::Client;
use blobd_client::error::{ClientError, ProtocolError};
use blobd_client::protocol::request::GcParams;
use serde::Serialize;

/// Asks the daemon, as the user who runs the command.
#[derive(Clone, Debug)]
pub(crate) struct Relay(Client);

/// The most names of models in one list of the disk usage: as many as the page shows.
const MAX_NAMES: u32 = 12;

type Question = fn(&Client) -> Result<Vec<u8>, ClientError>;

/// The paths, and what the daemon is asked.
const QUESTIONS: [(&str, Question); 10] = [
    ("/api/version", |client| json(&client.version()?)),
    ("/api/models", |client| json(&client.models()?)),
    ("/api/df", |client| json(&client.disk_usage_in_detail(MAX_NAMES)?)),
    ("/api/ps", |client| json(&client.sessions()?)),
    ("/api/residency", |client| json(&client.sessions_with_residency()?)),
    ("/api/pulls", |client| json(&client.running_pulls()?)),
    ("/api/partials", |client| json(&client.unfinished_downloads()?)),
    ("/api/trash", |client| json(&client.trash()?)),
    ("/api/gc", |client| json(&client.gc(&GcParams { dry_run: true, ..GcParams::default() })?)),
    ("/api/eviction", |client| json(&client.eviction_plan(None)?)),
];

/// A request that the page may make.
#[derive(Clone, Copy)]
pub(super) struct Request(Question);

impl Relay {
    pub(crate) const fn new(client: Client) -> Self {
        Self(client)
    }

    /// Sends the request to the daemon, and returns its response. Blocks.
    pub(super) fn ask(&self, request: Request) -> Result<Vec<u8>, ClientError> {
        (request.0)(&self.0)
    }
}

/// The request with this path, if there is one.
pub(super) fn find(path: &str) -> Option<Request> {
    QUESTIONS.iter().find(|(known, _)| *known == path).map(|(_, question)| Request(*question))
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, ClientError> {
    serde_json::to_vec(value).map_err(|error| ProtocolError::Json { reason: error.to_string() }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_paths_are_not_relayed() {
        assert!(find("/api/df").is_some());
        for path in
            ["/api/remove", "/v1/df", "/api/", "/api/df/", "/api/../v1/remove", "/API/df", "/api/df?x"]
        {
            assert!(find(path).is_none(), "{path}");
        }
    }
}
