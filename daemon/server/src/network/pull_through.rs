//! Models that are requested and not stored are pulled from the registries that `serve.upstream` lists. The manifest is sent
//! as soon as the registry has answered, and the files while they arrive.
//!
//! A pull belongs to nobody's connection: it goes on when the client that has caused it has gone, and everybody who asks for the
//! same model reads from the same pull. A name that is stored is compared with its registry now and then.
//!
//! Requests that are sent for such a pull name this daemon in `Via`. One that names it already has gone in a circle, and is
//! answered from the store.

mod candidates;
mod hub_repository;
mod model_pull;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::PullParams;
use blobd_store_format::digest::Digest;
use blobd_store_format::host::HUGGING_FACE;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use hyper::StatusCode;
use hyper::header::{RANGE, VIA};
use hyper::http::request::Parts;
use tracing_mutex::stdsync::Mutex;

use self::candidates::candidates;
use self::hub_repository::{HubListings, SmallFiles};
use self::model_pull::ModelPull;
use super::Server;
use super::answer::{Answer, Answered, parameter};
use super::hub;
use super::oci::{self, Part};
use super::source::{ArrivingFile, Doubted};
use crate::arriving::Known;
use crate::locks::lock;
use crate::ops::View;
use crate::state::Daemon;

/// The pulls for other machines.
#[derive(Debug, Default)]
pub(super) struct PullThrough {
    /// The name of this daemon in the header `Via`.
    own_name: String,
    /// The pulls by the canonical names of their models. A pull that has ended is kept for a while.
    pulls: Mutex<BTreeMap<String, Arc<ModelPull>>>,
    listings: HubListings,
    small_files: SmallFiles,
    doubted: Arc<Doubted>,
}

/// A request that may need a pull.
struct Asked<'a> {
    server: &'a Server,
    view: &'a View,
    request: &'a Parts,
    path: &'a str,
    client: u32,
    name: &'a str,
    /// The servers that have passed the request on.
    via: String,
}

/// A registry's present state of a stored name is asked for once in this time.
const FRESH: Duration = Duration::from_secs(60);
/// After a failure, the registry is not asked for the model again for so long.
const FAILED: Duration = Duration::from_secs(5);
/// How many pulls are remembered.
const MAX_PULLS: usize = 64;
/// How long a client waits for the manifest of a model.
const MANIFEST_LIMIT: Duration = Duration::from_secs(60);
/// As [`MANIFEST_LIMIT`], if another server waits for the answer, or if there is one in the store: two servers that wait for
/// each other do not block each other for longer.
const SHORT_LIMIT: Duration = Duration::from_secs(5);
/// A model without a manifest at its registry has one when all its files have arrived.
const WHOLE_LIMIT: Duration = Duration::from_secs(3600);
/// More servers in a row are a circle.
const MAX_HOPS: usize = 8;
const TOO_MANY: &str = "too many models are being pulled";

/// What came of asking a registry.
enum Outcome {
    Manifest(Arc<Manifest>),
    /// It is stored now.
    Stored,
    Missing,
    Failed(String),
}

impl PullThrough {
    pub(super) fn new(daemon: &Daemon) -> Self {
        // Its first part is random.
        let id = daemon.request_ids.next_id().to_string();
        let own_name = format!("blobd-{}", id.split('.').next().unwrap_or_default());
        Self { own_name, ..Self::default() }
    }

    /// Completes the answer that the store gives. `path` is decoded.
    pub(super) async fn complete(
        &self,
        server: &Server,
        view: &View,
        (request, path, client): (&Parts, &str, u32),
        answered: Answered,
    ) -> Answered {
        let Ok(answer) = &answered else { return answered };
        let status = answer.status;
        if let Some((repository, revision, file)) = hub::asked_file(path).filter(|_| view.offer.hub) {
            let Some(via) = self.via(request) else { return answered };
            let name = format!("{HUGGING_FACE}/{repository}");
            let asked = Asked { server, view, request, path, client, name: &name, via };
            return self.hub(&asked, (repository, revision, file), answered).await;
        }
        let Some((name, part)) = oci::part(path) else { return answered };
        let Some(via) = self.via(request).filter(|_| !view.offer.upstream.is_empty()) else {
            return answered;
        };
        let asked = Asked { server, view, request, path, client, name, via };
        match (part, status) {
            (Part::Manifest(tag), StatusCode::NOT_FOUND) if !tag.contains(':') => {
                self.missing_tag(&asked, tag, answered).await
            }
            (Part::Manifest(tag), StatusCode::OK | StatusCode::NOT_MODIFIED) if !tag.contains(':') => {
                self.stored_tag(&asked, tag, answered).await
            }
            (Part::Manifest(digest), StatusCode::NOT_FOUND) => Ok(match digest.parse() {
                Ok(digest) => self.manifest(&asked, digest).map_or(answered, Ok)?,
                Err(_malformed) => answered?,
            }),
            (Part::Blob(digest), StatusCode::NOT_FOUND) => self.blob(&asked, digest, answered).await,
            _ => answered,
        }
    }

