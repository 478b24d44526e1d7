//! The files of a model that a signature is over, and what a signature says about them.

use std::sync::Arc;

use blobd_client::protocol::signatures::{SignatureDetails, SignatureState};
use blobd_store::{Ingest, Store, StoredFile};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_paths::{self, paths};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::{Bundle, ModelFile, SignedFile};
use blobd_store_format::text::quoted;

use super::OpError;
use crate::trust::NamedKey;

/// The files of a model that its signatures list.
#[derive(Debug)]
pub(crate) struct SignableFiles(Vec<SignableFile>);

#[derive(Debug)]
struct SignableFile {
    name: Option<String>,
    path: String,
    digest: Digest,
}

impl SignableFiles {
    /// All files except for the configuration of the manifest, with their paths in an export. Reads recipes of archives only,
    /// for the files in them.
    pub(crate) fn of_model(store: &Store, name: &Reference, manifest: &Manifest) -> Result<Self, OpError> {
        Self::listed_by(name, manifest, |archive| Ok(Some(store.content().stored_file(archive)?)))
    }

    /// As [`Self::of_model`], for a model all of whose files have arrived in this ingest or were stored before.
    pub(super) fn of_ingest(ingest: &Ingest, name: &Reference, manifest: &Manifest) -> Result<Self, OpError> {
        Self::listed_by(name, manifest, |archive| known_archive(ingest.store(), archive, Some(ingest)))
    }

    fn listed_by(
        name: &Reference,
        manifest: &Manifest,
        archive: impl Fn(&Descriptor) -> Result<Option<StoredFile>, OpError>,
    ) -> Result<Self, OpError> {
        let mut found = Vec::new();
        for (file, name) in manifest.files().zip(manifest.names()).skip(1) {
            let is_archive = file.media_type.archive_of_weights().is_some();
            let stored = is_archive.then(|| archive(file)).transpose()?.flatten();
            found.extend(parts(file, name, stored.as_ref())?);
        }
        Ok(Self::new(name, found))
    }

    /// These files of a model, with their names.
    pub(super) fn new(name: &Reference, found: Vec<(Descriptor, Option<String>)>) -> Self {
        let listed = found.iter().map(|(file, name)| file_paths::ListedFile {
            media_type: &file.media_type,
            name: name.as_deref(),
            digest: file.digest,
            extension: None,
        });
        let paths = paths(&format!("{}-{}", name.model(), name.tag()), &listed.collect::<Vec<_>>());
        let files = found.into_iter().zip(paths);
        Self(files.map(|((file, name), path)| SignableFile { name, path, digest: file.digest }).collect())
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn listed(&self) -> Vec<SignedFile> {
        let mut files: Vec<_> =
            self.0.iter().map(|file| SignedFile { path: file.path.clone(), digest: file.digest }).collect();
        files.dedup();
        files
    }

    /// The files that are signed and that the model lacks.
    ///
    /// # Errors
    /// What differs, for people.
    pub(super) fn compare<'b>(&self, bundle: &'b Bundle) -> Result<Vec<&'b str>, String> {
        let file = |file: &'_ SignableFile| (file.name.clone(), file.path.clone(), file.digest);
        let files: Vec<_> = self.0.iter().map(file).collect();
        let files: Vec<_> = files
            .iter()
            .map(|(name, path, digest)| ModelFile { name: name.as_deref(), path, digest: *digest })
            .collect();
        bundle.statement().compare(&files).map_err(|difference| difference.to_string())
    }

    /// What a signature says about these files. A model that lacks files which are signed is wrong, unless `may_lack_files`.
    pub(crate) fn check(&self, bundle: &Bundle, keys: &[NamedKey], may_lack_files: bool) -> SignatureDetails {
        let compared = self.compare(bundle);
        let mut details = SignatureDetails {
            state: SignatureState::UnknownKey,
            key: None,
            key_id: bundle.key_id().map(str::to_owned),
            signed_files: bundle.statement().files().len() as u64,
            missing: compared.as_deref().map(shown).unwrap_or_default(),
            reason: None,
            bundle: bundle.text().to_owned(),
        };
        let signed = bundle.signed_bytes();
        let Some(signer) = keys.iter().find(|known| known.key.has_signed(&signed, bundle.signature())) else {
            // The bundle names a key that has not made this signature.
            let named = keys.iter().find(|known| bundle.key_id() == Some(known.key.id().as_str()));
            if let Some(NamedKey { name, .. }) = named {
                details.state = SignatureState::Wrong;
                details.reason = Some(format!("it names the key {name}, which did not sign this"));
            }
            return details;
        };
        details.key = Some(signer.name.clone());
        details.state = SignatureState::Wrong;
        match compared.as_deref() {
            Err(difference) => details.reason = Some(difference.clone()),
            Ok([first, others @ ..]) if !may_lack_files => {
                let others = match others.len() {
                    0 => String::new(),
                    count => format!(" and {count} others"),
                };
                details.reason =
                    Some(format!("the model lacks {}{others}, which were signed", quoted(first)));
            }
            Ok(_) => details.state = SignatureState::Signed,
        }
        details
    }
}

/// The files that a signature lists for a file of a manifest: the files in it if it is a stored archive, or else the file
/// itself.
pub(super) fn parts(
    file: &Descriptor,
    name: Option<&str>,
    stored: Option<&StoredFile>,
) -> Result<Vec<(Descriptor, Option<String>)>, OpError> {
    let members = stored.map(StoredFile::members).transpose()?.unwrap_or_default();
    Ok(match members.is_empty() {
        true => vec![(file.clone(), name.map(str::to_owned))],
        false => members.into_iter().map(|member| (member.file.descriptor, member.name)).collect(),
    })
}

/// An archive whose files are known: it is stored, or has `arrived` in this ingest.
pub(super) fn known_archive(
    store: &Store,
    file: &Descriptor,
    arrived: Option<&Ingest>,
) -> Result<Option<StoredFile>, OpError> {
    if let Some(recipe) = arrived.and_then(|ingest| ingest.added_recipe(file.digest)) {
        return Ok(Some(StoredFile { descriptor: file.clone(), recipe: Some(Arc::new(recipe.clone())) }));
    }
    let Some(stored) = store.content().stored_file_now(file)? else { return Ok(None) };
    // Without a recipe, it is one blob, or not there at all.
    let is_known = stored.recipe.is_some() || arrived.is_some() || store.content().has_file(file)?;
    Ok(Some(stored).filter(|_| is_known))
}

/// The first of the missing files.
pub(super) fn shown(missing: &[&str]) -> Vec<String> {
    const MAX_SHOWN: usize = 20;
    missing.iter().take(MAX_SHOWN).map(|path| (*path).to_owned()).collect()
}
