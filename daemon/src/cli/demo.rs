//! `blobd demo`

use blobd_client::protocol::error::ErrorBody;
use clap::Args;

use super::Global;

/// See a model pulled, split, shared and opened, on this machine alone
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd demo")]
pub(super) struct Params {}

/// One of the demo's two reader processes
#[derive(Debug, Args)]
pub(super) struct ReaderParams {
    #[arg(value_name = "REF")]
    reference: blobd_store_format::reference::Reference,
}

pub(super) fn run(_params: &Params) -> Result<(), ErrorBody> {
    todo!()
}

pub(super) fn run_reader(_global: &Global, _params: &ReaderParams) -> Result<(), ErrorBody> {
    todo!()
}
