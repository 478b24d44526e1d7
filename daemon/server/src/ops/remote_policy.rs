//! Applies the policy to a model at a registry, before its weights are downloaded.

use blobd_client::protocol::heads::FileHead;
use blobd_registry::RemoteModel;
use blobd_store::{Model, Store};
use blobd_store_format::file_format::read_header;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::policy::terms_of;
use super::pull_source::Pull;
use super::remote_heads::remote_heads;
use super::reusable::Reusable;
use crate::policy::{Terms, TermsBuilder};

/// Refuses a model that is to be pulled. Downloads the headers and the license texts if the decision depends on them.
pub(super) fn check_pull(
    pull: Pull<'_>,
    reusable: &Reusable<'_>,
    name: &Reference,
    remote: &RemoteModel,
) -> Result<(), OpError> {
    let Pull { store, policy, params, .. } = pull;
    let manifest = published(remote);
    let terms = || {
        let stored = manifest.map(|manifest| stored_model(store, reusable, name, manifest));
        let stored = stored.transpose()?.flatten();
        match stored {
            Some(model) => terms_of(store, &model),
            None => Ok(terms_in(remote, &readable_heads(pull, remote)?)),
        }
    };
    policy.check_remote(store, (&params.source, Some(name)), manifest.map(Manifest::digest), terms)
}

/// Refuses a model whose headers and texts were downloaded to describe it.
pub(super) fn check_heads(pull: Pull<'_>, remote: &RemoteModel, heads: &[FileHead]) -> Result<(), OpError> {
    let Pull { store, policy, params, .. } = pull;
    let manifest = published(remote).map(Manifest::digest);
    policy.check_remote(store, (&params.source, None), manifest, || Ok(terms_in(remote, heads)))
}

const fn published(remote: &RemoteModel) -> Option<&Manifest> {
    match remote {
        RemoteModel::Published(published) => Some(&published.manifest),
        RemoteModel::Files { .. } => None,
    }
}

/// The licenses and formats that headers and texts of a model at a registry state.
fn terms_in(remote: &RemoteModel, heads: &[FileHead]) -> Terms {
    let mut terms = TermsBuilder::default();
    published(remote).into_iter().for_each(|manifest| terms.add_manifest(manifest));
    for FileHead { media_type, name, content, .. } in heads {
        let content = content.as_ref().map(|content| content.0.as_slice());
        match content.and_then(|content| read_header(content).ok()) {
            Some(header) => terms.add_header(&*header),
            None => terms.add_file(media_type, name.as_deref()),
        }
        if media_type.component() == "license" {
            terms.add_license(content);
        }
    }
    terms.finish()
}

/// None of an archive whose headers can only be read with the rest of it.
fn readable_heads(pull: Pull<'_>, remote: &RemoteModel) -> Result<Vec<FileHead>, OpError> {
    match remote_heads(pull, remote) {
        Err(OpError::Archive { .. }) => Ok(Vec::new()),
        heads => heads,
    }
}

/// The model if all its files are in the store and the user may be given them. The headers of others are downloaded:
/// what a refusal says of them must not come from a model that is denied.
fn stored_model(
    store: &Store,
    reusable: &Reusable<'_>,
    name: &Reference,
    manifest: &Manifest,
) -> Result<Option<Model>, OpError> {
    let mut files = Vec::new();
    for file in manifest.files() {
        match store.content().stored_file_now(file)? {
            Some(stored) if reusable.has_file(file)? => files.push(stored),
            _ => return Ok(None),
        }
    }
    Ok(Some(Model { reference: name.clone(), manifest: manifest.clone(), files }))
}
