//! `blobd gc`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::response::{GcReason, GcReport};
use clap::Args;

use super::Global;
use super::connect::{client_error, connect};
use super::output::{Table, human_bytes, print, print_json, terminal_width};

/// Delete what no model needs
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd gc --dry-run                           the plan; nothing is deleted
  blobd gc")]
pub(super) struct Params {
    /// Print the plan and delete nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let request = GcParams { dry_run: params.dry_run };
    let report = connect(global)?.client.gc(&request).map_err(client_error)?;
    if global.json { print_json(&report) } else { print(&render(&report)) }
}

fn render(report: &GcReport) -> String {
    let mut table = Table::new(&["DIGEST", "SIZE", "REASON"], &[1]);
    for item in &report.deleted {
        let reason = match item.reason {
            GcReason::UnreferencedBlob => "blob that no model needs",
            GcReason::UnreferencedRecipe => "recipe that no model needs",
            GcReason::ExpiredTrash => "trash whose time is over",
            GcReason::AbandonedStaging => "left of a dead transaction",
            _ => "unneeded",
        };
        table.row([
            item.digest.map_or_else(|| "-".to_owned(), |digest| digest.to_string()),
            human_bytes(item.size),
            reason.to_owned(),
        ]);
    }
    let table = if report.deleted.is_empty() { String::new() } else { table.render(terminal_width()) };
    let verb = if report.dry_run { "would free" } else { "freed" };
    format!("{table}{verb} {}\n", human_bytes(report.freed_bytes))
}
