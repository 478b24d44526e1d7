//! `tag`: gives a model another name.

use std::sync::Arc;

use blobd_client::protocol::request::TagParams;
use blobd_client::protocol::response::Tagged;
use blobd_store::{Store, Verb};

use super::OpError;
use super::name_change::{NameChange, Named, TargetName};
use super::policy::CallerPolicy;
use super::relief::Leftover;
use crate::requester::Requester;

/// Points `target` at the manifest of `source`. Copies no data.
///
/// # Errors
/// Those of [`Names::check_name`](blobd_store::Names::check_name) if `target` is another model, unless it is forced; [`OpError::DeniedByPolicy`].
pub fn tag(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &TagParams,
) -> Result<Tagged, OpError> {
    NameChange::run(store, Leftover::Nothing, || add_tag(store, requester, policy, params))
}

fn add_tag(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &TagParams,
) -> Result<Tagged, OpError> {
    let target = TargetName::given(&params.target)?;
    let cause = format!("tag {}", params.target.short());
    let change = NameChange::new(store, requester, Verb::Tag, cause).replacing(params.force);
    let (model, lease) = change.stored_model(&params.source, policy, Some(&params.target))?;
    let digest = model.manifest.digest();
    let origin = store.names().name_origin(&model.reference, digest).of_copy();
    let ingest = change.begin_without_data(lease)?.with_name_origin(origin);
    let Named { name, unchanged, effects, .. } =
        change.commit(ingest, target, &model.manifest, None, |_name| true)?;
    Ok(Tagged { name, digest, unchanged, effects })
}
