//! `blobd ps`

use std::collections::BTreeMap;

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::OpenParams;
use blobd_client::protocol::response::SessionSummary;
use blobd_client::residency::Residency;
use clap::Args;
use serde::Serialize;

use super::connect::{client_error, connect};
use super::{Global, residency};
use crate::output::{Table, print, print_json, terminal_width};
use crate::size::human_bytes;
use crate::times::relative;

/// List the processes that have models open, and how much of each model is in memory
#[derive(Debug, Args)]
#[command(
    after_help = "IN MEMORY is how much of the whole model is in the page cache. The kernel reports that only to the
store's owner and to root; other users see a dash.

Examples:
  blobd ps
  blobd ps --json | jq -r '.sessions[] | [.pid, .model, .resident_bytes] | @tsv'"
)]
pub(super) struct Params {}

#[derive(Serialize)]
struct Session {
    #[serde(flatten)]
    summary: SessionSummary,
    /// Size of the whole model; absent if the kernel does not report residency to this user.
    #[serde(skip_serializing_if = "Option::is_none")]
    model_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resident_bytes: Option<u64>,
}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let list = connected.client.sessions().map_err(client_error)?;
    let mut models = BTreeMap::new();
    let sessions: Vec<_> =
        list.sessions.into_iter().map(|summary| session(&connected.client, summary, &mut models)).collect();
    if global.json {
        return print_json(&BTreeMap::from([("sessions", sessions)]));
    }
    let mut table =
        Table::new(&["MODEL", "PID", "USER", "COMMAND", "SINCE", "BYTES", "IN MEMORY"], &[1, 5, 6]);
    let is_empty = sessions.is_empty();
    for Session { summary, model_bytes, resident_bytes } in sessions {
        let residency = model_bytes.zip(resident_bytes);
        let in_memory = residency.map_or_else(
            || "-".to_owned(),
            |(bytes, resident_bytes)| residency::share(Residency { bytes, resident_bytes }),
        );
        table.row(row(&summary).into_iter().chain([in_memory]));
    }
    let note = if is_empty { "no model is open\n" } else { "" };
    print(&(table.render(terminal_width()) + note))
}

/// Model, process, user, command, start and bytes of a session.
pub(super) fn row(session: &SessionSummary) -> [String; 6] {
    [
        session.model.clone(),
        session.pid.to_string(),
        session.user.clone().unwrap_or_else(|| session.uid.to_string()),
        session.command.clone().unwrap_or_else(|| "-".to_owned()),
        relative(&session.since),
        human_bytes(session.bytes_mapped),
    ]
}

/// Adds the residency of the session's model, which is determined once for all its sessions.
fn session(
    client: &Client,
    summary: SessionSummary,
    models: &mut BTreeMap<String, Option<Residency>>,
) -> Session {
    let of_model = || {
        // A model that was removed meanwhile, or is damaged, is no error here.
        let model = client.open_with(&OpenParams::new(summary.model.parse().ok()?)).ok()?;
        residency::of_model(&model).ok().flatten()
    };
    let residency = *models.entry(summary.model.clone()).or_insert_with(of_model);
    let model_bytes = residency.map(|residency| residency.bytes);
    let resident_bytes = residency.map(|residency| residency.resident_bytes);
    Session { summary, model_bytes, resident_bytes }
}
