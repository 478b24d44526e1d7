//! `blobd tag`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::connect::report;
use super::{Global, lost_models};
use crate::output::printable;

/// Give a model another name
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd tag llama3:8b mine/assistant:v1
  blobd tag llama3:70b mine/assistant:v1 --force        replaces the model of that name")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "SRC")]
    source: Reference,
    /// The new name
    #[arg(value_name = "DST")]
    target: Reference,
    /// Replace another model that has the name, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let (source, target) = (params.source.clone(), params.target.clone());
    let request = TagParams { source, target, force: params.force };
    report(global, |client| client.tag(&request), render)
}

fn render(tagged: &Tagged) -> String {
    let Tagged { name, digest, displaced, evicted, .. } = tagged;
    let lost = lost_models::displaced(displaced) + &lost_models::evicted(evicted);
    format!("{} {}\n{lost}", printable(name), digest.short())
}
