//! Repositories of Hugging Face that are passed through: their files are those that the hub lists, at its commit. A GGUF file is
//! pulled as the model that it is, and a repository of other weights as one model. What is in git is fetched when it is asked for,
//! and kept in memory for a while.
//!
//! If the hub does not answer, what is stored is shown.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_client::protocol::request::PullParams;
use blobd_registry::{FailureKind, HubListing, RegistryError, TreeFile};
use blobd_store_format::derived_name::name_at_revision;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, HubFile as HubSource, PullSource};
use bytes::Bytes;
use hyper::Method;
use hyper::header::RANGE;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing_mutex::stdsync::Mutex;

use super::model_pull::ModelPull;
use super::{Asked, FAILED, FRESH, MANIFEST_LIMIT, Outcome, PullThrough, SHORT_LIMIT, TOO_MANY};
use crate::locks::lock;
use crate::network::answer::Answered;
use crate::network::hub::{self, HubBody};
use crate::network::source::{ArrivingFile, Source};
use crate::ops::{Found, HubContent, HubFile, Snapshot};
use crate::state::Daemon;

/// Files that are not weights are sent from memory.
const MAX_RELAYED_BYTES: u64 = 32 << 20;
const NOT_YET: &str = "the hub has not answered, or not sent all small files yet";
/// How many lists of files are remembered.
const MAX_LISTINGS: usize = 24;

/// What the hub has answered lately, by repository and revision.
#[derive(Debug, Default)]
pub(super) struct HubListings(Mutex<BTreeMap<(String, String), Listed>>);

#[derive(Clone, Debug)]
struct Listed {
    at: Instant,
    listing: Result<Arc<HubListing>, Failure>,
}

#[derive(Clone, Debug)]
enum Failure {
    Missing,
    Other(String),
}

impl Failure {
    fn of(error: &RegistryError) -> Self {
        match error.kind() {
            // Whether it is there is not told to those who may not have it.
            FailureKind::NotFound | FailureKind::Denied => Self::Missing,
            FailureKind::Upstream | FailureKind::UnusableModel => Self::Other(error.to_string()),
            FailureKind::InvalidRequest => {
                // It may name files of this machine.
                tracing::warn!("serve: {error}");
                Self::Other("the hub cannot be asked; the log of the server says why".to_owned())
            }
        }
    }

    fn message(self) -> String {
        match self {
            Self::Missing => "the hub does not have this file".to_owned(),
            Self::Other(message) => message,
        }
    }
}

impl HubListings {
    fn known(&self, key: &(String, String)) -> Option<Result<Arc<HubListing>, Failure>> {
        let known = lock(&self.0);
        let Listed { at, listing } = known.get(key)?;
        let age = if listing.is_ok() { FRESH } else { FAILED };
        (at.elapsed() < age).then(|| listing.clone())
    }

    /// Whether a commit is that of the main branch, as far as the hub has said so lately.
    fn is_main(&self, repository: &str, commit: &str) -> bool {
        let key = (repository.to_ascii_lowercase(), HubSource::DEFAULT_REVISION.to_owned());
        matches!(self.known(&key), Some(Ok(main)) if main.commit == commit)
    }

    fn add(&self, key: (String, String), listing: Result<Arc<HubListing>, Failure>) {
        let mut known = lock(&self.0);
        if known.len() >= MAX_LISTINGS && !known.contains_key(&key) {
            let oldest = known.iter().min_by_key(|(_, listed)| listed.at).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| known.remove(&oldest));
        }
        if let Ok(listed) = &listing {
            let by_commit = (key.0.clone(), listed.commit.clone());
            known.insert(by_commit, Listed { at: Instant::now(), listing: listing.clone() });
        }
        known.insert(key, Listed { at: Instant::now(), listing });
    }

    async fn get(
        &self,
        asked: &Asked<'_>,
        (repository, revision): (&str, &str),
        limit: Duration,
    ) -> Result<Arc<HubListing>, Failure> {
        let key = (repository.to_ascii_lowercase(), revision.to_owned());
        if let Some(known) = self.known(&key) {
            return known;
        }
        let registry = asked.server.daemon.registry().relaying(&asked.via);
        let listed = tokio::time::timeout(limit, registry.list(repository, revision)).await;
        let listed = match listed {
            Ok(Ok(listing)) => Ok(Arc::new(listing)),
            Ok(Err(error)) => Err(Failure::of(&error)),
            Err(_late) => Err(Failure::Other(format!("{repository}: the hub has not answered"))),
        };
        self.add(key, listed.clone());
        listed
    }
}

