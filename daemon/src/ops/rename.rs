//! `rename`: gives a model another name in place of its own.

use std::sync::Arc;

use blobd_client::protocol::request::RenameParams;
use blobd_client::protocol::response::Renamed;
use blobd_store::{Ingest, Store, Verb};
use blobd_store_format::reference::Reference;

use super::collect_on_failure::explaining_no_space;
use super::lost_models::{Evictions, displaced};
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::{OpError, error::refuse_pinned};
use crate::requester::Requester;

/// Renames a model. It keeps its pin, its origin and its last use. The new name is durable before the old one is
/// removed.
///
/// # Errors
/// [`OpError::TargetExists`] if another model has the name, unless it is forced; [`OpError::DeniedByPolicy`].
pub fn rename(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &RenameParams,
) -> Result<Renamed, OpError> {
    explaining_no_space(store, Leftover::Nothing, rename_model(store, requester, policy, params))
}

fn rename_model(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &RenameParams,
) -> Result<Renamed, OpError> {
    refuse_pinned(&params.target)?;
    let (source, name) = (store.resolve_for_change(&params.source)?, params.target.short());
    let from = source.short();
    let lease = store.leases().grant(format!("rename of {from}"));
    let model = store.leased_model(&source, &lease)?;
    policy.check_stored(store, &model, Some(&params.target))?;
    let digest = model.manifest.digest();
    if source == params.target {
        return Ok(Renamed { from, name, digest, displaced: Vec::new(), evicted: Vec::new() });
    }
    let is_free = |present: Option<&Reference>| match present {
        Some(present) if !params.force => Err(OpError::TargetExists { name: present.short() }),
        _ => Ok(()),
    };
    let evictions = Evictions::new(requester, format!("rename of {from}"));
    let ingest = evictions.observe(Ingest::begin(store, lease)?).may_move_pinned(params.force);
    let ingest = requester.acting(ingest, Verb::Rename);
    let committed = ingest.renaming(source).commit_if(&params.target, &model.manifest, None, is_free)?;
    let displaced = displaced(store, requester, committed);
    Ok(Renamed { from, name, digest, displaced, evicted: evictions.take() })
}
