//! `sharing`: which bytes of a model other models need too. `residency`: how much of it is in the page cache.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

use blobd_client::protocol::response::ModelSharing;
use blobd_client::protocol::space::SharedWith;
use blobd_client::residency::Residency;
use blobd_store::Store;
use blobd_store::index::Sharing;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::{Model, counted};
use crate::ops::OpError;

/// Compares a model with all others. Sizes are those that the file system has allocated. Models with equal manifests share
/// everything.
pub(crate) fn sharing(store: &Store, reference: &Reference) -> Result<ModelSharing, OpError> {
    let reference = store.names().resolve(reference)?;
    let files: Vec<Digest> = store.names().manifest(&reference)?.digests().into_iter().collect();
    let mut others = Model::all(store)?;
    others.retain(|model| *model.reference() != reference);
    let their_files: Vec<&[Digest]> = others.iter().map(|model| &*model.manifest.files).collect();
    let sharing = counted(store, |catalog| Sharing::count(catalog, &files, &their_files))?;
    let rows = others.iter().zip(sharing.with_others).filter(|(_, bytes)| *bytes > 0);
    let mut models: Vec<_> =
        rows.map(|(model, bytes)| SharedWith { name: model.reference().short(), bytes }).collect();
    models.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let (unique_bytes, shared_bytes) = (sharing.unique_bytes, sharing.shared_bytes);
    Ok(ModelSharing { name: reference.short(), unique_bytes, shared_bytes, models })
}

/// Counts the pages of all blobs of the model with this manifest, each blob once. Does not count as use of the model.
/// `None` if neither `reference` nor another name means that model any more.
///
/// # Errors
/// [`blobd_store::StoreError`], also for a missing blob; [`OpError::Internal`] if the kernel does not tell this user.
pub(crate) fn residency(
    store: &Store,
    reference: &Reference,
    manifest: Digest,
) -> Result<Option<Residency>, OpError> {
    let Some(manifest) = find(store, reference, manifest)? else { return Ok(None) };
    let mut blobs = BTreeSet::new();
    for file in manifest.files() {
        blobs.extend(store.content().stored_file(file)?.blob_sizes().into_iter().map(|(digest, _)| digest));
    }
    let mut sum = Residency::default();
    for digest in blobs {
        let file = store.content().open_blob(digest, 0)?;
        let part = Residency::of_file(file.as_fd()).map_err(|error| OpError::Internal(error.to_string()))?;
        sum = sum.plus(part);
    }
    Ok(Some(sum))
}

fn find(store: &Store, reference: &Reference, digest: Digest) -> Result<Option<Manifest>, OpError> {
    let named = |name: &Reference| store.names().manifest(name).ok().filter(|found| found.digest() == digest);
    match named(reference) {
        None => Ok(store.names().names_of(digest)?.iter().find_map(named)),
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::{begin, new_store};
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::manifest::Manifest;

    use super::*;

    fn add(store: &std::sync::Arc<Store>, name: &str, contents: &[&[u8]]) {
        let mut ingest = begin(store);
        let mut file = |bytes: &[u8]| Descriptor {
            media_type: MediaType::new("text/plain"),
            digest: ingest.add_bytes(bytes).unwrap(),
            size: bytes.len() as u64,
        };
        let config = file(format!("{{\"name\":\"{name}\"}}").as_bytes());
        let layers = contents.iter().map(|bytes| file(bytes)).collect();
        ingest.commit(&name.parse().unwrap(), &Manifest::compose(config, layers).unwrap(), None).unwrap();
    }

    #[test]
    fn bytes_are_shared_with_each_model_that_needs_them() {
        let (_folder, store) = new_store();
        let (large, small) = (vec![1; 1 << 20], vec![2; 64 << 10]);
        add(&store, "a", &[&large, &small]);
        add(&store, "b", &[&large]);
        add(&store, "c", &[&small, &large]);
        add(&store, "alone", &[&[3; 9000]]);
        let sharing = sharing(&store, &"a".parse().unwrap()).unwrap();
        let names: Vec<_> = sharing.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["c:latest", "b:latest"]);
        assert_eq!(sharing.models[0].bytes, sharing.shared_bytes);
        assert!(sharing.models[1].bytes >= 1 << 20 && sharing.models[1].bytes < sharing.shared_bytes);
        assert!(sharing.unique_bytes <= 8 << 10, "only the configuration: {}", sharing.unique_bytes);
    }

    #[test]
    fn unknown_model_is_not_found() {
        let (_folder, store) = new_store();
        assert!(sharing(&store, &"nobody".parse().unwrap()).is_err());
    }
}
