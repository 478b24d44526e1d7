//! `blobd undelete`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::UndeleteParams;
use clap::Args;

use super::batch::Batch;
use super::connect::{client_error, connect};
use super::model_name::{ModelName, expand_among, names};
use super::{Global, lost_models};
use crate::output::{print, printable};

/// Restore models from the trash
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd undelete llama3:8b
  blobd ls --trash                             list the models in the trash")]
pub(super) struct Params {
    /// The models, by the names that they had before, or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Replace another model that has the name now, even if that is pinned
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let trash = || {
        let trash = connected.client.trash().map_err(client_error)?.models;
        Ok(names(trash.iter().map(|model| model.name.as_str())))
    };
    let models = expand_among(&params.models, trash)?;
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let undelete = |reference| {
            let request = UndeleteParams { reference, force: params.force };
            connected.client.undelete(&request).map_err(client_error)
        };
        if let Some(done) = batch.add(&model.label, model.reference.and_then(undelete))
            && !global.hides_reports()
        {
            let lost = lost_models::displaced(&done.displaced);
            print(&format!("{} {} restored\n{lost}", printable(&done.name), done.digest.short()))?;
        }
    }
    batch.finish("undeleted", ["models was not restored", "models were not restored"])
}
