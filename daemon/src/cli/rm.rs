//! `blobd rm`

use std::time::Duration;

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::Removed;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::connect::report;
use super::{Global, lost_models};
use crate::size::human_bytes;

/// Remove models and free what nothing else needs
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd rm llama3:8b
  blobd rm --keep 7d llama3:8b                 `blobd undelete` can restore it for a week
  blobd rm llama3:8b llama3:70b --json | jq .freed_bytes")]
pub(super) struct Params {
    /// The models
    #[arg(required = true, value_name = "REF")]
    references: Vec<Reference>,
    /// Move the models to the trash for this time (7d, 12h) instead of freeing their space
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    keep: Option<Duration>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let request = RemoveParams {
        references: params.references.clone(),
        keep_seconds: params.keep.map(|keep| keep.as_secs()),
    };
    report(global, |client| client.remove(&request), summary)
}

fn summary(removed: &Removed) -> String {
    let is_alone = removed.models.len() == 1;
    let line = |model| match is_alone {
        true => format!("{}\n", lost_models::subject("removed", model)),
        false => lost_models::line("removed", model),
    };
    let mut text: String = removed.models.iter().map(line).collect();
    match &removed.trashed_until {
        Some(until) => text.push_str(&format!("in the trash until {until}; `blobd undelete` restores it\n")),
        None => text.push_str(&format!("freed {}\n", human_bytes(removed.freed_bytes))),
    }
    text + &lost_models::kept(&removed.kept)
}
