//! `gc`: deletes what nothing needs.

use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::response::{GcItem, GcReason, GcReport};
use blobd_store::Store;
use blobd_store::gc::{self, GcPlan, Litter, Node};

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
            false => store.with_reserve(|| empty_quarantine(store, false)),
        };
    }
    let mut descriptions = Descriptions::default();
    let mut describe = |plan: &GcPlan| descriptions = Descriptions::of(store, plan);
    let plan = if params.dry_run {
        gc::plan(store).inspect(describe)?
    } else {
        store.with_reserve(|| gc::collect_inspected(store, &mut describe))?
    };
    Ok(GcReport {
        dry_run: params.dry_run,
        deleted: items(&plan, &descriptions),
        freed_bytes: plan.freed_bytes(),
        kept: plan.kept(store).into_iter().map(kept).collect(),
        lower_stores: store.lower_paths().iter().map(|place| place.display().to_string()).collect(),
    })
}

fn items(plan: &GcPlan, descriptions: &Descriptions) -> Vec<GcItem> {
    let items = plan.litter.iter().map(litter).chain(plan.deletions.iter().copied().map(deletion));
    let described = |item: GcItem| {
        let of = item.digest.and_then(|digest| descriptions.get(digest));
        GcItem { of: of.map(ToOwned::to_owned), ..item }
    };
    items.map(described).collect()
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
