//! `blobd undelete`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::UndeleteParams;
use blobd_store_format::reference::Reference;
use blobd_store_format::text::printable;
use clap::Args;

use super::batch::Batch;
use super::connect::{client_error, connect};
use super::model_name::{ModelName, expand_among, names, parse_new_name};
use super::{Global, lost_models, usage};
use crate::output::print;

/// Restore models from the trash
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd undelete llama3:8b
  blobd undelete llama3:8b --name llama3:old   beside the model that has the name now
  blobd undelete llama3:8b --force             in place of it
  blobd ls --trash                             list the models in the trash")]
pub(super) struct Params {
    /// The models, by the names that they had before, or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Restore the model under this name
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace another model that has the name now, also a pinned one; that model goes to the trash
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
    if params.name.is_some() && models.len() > 1 {
        return Err(usage("--name: names one model, but several are given"));
    }
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let undelete = |reference| {
            let request = UndeleteParams { reference, name: params.name.clone(), force: params.force };
            connected.client.undelete(&request).map_err(client_error)
        };
        if let Some(done) = batch.add(&model.label, model.reference.and_then(undelete))
            && !global.hides_reports()
        {
            let effects = lost_models::effects(&done.effects);
            print(&format!("{} {} restored\n{effects}", printable(&done.name), done.digest.short()))?;
        }
    }
    batch.finish("undeleted", ["models was not restored", "models were not restored"])
}
