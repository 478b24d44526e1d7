//! `resolve`: what a source names at its server now.

use blobd_client::protocol::response::Resolved;
use blobd_registry::{PublishedModel, RemoteFile, RemoteModel};

use super::OpError;
use super::pull_source::{Pull, resolve as resolve_source};

/// Requests the manifest of a source, or its list of files, and nothing else. Stores nothing. Blocks the calling
/// thread.
///
/// # Errors
/// [`OpError`] when the policy denies it, the source does not exist or its server fails.
pub fn resolve(pull: Pull<'_>) -> Result<Resolved, OpError> {
    let Pull { registry, handle, params, policy, events, .. } = pull;
    policy.check_source(&params.source, None)?;
    Ok(match handle.block_on(resolve_source(registry, params, &[], events.closed()))? {
        RemoteModel::Published(PublishedModel { manifest, .. }) => {
            Resolved { digest: Some(manifest.digest()), files: manifest.digests().into_iter().collect() }
        }
        RemoteModel::Files { files, .. } => {
            let files = files.iter().filter_map(RemoteFile::digest).collect();
            Resolved { digest: None, files }
        }
    })
}
