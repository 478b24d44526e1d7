//! `blobd tag`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store_format::reference::Reference;
use blobd_store_format::text::printable;
use clap::Args;

use super::connect::{client_error, connect, print_report};
use super::model_name::{ModelName, only, parse_new_name};
use super::{Global, lost_models};

/// Give a model another name
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd tag llama3:8b mine/assistant:v1
  blobd tag llama3:70b mine/assistant:v1 --force        replaces the model of that name")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "SRC")]
    source: ModelName,
    /// The new name
    #[arg(value_name = "DST", value_parser = parse_new_name)]
    target: Reference,
    /// Replace another model that has the name, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let (source, target) = (only(global, client, &params.source)?, params.target.clone());
    let tagged = client.tag(&TagParams { source, target, force: params.force }).map_err(client_error)?;
    print_report(global, &tagged, render)
}

fn render(tagged: &Tagged) -> String {
    let Tagged { name, digest, effects, .. } = tagged;
    format!("{} {}\n{}", printable(name), digest.short(), lost_models::effects(effects))
}
