//! `blobd pin` and `blobd unpin`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PinParams;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::Global;
use super::batch::Batch;
use super::connect::{client_error, connect};
use crate::output::{print, printable};

/// Keep models from being evicted or removed
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd pin llama3:8b
  blobd ls --json | jq '.models[] | select(.pinned)'")]
pub(super) struct PinArgs {
    /// The models
    #[arg(required = true, value_name = "REF")]
    pub(super) references: Vec<Reference>,
}

/// Allow pinned models to be evicted and removed again; removes nothing
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd unpin llama3:8b")]
pub(super) struct UnpinArgs {
    /// The models
    #[arg(required = true, value_name = "REF")]
    pub(super) references: Vec<Reference>,
}

pub(super) fn run(global: &Global, references: &[Reference], pinned: bool) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let mut batch = Batch::new(global, references.len());
    for reference in references {
        let request = PinParams { reference: reference.clone(), pinned };
        let done = connected.client.pin(&request).map_err(client_error);
        if let Some(done) = batch.add(&reference.short(), done)
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
