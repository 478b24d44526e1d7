//! `blobd ps`

use blobd_client::protocol::error::ErrorBody;
use clap::Args;

use super::Global;
use super::connect::{client_error, connect};
use super::output::{Table, human_bytes, print, print_json, terminal_width};

/// List who has what open
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd ps
  blobd ps --json | jq -r '.sessions[] | [.pid, .model] | @tsv'")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    let list = connect(global)?.client.sessions().map_err(client_error)?;
    if global.json {
        return print_json(&list);
    }
    let mut table = Table::new(&["MODEL", "PID", "USER", "COMMAND", "SINCE", "BYTES"], &[1, 5]);
    for session in &list.sessions {
        table.row([
            session.model.clone(),
            session.pid.to_string(),
            session.user.clone().unwrap_or_else(|| session.uid.to_string()),
            session.command.clone().unwrap_or_else(|| "-".to_owned()),
            session.since.clone(),
            human_bytes(session.bytes_mapped),
        ]);
    }
    print(&table.render(terminal_width()))
}
