//! What other machines can read: the models that the configuration offers, as far as their reader may read them. What is
//! not shown is as if it were not there.

mod signature;
mod snapshot;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use blobd_store::leases::Lease;
use blobd_store::{FileReader, Model, Store, StoredFile};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::served_name;
use blobd_store_format::source::{PullSource, PulledSource};
use serde::{Deserialize, Serialize};

pub(crate) use self::snapshot::{HubContent, HubFile, Snapshot};
use super::policy::CallerPolicy;
use super::{OpError, damage};
use crate::offer::Offer;

/// The store as another machine sees it.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) offer: Arc<Offer>,
    pub(crate) policy: CallerPolicy,
}

/// A tag, or the manifest itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Tag(String),
    Digest(Digest),
}

#[derive(Debug)]
pub(crate) enum Found<T> {
    There(T),
    Missing,
    /// It is stored, and cannot be sent for this reason.
    Withheld(String),
}

/// A file of a model, or a blob of it, that stays while it is read.
#[derive(Debug)]
pub(crate) struct ServedFile {
    file: StoredFile,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// In the store, and kept by the lease.
    Store { _lease: Lease },
    /// A short file.
    Memory(Vec<u8>),
}

impl ServedFile {
    pub(crate) const fn digest(&self) -> Digest {
        self.file.descriptor.digest
    }

    pub(crate) const fn size(&self) -> u64 {
        self.file.descriptor.size
    }

    /// Reads a range within the file.
    pub(crate) fn read(&self, store: &Store, range: Range<u64>) -> Result<Vec<u8>, OpError> {
        let wanted = range.end.saturating_sub(range.start);
        let bytes = match &self.place {
            Place::Store { .. } => {
                let _held = store.content().hold_lower_stores();
                FileReader::new(store.content(), &self.file).read_range(range)?
            }
            Place::Memory(bytes) => {
                let place = |offset| usize::try_from(offset).unwrap_or(usize::MAX);
                bytes.get(place(range.start)..place(range.end)).unwrap_or_default().to_vec()
            }
        };
        match bytes.len() as u64 == wanted {
            true => Ok(bytes),
            false => Err(OpError::Internal(format!("{}: is shorter than its recipe says", self.digest()))),
        }
    }
}

/// A manifest that refers to another one, as an index lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Referrer {
    media_type: String,
    digest: Digest,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) artifact_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
}

impl View {
    /// The names of all models that are shown, in order.
    pub(crate) fn models(&self, store: &Store) -> Result<Vec<Reference>, OpError> {
        let mut shown = Vec::new();
        for name in store.names().all_tags()?.into_iter().filter(|name| self.offer.includes(name)) {
            if self.may_read(store, &name)? {
                shown.push(name);
            }
        }
        Ok(shown)
    }

    /// The tags that are shown of the model that a repository's name means. `host` is the registry that the client would
    /// have asked otherwise.
    pub(crate) fn tags(
        &self,
        store: &Store,
        repository: &str,
        host: Option<&str>,
    ) -> Result<Vec<Reference>, OpError> {
        let mut names = store.names().all_tags()?;
        names.retain(|name| self.offer.includes(name));
        let mut shown = Vec::new();
        for name in served_name::find(&names, repository, host) {
            if self.may_read(store, name)? {
                shown.push(name.clone());
            }
        }
        Ok(shown)
    }

    /// A manifest of one of these tags, with its bytes as they are stored.
    pub(crate) fn manifest(
        &self,
        store: &Store,
        tags: &[Reference],
        wanted: &Wanted,
    ) -> Result<Found<Manifest>, OpError> {
        for tag in tags {
            let is_meant = match wanted {
                Wanted::Tag(name) => tag.tag().eq_ignore_ascii_case(name),
                Wanted::Digest(_) => true,
            };
            let Some(manifest) =
                is_meant.then(|| present(store.names().manifest(tag))).transpose()?.flatten()
            else {
                continue;
            };
            if matches!(wanted, Wanted::Digest(digest) if *digest != manifest.digest()) {
                continue;
            }
            for file in manifest.files() {
                if let Some(reason) = reason_to_withhold(&store.content().stored_file(file)?) {
                    return Ok(Found::Withheld(format!("model {}: {reason}", tag.short())));
                }
            }
            return Ok(Found::There(manifest));
        }
        Ok(Found::Missing)
    }

    /// The model at its registry that one of these tags follows under its own name, and the digest of the stored manifest.
    pub(crate) fn followed(
        &self,
        store: &Store,
        tags: &[Reference],
        tag: &str,
    ) -> Result<Option<(Reference, Digest)>, OpError> {
        let Some(tag) = tags.iter().find(|known| known.tag().eq_ignore_ascii_case(tag)) else {
            return Ok(None);
        };
        let Some(manifest) = present(store.names().manifest(tag))? else { return Ok(None) };
        let source = store.names().name_origin(tag, manifest.digest()).source;
        let source = source.and_then(|source| source.parse::<PulledSource>().ok());
        Ok(match source {
            Some(PulledSource { source: PullSource::Registry(reference), components })
                if components.are_default() && reference.same_model(tag) =>
            {
                Some((reference, manifest.digest()))
            }
            _ => None,
        })
    }

