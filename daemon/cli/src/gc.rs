//! `blobd gc`

use std::collections::{BTreeMap, BTreeSet};

use blobd_cli_common::connect::{report, show};
use blobd_cli_common::output::{Table, human_bytes, or_dash, printable, terminal_width};
use blobd_cli_common::times::relative;
use blobd_cli_common::{Global, lost_models};
use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::upkeep::{EvictionPlan, GcItem, GcReason, GcReport, QuarantinedItem, Unlisted};
use blobd_store_format::size::{limit_bytes, parse_size};
use clap::Args;

use crate::{Client, Digest, ErrorBody};

/// Delete what no model needs
#[derive(Debug, Args)]
#[command(after_help = "Other stores may use this one as a lower store. `gc` does not know what they need:
it deletes everything that no model of this store needs.

Examples:
  blobd gc --dry-run                           the plan; nothing is deleted
  blobd gc
  blobd gc --quarantine --dry-run              the damaged blobs in quarantine, by age and model
  blobd gc --quarantine                        deletes them, and nothing else
  blobd gc --plan-eviction                     models that would be evicted to meet the quota
  blobd gc --plan-eviction=20GiB               models that would be evicted to free 20 GiB")]
pub(super) struct Params {
    /// Print the plan and delete nothing
    #[arg(long)]
    dry_run: bool,
    /// Delete the damaged blobs that `verify` has put aside, and nothing else
    #[arg(long, conflicts_with = "plan_eviction")]
    quarantine: bool,
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

/// `None` frees down to the low watermark.
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
    let collect =
        |client: &Client| client.gc(&GcParams { dry_run: params.dry_run, quarantine: params.quarantine });
    if params.dry_run { show(global, collect, render) } else { report(global, collect, render) }
}

fn render(report: &GcReport) -> String {
    let quarantined: Vec<_> = report.deleted.iter().filter(|item| item.quarantined.is_some()).collect();
    let verb = if report.dry_run { "would free" } else { "freed" };
    let is_empty = report.deleted.is_empty() && report.freed_bytes == 0;
    let freed = format!("{verb} {}\n", human_bytes(report.freed_bytes));
    let freed = if is_empty { "nothing to delete\n".to_owned() } else { freed };
    if !quarantined.is_empty() {
        return quarantine(&quarantined) + &freed + &still_damaged(&quarantined);
    }
    deleted(&report.deleted)
        + &unlisted(report.unlisted)
        + &freed
        + &lost_models::kept(&report.kept)
        + &lower(&report.lower_stores)
}

fn quarantine(items: &[&GcItem]) -> String {
    let rows = items.iter().filter_map(|item| {
        let QuarantinedItem { since, models, .. } = item.quarantined.as_ref()?;
        let of = or_dash((!models.is_empty()).then(|| models.join(", ")));
        Some([or_dash(item.digest.map(Digest::short)), human_bytes(item.size), relative(since), of])
    });
    let table = Table::with_rows(&["DIGEST", "SIZE", "SINCE", "OF"], &[1], rows);
    table.with_names_in(&[3]).render(terminal_width())
}

fn still_damaged(items: &[&GcItem]) -> String {
    let needed = items.iter().filter_map(|item| item.quarantined.as_ref()).filter(|item| item.is_needed);
    let models: BTreeSet<&str> = needed.flat_map(|item| &item.models).map(String::as_str).collect();
    let note = |name: &str| {
        let name = printable(name);
        format!(
            "note: {name} is damaged and needs them: `blobd verify --repair {name}` gets them from its source\n"
        )
    };
    models.into_iter().map(note).collect()
}

/// Lower stores are collected by their own daemons, which do not know of this one.
fn lower(stores: &[String]) -> String {
    if stores.is_empty() {
        return String::new();
    }
    let stores: Vec<_> = stores.iter().map(|store| printable(store)).collect();
    format!(
        "note: lower stores are not collected: {}; a collection there does not know what this store uses of them\n",
        stores.join(", ")
    )
}

fn unlisted(unlisted: Option<Unlisted>) -> String {
    let line = |Unlisted { files, bytes }| format!("and {files} more files, {}\n", human_bytes(bytes));
    unlisted.map(line).unwrap_or_default()
}

