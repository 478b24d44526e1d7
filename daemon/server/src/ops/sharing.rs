//! `sharing`: which bytes of a model other models need too.

use blobd_client::protocol::response::{ModelSharing, SharedWith};
use blobd_store::Store;
use blobd_store::index::Sharing;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::measure::{Model, counted};

/// Compares a model with all others. Sizes are what the file system has allocated. Models with equal manifests
/// share everything.
///
/// # Errors
/// As for [`super::usage`], and [`blobd_store::StoreError::NoSuchModel`].
pub fn sharing(store: &Store, reference: &Reference) -> Result<ModelSharing, OpError> {
    let reference = store.names().resolve(reference)?;
    let files: Vec<Digest> = store.names().manifest(&reference)?.digests().into_iter().collect();
    let mut others = Model::all(store)?;
    others.retain(|model| *model.reference() != reference);
    let their_files: Vec<&[Digest]> = others.iter().map(|model| &*model.manifest().files).collect();
    let sharing = counted(store, |catalog| Sharing::count(catalog, &files, &their_files))?;
    let rows = others.iter().zip(sharing.with_others).filter(|(_, bytes)| *bytes > 0);
    let mut models: Vec<_> =
        rows.map(|(model, bytes)| SharedWith { name: model.reference().short(), bytes }).collect();
    models.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let (unique_bytes, shared_bytes) = (sharing.unique_bytes, sharing.shared_bytes);
    Ok(ModelSharing { name: reference.short(), unique_bytes, shared_bytes, models })
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
