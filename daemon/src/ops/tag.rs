//! `tag`: gives a model another name.

use std::sync::Arc;

use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store::{Ingest, Store, Verb};

use super::collect_on_failure::explaining_no_space;
use super::lost_models::{Evictions, displaced};
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::{OpError, error::refuse_pinned};
use crate::requester::Requester;

/// Points `target` at the manifest of `source`. Copies no data.
///
/// # Errors
/// [`blobd_store::StoreError::Pinned`] if `target` is another model that is pinned, unless it is forced;
/// [`OpError::DeniedByPolicy`].
pub fn tag(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &TagParams,
) -> Result<Tagged, OpError> {
    explaining_no_space(store, Leftover::Nothing, add_tag(store, requester, policy, params))
}

fn add_tag(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &TagParams,
) -> Result<Tagged, OpError> {
    refuse_pinned(&params.target)?;
    let name = params.target.short();
    let lease = store.leases().grant(format!("tag {name}"));
    let model = store.leased_model(&params.source, &lease)?;
    policy.check_stored(store, &model, Some(&params.target))?;
    let evictions = Evictions::new(requester, format!("tag {name}"));
    let ingest = evictions.observe(Ingest::begin(store, lease)?).may_move_pinned(params.force);
    let ingest = requester.acting(ingest, Verb::Tag);
    let committed = ingest.commit(&params.target, &model.manifest, None)?;
    let (digest, unchanged) = (model.manifest.digest(), committed.is_unchanged());
    let displaced = displaced(store, requester, committed);
    Ok(Tagged { name, digest, unchanged, displaced, evicted: evictions.take() })
}
