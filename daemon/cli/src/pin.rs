//! `blobd pin` and `blobd unpin`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PinParams;
use blobd_store_format::text::printable;
use clap::Args;

use super::Global;
use super::batch::Batch;
use super::connect::{client_error, connect};
use super::model_name::{ModelName, expand};
use crate::output::print;

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

pub(super) fn run(global: &Global, models: &[ModelName], pinned: bool) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let models = expand(&connected.client, models)?;
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let pin = |reference| connected.client.pin(&PinParams { reference, pinned }).map_err(client_error);
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