/// The content of files that are not stored.
#[derive(Debug)]
pub(super) struct SmallFiles {
    /// The newest last.
    kept: Mutex<VecDeque<(HubContent, Bytes)>>,
    /// Units of what may be in memory, with what clients have not taken yet.
    memory: Arc<Semaphore>,
}

/// A file's content, and its units until the last client has taken it.
struct Held(Vec<u8>, #[expect(dead_code, reason = "returned when it is dropped")] OwnedSemaphorePermit);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Default for SmallFiles {
    fn default() -> Self {
        let units = usize::try_from(Self::MAX_BYTES / Self::UNIT_BYTES).unwrap_or(usize::MAX);
        Self { kept: Mutex::default(), memory: Arc::new(Semaphore::new(units)) }
    }
}

impl SmallFiles {
    const UNIT_BYTES: u64 = 64 << 10;
    const MAX_BYTES: u64 = 96 << 20;
    const MAX_KEPT_BYTES: u64 = 32 << 20;
    /// How long a client waits for others that take their files slowly.
    const LIMIT: Duration = Duration::from_secs(30);

    fn get(&self, file: HubContent) -> Option<Bytes> {
        lock(&self.kept).iter().find(|(known, _)| *known == file).map(|(_, content)| content.clone())
    }

    /// Reserves memory for a file; `None` if other files have all of it for too long.
    async fn reserve(&self, size: u64) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(size.div_ceil(Self::UNIT_BYTES)).ok()?;
        let reserved = Arc::clone(&self.memory).acquire_many_owned(units);
        tokio::time::timeout(Self::LIMIT, reserved).await.ok()?.ok()
    }

    /// Keeps a file, and drops the oldest ones beyond the limit.
    fn keep(&self, file: HubContent, content: Vec<u8>, reserved: OwnedSemaphorePermit) -> Bytes {
        let content = Bytes::from_owner(Held(content, reserved));
        let mut kept = lock(&self.kept);
        kept.push_back((file, content.clone()));
        while kept.iter().map(|(_, content)| content.len() as u64).sum::<u64>() > Self::MAX_KEPT_BYTES {
            kept.pop_front();
        }
        content
    }
}

/// A file that is asked for, of the repository as the hub has it.
struct AskedFile<'a> {
    asked: &'a Asked<'a>,
    repository: &'a str,
    /// `None` for what is on the main branch.
    revision: Option<&'a str>,
    listing: &'a HubListing,
    file: &'a TreeFile,
}

impl PullThrough {
    /// Answers about a repository. `answered` is what the store answers.
    pub(super) async fn hub(
        &self,
        asked: &Asked<'_>,
        (repository, revision, path): (&str, &str, Option<&str>),
        answered: Answered,
    ) -> Answered {
        let Ok(stored) = &answered else { return answered };
        let is_stored = !hub::is_unknown_repository(stored);
        let Some(model) = asked.candidates(Reference::DEFAULT_TAG).pop() else { return answered };
        if asked.view.policy.may_refuse(&model) {
            return if is_stored { answered } else { self.checked_model(asked, &model, answered).await };
        }
        let limit = if is_stored { SHORT_LIMIT } else { asked.limit(MANIFEST_LIMIT) };
        let listing = match self.listings.get(asked, (repository, revision), limit).await {
            // The list of the main branch has another commit, so the answer says that there is no such revision.
            Err(Failure::Missing) if !is_stored => {
                self.listings.get(asked, (repository, HubSource::DEFAULT_REVISION), limit).await
            }
            listing => listing,
        };
        let listing = match listing {
            Ok(listing) => listing,
            Err(Failure::Other(message)) if !is_stored => return Ok(hub::failure(&message)),
            Err(_) => return answered,
        };
        let snapshot = Snapshot::of_listing(&listing);
        let is_main =
            revision == HubSource::DEFAULT_REVISION || self.listings.is_main(repository, &listing.commit);
        let revision = (!is_main).then_some(revision);
        let listed = path.and_then(|path| listing.files.iter().find(|file| file.path == path));
        let body = match listed {
            Some(file) => {
                let file = AskedFile { asked, repository, revision, listing: &listing, file };
                match self.body(&file).await {
                    Ok(body) => Some(body),
                    Err(refusal) => return *refusal,
                }
            }
            None => None,
        };
        let mut request = asked.request.clone();
        if let Some(digest) = listed.and_then(|file| file.digest)
            && self.is_wrong_at_a_client(&asked.server.daemon, digest)
        {
            request.headers.remove(RANGE);
        }
        let Asked { server, view, path, .. } = asked;
        hub::answer_for((&server.daemon, view, &request, path), &snapshot, |_| body).map_or(answered, Ok)
    }

