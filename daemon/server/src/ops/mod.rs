//! One file per verb, and the steps that several verbs share: `measure`, `pull_source`, `stored_header`,
//! `survey` and others. Verbs orchestrate; the store, [`crate::ingest`], [`crate::transfer`] and the
//! registry do the work. A verb does not use another verb.
//!
//! All functions block on the disk; the server calls them on blocking threads.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod damage;
mod disk_rows;
mod doctor;
mod edit;
mod empty_quarantine;
mod error;
mod evict;
mod fit;
mod garbage;
mod gc;
mod heads;
mod health;
mod history;
mod import;
mod import_source;
mod inspect;
mod layer_info;
mod list;
mod lost_models;
mod measure;
mod name_change;
mod new_model;
mod open;
mod open_cache;
mod partial;
mod pin;
mod plan_pull;
mod policy;
mod progress;
mod promote;
mod pull;
mod pull_source;
mod pulls;
mod reindex;
mod relief;
mod remote_heads;
mod remote_policy;
mod remove;
mod rename;
mod repair;
mod residency;
mod resolve;
mod reusable;
mod select;
mod sharing;
mod show;
mod sidecars;
mod soft_quota;
mod stored_header;
mod stored_subject;
mod survey;
mod tag;
mod texts;
mod time;
mod undelete;
mod usage;
mod usage_detail;
mod user_usage;
mod verify;

pub use doctor::{DoctorContext, doctor};
pub use edit::{EditReport, edit};
pub use error::OpError;
pub use evict::{EvictionReport, Evictor, LastOpened, evict_excess, eviction_plan};
pub(crate) use fit::fit;
pub use gc::gc;
pub use heads::{HeadContent, HeadsOutline, heads};
pub use health::health;
pub use history::history;
pub(crate) use import::client_has_gone;
pub use import::import;
#[cfg(test)]
pub use import_source::FileAccess;
pub use import_source::{FileFacts, ImportSource};
pub use inspect::inspect;
pub use list::list;
pub(crate) use open::open_blobs;
pub use open::{Located, open};
pub use open_cache::{OpenCache, OpenResponse};
pub use partial::{partials, remove_partials};
pub use pin::pin;
pub use plan_pull::plan_pull;
pub use policy::CallerPolicy;
pub(crate) use policy::TermsCache;
pub use promote::promote;
pub use pull::pull;
pub(crate) use pull_source::pulled_name;
pub use pull_source::{FetchLimit, Pull};
pub(crate) use pulls::pulls;
pub use reindex::reindex;
pub use remove::remove;
pub use rename::rename;
pub use residency::residency;
pub use resolve::resolve;
pub use sharing::sharing;
pub use show::{Shown, outline, show};
pub(crate) use stored_header::header_bytes;
#[cfg(test)]
pub(crate) use survey::recipe_fault;
pub use tag::tag;
pub(crate) use time::rfc3339;
pub use undelete::{trash, undelete};
pub use usage::{usage, usage_in_detail};
pub(crate) use usage_detail::detail_bytes;
pub(crate) use user_usage::user_usage;
pub use verify::verify;

pub use crate::memory_gauge::MemoryGauge;
pub use crate::requester::Requester;
pub use crate::running_pulls::PullWatch;
