//! `blobd rename`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::RenameParams;
use blobd_client::protocol::response::Renamed;
use blobd_store_format::reference::Reference;
use blobd_store_format::text::printable;
use clap::Args;

use super::connect::{client_error, connect, print_report};
use super::model_name::{ModelName, only, parse_new_name};
use super::{Global, lost_models};

/// Give a model another name in place of its own
///
/// The model keeps its pin, its origin and its last use, and programs that have it open keep it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd rename hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M llama3.2:1b
  blobd rename draft:v2 assistant:latest --force        replaces the model assistant:latest")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "OLD")]
    source: ModelName,
    /// Its new name
    #[arg(value_name = "NEW", value_parser = parse_new_name)]
    target: Reference,
    /// Replace another model that has the new name, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let (source, target) = (only(global, client, &params.source)?, params.target.clone());
    let renamed =
        client.rename(&RenameParams { source, target, force: params.force }).map_err(client_error)?;
    print_report(global, &renamed, render)
}

fn render(renamed: &Renamed) -> String {
    let Renamed { from, name, digest, effects } = renamed;
    let effects = lost_models::effects(effects);
    format!("{} is {} {} now\n{effects}", printable(from), printable(name), digest.short())
}
