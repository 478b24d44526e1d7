//! `inspect`: describes a model that is not in the store from the headers of its files.

use blobd_client::protocol::heads::ModelHeads;
use blobd_registry::RemoteModel;

use super::OpError;
use super::pull_source::{Pull, resolve, target_name};
use super::remote_heads::{check_layers, remote_heads};
use super::remote_policy::check_heads;

/// Describes a model at its registry. Stores nothing, and downloads its manifest, the headers of its files and
/// its short texts. Blocks the calling thread.
///
/// # Errors
/// [`OpError`] when the policy denies it, the source does not exist, its server fails, or a header is invalid.
pub fn inspect(pull: Pull<'_>) -> Result<ModelHeads, OpError> {
    let Pull { registry, handle, params, policy, events, .. } = pull;
    let name = target_name(params)?.preferred().short();
    policy.check_source(&params.source, None)?;
    let origin = params.source.to_string();
    let remote = handle.block_on(resolve(registry, params, &[], events.closed()))?;
    let files = remote_heads(pull, &remote)?;
    check_layers(&remote, &files)?;
    check_heads(pull, &remote, &files)?;
    let digest = match &remote {
        RemoteModel::Published(published) => Some(published.manifest.digest()),
        RemoteModel::Files { .. } => None,
    };
    Ok(ModelHeads { name, digest, origin: Some(origin), files })
}
