//! The function, the turn and the memory of each request. A [`Route`] without a function does not compile.

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::naming::EditParams;
use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::route::{Route, markers as m};
use blobd_client::protocol::signatures::SignaturesParams;
use hyper::Request;
use hyper::body::Incoming;

use super::answer::{Memory, TurnPool};
use super::body::{BodyLimit, HttpResponse};
use super::{Caller, changes, events, log, observe, open, show};
use crate::ops;

pub(super) async fn dispatch(caller: &Caller, request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let (c, r) = (caller, request);
    match caller.route {
        Route::Version => c.run::<m::Version>(r, observe::version).await,
        Route::Access => c.run::<m::Access>(r, observe::access).await,
        Route::Health => c.run::<m::Health>(r, observe::health).await,
        Route::Models => c.read::<m::Models, _>(r, |daemon, _| ops::list(&daemon.store)).await,
        Route::Model => c.run::<m::Model>(r, show::show).await,
        Route::Manifest => c.run::<m::Manifest>(r, show::manifest).await,
        Route::Heads => c.run::<m::Heads>(r, show::heads).await,
        Route::Fit => c.run::<m::Fit>(r, show::fit).await,
        Route::History => c.read::<m::History, _>(r, |daemon, name| ops::history(&daemon.store, name)).await,
        Route::Sharing => c.read::<m::Sharing, _>(r, |daemon, name| ops::sharing(&daemon.store, name)).await,
        Route::Usage => c.run::<m::Usage>(r, observe::usage).await,
        Route::UserUsage => c.run::<m::UserUsage>(r, observe::user_usage).await,
        Route::Sessions => c.run::<m::Sessions>(r, observe::sessions).await,
        Route::RunningPulls => {
            c.read::<m::RunningPulls, _>(r, |daemon, _| Ok(ops::pulls(&daemon.running_pulls.list()))).await
        }
        Route::Partials => {
            c.read::<m::Partials, _>(r, |daemon, _| ops::partials(&daemon.store, &daemon.transfers)).await
        }
        Route::Trash => c.read::<m::Trash, _>(r, |daemon, _| ops::trash(&daemon.store)).await,
        Route::Doctor => {
            c.read::<m::Doctor, _>(r, |daemon, _| ops::doctor(&daemon.store, daemon.doctor_context())).await
        }
        Route::Eviction => c.read::<m::Eviction, _>(r, observe::eviction).await,
        Route::GcPlan => c.read::<m::GcPlan, _>(r, observe::gc_plan).await,
        Route::Limit => c.run::<m::Limit>(r, changes::limit).await,
        Route::Configuration => c.run::<m::Configuration>(r, observe::configuration).await,
        Route::Metrics => c.run::<m::Metrics>(r, observe::metrics).await,
        Route::Open => c.upgrade::<m::Open>(r, open::open).await,
        Route::Release => c.run::<m::Release>(r, changes::release).await,
        Route::Verify => c.run::<m::Verify>(r, events::verify).await,
        Route::Signatures => c.run::<m::Signatures>(r, show::signatures).await,
        Route::Log => c.run::<m::Log>(r, log::log).await,
        Route::Pull => c.run::<m::Pull>(r, events::pull).await,
        Route::Push => c.run::<m::Push>(r, events::push).await,
        Route::Transfer => c.run::<m::Transfer>(r, events::transfer).await,
        Route::PullPlan => c.run::<m::PullPlan>(r, observe::plan_pull).await,
        Route::Resolve => c.run::<m::Resolve>(r, observe::resolve).await,
        Route::Inspect => c.run::<m::Inspect>(r, observe::inspect).await,
        Route::Import => c.upgrade::<m::Import>(r, open::import).await,
        Route::Edit => c.run::<m::Edit>(r, events::edit).await,
        Route::Promote => c.run::<m::Promote>(r, events::promote).await,
        Route::Sign => c.change::<m::Sign, _>(r, changes::sign).await,
        Route::Remove => c.run::<m::Remove>(r, changes::remove).await,
        Route::Undelete => {
            c.change::<m::Undelete, _>(r, |c| ops::undelete(c.store, c.requester, c.policy, c.params)).await
        }
        Route::Undo => c.change::<m::Undo, _>(r, changes::undo).await,
        Route::Pin => c.change::<m::Pin, _>(r, |c| ops::pin(c.store, c.requester, c.params)).await,
        Route::Tag => c.change::<m::Tag, _>(r, |c| ops::tag(c.store, c.requester, c.policy, c.params)).await,
        Route::Rename => c.change::<m::Rename, _>(r, changes::rename).await,
        Route::RemovePartials => c.change::<m::RemovePartials, _>(r, changes::remove_partials).await,
        Route::SetLimit => c.run::<m::SetLimit>(r, changes::set_limit).await,
        Route::Gc => c.change::<m::Gc, _>(r, |c| ops::gc(c.store, *c.params)).await,
        Route::Reindex => c.change::<m::Reindex, _>(r, |c| ops::reindex(c.store)).await,
    }
}

