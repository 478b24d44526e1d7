//! `blobd undelete`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::UndeleteParams;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::batch::Batch;
use super::connect::{client_error, connect};
use super::{Global, lost_models, usage};
use crate::output::{print, printable};

/// Restore models from the trash
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd undelete llama3:8b
  blobd undelete llama3:8b --name llama3:old   beside the model that has the name now
  blobd undelete llama3:8b --force             in place of it
  blobd ls --trash                             list the models in the trash")]
pub(super) struct Params {
    /// The models, by the names that they had before
    #[arg(required = true, value_name = "REF")]
    references: Vec<Reference>,
    /// Restore the model under this name
    #[arg(long, value_name = "REF")]
    name: Option<Reference>,
    /// Replace another model that has the name now, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.name.is_some() && params.references.len() > 1 {
        return Err(usage("--name: names one model, but several are given"));
    }
    let connected = connect(global)?;
    let mut batch = Batch::new(global, params.references.len());
    for reference in &params.references {
        let request =
            UndeleteParams { reference: reference.clone(), name: params.name.clone(), force: params.force };
        let done = connected.client.undelete(&request).map_err(client_error);
        if let Some(done) = batch.add(&reference.short(), done)
            && !global.hides_reports()
        {
            let lost = lost_models::displaced(&done.displaced);
            print(&format!("{} {} restored\n{lost}", printable(&done.name), done.digest.short()))?;
        }
    }
    batch.finish("undeleted", ["models was not restored", "models were not restored"])
}
