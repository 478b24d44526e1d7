//! The signatures of a model that comes with its manifest, from a bundle of `blobd save`: checked before its files are read, if a
//! rule `[[trust]]` is for it. Models from other programs' stores have none, and are signed after the import.

use blobd_client::protocol::request::ImportParams;
use blobd_store::{Ingest, Store};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;

use crate::ops::policy::CallerPolicy;
use crate::ops::signable_files::known_archive;
use crate::ops::trust::KnownFiles;
use crate::ops::{OpError, signatures, trust};
use crate::trust::{AppliedRule, TrustMode};

/// The signatures of a model that is loaded.
pub(super) struct Signatures<'p> {
    store: &'p Store,
    policy: &'p CallerPolicy,
    name: &'p Reference,
    manifest: Option<&'p Manifest>,
    applied: Option<AppliedRule<'p>>,
    /// Those that the store has of this manifest too.
    bundles: Vec<Bundle>,
}

impl<'p> Signatures<'p> {
    pub(super) fn new(
        (store, policy): (&'p Store, &'p CallerPolicy),
        params: &ImportParams,
        name: &'p Reference,
        manifest: Option<&'p Manifest>,
    ) -> Result<Self, OpError> {
        let is_loaded = manifest.is_some() && params.program.is_none();
        let applied = is_loaded.then(|| policy.trust().rule_for([name])).flatten();
        let mut texts = params.signatures.clone();
        if let Some(manifest) = manifest.filter(|_| applied.is_some()) {
            texts.extend(store.names().signatures(manifest.digest())?);
        }
        let bundles = texts.iter().filter_map(|text| Bundle::parse(text.as_bytes()).ok()).collect();
        Ok(Self { store, policy, name, manifest, applied, bundles })
    }

    /// Compares them with the digests in the manifest; with `ingest`, with those of the files in archives too.
    ///
    /// # Errors
    /// [`OpError::DeniedByPolicy`] if the model is not signed as its rule demands.
    pub(super) fn check(&self, ingest: Option<&Ingest>) -> Result<(), OpError> {
        let (Some(applied), Some(manifest)) = (self.applied, self.manifest) else { return Ok(()) };
        let layers = manifest.layers().iter().zip(manifest.names().skip(1));
        let files = layers.map(|(file, name)| (file.clone(), name.map(str::to_owned))).collect();
        let known = KnownFiles { name: self.name, files, is_all: true };
        let archive = |file: &Descriptor| known_archive(self.store, file, ingest);
        match trust::compare_known(applied.rule, known, &self.bundles, archive)?.flaw {
            Some(flaw) if applied.rule.mode == TrustMode::Enforce => Err(OpError::DeniedByPolicy {
                message: format!("model {}: {flaw}", self.name.short()),
                hint: format!(
                    "{}; `blobd save` writes the signatures of a model with it, and `blobd import` takes files that are \
                     signed afterwards",
                    applied.description()
                ),
            }),
            // The first use of the model warns.
            _ => Ok(()),
        }
    }

    /// Keeps them with the model, before it gets its name.
    pub(super) fn keep(&self, ingest: &Ingest) -> Result<(), OpError> {
        let Some(manifest) = self.manifest.filter(|_| !self.bundles.is_empty()) else { return Ok(()) };
        signatures::add_arriving(ingest, self.policy.trust(), (self.name, manifest), &self.bundles)
    }
}
