//! A model that is pulled because another machine has requested it: what is known of it and what has arrived, for those
//! who read it before its pull has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use blobd_client::protocol::error::ErrorBody;
use blobd_registry::{RemoteFile, RemoteModel};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// Files up to this size are received first: clients begin with them.
const SMALL_BYTES: u64 = 1 << 20;

/// Shared by the pull, which fills it, and its readers.
#[derive(Debug, Default)]
pub struct Arriving(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Whether the model has no manifest before all its files have arrived.
    is_composed: bool,
    /// Whether readers are told nothing of the model yet: a rule may still refuse it.
    is_hidden: bool,
    manifest: Option<Arc<Manifest>>,
    /// The files of a model without a manifest, by their numbers, with their digests as far as they are known.
    files: BTreeMap<usize, (Option<Descriptor>, Option<String>)>,
    /// What a transfer of a file is known by.
    transfers: BTreeMap<Digest, Digest>,
    /// Files that are stored.
    complete: BTreeSet<Digest>,
    /// Files that somebody waits for.
    wanted: BTreeSet<Digest>,
    end: Option<PullEnd>,
}

/// How and when a pull has ended.
#[derive(Clone, Debug)]
pub(crate) struct PullEnd {
    pub(crate) at: Instant,
    pub(crate) failure: Option<Arc<ErrorBody>>,
}

/// A file and the name that it has in its model.
pub(crate) type ListedFile = (Descriptor, Option<String>);

/// What is known of a model's manifest.
#[derive(Clone, Debug)]
pub(crate) enum Known {
    /// Its registry has not answered yet.
    Nothing,
    /// It has none until all its files have arrived.
    Composed,
    Manifest(Arc<Manifest>),
}

impl Arriving {
    /// The model is known now; with `is_hidden`, to its readers when [`Self::show`] is called.
    pub(crate) fn set_remote(&self, remote: &RemoteModel, is_hidden: bool) {
        let mut state = lock(&self.0);
        state.is_hidden = is_hidden;
        match remote {
            RemoteModel::Published(published) => state.manifest = Some(Arc::new(published.manifest.clone())),
            RemoteModel::Files { files, .. } => {
                let known = |file: &RemoteFile| file.descriptor().or_else(|| file.unchanged());
                let listed = files.iter().map(|file| (known(file), file.name().map(str::to_owned)));
                state.files = listed.enumerate().collect();
                state.is_composed = true;
            }
        }
    }

    /// What has arrived of the model is given to its readers from now on.
    pub(crate) fn show(&self) {
        lock(&self.0).is_hidden = false;
    }

    /// The files of the model and their names, without its configuration; `None` before all their digests are known. Those of
    /// files in git are known when they have arrived, and such files are small.
    pub(crate) fn listing(&self) -> Option<Vec<ListedFile>> {
        let state = lock(&self.0);
        if state.is_hidden {
            return None;
        }
        if let Some(manifest) = &state.manifest {
            let files = manifest.files().zip(manifest.names()).skip(1);
            return Some(files.map(|(file, name)| (file.clone(), name.map(str::to_owned))).collect());
        }
        let file = |(file, name): &(Option<Descriptor>, Option<String>)| Some((file.clone()?, name.clone()));
        if state.is_composed { state.files.values().map(file).collect() } else { None }
    }

    pub(crate) fn known(&self) -> Known {
        let state = lock(&self.0);
        match &state.manifest {
            // As one that is complete only when all its files are there.
            _ if state.is_hidden => Known::Composed,
            Some(manifest) => Known::Manifest(Arc::clone(manifest)),
            None if state.is_composed => Known::Composed,
            None => Known::Nothing,
        }
    }

    /// Which of the files that are left is received next, by their numbers: small ones, and then those that somebody waits for.
    pub(crate) fn next(&self, left: &BTreeSet<usize>, files: &[RemoteFile]) -> Option<usize> {
        let state = lock(&self.0);
        let rank = |number: &&usize| {
            let Some(file) = files.get(**number) else { return (true, true) };
            let is_wanted = file.digest().is_some_and(|digest| state.wanted.contains(&digest));
            (file.size() > SMALL_BYTES, !is_wanted)
        };
        left.iter().min_by_key(rank).copied()
    }

    /// A file is being transferred from now on.
    pub(crate) fn set_transfer(&self, file: &RemoteFile) {
        if let Some(digest) = file.digest() {
            lock(&self.0).transfers.insert(digest, file.identity());
        }
    }

    /// The file with this number is stored.
    pub(crate) fn set_complete(&self, number: usize, file: &Descriptor) {
        let mut state = lock(&self.0);
        state.complete.insert(file.digest);
        state.files.entry(number).and_modify(|(known, _)| *known = Some(file.clone()));
    }

    pub(crate) fn is_complete(&self, file: Digest) -> bool {
        lock(&self.0).complete.contains(&file)
    }

    /// Somebody waits for this file. Returns what its transfer is known by, if it has begun.
    pub(crate) fn want(&self, file: Digest) -> Option<Digest> {
        let mut state = lock(&self.0);
        state.wanted.insert(file);
        state.transfers.get(&file).copied()
    }

    /// What the transfer of a file is known by, if it has begun.
    pub(crate) fn transfer(&self, file: Digest) -> Option<Digest> {
        lock(&self.0).transfers.get(&file).copied()
    }

    pub(crate) fn set_end(&self, failure: Option<ErrorBody>) {
        lock(&self.0).end = Some(PullEnd { at: Instant::now(), failure: failure.map(Arc::new) });
    }

    pub(crate) fn end(&self) -> Option<PullEnd> {
        lock(&self.0).end.clone()
    }
}