    /// Answers about a repository that a rule may refuse: it is not there before its model was pulled as far as that takes, and has
    /// no other files.
    async fn checked_model(&self, asked: &Asked<'_>, model: &Reference, answered: Answered) -> Answered {
        let Some(pull) = self.pull_of(asked, model, || PullParams::of(model.clone())) else {
            return Ok(hub::failure(TOO_MANY));
        };
        let (began, limit) = (Instant::now(), asked.limit(MANIFEST_LIMIT));
        let files = loop {
            match (pull.arriving.end(), pull.arriving.listing()) {
                (Some(end), _) => match Outcome::from_failure(&end) {
                    Outcome::Failed(message) => return Ok(hub::failure(&message)),
                    Outcome::Stored => return asked.stored_now().await,
                    Outcome::Missing | Outcome::Manifest(_) => return answered,
                },
                (None, Some(files)) => break files,
                (None, None) if began.elapsed() > limit => return Ok(hub::failure(NOT_YET)),
                (None, None) => pull.wait().await,
            }
        };
        let snapshot = Snapshot::of_files(&pull.model, &files);
        let (daemon, mut request) = (&asked.server.daemon, asked.request.clone());
        if files.iter().any(|(file, _)| self.may_be_wrong(daemon, &pull, file.digest)) {
            request.headers.remove(RANGE);
        }
        let body = |known: HubFile| Some(HubBody::File(self.arriving(&pull, known.digest()?)?));
        hub::answer_for((daemon, asked.view, &request, asked.path), &snapshot, body).map_or(answered, Ok)
    }

    async fn body(&self, file: &AskedFile<'_>) -> Result<HubBody, Box<Answered>> {
        if file.asked.request.method == Method::HEAD {
            return Ok(HubBody::File(Source::Announced(file.file.size)));
        }
        if let Some(digest) = file.file.digest
            && let Some(stored) = file.stored(digest).await?
        {
            return Ok(stored);
        }
        match file.file.digest {
            Some(digest) if FileFormat::split_name(&file.file.path).is_some() => {
                self.pulled(file, digest).await
            }
            _ => self.relayed(file).await,
        }
    }

    /// A file that is in git, or no part of a model.
    async fn relayed(&self, file: &AskedFile<'_>) -> Result<HubBody, Box<Answered>> {
        let Some(known) = HubContent::of_listed(file.file) else { return Err(refusal("has no digest")) };
        if let Some(content) = self.small_files.get(known) {
            return Ok(HubBody::Document(content));
        }
        let Some(reserved) = self.small_files.reserve(file.file.size.min(MAX_RELAYED_BYTES)).await else {
            return Err(refusal("too many files are being sent"));
        };
        // Another client may have waited for the same one.
        let content = match self.small_files.get(known) {
            Some(content) => content,
            None => self.small_files.keep(known, file.relayed().await?, reserved),
        };
        Ok(HubBody::Document(content))
    }

    /// A file of weights, while its model arrives.
    async fn pulled(&self, file: &AskedFile<'_>, digest: Digest) -> Result<HubBody, Box<Answered>> {
        let failed = |message: &str| Err(refusal(message));
        let Some((model, params)) = file.model() else {
            return failed("this file belongs to no model that is shown here");
        };
        let Some(pull) = self.pull_of(file.asked, &model, || params) else { return failed(TOO_MANY) };
        let (began, limit) = (Instant::now(), file.asked.limit(MANIFEST_LIMIT));
        loop {
            if let Some(end) = pull.arriving.end() {
                return match Outcome::from_failure(&end) {
                    Outcome::Failed(message) => failed(&message),
                    Outcome::Missing | Outcome::Manifest(_) => failed("the model cannot be pulled"),
                    Outcome::Stored => match file.stored(digest).await? {
                        Some(stored) => Ok(stored),
                        None => failed("the model that was pulled has another file"),
                    },
                };
            }
            if let Some(arriving) = self.arriving(&pull, digest) {
                return Ok(HubBody::File(arriving));
            }
            if began.elapsed() > limit {
                return failed(NOT_YET);
            }
            pull.wait().await;
        }
    }

    fn arriving(&self, pull: &ModelPull, digest: Digest) -> Option<Source> {
        let files = pull.arriving.listing()?;
        let (file, _) = files.into_iter().find(|(file, _)| file.digest == digest)?;
        Some(ArrivingFile::new(Arc::clone(&pull.arriving), file, Arc::clone(&self.doubted)).into())
    }

