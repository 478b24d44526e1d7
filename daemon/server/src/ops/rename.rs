//! `rename`: gives a model another name in place of its own.

use std::sync::Arc;

use blobd_client::protocol::lost_model::NameEffects;
use blobd_client::protocol::request::RenameParams;
use blobd_client::protocol::response::Renamed;
use blobd_store::{Store, Verb};

use super::OpError;
use super::name_change::{NameChange, Named, TargetName};
use super::policy::CallerPolicy;
use super::relief::Leftover;
use crate::requester::Requester;

/// Renames a model. It keeps its pin, its origin and its last use. The new name is durable before the old one is
/// removed.
///
/// # Errors
/// Those of [`Names::check_change`](blobd_store::Names::check_change); those of [`Names::check_name`](blobd_store::Names::check_name) if another model has the name, unless it is forced;
/// [`OpError::DeniedByPolicy`].
pub fn rename(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &RenameParams,
) -> Result<Renamed, OpError> {
    NameChange::run(store, Leftover::Nothing, || rename_model(store, requester, policy, params))
}

fn rename_model(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &RenameParams,
) -> Result<Renamed, OpError> {
    let target = TargetName::given(&params.target)?;
    let source = store.names().resolve_for_change(&params.source)?;
    // The commit checks this again.
    store.names().check_change(&source, requester.name_user())?;
    let from = source.short();
    let change = NameChange::new(store, requester, Verb::Rename, format!("rename of {from}"));
    let change = change.replacing(params.force);
    let (model, lease) = change.stored_model(&source, policy, Some(&params.target))?;
    let digest = model.manifest.digest();
    if source == params.target {
        let name = params.target.short();
        return Ok(Renamed { from, name, digest, effects: NameEffects::default() });
    }
    let ingest = change.begin_without_data(lease)?.renaming(source);
    let Named { name, effects, .. } = change.commit(ingest, target, &model.manifest, None, |_name| true)?;
    Ok(Renamed { from, name, digest, effects })
}
