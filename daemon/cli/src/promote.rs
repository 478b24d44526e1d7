//! `blobd promote`

use blobd_cli_common::connect::{client_error, connect, print_report, print_result};
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::{counted, human_bytes, printable};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, lost_models};
use blobd_client::protocol::event::{Event, WorkProgress};
use blobd_client::protocol::naming::{PromoteParams, Promoted};
use clap::Args;

use crate::ErrorBody;

/// Copy a model of a lower store into the writable store
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd promote llama3:8b                      usable without the lower store from now on
  blobd promote llama3:8b --dry-run            how much would be copied

Lower stores are the read-only stores that `lower` in the configuration names. What is copied is
verified. The lower store keeps its copy.")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// Print how much would be copied, and copy nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let mut bar: Option<Bar> = None;
    let quiet = global.hides_progress();
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &params.model)?;
    let label = reference.short();
    let request = PromoteParams { reference, dry_run: params.dry_run };
    let promoted = connected.client.promote(&request, |event| {
        if let Event::Progress(WorkProgress { total: Some(total), completed: Some(completed), .. }) = event {
            bar.get_or_insert_with(|| Bar::new(&label, total, quiet)).set(completed, total);
        }
    });
    if let Some(bar) = bar {
        bar.clear();
    }
    let promoted = promoted.map_err(client_error)?;
    let print = if params.dry_run { print_result } else { print_report };
    print(global, &promoted, render)
}

fn render(promoted: &Promoted) -> String {
    let (name, size) = (printable(&promoted.name), human_bytes(promoted.copied_bytes));
    let blobs = counted(promoted.copied_blobs, "blob");
    let from = promoted.from.as_ref().map_or_else(String::new, |from| format!(" from {}", printable(from)));
    let summary = match (promoted.dry_run, promoted.copied_blobs) {
        (_, 0) if promoted.from.is_none() => format!("{name}: whole in the writable store already\n"),
        (true, _) => format!("{name}: would copy {size} in {blobs}{from}\n"),
        (false, _) => format!("{name}: copied {size} in {blobs}{from}\n"),
    };
    summary + &lost_models::effects(&promoted.effects)
}
