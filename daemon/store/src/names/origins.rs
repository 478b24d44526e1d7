//! Records of where models came from, of the versions of files that have no digest at their server, and of what each
//! model is, so that a list of models needs no headers.

use std::path::Path;

use blobd_model::kind::ModelKind;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use crate::ledger::accounting::Reservation;
use crate::names::Names;
use crate::names::records::{NameOrigin, account_in, recorded_origin_in};
use crate::root::Root;
use crate::{Account, StoreError};

/// A file at a URL, and what its server said to identify its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    pub url: String,
    /// The `ETag`, with its quotes, or the `Last-Modified`.
    pub validator: String,
    pub size: u64,
    pub digest: Digest,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Origin {
    origin: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    files: Vec<FileVersion>,
    /// Absent in records of earlier versions.
    #[serde(
        default,
        deserialize_with = "ModelKind::deserialize_known",
        skip_serializing_if = "Option::is_none"
    )]
    kind: Option<ModelKind>,
}

/// The origin of a manifest, with disk space reserved for its file.
#[derive(Debug)]
pub(crate) struct OriginRecord {
    origin: Origin,
    reservation: Reservation,
}

impl OriginRecord {
    /// `reserve` reserves disk space for a record of the given length.
    pub(crate) fn new(
        origin: &str,
        files: Vec<FileVersion>,
        kind: Option<ModelKind>,
        reserve: impl FnOnce(u64) -> Result<Reservation, StoreError>,
    ) -> Result<Self, StoreError> {
        let origin = Origin { origin: origin.to_owned(), files, kind };
        let length = origin.encode()?.len() as u64;
        Ok(Self { origin, reservation: reserve(length)? })
    }

    pub(crate) fn text(&self) -> &str {
        &self.origin.origin
    }
}

impl Origin {
    /// Longer records are not read.
    const MAX_BYTES: u64 = 64 << 10;

    /// Without the versions if it would be too long with them.
    fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let json = StoreError::encode(self, layout::ORIGINS)?;
        if json.len() as u64 <= Self::MAX_BYTES {
            return Ok(json);
        }
        let without = Self { origin: self.origin.clone(), files: Vec::new(), kind: self.kind };
        StoreError::encode(&without, layout::ORIGINS)
    }

    /// This record with newer versions of files, and with the kind if it has none.
    fn with(self, newer: Vec<FileVersion>, kind: Option<ModelKind>) -> Self {
        let is_kept = |file: &FileVersion| newer.iter().all(|newer| newer.url != file.url);
        let kept: Vec<_> = self.files.into_iter().filter(is_kept).collect();
        let files = kept.into_iter().chain(newer).collect();
        Self { origin: self.origin, files, kind: self.kind.or(kind) }
    }
}

impl Names {
    /// Where the content of a name came from, and what updates the name.
    pub fn name_origin(&self, reference: &Reference, manifest: Digest) -> NameOrigin {
        let origin = |root: &Root| {
            let found = name_origin_in(root, reference, manifest);
            found.origin.is_some().then_some(found)
        };
        origin(&self.content.root)
            .or_else(|| self.content.lower.find(|root| Ok(origin(root))))
            .unwrap_or_default()
    }

    pub fn origin(&self, manifest: Digest) -> Option<String> {
        let of_lower = || self.content.lower.find(|root| Ok(origin_in(root, manifest)));
        self.own_origin(manifest).or_else(of_lower)
    }

    pub fn kind(&self, manifest: Digest) -> Option<ModelKind> {
        let of_lower = || self.content.lower.find(|root| Ok(kind_in(root, manifest)));
        kind_in(&self.content.root, manifest).or_else(of_lower)
    }

    pub(crate) fn own_origin(&self, manifest: Digest) -> Option<String> {
        origin_in(&self.content.root, manifest)
    }

    /// Like [`Self::origin`], but an unreadable record is an error: for decisions that must not depend on a failure.
    pub fn recorded_origin(&self, manifest: Digest) -> Result<Option<String>, StoreError> {
        let origin = |root: &Root| Ok(try_record_in(root, manifest)?.map(|record| record.origin));
        Ok(origin(&self.content.root)?.or_else(|| self.content.lower.find(origin)))
    }

    /// The versions of the files at these URLs that models were made of. Not all of it may still be stored.
    pub fn file_versions(&self, urls: &[String]) -> Result<Vec<FileVersion>, StoreError> {
        let recorded =
            self.origins()?.into_iter().filter_map(|manifest| record_in(&self.content.root, manifest));
        let files = recorded.flat_map(|origin| origin.files);
        Ok(files.filter(|file| urls.contains(&file.url)).collect())
    }

