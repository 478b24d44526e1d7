//! `blobd demo`

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::{Global, usage};
use crate::demo;

/// Show pull, import, sharing, export and removal with generated models, without a network
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd demo                                   needs no network and leaves nothing behind
  blobd demo --json | jq .saved_bytes          only the figures")]
pub(super) struct Params {}

/// Run one of the demo's reader processes
#[derive(Debug, Args)]
pub(super) struct ReaderParams {
    #[arg(value_name = "REF")]
    reference: Reference,
}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    demo::run(global.json).map_err(|error| error.body())
}

pub(super) fn run_reader(global: &Global, params: &ReaderParams) -> Result<(), ErrorBody> {
    let socket = global.socket.as_deref().ok_or_else(|| usage("--socket: required"))?;
    demo::reader::run(socket, &params.reference).map_err(|error| error.body())
}