/// More than an open model needs in the list of sessions, as a value and as JSON.
const SESSION_BYTES: usize = 1 << 10;
/// More than the text of all metrics.
const METRICS_BYTES: usize = 128 << 10;

pub(super) const fn turns(route: Route) -> TurnPool {
    match route {
        Route::Health => |daemon| &daemon.limits.health.turns,
        // Reads the whole store: few run at a time.
        Route::Sharing
        | Route::Usage
        | Route::UserUsage
        | Route::Partials
        | Route::Doctor
        | Route::Eviction
        | Route::GcPlan
        | Route::Gc
        | Route::Log => |daemon| &daemon.work.surveys,
        Route::Metrics => |daemon| &daemon.work.scrapes,
        Route::Verify => |daemon| &daemon.work.verifications,
        Route::Pull => |daemon| &daemon.work.pulls,
        Route::Push | Route::Transfer => |daemon| &daemon.work.pushes,
        // Waits for a registry.
        Route::PullPlan | Route::Resolve => |daemon| &daemon.work.plans,
        // Waits for a registry, and has a header in memory.
        Route::Inspect => |daemon| &daemon.work.inspections,
        // Reads, hashes and writes a whole model.
        Route::Import | Route::Promote => |daemon| &daemon.work.imports,
        // Reads, hashes and writes a header, after waiting for the memory for it.
        Route::Edit => |daemon| &daemon.work.edits,
        // Work with the disk that takes a moment.
        _ => |daemon| &daemon.limits.disk,
    }
}

/// How long the body of a request may be. An edit contains files; their texts are in memory as they were received, as they
/// are, and as decoded bytes.
pub(super) const fn body_limit(route: Route) -> BodyLimit {
    match route {
        Route::Edit => BodyLimit { bytes: EditParams::MAX_BODY_BYTES, memory_per_byte: 3 },
        // Its lists are short; the manifest and the signatures are in memory as text in JSON, as text, and decoded.
        Route::Import => BodyLimit { bytes: ImportParams::MAX_BODY_BYTES, memory_per_byte: 4 },
        // The bundle is in memory as text in JSON, as text, and decoded.
        Route::Sign | Route::Signatures => {
            BodyLimit { bytes: SignaturesParams::MAX_BODY_BYTES, memory_per_byte: 4 }
        }
        _ => BodyLimit::OF_NAMES,
    }
}

/// The memory that is counted before the response is made.
pub(super) const fn memory(route: Route) -> Memory {
    match route {
        Route::Models | Route::Trash => Memory::Store(|size| size.models(1 << 10)),
        Route::History => Memory::Store(|size| size.models(256)),
        Route::Sharing => Memory::Store(|size| size.models_and_blobs(512, 16)),
        Route::Usage => Memory::Store(|size| size.models_and_blobs(1 << 10, 32)),
        Route::UserUsage => Memory::Store(|size| size.models_and_blobs(128, 32)),
        Route::Partials => Memory::Store(|size| size.models_and_blobs(512, 32)),
        Route::Doctor => Memory::Store(|size| size.models_and_blobs(256, 32)),
        Route::Eviction => Memory::Store(|size| size.models_and_blobs(1 << 10, 128)),
        Route::GcPlan | Route::Gc => Memory::Store(|size| size.models_and_blobs(128, 128)),
        Route::Sessions => Memory::Daemon(|daemon| daemon.sessions.count() * SESSION_BYTES),
        Route::Metrics => Memory::Daemon(|_| METRICS_BYTES),
        _ => Memory::Short,
    }
}
