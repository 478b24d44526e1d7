//! `blobd df`

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::response::DiskUsage;
use clap::Args;

use super::Global;
use super::connect::show;
use crate::output::{Table, terminal_width};
use crate::size::human_bytes;

/// Show how much disk space models take and how much sharing saves
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd df
  blobd df -v                                  also a row per model: unique and shared bytes
  blobd df --json | jq .saved_bytes")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    show(global, Client::disk_usage, |usage| {
        let totals = totals(usage).render(terminal_width());
        if global.verbose { totals + "\n" + &models(usage).render(terminal_width()) } else { totals }
    })
}

fn totals(usage: &DiskUsage) -> Table {
    let mut table = Table::new(&["WHAT", "SIZE", ""], &[1]);
    for (what, bytes, remark) in [
        ("models", usage.logical_bytes, "as if nothing were shared"),
        ("on disk", usage.physical_bytes, "blobs and recipes"),
        ("saved", usage.saved_bytes, "by sharing"),
        ("reclaimable", usage.reclaimable_bytes, "`blobd gc` frees it"),
        ("unfinished", usage.partial_bytes, "imports and pulls in progress"),
        ("trash", usage.trash_bytes, "`blobd undelete` restores it until it expires"),
        ("quarantine", usage.quarantine_bytes, "damaged blobs, kept for inspection"),
        ("in use", usage.held_bytes, "removed, but a program has it open or mapped"),
        ("reserve", usage.reserve_bytes, "freed on a full disk so that removing works"),
        ("free", usage.free_bytes, "on the file system"),
    ] {
        table.row([what.to_owned(), human_bytes(bytes), remark.to_owned()]);
    }
    table
}

fn models(usage: &DiskUsage) -> Table {
    let mut table = Table::new(&["NAME", "SIZE", "UNIQUE", "SHARED", "LAST OPENED"], &[1, 2, 3]);
    for model in &usage.models {
        table.row([
            model.name.clone(),
            human_bytes(model.logical_bytes),
            human_bytes(model.unique_bytes),
            human_bytes(model.shared_bytes),
            model.last_opened.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table
}
