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
    #[serde(flatten)]
    facts: RecordedFacts,
}

/// What is recorded of a model's weights, so that a list of models needs no headers. Records of earlier versions lack it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedFacts {
    #[serde(
        default,
        deserialize_with = "ModelKind::deserialize_known",
        skip_serializing_if = "Option::is_none"
    )]
    pub kind: Option<ModelKind>,
    /// The model family, such as `llama`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// The file type, such as `Q4_K_M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
}

impl RecordedFacts {
    /// With what only the other record has.
    fn or(self, other: Self) -> Self {
        Self {
            kind: self.kind.or(other.kind),
            architecture: self.architecture.or(other.architecture),
            quantization: self.quantization.or(other.quantization),
        }
    }
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
        facts: RecordedFacts,
        reserve: impl FnOnce(u64) -> Result<Reservation, StoreError>,
    ) -> Result<Self, StoreError> {
        let origin = Origin { origin: origin.to_owned(), files, facts };
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
        let without = Self { origin: self.origin.clone(), files: Vec::new(), facts: self.facts.clone() };
        StoreError::encode(&without, layout::ORIGINS)
    }

    /// This record with newer versions of files, and with the facts that it lacks.
    fn with(self, newer: Vec<FileVersion>, facts: RecordedFacts) -> Self {
        let is_kept = |file: &FileVersion| newer.iter().all(|newer| newer.url != file.url);
        let kept: Vec<_> = self.files.into_iter().filter(is_kept).collect();
        let files = kept.into_iter().chain(newer).collect();
        Self { origin: self.origin, files, facts: self.facts.or(facts) }
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

    pub fn facts(&self, manifest: Digest) -> RecordedFacts {
        let facts = |root: &Root| record_in(root, manifest).map(|record| record.facts);
        let of_lower = || self.content.lower.find(|root| Ok(facts(root)));
        facts(&self.content.root).or_else(of_lower).unwrap_or_default()
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
            let merged = stored.with(origin.files, origin.facts).encode()?;
            if merged != before {
                self.ledger.write_record(temporary, &target, &merged, Some(reservation))?;
            }
        }
        self.content.disk.sync_dir(directory)
    }

    /// Adds facts that the record of a manifest lacks. Without a record in the writable store, it does nothing.
    pub fn complete_facts(&self, manifest: Digest, facts: RecordedFacts) -> Result<(), StoreError> {
        let Some(stored) = record_in(&self.content.root, manifest) else { return Ok(()) };
        let before = stored.encode()?;
        let completed = stored.with(Vec::new(), facts).encode()?;
        if completed == before {
            return Ok(());
        }
        self.ledger.write_lone_record(&layout::origin(manifest), &completed)
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

pub(crate) fn facts_in(root: &Root, manifest: Digest) -> RecordedFacts {
    record_in(root, manifest).map(|record| record.facts).unwrap_or_default()
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
        Origin { origin: "https://a/x.gguf".to_owned(), files, facts: RecordedFacts::default() }
    }

    #[test]
    fn newer_version_of_a_file_replaces_the_older_one() {
        let merged = origin(vec![version("a", "1"), version("b", "1")])
            .with(vec![version("a", "2")], RecordedFacts::default());
        assert_eq!(merged, origin(vec![version("b", "1"), version("a", "2")]));
    }

    #[test]
    fn facts_are_added_to_a_record_without_them_and_then_stay() {
        let facts = |kind, quantization: Option<&str>| RecordedFacts {
            kind: Some(kind),
            architecture: None,
            quantization: quantization.map(str::to_owned),
        };
        let merged = origin(Vec::new()).with(Vec::new(), facts(ModelKind::Adapter, None));
        assert_eq!(merged.facts, facts(ModelKind::Adapter, None));
        let json = merged.encode().unwrap();
        assert_eq!(serde_json::from_slice::<Origin>(&json).unwrap(), merged);
        let merged = merged.with(Vec::new(), facts(ModelKind::Draft, Some("Q4_K_M")));
        assert_eq!(merged.facts, facts(ModelKind::Adapter, Some("Q4_K_M")));
        let later = br#"{"origin":"x","kind":"hologram"}"#;
        assert_eq!(serde_json::from_slice::<Origin>(later).unwrap().facts.kind, None, "of a later version");
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