    /// Records the origin of a manifest, durably, unless it has one. Versions of files are added to that.
    pub(crate) fn write_origin(
        &self,
        temporary: &Path,
        manifest: Digest,
        OriginRecord { origin, reservation }: OriginRecord,
    ) -> Result<(), StoreError> {
        let (target, directory) = (layout::origin(manifest), Path::new(layout::ORIGINS));
        self.content.create_directories(directory)?;
        // Synced even if the file exists: the process that wrote it may have been killed before its sync.
        if self.content.root.status(&target)?.is_none() {
            self.ledger.write_record(temporary, &target, &origin.encode()?, Some(reservation))?;
        } else if let Some(stored) = record_in(&self.content.root, manifest) {
            let before = stored.encode()?;
            let merged = stored.with(origin.files, origin.kind).encode()?;
            if merged != before {
                self.ledger.write_record(temporary, &target, &merged, Some(reservation))?;
            }
        }
        self.content.disk.sync_dir(directory)
    }

    pub(crate) fn remove_origin(&self, manifest: Digest) -> Result<(), StoreError> {
        self.ledger.remove_record(&layout::origin(manifest)).map(drop)
    }

    /// Who is charged for a name with this manifest, or was until it was removed, if that is recorded.
    pub fn account_of(&self, reference: &Reference, manifest: Digest) -> Option<Account> {
        account_in(&self.content.root, reference, manifest)
    }

    pub(crate) fn origins(&self) -> Result<Vec<Digest>, StoreError> {
        self.content.root.parsed_names(layout::ORIGINS, layout::parse_recipe_name)
    }
}

/// Where the content of a name came from, by the history of the name, or as recorded for the manifest. Earlier versions
/// recorded only the latter, and updated the name from it.
pub(crate) fn name_origin_in(root: &Root, reference: &Reference, manifest: Digest) -> NameOrigin {
    match recorded_origin_in(root, reference, manifest) {
        Some(NameOrigin { origin: None, source }) => NameOrigin { origin: origin_in(root, manifest), source },
        Some(recorded) => recorded,
        None => NameOrigin::following(origin_in(root, manifest)),
    }
}

pub(crate) fn origin_in(root: &Root, manifest: Digest) -> Option<String> {
    Some(record_in(root, manifest)?.origin)
}

pub(crate) fn kind_in(root: &Root, manifest: Digest) -> Option<ModelKind> {
    record_in(root, manifest)?.kind
}

fn record_in(root: &Root, manifest: Digest) -> Option<Origin> {
    try_record_in(root, manifest).ok().flatten()
}

fn try_record_in(root: &Root, manifest: Digest) -> Result<Option<Origin>, StoreError> {
    let path = layout::origin(manifest);
    let Some(json) = root.read_limited(&path, Origin::MAX_BYTES)? else { return Ok(None) };
    let damaged = |error: serde_json::Error| StoreError::io("parse", root.full(&path))(error.into());
    serde_json::from_slice(&json).map(Some).map_err(damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(url: &str, validator: &str) -> FileVersion {
        let (url, validator) = (url.to_owned(), validator.to_owned());
        FileVersion { url, validator, size: 1, digest: Digest::of(b"x") }
    }

    fn origin(files: Vec<FileVersion>) -> Origin {
        Origin { origin: "https://a/x.gguf".to_owned(), files, kind: None }
    }

    #[test]
    fn newer_version_of_a_file_replaces_the_older_one() {
        let merged = origin(vec![version("a", "1"), version("b", "1")]).with(vec![version("a", "2")], None);
        assert_eq!(merged, origin(vec![version("b", "1"), version("a", "2")]));
    }

    #[test]
    fn kind_is_added_to_a_record_without_one_and_then_stays() {
        let merged = origin(Vec::new()).with(Vec::new(), Some(ModelKind::Adapter));
        assert_eq!(merged.kind, Some(ModelKind::Adapter));
        let json = merged.encode().unwrap();
        assert_eq!(serde_json::from_slice::<Origin>(&json).unwrap(), merged);
        assert_eq!(merged.with(Vec::new(), Some(ModelKind::Draft)).kind, Some(ModelKind::Adapter));
        let later = br#"{"origin":"x","kind":"hologram"}"#;
        assert_eq!(serde_json::from_slice::<Origin>(later).unwrap().kind, None, "of a later version");
    }

    #[test]
    fn record_without_versions_is_that_of_earlier_releases() {
        let json = origin(Vec::new()).encode().unwrap();
        assert_eq!(json, br#"{"origin":"https://a/x.gguf"}"#);
        assert_eq!(serde_json::from_slice::<Origin>(&json).unwrap(), origin(Vec::new()));
    }

    #[test]
    fn versions_that_would_make_the_record_unreadable_are_left_out() {
        let many = (0..1000).map(|number| version(&format!("https://a/{number:0100}"), "1")).collect();
        assert_eq!(origin(many).encode().unwrap(), origin(Vec::new()).encode().unwrap());
    }
}
