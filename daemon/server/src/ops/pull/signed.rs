//! Whether a model that is pulled is signed as a rule `[[trust]]` demands. Its server is asked for signatures only if a rule
//! applies, and they are compared with the digests of its files before any file is requested.
//!
//! A hub does not say the SHA-256 of files that it stores in git, and none is known of the files in an archive. Those in git
//! are received first; archives are compared when they have arrived, and before the model has a name.

use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::pull::PullProgress;
use blobd_registry::{FetchedSignatures, RemoteFile, RemoteModel};
use blobd_store::Ingest;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;
use blobd_store_format::source::PullSource;

use super::source::{Pull, reporting_silence, unwanted};
use crate::ops::new_model::NewFile;
use crate::ops::signable_files::known_archive;
use crate::ops::trust::{Compared, KnownFiles};
use crate::ops::{OpError, signatures, trust};
use crate::trust::{AppliedRule, TrustMode};

/// The signatures of a model that is pulled.
pub(super) struct Signatures<'p> {
    pull: Pull<'p>,
    name: &'p Reference,
    /// The rule that applies, and what is compared for it.
    demand: Option<Demand<'p>>,
}

struct Demand<'p> {
    applied: AppliedRule<'p>,
    fetched: FetchedSignatures,
    files: Vec<ListedFile>,
    /// What is wrong, if the rule only warns of it.
    flaw: Option<String>,
    /// Whether all files were compared with the signatures.
    has_compared_all: bool,
}

/// A file of the model as its server lists it.
struct ListedFile {
    media_type: MediaType,
    name: Option<String>,
    size: u64,
    digest: Option<Digest>,
}

/// The files that have arrived, by their numbers.
type Arrived<'a> = (&'a Ingest, &'a BTreeMap<usize, NewFile>);

impl<'p> Signatures<'p> {
    /// Fetches the signatures of a model if a rule applies to it.
    ///
    /// # Errors
    /// [`OpError::DeniedByPolicy`] if it is not signed as the rule demands.
    pub(super) fn fetch(pull: Pull<'p>, name: &'p Reference, remote: &RemoteModel) -> Result<Self, OpError> {
        let names = std::iter::once(name.clone()).chain(pull.params.source.name().ok());
        let Some(applied) = pull.policy.trust().rule_for(&names.collect::<Vec<_>>()) else {
            return Ok(Self { pull, name, demand: None });
        };
        let fetched = FetchedSignatures { bundles: stored(pull, name, remote)?, ..Default::default() };
        let mut demand =
            Demand { applied, fetched, files: listed(remote), flaw: None, has_compared_all: false };
        if demand.compare(pull, name, None)?.flaw.is_some() {
            pull.send(PullProgress::working("fetching the signatures", Phase::Resolving));
            match ask(pull, remote)? {
                Ok(fetched) => demand.fetched = fetched,
                Err(error) if applied.rule.mode == TrustMode::Enforce => return Err(error),
                Err(error) => demand.fetched.unusable = Some(error.to_string()),
            }
        }
        let mut signatures = Self { pull, name, demand: Some(demand) };
        signatures.check(None)?;
        Ok(signatures)
    }

    /// The numbers of the files in the order in which they are requested: those first that must be known before the others.
    pub(super) fn waves(&self, files: &[RemoteFile]) -> [BTreeSet<usize>; 2] {
        let is_first = |file: &RemoteFile| {
            self.demand.is_some() && file.digest().is_none() && file.unchanged().is_none()
        };
        let (first, rest) = (0..files.len()).partition(|number| files.get(*number).is_some_and(is_first));
        [first, rest]
    }

    /// Whether files are still to be compared: their digests are not known yet, or they are in an archive.
    pub(super) fn may_refuse_later(&self) -> bool {
        self.demand
            .as_ref()
            .is_some_and(|demand| demand.applied.rule.mode == TrustMode::Enforce && !demand.has_compared_all)
    }

    /// Notes the files that have arrived, by their numbers.
    ///
    /// # Errors
    /// [`OpError::DeniedByPolicy`] as [`Self::fetch`].
    pub(super) fn check_received(
        &mut self,
        ingest: &Ingest,
        received: &BTreeMap<usize, NewFile>,
    ) -> Result<(), OpError> {
        let Some(demand) = &mut self.demand else { return Ok(()) };
        for (number, file) in received {
            // Those of a manifest are known.
            if let Some(listed) = demand.files.get_mut(*number).filter(|listed| listed.digest.is_none()) {
                listed.digest = Some(file.descriptor.digest);
            }
        }
        self.check(Some((ingest, received)))
    }

    fn check(&mut self, arrived: Option<Arrived<'_>>) -> Result<(), OpError> {
        let Some(demand) = &mut self.demand else { return Ok(()) };
        let Compared { flaw, is_all } = demand.compare(self.pull, self.name, arrived)?;
        (demand.flaw, demand.has_compared_all) = (flaw, is_all);
        match &demand.flaw {
            Some(flaw) if demand.applied.rule.mode == TrustMode::Enforce => Err(OpError::DeniedByPolicy {
                message: format!("model {}: {flaw}", self.name.short()),
                hint: format!("{}; {}", demand.applied.description(), advice(&self.pull.params.source)),
            }),
            _ => Ok(()),
        }
    }