/// One row for all items of one model with one reason, the largest first.
fn deleted(items: &[GcItem]) -> String {
    if items.is_empty() {
        return String::new();
    }
    let mut groups: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
    for item in items {
        let group = groups.entry((item.of.as_deref().unwrap_or("-"), reason(item.reason))).or_default();
        *group = (group.0.saturating_add(item.size), group.1.saturating_add(1));
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    let rows = groups.into_iter().map(|((of, reason), (bytes, count))| {
        [of.to_owned(), human_bytes(bytes), count.to_string(), reason.to_owned()]
    });
    let table = Table::with_rows(&["OF", "SIZE", "FILES", "REASON"], &[1, 2], rows);
    table.leaving_out_first(&["FILES"]).render(terminal_width())
}

const fn reason(reason: GcReason) -> &'static str {
    match reason {
        GcReason::UnreferencedBlob => "no model needs it",
        GcReason::UnreferencedRecipe => "recipe that no model needs",
        GcReason::ExpiredTrash => "expired in the trash",
        GcReason::AbandonedStaging => "left by an interrupted transaction",
        GcReason::AbandonedDownload => "download abandoned a week ago",
        GcReason::Quarantined => "damaged, in quarantine",
        _ => "unneeded",
    }
}

fn render_eviction(plan: &EvictionPlan) -> String {
    let rows = plan.evicted.iter().map(|model| {
        let (freed, origin) = (human_bytes(model.freed_bytes), or_dash(model.origin.as_ref()));
        [model.name.clone(), freed, model.last_used.clone(), origin]
    });
    let table = Table::with_rows(&["NAME", "FREES", "LAST USED", "ORIGIN"], &[1], rows);
    let table = table.with_names_in(&[0, 3]).leaving_out_first(&["ORIGIN", "LAST USED"]);
    let mut text = if table.has_rows() { table.render(terminal_width()) } else { String::new() };
    text.push_str(&eviction_summary(plan));
    if plan.garbage_bytes > 0 {
        let enough = if plan.garbage_bytes >= plan.needed_bytes { ", which is enough" } else { "" };
        let garbage = human_bytes(plan.garbage_bytes);
        text.push_str(&format!("{garbage} of it is needed by no model and is deleted first{enough}\n"));
    }
    let kept = plan.spared.iter().map(|model| [model.name.clone(), model.reason.clone()]);
    let kept = Table::with_rows(&["WOULD BE KEPT", "BECAUSE"], &[], kept);
    text += &if kept.has_rows() { kept.render(terminal_width()) } else { String::new() };
    if plan.policy == "never" {
        text.push_str("eviction is off; to enable it, set evict under [space] in the configuration\n");
    }
    text
}

fn eviction_summary(plan: &EvictionPlan) -> String {
    let used = human_bytes(plan.used_bytes);
    let used = match plan.quota_bytes {
        Some(quota) => format!("{used} of a quota of {} used", limit_bytes(quota)),
        None => format!("{used} used, no quota"),
    };
    let (needed, freed) = (human_bytes(plan.needed_bytes), human_bytes(plan.freed_bytes));
    if plan.needed_bytes == 0 {
        format!("{used}; nothing to evict\n")
    } else if plan.freed_bytes < plan.needed_bytes {
        format!(
            "{used}; {needed} cannot be freed: all candidates together are not enough, so none is evicted\n"
        )
    } else {
        format!("{used}; {needed} needed, this would free {freed}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(needed_bytes: u64, freed_bytes: u64, quota_bytes: Option<u64>) -> String {
        let used_bytes = 115 << 20;
        let plan =
            EvictionPlan { used_bytes, quota_bytes, needed_bytes, freed_bytes, ..EvictionPlan::default() };
        eviction_summary(&plan)
    }

    #[test]
    fn summary_of_an_eviction_says_what_is_used_needed_and_freed() {
        assert_eq!(summary(0, 0, None), "115 MiB used, no quota; nothing to evict\n");
        assert_eq!(
            summary(1 << 20, 2 << 20, Some(120 << 20)),
            "115 MiB of a quota of 120 MiB used; 1.00 MiB needed, this would free 2.00 MiB\n"
        );
        assert_eq!(
            summary(1 << 20, 0, None),
            "115 MiB used, no quota; 1.00 MiB cannot be freed: all candidates together are not enough, so none is \
             evicted\n"
        );
    }
}
