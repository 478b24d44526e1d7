//! The verbs: one file each. They say what happens in which order; how it is done is the
//! store's, the intake's and the registry's business.
//!
//! All of them block on the disk; the server calls them where blocking is allowed.

// Files of the store are reached through its root alone, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod answers;
mod collect;
mod commit;
mod compose;
mod damage;
mod doctor;
mod error;
mod evict;
mod import;
mod list;
mod manifest;
mod open;
mod pin;
mod plan_pull;
mod pull;
mod reindex;
mod remove;
mod repair;
mod shards;
mod show;
mod survey;
mod tag;
mod undelete;
mod usage;
mod verify;
mod verify_progress;

pub use answers::{Answer, Answers};
pub use collect::collect;
pub use doctor::{Surroundings, doctor};
pub use error::OpError;
pub use evict::{Evictor, LastOpened, evict_excess, eviction_plan};
pub(crate) use import::client_has_gone;
pub use import::{FileFacts, ImportSource, import, import_from};
pub use list::list;
pub(crate) use list::rfc3339;
pub use manifest::manifest;
pub(crate) use open::open_blobs;
pub use open::{Located, open};
pub use pin::pin;
pub use plan_pull::{Planning, plan_pull};
pub use pull::{FetchLimit, Pull, pull};
pub use reindex::reindex;
pub use remove::remove;
pub use show::{Shown, outline, show};
pub use tag::tag;
pub use undelete::{trash, undelete};
pub use usage::usage;
pub use verify::verify;
