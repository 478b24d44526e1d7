//! `gc`: what nothing needs goes.

use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::response::GcReport;

use super::OpError;
use crate::gc;
use crate::store::Store;

/// Plans a collection and, unless it is a dry run, executes the plan.
///
/// # Errors
/// [`crate::store::StoreError`] when one manifest, recipe or record in the trash cannot be read;
/// then nothing is deleted.
pub fn collect(store: &Store, params: GcParams) -> Result<GcReport, OpError> {
    let plan = if params.dry_run { gc::plan(store)? } else { store.with_reserve(|| gc::collect(store))? };
    Ok(GcReport {
        dry_run: params.dry_run,
        deleted: plan.items(),
        freed_bytes: plan.freed_bytes(),
        kept: plan.kept(store),
    })
}
