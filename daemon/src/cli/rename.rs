//! `blobd rename`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::RenameParams;
use blobd_client::protocol::response::Renamed;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::connect::report;
use super::{Global, lost_models};
use crate::output::printable;

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
    source: Reference,
    /// Its new name
    #[arg(value_name = "NEW")]
    target: Reference,
    /// Replace another model that has the new name, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let (source, target) = (params.source.clone(), params.target.clone());
    let request = RenameParams { source, target, force: params.force };
    report(global, |client| client.rename(&request), render)
}

fn render(renamed: &Renamed) -> String {
    let Renamed { from, name, digest, displaced, evicted } = renamed;
    let lost = lost_models::displaced(displaced) + &lost_models::evicted(evicted);
    format!("{} is {} {} now\n{lost}", printable(from), printable(name), digest.short())
}