    /// Whether a client may have wrong bytes of a file: of one that arrives, or that is stored now.
    fn is_wrong_at_a_client(&self, daemon: &Daemon, file: Digest) -> bool {
        let pulls: Vec<Arc<ModelPull>> = lock(&self.pulls).values().map(Arc::clone).collect();
        let arriving = pulls.iter().find(|pull| pull.arriving.transfer(file).is_some());
        match arriving {
            Some(pull) => self.may_be_wrong(daemon, pull, file),
            None => self.doubted.includes(file, None),
        }
    }
}

impl AskedFile<'_> {
    /// The model whose pull brings the file, and how it is pulled.
    fn model(&self) -> Option<(Reference, PullParams)> {
        let asked = self.asked;
        if FileFormat::GGUF.stem_of(&self.file.path).is_none() {
            let model = asked.candidates(Reference::DEFAULT_TAG).pop()?;
            let revision = self.revision.map(str::to_owned);
            let components = Components { revision, ..Components::DEFAULT };
            let at_revision = self.revision.map(|revision| name_at_revision(&model, revision));
            let name = at_revision.unwrap_or_else(|| Ok(model.clone()));
            return Some((name.ok()?, PullParams { components, ..PullParams::of(model) }));
        }
        let source = PullSource::Hub(HubSource::new(self.repository, self.revision, &self.file.path).ok()?);
        let model = source.derived_name().ok()??.first().clone();
        asked.view.offer.includes(&model).then(|| (model, PullParams::of_source(source)))
    }

    async fn stored(&self, digest: Digest) -> Result<Option<HubBody>, Box<Answered>> {
        let Asked { server, client, .. } = self.asked;
        let (view, repository) = (self.asked.view.clone(), self.repository.to_owned());
        let turn = server.daemon.work.served_reads.acquire(*client).await.into();
        let read = move |daemon: &Daemon| {
            let tags = view.hub_tags(&daemon.store, &repository)?;
            view.file(&daemon.store, &tags, digest)
        };
        match server.daemon.blocking(turn, read).await {
            Ok(Found::There(file)) => Ok(Some(HubBody::File(file.into()))),
            Ok(Found::Missing) => Ok(None),
            Ok(Found::Withheld(reason)) => Err(refusal(&reason)),
            Err(error) => Err(Box::new(Err(error))),
        }
    }

    async fn relayed(&self) -> Result<Vec<u8>, Box<Answered>> {
        let registry = self.asked.server.daemon.registry().relaying(&self.asked.via);
        let place = (self.repository, &*self.listing.commit);
        let content = registry.small_hub_file(place, self.file, MAX_RELAYED_BYTES).await;
        content.map_err(|error| refusal(&Failure::of(&error).message()))
    }
}

fn refusal(message: &str) -> Box<Answered> {
    Box::new(Ok(hub::failure(message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(commit: &str) -> Arc<HubListing> {
        Arc::new(HubListing { commit: commit.to_owned(), files: Vec::new() })
    }

    #[test]
    fn listing_is_known_by_its_revision_and_its_commit_and_the_oldest_is_forgotten() {
        let listings = HubListings::default();
        let key = |number: usize, revision: &str| (format!("me/{number}"), revision.to_owned());
        listings.add(key(0, "main"), Ok(listing("abc")));
        for revision in ["main", "abc"] {
            assert_eq!(listings.known(&key(0, revision)).unwrap().unwrap().commit, "abc");
        }
        assert!(listings.known(&key(0, "v2")).is_none());
        listings.add(key(1, "main"), Err(Failure::Missing));
        assert!(matches!(listings.known(&key(1, "main")), Some(Err(Failure::Missing))));
        for number in 2..MAX_LISTINGS + 2 {
            listings.add(key(number, "main"), Err(Failure::Missing));
        }
        assert!(listings.known(&key(0, "main")).is_none());
        assert!(lock(&listings.0).len() <= MAX_LISTINGS + 1);
    }

    #[tokio::test]
    async fn small_files_are_kept_up_to_a_limit_and_those_being_sent_count() {
        let small = SmallFiles::default();
        let file = |number: u8| HubContent::Digest(Digest::of(&[number]));
        let size = SmallFiles::MAX_KEPT_BYTES / 2;
        let content = vec![0; usize::try_from(size).unwrap()];
        let mut sent = Vec::new();
        for number in 0..6 {
            let reserved = small.reserve(size).await.unwrap();
            sent.push(small.keep(file(number), content.clone(), reserved));
        }
        assert!(small.get(file(3)).is_none());
        assert!(small.get(file(4)).is_some() && small.get(file(5)).is_some());
        assert_eq!(small.memory.available_permits(), 0, "clients have all memory");
        sent.clear();
        assert!(small.reserve(size).await.is_some());
    }
}