    /// Whether a client may have wrong bytes of a file that arrives.
    fn may_be_wrong(&self, daemon: &Daemon, pull: &ModelPull, file: Digest) -> bool {
        let transfer = pull.arriving.transfer(file);
        self.doubted.includes(file, transfer.and_then(|transfer| daemon.transfers.attempt(transfer)).as_ref())
    }

    /// The servers that a request to a registry has come from; `None` if it would go in a circle.
    fn via(&self, request: &Parts) -> Option<String> {
        let values = request.headers.get_all(VIA).iter().map(|value| value.to_str().unwrap_or_default());
        let earlier = values.filter(|value| !value.is_empty()).collect::<Vec<_>>().join(", ");
        let hops: Vec<_> = earlier.split(',').filter(|hop| !hop.trim().is_empty()).collect();
        let is_own = |hop: &&str| hop.split_ascii_whitespace().any(|word| word == self.own_name);
        if hops.iter().any(is_own) || hops.len() >= MAX_HOPS {
            return None;
        }
        let own = format!("1.1 {}", self.own_name);
        Some(if hops.is_empty() { own } else { format!("{earlier}, {own}") })
    }

    async fn missing_tag(&self, asked: &Asked<'_>, tag: &str, answered: Answered) -> Answered {
        let mut failure = None;
        for model in asked.candidates(tag) {
            match self.ask(asked, &model, asked.limit(MANIFEST_LIMIT)).await {
                Outcome::Manifest(manifest) => return Ok(oci::manifest(asked.request, &manifest, false)),
                Outcome::Stored => return asked.stored_now().await,
                Outcome::Missing => {}
                Outcome::Failed(message) => failure = failure.or(Some(message)),
            }
        }
        match failure {
            Some(message) => Ok(oci::refusal(StatusCode::BAD_GATEWAY, "UNKNOWN", &message)),
            None => answered,
        }
    }

    /// Sends the registry's present manifest, or the stored one if that is the same or the registry does not answer.
    async fn stored_tag(&self, asked: &Asked<'_>, tag: &str, answered: Answered) -> Answered {
        let Some((model, stored)) = asked.followed(tag).await? else { return answered };
        match self.ask(asked, &model, SHORT_LIMIT).await {
            Outcome::Manifest(manifest) if manifest.digest() != stored => {
                Ok(oci::manifest(asked.request, &manifest, false))
            }
            _ => answered,
        }
    }

    /// Pulls a model, unless it is being pulled or was pulled just now, and waits for its manifest.
    async fn ask(&self, asked: &Asked<'_>, model: &Reference, limit: Duration) -> Outcome {
        let Some(pull) = self.pull_of(asked, model, || PullParams::of(model.clone())) else {
            return Outcome::Failed(TOO_MANY.to_owned());
        };
        let began = Instant::now();
        loop {
            let (known, end) = (pull.arriving.known(), pull.arriving.end());
            let limit = if matches!(known, Known::Composed) { WHOLE_LIMIT } else { limit };
            match (known, end) {
                (_, Some(end)) if end.failure.is_some() => return Outcome::from_failure(&end),
                (Known::Manifest(manifest), _) => return Outcome::Manifest(manifest),
                (_, Some(_)) => return Outcome::Stored,
                _ if began.elapsed() > limit => {
                    return Outcome::Failed(format!("{}: its registry has not answered", model.short()));
                }
                _ => pull.wait().await,
            }
        }
    }

    /// The pull of a model, which begins unless it is running or was just done; `None` if there are too many.
    fn pull_of(
        &self,
        asked: &Asked<'_>,
        model: &Reference,
        params: impl FnOnce() -> PullParams,
    ) -> Option<Arc<ModelPull>> {
        let mut pulls = lock(&self.pulls);
        let key = model.canonical();
        if let Some(known) = pulls.get(&key).filter(|pull| pull.is_fresh()) {
            return Some(Arc::clone(known));
        }
        pulls.remove(&key);
        if pulls.len() >= MAX_PULLS {
            let ended = |pull: &ModelPull| Some(pull.arriving.end()?.at);
            let ended = pulls.iter().filter_map(|(key, pull)| Some((ended(pull)?, key.clone())));
            let (_, oldest) = ended.min()?;
            pulls.remove(&oldest);
        }
        let pull = ModelPull::start(&asked.server.daemon, asked.view, (model, params()), &asked.via);
        pulls.insert(key, Arc::clone(&pull));
        Some(pull)
    }

    /// The pull of one of these models, running or not, whose manifest is one that is looked for.
    fn pull_with(
        &self,
        asked: &Asked<'_>,
        is_meant: impl Fn(&Manifest) -> bool,
    ) -> Option<(Arc<ModelPull>, Arc<Manifest>)> {
        let models = asked.candidates(Reference::DEFAULT_TAG);
        let pulls = lock(&self.pulls);
        pulls.values().find_map(|pull| {
            let Known::Manifest(manifest) = pull.arriving.known() else { return None };
            let is_of_model = models.iter().any(|model| model.is_sibling_of(&pull.model));
            let is_shown = is_of_model && asked.view.offer.includes(&pull.model) && is_meant(&manifest);
            is_shown.then(|| (Arc::clone(pull), manifest))
        })
    }

