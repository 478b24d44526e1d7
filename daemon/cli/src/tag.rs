//! `blobd tag`, `blobd rename`, `blobd pin` and `blobd unpin`

use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{client_error, connect, print_report};
use blobd_cli_common::model_name::{ModelName, expand, only, parse_new_name};
use blobd_cli_common::output::{print, printable};
use blobd_cli_common::{Global, lost_models};
use blobd_client::protocol::naming::{Renamed, Tagged};
use blobd_client::protocol::request::{PinParams, RenameParams, TagParams};
use clap::Args;

use crate::{ErrorBody, Reference};

/// Give a model another name
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd tag llama3:8b mine/assistant:v1
  blobd tag llama3:70b mine/assistant:v1 --force        replaces the model of that name")]
pub(super) struct TagArgs {
    /// The model
    #[arg(value_name = "SRC")]
    source: ModelName,
    /// The new name
    #[arg(value_name = "DST", value_parser = parse_new_name)]
    target: Reference,
    /// Replace another model that has the name, even a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

/// Give a model another name in place of its own
///
/// The model keeps its pin, its origin and its last use, and programs that have it open keep it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd rename hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M llama3.2:1b
  blobd rename draft:v2 assistant:latest --force        replaces the model assistant:latest")]
pub(super) struct RenameArgs {
    /// The model
    #[arg(value_name = "OLD")]
    source: ModelName,
    /// Its new name
    #[arg(value_name = "NEW", value_parser = parse_new_name)]
    target: Reference,
    /// Replace another model that has the new name, even a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

/// Keep models from being evicted or removed
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd pin llama3:8b
  blobd pin 'hf.co/*:Q8_0'                     all models with such names
  blobd ls --json | jq '.models[] | select(.pinned)'")]
pub(super) struct PinArgs {
    /// The models, by name or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    pub(super) models: Vec<ModelName>,
}

/// Allow pinned models to be evicted and removed again; removes nothing
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd unpin llama3:8b")]
pub(super) struct UnpinArgs {
    /// The models, by name or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    pub(super) models: Vec<ModelName>,
}

pub(super) fn tag(global: &Global, args: &TagArgs) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let (source, target) = (only(global, client, &args.source)?, args.target.clone());
    let tagged =
        client.tag(&TagParams { source, target, force: args.force, origin: None }).map_err(client_error)?;
    print_report(global, &tagged, |Tagged { name, digest, effects, .. }| {
        format!("{} {}\n{}", printable(name), digest.short(), lost_models::effects(effects))
    })
}

pub(super) fn rename(global: &Global, args: &RenameArgs) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let (source, target) = (only(global, client, &args.source)?, args.target.clone());
    let renamed = client.rename(&RenameParams { source, target, force: args.force }).map_err(client_error)?;
    print_report(global, &renamed, |Renamed { from, name, digest, effects }| {
        let effects = lost_models::effects(effects);
        format!("{} is {} {} now\n{effects}", printable(from), printable(name), digest.short())
    })
}

pub(super) fn pin(global: &Global, models: &[ModelName], pinned: bool) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let models = expand(client, models)?;
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let pin = |reference| client.pin(&PinParams { reference, pinned }).map_err(client_error);
        if let Some(done) = batch.add(&model.label, model.reference.and_then(pin))
            && !global.hides_reports()
        {
            let state = if done.pinned { "pinned" } else { "not pinned" };
            print(&format!("{} {state}\n", printable(&done.name)))?;
        }
    }
    let what = if pinned {
        ["models was not pinned", "models were not pinned"]
    } else {
        ["models was not unpinned", "models were not unpinned"]
    };
    batch.finish("pins", what)
}