    /// A file of one of these tags, or a blob that its files consist of, such as a tensor.
    pub(crate) fn file(
        &self,
        store: &Store,
        tags: &[Reference],
        digest: Digest,
    ) -> Result<Found<ServedFile>, OpError> {
        let _held = store.content().hold_lower_stores();
        for tag in tags {
            let lease =
                store.liveness().leases().grant(format!("another machine that reads {}", tag.short()));
            let Some(model) = present(store.names().leased_model(tag, &lease))? else { continue };
            let Some(file) = part(store, &model, digest)? else { continue };
            if let Some(reason) = reason_to_withhold(&file) {
                return Ok(Found::Withheld(reason));
            }
            damage::refuse(store, &model, &file.blob_sizes())?;
            return Ok(Found::There(ServedFile { file, place: Place::Store { _lease: lease } }));
        }
        Ok(signature::file(store, tags, digest)?.map_or(Found::Missing, Found::There))
    }

    /// The manifests of these tags that have this one as their subject, and its signatures.
    pub(crate) fn referrers(
        &self,
        store: &Store,
        tags: &[Reference],
        subject: Digest,
    ) -> Result<Vec<Referrer>, OpError> {
        let mut referrers = Vec::new();
        for tag in tags {
            let manifest = present(store.names().manifest(tag))?;
            referrers.extend(manifest.and_then(|manifest| referrer(&manifest, subject)));
        }
        for signature in signature::of_tags(store, tags)?.iter().filter(|found| found.subject == subject) {
            referrers.extend(referrer(&signature.manifest, subject));
        }
        referrers.sort_by_key(|referrer: &Referrer| referrer.digest);
        referrers.dedup();
        Ok(referrers)
    }

    /// The manifest of a signature of one of these tags.
    pub(crate) fn signature(
        &self,
        store: &Store,
        tags: &[Reference],
        manifest: Digest,
    ) -> Result<Option<Manifest>, OpError> {
        let mut signatures = signature::of_tags(store, tags)?.into_iter().map(|found| found.manifest);
        Ok(signatures.find(|found| found.digest() == manifest))
    }

    fn may_read(&self, store: &Store, name: &Reference) -> Result<bool, OpError> {
        if !self.policy.may_refuse_content() {
            return Ok(true);
        }
        let manifest = present(store.names().manifest(name))?;
        manifest.map_or(Ok(false), |manifest| self.policy.may_send(store, name, &manifest))
    }
}

/// A file of a model whose other files may not have arrived yet; `None` if it is not stored.
pub(crate) fn arrived_file(store: &Store, file: &Descriptor) -> Result<Option<ServedFile>, OpError> {
    let _held = store.content().hold_lower_stores();
    let lease = store.liveness().leases().grant(format!("another machine that reads {}", file.digest));
    // Before the check, so that it is not collected meanwhile.
    lease.protect(file.digest);
    let Some(stored) = store.content().stored_file_now(file)? else { return Ok(None) };
    lease.protect_all(stored.blob_sizes().into_iter().map(|(digest, _)| digest));
    if !store.content().has_file(file)? {
        return Ok(None);
    }
    Ok(reason_to_withhold(&stored)
        .is_none()
        .then_some(ServedFile { file: stored, place: Place::Store { _lease: lease } }))
}

/// `None` for a model that was removed meanwhile.
fn present<T>(read: Result<T, blobd_store::StoreError>) -> Result<Option<T>, OpError> {
    match read {
        Err(error) if error.is_no_such_model() => Ok(None),
        read => Ok(read.map(Some)?),
    }
}

fn part(store: &Store, model: &Model, digest: Digest) -> Result<Option<StoredFile>, OpError> {
    if let Some(file) = model.files.iter().find(|file| file.descriptor.digest == digest) {
        return Ok(Some(file.clone()));
    }
    // In an archive.
    if let Some(named) = model.contents()?.into_iter().find(|named| named.file.descriptor.digest == digest) {
        return Ok(Some(named.file));
    }
    let has_blob = |file: &StoredFile| {
        file.recipe.as_ref().is_some_and(|recipe| recipe.blob_sizes().contains_key(&digest))
    };
    if !model.files.iter().any(has_blob) {
        return Ok(None);
    }
    // The whole blob: a recipe says only up to where it needs it.
    let size = store.content().blob_size(digest)?;
    let media_type = MediaType::new("application/octet-stream");
    Ok(size.map(|size| StoredFile { descriptor: Descriptor { media_type, digest, size }, recipe: None }))
}

fn reason_to_withhold(file: &StoredFile) -> Option<String> {
    file.recipe.as_ref().and_then(|recipe| recipe.unpacked()).map(|_| {
        let digest = file.descriptor.digest;
        format!("layer {digest} was stored decompressed, and its compressed form cannot be made again")
    })
}

fn referrer(manifest: &Manifest, subject: Digest) -> Option<Referrer> {
    #[derive(Deserialize)]
    struct Subject {
        digest: Digest,
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Referring {
        subject: Option<Subject>,
        artifact_type: Option<String>,
        annotations: Option<BTreeMap<String, String>>,
    }

    let Referring { subject: found, artifact_type, annotations } =
        serde_json::from_slice(manifest.raw()).ok()?;
    found.filter(|found| found.digest == subject)?;
    let media_type = manifest.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
    Some(Referrer {
        media_type: media_type.as_str().to_owned(),
        digest: manifest.digest(),
        size: manifest.raw().len() as u64,
        artifact_type: artifact_type.or_else(|| Some(manifest.config().media_type.as_str().to_owned())),
        annotations,
    })
}
