//! What the policy's rules need to know of a stored model: its names, and where it came from.

use std::collections::BTreeSet;

use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;

use super::OpError;
use crate::policy::Subject;

/// How many models made from each other by edits are followed to where the first came from. Beyond that, nothing would
/// be known of the origin, so the model is refused.
const MAX_EDITS: usize = 1000;

/// Adds where a stored model came from, and all its names if rules need them; of an edited model also those of its
/// source. Where the content of a name came from counts, if the model is used by that `name`, otherwise what was
/// recorded first for the manifest. A record that cannot be read is an error: to leave it out would lift the rules about registries.
pub(super) fn add_stored(
    subject: &mut Subject,
    store: &Store,
    (manifest, name): (Digest, Option<&Reference>),
    needs_names: bool,
) -> Result<(), OpError> {
    let mut own_origin = name.and_then(|name| store.names().name_origin(name, manifest).origin);
    let (mut next, mut seen) = (Some((manifest, None)), BTreeSet::new());
    while let Some((manifest, name)) = next.take().filter(|(manifest, _)| seen.insert(*manifest)) {
        if seen.len() > MAX_EDITS {
            let what = "its origin is unknown: it was made by more than 1000 edits in a row";
            return Err(OpError::Internal(format!("manifest {manifest}: {what}")));
        }
        if needs_names {
            store.names().names_of(manifest)?.iter().for_each(|name| subject.add_name(name));
        }
        let recorded = store.names().recorded_origin(manifest)?;
        match own_origin.take().or(recorded).as_deref().and_then(Origin::parse) {
            Some(Origin::Import(_)) => subject.add_local(),
            Some(Origin::Url(source) | Origin::Source(source)) => subject.add_source(&source),
            Some(Origin::Edit { name, manifest: Some(edited) }) => {
                subject.add_name(&name);
                next = Some((edited, Some(name)));
            }
            Some(Origin::Edit { name, manifest: None }) => match named(store, &name)? {
                Some(edited) => next = Some((edited, Some(name))),
                None => subject.add_source(&PullSource::Registry(name)),
            },
            None => add_hosts(subject, store, manifest, name.as_ref())?,
        }
    }
    Ok(())
}

/// Without a record, a model is taken to come from the hosts in its names; of an edited model that is not stored any
/// more, from the host in the `name` that it had.
fn add_hosts(
    subject: &mut Subject,
    store: &Store,
    manifest: Digest,
    name: Option<&Reference>,
) -> Result<(), OpError> {
    let names = store.names().names_of(manifest)?;
    names.iter().chain(name).for_each(|name| subject.add_host(name));
    Ok(())
}

/// The manifest that a name has now.
fn named(store: &Store, name: &Reference) -> Result<Option<Digest>, StoreError> {
    match store.names().resolve(name).and_then(|name| store.names().manifest(&name)) {
        Ok(manifest) => Ok(Some(manifest.digest())),
        Err(error) if error.is_no_such_model() => Ok(None),
        Err(error) => Err(error),
    }
}
