//! `gc`: deletes what nothing needs.

use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::response::{GcItem, GcReason, GcReport};
use blobd_store::Store;
use blobd_store::gc::{self, Beyond, GcPlan, Litter, Node};

use super::OpError;
use super::empty_quarantine::empty_quarantine;
use super::garbage::Descriptions;
use super::lost_models::kept;

/// Plans a collection and, unless it is a dry run, executes the plan.
///
/// # Errors
/// [`blobd_store::StoreError`] when a manifest, recipe or trash record cannot be read; then nothing is deleted.
pub fn gc(store: &Store, params: GcParams) -> Result<GcReport, OpError> {
    if params.quarantine {
        return match params.dry_run {
            true => empty_quarantine(store, true),
            false => store.ledger().with_reserve(|| empty_quarantine(store, false)),
        };
    }
    let lower_stores =
        store.content().lower_paths().iter().map(|place| place.display().to_string()).collect();
    let mut report = GcReport { dry_run: params.dry_run, lower_stores, ..GcReport::default() };
    if params.dry_run {
        let plan = gc::plan(store.liveness())?;
        add(&mut report, store, &plan, &Descriptions::of(store, &plan));
        let Beyond { files, bytes } = plan.beyond;
        note_unlisted(&mut report, files, bytes);
        return Ok(report);
    }
    store.ledger().with_reserve(|| collect(store, &mut report))?;
    Ok(report)
}

fn collect(store: &Store, report: &mut GcReport) -> Result<(), OpError> {
    loop {
        let mut descriptions = Descriptions::default();
        let deleted =
            gc::collect_batch(store.liveness(), &mut |plan| descriptions = Descriptions::of(store, plan))?;
        add(report, store, &deleted, &descriptions);
        if deleted.is_last_batch() {
            return Ok(());
        }
    }
}

/// Adds what was deleted, or would be. Of very many files, only the first are listed.
fn add(report: &mut GcReport, store: &Store, plan: &GcPlan, descriptions: &Descriptions) {
    /// With 300 bytes for each, in memory and as JSON.
    const MAX_LISTED: usize = 1 << 16;
    report.freed_bytes = report.freed_bytes.saturating_add(plan.freed_bytes());
    report.kept = plan.kept(store.liveness()).into_iter().map(kept).collect();
    for item in items(plan, descriptions) {
        if report.deleted.len() < MAX_LISTED {
            report.deleted.push(item);
        } else {
            note_unlisted(report, 1, item.size);
        }
    }
}

fn note_unlisted(report: &mut GcReport, files: u64, bytes: u64) {
    if files > 0 {
        let unlisted = report.unlisted.get_or_insert_default();
        unlisted.files = unlisted.files.saturating_add(files);
        unlisted.bytes = unlisted.bytes.saturating_add(bytes);
    }
}

fn items(plan: &GcPlan, descriptions: &Descriptions) -> impl Iterator<Item = GcItem> {
    let items = plan.litter.iter().map(litter).chain(plan.deletions.iter().copied().map(deletion));
    let described = move |item: GcItem| {
        let of = item.digest.and_then(|digest| descriptions.get(digest));
        GcItem { of: of.map(ToOwned::to_owned), ..item }
    };
    items.map(described)
}

fn deletion((node, size): (Node, u64)) -> GcItem {
    let reason = match node {
        Node::Recipe(_) => GcReason::UnreferencedRecipe,
        Node::Blob(_) => GcReason::UnreferencedBlob,
    };
    GcItem { digest: Some(node.digest()), size, reason, of: None, quarantined: None }
}

const fn litter(litter: &Litter) -> GcItem {
    let (digest, size, reason) = match litter {
        Litter::Trash { record, bytes } => (Some(*record), *bytes, GcReason::ExpiredTrash),
        Litter::Partial { file, bytes } => (Some(*file), *bytes, GcReason::AbandonedDownload),
        Litter::Staging { bytes, .. } => (None, *bytes, GcReason::AbandonedStaging),
    };
    GcItem { digest, size, reason, of: None, quarantined: None }
}
