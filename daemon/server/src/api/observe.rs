//! Requests that show the state of the daemon, the store and its clients, and what a registry has. A request to a
//! registry ends soon after its client has disconnected.

use std::collections::BTreeMap;

use blobd_client::protocol::access::{OwnAccess, Right};
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::params::{EvictionParams, NoParams, SessionParams, UsageParams};
use blobd_client::protocol::pull::{PullPlan, Resolved};
use blobd_client::protocol::request::{GcParams, PullParams};
use blobd_client::protocol::response::{ModelHeads, SessionList, Version};
use blobd_client::protocol::route::Bytes;
use blobd_client::protocol::space::{DiskUsage, UserUsage};
use blobd_client::protocol::upkeep::{Configuration, EvictionPlan, GcReport, Health};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::Caller;
use super::answer::{json_length, json_of, reduced};
use super::body::{Answer, Params, Reply, raw_response, text_response};
use crate::access::Access;
use crate::memory_gauge::MemoryGauge;
use crate::monitoring;
use crate::ops::{self, OpError};
use crate::principal::Principal;
use crate::quotas::{Quotas, UserQuota};
use crate::state::Daemon;

pub(super) async fn version(caller: &Caller, _: Params<NoParams>) -> Answer<Version> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: blobd_client::protocol::VERSION,
        root: caller.daemon.store.content().place().display().to_string(),
        pid: std::process::id(),
    };
    caller.answer(&version).await
}

pub(super) async fn access(caller: &Caller, _: Params<NoParams>) -> Answer<OwnAccess> {
    caller.answer(&caller.daemon.access.get().own_access(&caller.peer)).await
}

pub(super) async fn health(caller: &Caller, _: Params<NoParams>) -> Answer<Health> {
    caller.answer(&monitoring::health(&caller.daemon, caller.peer.uid).await).await
}

pub(super) async fn configuration(caller: &Caller, _: Params<NoParams>) -> Answer<Configuration> {
    caller.answer(&*caller.daemon.configuration.get()).await
}

pub(super) fn eviction(daemon: &Daemon, params: &EvictionParams) -> Result<EvictionPlan, OpError> {
    ops::eviction_plan(&daemon.store, &*daemon.last_opened, params.bytes)
}

pub(super) fn gc_plan(daemon: &Daemon, _: &NoParams) -> Result<GcReport, OpError> {
    ops::gc(&daemon.store, GcParams { dry_run: true, ..GcParams::default() })
}

pub(super) async fn usage(caller: &Caller, params: Params<UsageParams>) -> Answer<DiskUsage> {
    let detail = params.detail.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let memory = match detail {
        Some(limit) => caller.reserve(ops::detail_bytes(caller.store_size().await.listing, limit)).await?,
        None => caller.reserve(0).await?,
    };
    let usage = move |daemon: &Daemon| ops::usage_in_detail(&daemon.store, &*daemon.last_opened, detail);
    caller.respond_within(memory, &caller.daemon.work.surveys, usage).await
}

/// Administrators see all users, others themselves.
pub(super) async fn user_usage(caller: &Caller, _: Params<NoParams>) -> Answer<UserUsage> {
    let (requester, peer) = (caller.requester(), caller.peer.clone());
    let usage = move |daemon: &Daemon| {
        let (access, quotas) = (daemon.access.get(), daemon.quotas.get());
        let quota_of = |uid| quota_of(uid, &peer, &access, &quotas);
        ops::user_usage(&daemon.store, &quota_of, requester)
    };
    caller.respond(usage).await
}

/// The caller has the groups of its process, by which its requests are admitted; other users those that the name
/// service knows.
fn quota_of(uid: u32, caller: &Principal, access: &Access, quotas: &Quotas) -> UserQuota {
    let user = if uid == caller.uid { caller.clone() } else { quotas.absent(uid) };
    quotas.quota_of(&user, access.rights_of(&user).include(Right::Administer))
}

pub(super) async fn sessions(caller: &Caller, params: Params<SessionParams>) -> Answer<SessionList> {
    if !params.residency {
        return caller.respond(|daemon| Ok(daemon.sessions.list())).await;
    }
    let memory = caller.reserve(0).await?;
    // Reads much more than the other one.
    let surveys = &caller.daemon.work.surveys;
    caller.respond_within(memory, surveys, |daemon| Ok(with_residency(daemon))).await
}

