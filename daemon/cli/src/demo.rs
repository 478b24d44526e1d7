//! `blobd demo`

use blobd_client::protocol::error::ErrorBody;
use clap::Args;

use super::Global;

/// Show pull, import, sharing, export and removal with generated models, without a network
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd demo                                   needs no network and leaves nothing behind
  blobd demo --json | jq .saved_bytes          only the figures")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    global.server.demo(global.json)
}
