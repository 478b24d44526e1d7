//! `blobd tag`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::Global;
use super::connect::report;
use crate::output::printable;

/// Give a model another name
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd tag llama3:8b mine/assistant:v1")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "SRC")]
    source: Reference,
    /// The new name; a model that has it now loses it
    #[arg(value_name = "DST")]
    target: Reference,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let request = TagParams { source: params.source.clone(), target: params.target.clone() };
    let render = |tagged: &Tagged| format!("{} {}\n", printable(&tagged.name), tagged.digest.short());
    report(global, |client| client.tag(&request), render)
}