/// The most models whose residency one request determines: a large one takes some hundred milliseconds.
const MAX_RESIDENCIES: usize = 64;

/// By manifest, because the name may belong to another model since it was opened. A model without a name, or a damaged
/// one, has no residency.
fn with_residency(daemon: &Daemon) -> SessionList {
    let mut models = BTreeMap::new();
    let sessions = daemon.sessions.models().into_iter().map(|(model, manifest, mut session)| {
        let is_one_too_many = models.len() >= MAX_RESIDENCIES;
        let of_model = || match is_one_too_many {
            true => None,
            false => ops::residency(&daemon.store, &model, manifest).ok().flatten(),
        };
        let residency = *models.entry(manifest).or_insert_with(of_model);
        session.model_bytes = residency.map(|residency| residency.bytes);
        session.resident_bytes = residency.map(|residency| residency.resident_bytes);
        session
    });
    SessionList { sessions: sessions.collect() }
}

pub(super) async fn metrics(caller: &Caller, _: Params<NoParams>) -> Result<Reply<Bytes<String>>, ErrorBody> {
    let memory = caller.reserve(0).await?;
    let turn = caller.turn().await;
    let text = monitoring::scrape(&caller.daemon, turn).await?;
    let memory = reduced(memory, text.len());
    Ok(Reply::new(text_response(text, monitoring::TEXT_FORMAT, memory)))
}

pub(super) async fn plan_pull(caller: &Caller, params: Params<PullParams>) -> Answer<PullPlan> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let plan = move |daemon: &Daemon| {
        let (registry, gauge) = (daemon.registry(), MemoryGauge::new(&daemon.limits.memory, requester.uid()));
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        ops::plan_pull(ops::Pull { gauge: Some(&gauge), ..pull }, &*daemon.last_opened)
    };
    caller.respond(plan).await
}

pub(super) async fn resolve(caller: &Caller, params: Params<PullParams>) -> Answer<Resolved> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let resolve = move |daemon: &Daemon| {
        ops::resolve(daemon.pull(&daemon.registry(), &handle, requester, &policy, &params, &events))
    };
    caller.respond(resolve).await
}

/// The headers are counted while they arrive, and their base64 with them.
pub(super) async fn inspect(caller: &Caller, params: Params<PullParams>) -> Answer<ModelHeads> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let inspect = move |daemon: &Daemon| {
        let (registry, gauge) = (daemon.registry(), MemoryGauge::new(&daemon.limits.memory, requester.uid()));
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        let heads = ops::inspect(ops::Pull { gauge: Some(&gauge), ..pull })?;
        let length = json_length(&heads)?;
        let json = json_of(&heads, length)?;
        drop(heads);
        Ok((json, gauge.into_permit()))
    };
    let turn = caller.turn().await;
    let (json, memory) = caller.daemon.blocking(turn.clone(), inspect).await?;
    let memory = match reduced(memory, json.len()) {
        None => caller.memory(json.len()).await?,
        counted => counted,
    };
    drop(turn);
    Ok(Reply::new(raw_response(json, memory)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Names;
    use crate::principal::tests::principal;
    use crate::quotas::GroupQuota;
    use crate::user_set::{Member, NameOrNumber, UserSet};

    /// A directory service may give other groups to a process than the name service lists.
    #[test]
    fn quota_of_the_caller_is_by_the_groups_of_its_process() {
        let group = UserSet::new(&[Member::Group(NameOrNumber::Number(80001))], &Names::default());
        let hard = |hard| UserQuota { soft: None, hard: Some(hard) };
        let entry = GroupQuota {
            name: "80001".to_owned(),
            members: group.clone(),
            each: Some(hard(20)),
            together: UserQuota::default(),
        };
        let quotas = Quotas { default: hard(1), groups: vec![entry], ..Quotas::default() };
        let caller = principal(70001, 70001, Some(&[80001]));
        let of = |uid, access: &Access| quota_of(uid, &caller, access, &quotas);
        assert_eq!(of(70001, &Access::default()), hard(20));
        assert_eq!(of(70002, &Access::default()), hard(1));
        let access = Access { administer: group, ..Access::default() };
        assert_eq!(of(70001, &access), UserQuota::default(), "an administrator by that group");
    }
}
