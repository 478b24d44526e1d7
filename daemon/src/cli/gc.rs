//! `blobd gc`

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::response::{GcReason, GcReport};
use blobd_client::protocol::upkeep::EvictionPlan;
use clap::Args;

use super::Global;
use super::connect::{report, show};
use crate::output::{Table, printable, terminal_width};
use crate::size::{human_bytes, parse_size};

/// Delete what no model needs
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd gc --dry-run                           the plan; nothing is deleted
  blobd gc
  blobd gc --plan-eviction                     models that would be evicted to meet the quota
  blobd gc --plan-eviction=20GiB               models that would be evicted to free 20 GiB")]
pub(super) struct Params {
    /// Print the plan and delete nothing
    #[arg(long)]
    dry_run: bool,
    /// Print which models would be evicted, and delete nothing
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with = "dry_run",
        value_parser = optional_size
    )]
    plan_eviction: Option<BytesToFree>,
}

/// How many bytes to free; `None`: down to the low watermark.
#[derive(Clone, Copy, Debug)]
struct BytesToFree(Option<u64>);

fn optional_size(text: &str) -> Result<BytesToFree, String> {
    if text.is_empty() {
        Ok(BytesToFree(None))
    } else {
        parse_size(text).map(|bytes| BytesToFree(Some(bytes)))
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if let Some(BytesToFree(bytes)) = params.plan_eviction {
        return show(global, |client| client.eviction_plan(bytes), render_eviction);
    }
    let collect = |client: &Client| client.gc(&GcParams { dry_run: params.dry_run });
    if params.dry_run { show(global, collect, render) } else { report(global, collect, render) }
}

fn render(report: &GcReport) -> String {
    let mut table = Table::new(&["DIGEST", "SIZE", "REASON"], &[1]);
    for item in &report.deleted {
        let reason = match item.reason {
            GcReason::UnreferencedBlob => "blob that no model needs",
            GcReason::UnreferencedRecipe => "recipe that no model needs",
            GcReason::ExpiredTrash => "expired trash",
            GcReason::AbandonedStaging => "left by an interrupted transaction",
            GcReason::AbandonedDownload => "download abandoned a week ago",
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
    let mut text = format!("{table}{verb} {}\n", human_bytes(report.freed_bytes));
    for kept in &report.kept {
        let by = kept.by.iter().map(|by| printable(by)).collect::<Vec<_>>().join(", ");
        text.push_str(&format!("kept {} for {by}\n", human_bytes(kept.bytes)));
    }
    text
}

fn render_eviction(plan: &EvictionPlan) -> String {
    let mut table = Table::new(&["NAME", "FREES", "LAST USED", "ORIGIN"], &[1]);
    for model in &plan.evicted {
        let origin = model.origin.clone().unwrap_or_else(|| "-".to_owned());
        table.row([model.name.clone(), human_bytes(model.freed_bytes), model.last_used.clone(), origin]);
    }
    let mut text = if plan.evicted.is_empty() { String::new() } else { table.render(terminal_width()) };
    let quota = plan.quota_bytes.map_or_else(|| "no quota".to_owned(), human_bytes);
    let (used, needed) = (human_bytes(plan.used_bytes), human_bytes(plan.needed_bytes));
    text.push_str(&format!(
        "used {used} of {quota}; {needed} to free; would free {}\n",
        human_bytes(plan.freed_bytes)
    ));
    if plan.garbage_bytes > 0 {
        let enough = if plan.garbage_bytes >= plan.needed_bytes { ", which is enough" } else { "" };
        let garbage = human_bytes(plan.garbage_bytes);
        text.push_str(&format!("{garbage} of it is needed by no model and is deleted first{enough}\n"));
    }
    if plan.freed_bytes < plan.needed_bytes {
        text.push_str("evicting all candidates would not free enough, so no model would be evicted\n");
    }
    for model in &plan.spared {
        text.push_str(&format!("{} would be kept: {}\n", printable(&model.name), model.reason));
    }
    if plan.policy == "never" {
        text.push_str("eviction is off; to enable it, set evict under [space] in the configuration\n");
    }
    text
}
