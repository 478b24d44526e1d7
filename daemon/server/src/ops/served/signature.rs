//! The signatures of models as other machines see them: artifacts beside the manifest in a registry, a file in a repository
//! of a hub. They are composed when they are asked for, always with the same bytes.

use blobd_store::Store;
use blobd_store::StoredFile;
use blobd_store_format::artifact::ArtifactKind;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::{Bundle, SignatureArtifact};

use super::{Place, ServedFile, present};
use crate::ops::OpError;

/// A signature with its manifest.
#[derive(Debug)]
pub(super) struct ServedSignature {
    pub(super) subject: Digest,
    pub(super) manifest: Manifest,
    bundle: Bundle,
}

/// The signatures of all these models.
pub(super) fn of_tags(store: &Store, tags: &[Reference]) -> Result<Vec<ServedSignature>, OpError> {
    let mut found = Vec::new();
    for tag in tags {
        let Some(model) = present(store.names().manifest(tag))? else { continue };
        let subject = model.descriptor();
        for text in store.names().signatures(subject.digest)? {
            let Ok(bundle) = Bundle::parse(text.as_bytes()) else { continue };
            let composed = SignatureArtifact::compose(&subject, &bundle).ok();
            let manifest = composed.and_then(|raw| Manifest::parse(raw).ok());
            found.extend(manifest.map(|manifest| ServedSignature {
                subject: subject.digest,
                manifest,
                bundle,
            }));
        }
    }
    Ok(found)
}

/// A file of a signature: the bundle, or the configuration, which is empty.
pub(super) fn file(store: &Store, tags: &[Reference], digest: Digest) -> Result<Option<ServedFile>, OpError> {
    let is_config = digest == Digest::of(ArtifactKind::EMPTY_CONFIG);
    let signatures = of_tags(store, tags)?;
    let bundle = || {
        let of_digest =
            signatures.iter().find(|found| SignatureArtifact::layer(&found.bundle).digest == digest);
        of_digest.map(|found| found.bundle.text().as_bytes().to_vec())
    };
    let config = || (is_config && !signatures.is_empty()).then(|| ArtifactKind::EMPTY_CONFIG.to_vec());
    let Some(bytes) = bundle().or_else(config) else { return Ok(None) };
    let media_type = MediaType::new("application/octet-stream");
    let descriptor = Descriptor { media_type, digest, size: bytes.len() as u64 };
    let file = StoredFile { descriptor, recipe: None };
    Ok(Some(ServedFile { file, place: Place::Memory(bytes) }))
}

/// The signature of a repository of a hub, which has only one: the latest of its model. `None` if its tags are several
/// models.
pub(super) fn of_repository(store: &Store, tags: &[Reference]) -> Result<Option<Descriptor>, OpError> {
    let mut signatures = of_tags(store, tags)?;
    let mut models = std::collections::BTreeSet::new();
    for tag in tags {
        models.extend(present(store.names().manifest(tag))?.map(|manifest| manifest.digest()));
    }
    let latest = signatures.pop().filter(|_| models.len() == 1);
    Ok(latest.map(|found| SignatureArtifact::layer(&found.bundle)))
}
