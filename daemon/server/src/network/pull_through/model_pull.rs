//! One pull for other machines: an ordinary one, in the name of the user that `serve.upstream_user` names and within its quota.
//! What the pull may have and reuse is what those who read may have.

use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::access::Right;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::params::Params as _;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::route::Route;
use blobd_store_format::reference::Reference;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tracing::Instrument as _;

use super::{FAILED, FRESH};
use crate::arriving::Arriving;
use crate::memory_gauge::MemoryGauge;
use crate::ops::{self, CallerPolicy, View};
use crate::principal::Principal;
use crate::request_record::RequestRecord;
use crate::requester::Requester;
use crate::state::Daemon;

#[derive(Debug)]
pub(super) struct ModelPull {
    pub(super) model: Reference,
    pub(super) params: PullParams,
    pub(super) arriving: Arc<Arriving>,
}

impl ModelPull {
    /// Begins a pull. It goes on whether anybody waits for it or not.
    pub(super) fn start(
        daemon: &Arc<Daemon>,
        view: &View,
        (model, params): (&Reference, PullParams),
        via: &str,
    ) -> Arc<Self> {
        let pull = Arc::new(Self { model: model.clone(), params, arriving: Arc::default() });
        let puller = view.offer.puller.clone();
        let is_own = puller.is_none();
        let principal = puller.unwrap_or_else(Principal::of_daemon);
        let started = Started {
            daemon: Arc::clone(daemon),
            arriving: Arc::clone(&pull.arriving),
            principal,
            is_own,
            policy: view.policy.clone(),
            params: pull.params.clone(),
            via: via.to_owned(),
        };
        tokio::spawn(started.run());
        pull
    }

    /// Whether its registry need not be asked again.
    pub(super) fn is_fresh(&self) -> bool {
        let Some(end) = self.arriving.end() else { return true };
        end.at.elapsed() < if end.failure.is_some() { FAILED } else { FRESH }
    }

    /// Waits a moment for something to arrive.
    pub(super) async fn wait(&self) {
        const INTERVAL: Duration = Duration::from_millis(10);
        tokio::time::sleep(INTERVAL).await;
    }
}

struct Started {
    daemon: Arc<Daemon>,
    arriving: Arc<Arriving>,
    principal: Principal,
    is_own: bool,
    policy: CallerPolicy,
    params: PullParams,
    via: String,
}

impl Started {
    async fn run(self) {
        let Self { daemon, principal, .. } = &self;
        let record = RequestRecord::start(daemon, principal, Some(Route::Pull), daemon.request_ids.next_id());
        record.note_subject(self.params.subject());
        let arriving = Arc::clone(&self.arriving);
        let span = record.span().clone();
        let failure = self.pulled(&record).instrument(span).await.err();
        match &failure {
            Some(error) => {
                record.failed(error.clone());
            }
            None => record.succeeded(),
        }
        arriving.set_end(failure);
    }

    /// Whose pull it is, if that user may pull.
    fn requester(&self) -> Result<Requester, ErrorBody> {
        if self.is_own {
            return Ok(Requester::own());
        }
        let rights = self.daemon.access.get().rights_of(&self.principal);
        if rights.include(Right::Pull) {
            return Ok(self.daemon.requester_with(&self.principal, rights));
        }
        let message = "serve.upstream_user: this user may not pull models".to_owned();
        Err(ErrorBody::new(ErrorCode::Denied, message).with_hint("`access.pull` lists the users who may"))
    }

    async fn pulled(self, record: &Arc<RequestRecord>) -> Result<(), ErrorBody> {
        let requester = self.requester()?;
        let Self { daemon, arriving, policy, params, via, .. } = self;
        daemon.metrics.events.pulls_started.inc();
        let (model, source) = (ops::pulled_name(&params), params.source.to_string());
        let watch = daemon.running_pulls.begin(requester, model, source.clone());
        let turn = daemon.work.pulls.acquire(requester.uid()).await.into();
        let (handle, record) = (Handle::current(), Arc::clone(record));
        let (events, mut progress) = mpsc::channel(1);
        let work = move |daemon: &Daemon| {
            let registry = daemon.registry().relaying(&via);
            let gauge = MemoryGauge::for_pull(&daemon.limits.memory, requester.uid());
            let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
            let (watch, arriving) = (Some(&watch), Some(&*arriving));
            ops::pull(ops::Pull { watch, arriving, gauge: Some(&gauge), ..pull })
                .inspect(|done| record.finished(done))
        };
        let work = daemon.blocking(turn, work);
        // The pull stops if nobody takes its progress.
        let drained = async { while progress.recv().await.is_some() {} };
        let (done, ()) = tokio::join!(work, drained);
        done.map(drop).map_err(|error| {
            tracing::warn!("serve: pull of {source}: {error}");
            error.body()
        })
    }
}