    fn manifest(&self, asked: &Asked<'_>, digest: Digest) -> Option<Answer> {
        let (_, manifest) = self.pull_with(asked, |manifest| manifest.digest() == digest)?;
        Some(oci::manifest(asked.request, &manifest, true))
    }

    /// A file of a model that is being pulled. One whose pull has failed is pulled again.
    async fn blob(&self, asked: &Asked<'_>, digest: Digest, answered: Answered) -> Answered {
        let has_file = |manifest: &Manifest| manifest.files().any(|file| file.digest == digest);
        let Some((mut pull, manifest)) = self.pull_with(asked, has_file) else { return answered };
        let Some(file) = manifest.files().find(|file| file.digest == digest).cloned() else {
            return answered;
        };
        if let Some(end) = pull.arriving.end() {
            if end.failure.is_none() {
                return asked.stored_now().await;
            }
            // Peers ask every machine for files, and begin no pulls.
            if parameter(asked.request, "ns").is_some() {
                return answered;
            }
            let model = pull.model.clone();
            let again = self.pull_of(asked, &model, || pull.params.clone());
            let Some(again) = again.filter(|again| again.arriving.end().is_none()) else {
                let message =
                    format!("{}: its pull has failed; it is tried again in some seconds", model.short());
                return Ok(oci::refusal(StatusCode::BAD_GATEWAY, "UNKNOWN", &message));
            };
            pull = again;
        }
        let mut request = asked.request.clone();
        if self.may_be_wrong(&asked.server.daemon, &pull, digest) {
            request.headers.remove(RANGE);
        }
        let file = ArrivingFile::new(Arc::clone(&pull.arriving), file, Arc::clone(&self.doubted));
        Ok(oci::blob(&request, digest, file))
    }

    /// Whether a client may have wrong bytes of a file that is stored now.
    pub(super) fn is_doubted(&self, path: &str) -> bool {
        matches!(oci::part(path), Some((_, Part::Blob(digest))) if self.doubted.includes(digest, None))
    }
}

impl Asked<'_> {
    fn candidates(&self, tag: &str) -> Vec<Reference> {
        let host = parameter(self.request, "ns");
        let mut models = candidates(&self.view.offer.upstream, self.name, tag, host.as_deref());
        models.retain(|model| self.view.offer.includes(model));
        models
    }

    /// Another server that waits for the answer may be one that this one waits for.
    fn limit(&self, limit: Duration) -> Duration {
        if self.via.contains(',') { SHORT_LIMIT } else { limit }
    }

    async fn followed(&self, tag: &str) -> Result<Option<(Reference, Digest)>, crate::ops::OpError> {
        let (view, name, tag) = (self.view.clone(), self.name.to_owned(), tag.to_owned());
        let host = parameter(self.request, "ns");
        let turn = self.server.daemon.work.served_reads.acquire(self.client).await.into();
        let read = move |daemon: &Daemon| {
            let tags = view.tags(&daemon.store, &name, host.as_deref())?;
            view.followed(&daemon.store, &tags, &tag)
        };
        let followed = self.server.daemon.blocking(turn, read).await?;
        let is_upstream =
            |model: &Reference| candidates::is_upstream(&self.view.offer.upstream, model.host());
        Ok(followed.filter(|(model, _)| is_upstream(model)))
    }

    /// What the store answers after a pull.
    async fn stored_now(&self) -> Answered {
        self.server.stored(self.view.clone(), self.request, self.path, self.client).await
    }
}

impl Outcome {
    fn from_failure(end: &crate::arriving::PullEnd) -> Self {
        let Some(failure) = &end.failure else { return Self::Stored };
        match failure.code {
            // Whether it is there is not told to those who may not have it.
            ErrorCode::NotFound | ErrorCode::Denied | ErrorCode::DeniedByPolicy => Self::Missing,
            // Others may name files of this machine, and are in its log.
            ErrorCode::Upstream => Self::Failed(failure.message.clone()),
            _ => Self::Failed("the model cannot be pulled; the log of the server says why".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn through() -> PullThrough {
        PullThrough { own_name: "blobd-1".to_owned(), ..PullThrough::default() }
    }

    fn via(values: &[&str]) -> Option<String> {
        let mut request = Request::builder();
        for value in values {
            request = request.header(VIA, *value);
        }
        through().via(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn requests_that_have_passed_here_or_through_many_servers_are_not_passed_on() {
        assert_eq!(via(&[]).as_deref(), Some("1.1 blobd-1"));
        assert_eq!(via(&["1.1 a", "2 b"]).as_deref(), Some("1.1 a, 2 b, 1.1 blobd-1"));
        assert_eq!(via(&["1.1 a, 1.1 blobd-1", "1.1 c"]), None);
        assert!(via(&["1.1 blobd-12"]).is_some());
        assert_eq!(via(&["a,b,c,d", "e,f,g,h"]), None);
    }
}