    /// Keeps the signatures with the model, before it gets its name.
    pub(super) fn keep(&self, ingest: &Ingest, manifest: &Manifest) -> Result<(), OpError> {
        let Some(demand) = &self.demand else { return Ok(()) };
        let bundles = &demand.fetched.bundles;
        signatures::add_arriving(ingest, self.pull.policy.trust(), (self.name, manifest), bundles)
    }

    /// What the user should know about them once the model has its name.
    pub(super) fn note(self, manifest: &Manifest) -> Result<Option<String>, OpError> {
        let Self { name, demand: Some(Demand { applied, flaw: Some(flaw), .. }), .. } = self else {
            return Ok(None);
        };
        trust::refuse_or_warn(applied, name, manifest.digest(), &flaw)?;
        Ok(Some(format!("{flaw}; {}", applied.description())))
    }
}

impl Demand<'_> {
    /// Compares the files with the signatures, as far as they are known.
    fn compare(
        &self,
        pull: Pull<'_>,
        name: &Reference,
        arrived: Option<Arrived<'_>>,
    ) -> Result<Compared, OpError> {
        let known = self.files.iter().filter_map(|file| {
            let media_type = file.media_type.clone();
            Some((Descriptor { media_type, digest: file.digest?, size: file.size }, file.name.clone()))
        });
        let is_all = self.files.iter().all(|file| file.digest.is_some());
        let known = KnownFiles { name, files: known.collect(), is_all };
        let archive = |file: &Descriptor| {
            let has_arrived = |files: &BTreeMap<usize, NewFile>| {
                files.values().any(|arrived| arrived.descriptor.digest == file.digest)
            };
            let ingest = arrived.filter(|(_, files)| has_arrived(files)).map(|(ingest, _)| ingest);
            known_archive(pull.store, file, ingest)
        };
        let compared = trust::compare_known(self.applied.rule, known, &self.fetched.bundles, archive)?;
        let flaw = match (compared.flaw, &self.fetched.unusable) {
            (Some(flaw), Some(reason)) => Some(format!("{flaw}; {reason}")),
            (flaw, _) => flaw,
        };
        Ok(Compared { flaw, ..compared })
    }
}

/// Asks the server of a model for its signatures, until the client goes.
fn ask(pull: Pull<'_>, remote: &RemoteModel) -> Result<Result<FetchedSignatures, OpError>, OpError> {
    let Pull { registry, params, events, handle, .. } = pull;
    let asked = async {
        tokio::select! {
            fetched = registry.signatures(&params.source, &params.components, remote) => Ok(fetched),
            () = events.closed() => Err(unwanted(params)),
        }
    };
    let answer = handle.block_on(reporting_silence(&pull, asked))?;
    Ok(answer.map_err(OpError::from))
}

/// The signatures that the store has of the model, or of the one that has its name now: the same files may be in both.
fn stored(pull: Pull<'_>, name: &Reference, remote: &RemoteModel) -> Result<Vec<Bundle>, OpError> {
    let names = pull.store.names();
    let manifest = match remote.manifest() {
        Some(manifest) => Some(manifest.digest()),
        None => match names.manifest(name) {
            Err(error) if error.is_no_such_model() => None,
            manifest => Some(manifest?.digest()),
        },
    };
    let bundles = manifest.map(|digest| names.signatures(digest)).transpose()?.unwrap_or_default();
    Ok(bundles.iter().filter_map(|text| Bundle::parse(text.as_bytes()).ok()).collect())
}

/// The files of a model that a signature may list, in the order of its server.
fn listed(remote: &RemoteModel) -> Vec<ListedFile> {
    match remote {
        RemoteModel::Published(published) => {
            let layers = published.manifest.layers().iter().zip(published.manifest.names().skip(1));
            let file = |(file, name): (&Descriptor, Option<&str>)| ListedFile {
                media_type: file.media_type.clone(),
                name: name.map(str::to_owned),
                size: file.size,
                digest: Some(file.digest),
            };
            layers.map(file).collect()
        }
        RemoteModel::Files { files, .. } => {
            let file = |file: &RemoteFile| ListedFile {
                media_type: file.media_type().clone(),
                name: file.name().map(str::to_owned),
                size: file.size(),
                digest: file.descriptor().or_else(|| file.unchanged()).map(|file| file.digest),
            };
            files.iter().map(file).collect()
        }
    }
}

/// Where a signature of the model would be.
fn advice(source: &PullSource) -> String {
    match source {
        PullSource::Url(_) => {
            "a file at a URL has no signature: download it, `blobd import` it, and `blobd sign` it \
             if you trust it"
                .to_owned()
        }
        PullSource::Hub(file) => at_hub(file.repository()),
        PullSource::Registry(reference) if trust::is_at_hub(reference) => at_hub(&reference.repository()),
        PullSource::Registry(_) => {
            "its publisher must sign it, and `blobd push` sends the signatures of a model with it".to_owned()
        }
    }
}

fn at_hub(repository: &str) -> String {
    format!(
        "its publisher must sign it: the signature is expected in the file {} of {repository}",
        Bundle::FILE_NAME
    )
}
