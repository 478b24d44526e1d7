//! The verbs, and the steps that several of them share. Verbs orchestrate; the store, [`crate::ingest`],
//! [`crate::transfer`] and the registry do the work. A verb does not use another verb.
//!
//! - A model by its name: `open`, `describe` (`show`, `heads`, `fit`), `list` (`ls`, `history`).
//! - New models: `pull`, `import`, `edit`; each fills a `new_model` and gives it a name.
//! - Names: `name_change` (`tag`, `rename`, `pin`, `undelete`, `undo`, `promote`).
//! - Other machines: `push`, `served`. Who has made a model: `signatures`.
//! - Disk space: `space` (`df`, `rm`, `gc`, `evict`, `partial`, quotas).
//! - Whether all is well: `verify`, `doctor`, `health` (`reindex`).
//! - What verbs share: `error`, `policy` (what a user may not have), `trust` (what must be signed), `damage`.
//!
//! All functions block on the disk; the server calls them on blocking threads.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc::Sender;

mod damage;
mod describe;
mod doctor;
mod edit;
mod error;
mod health;
mod import;
mod list;
mod name_change;
mod new_model;
mod open;
mod policy;
mod pull;
mod push;
mod served;
mod shard_sets;
mod signable_files;
mod signatures;
mod space;
mod trust;
mod verify;

pub use describe::show;
pub(crate) use describe::{HeadContent, HeadsOutline, Shown, fit, header_bytes, heads, outline};
pub use doctor::{DoctorContext, doctor};
pub use edit::edit;
pub(crate) use edit::edits_header;
pub use error::OpError;
pub(crate) use health::{health, reindex};
pub(crate) use import::client_has_gone;
pub use import::{FileAccess, FileFacts, ImportSource, import};
pub(crate) use list::history;
pub use list::list;
pub use name_change::{pin, promote, rename, tag, trash, undelete, undo};
pub(crate) use open::open_blobs;
pub use open::{Located, OpenCache, OpenResponse, open};
pub use policy::CallerPolicy;
pub(crate) use policy::TermsCache;
pub use pull::{FetchLimit, Pull, pull};
pub(crate) use pull::{inspect, plan_pull, pulled_name, pulls, resolve};
pub(crate) use push::{Listeners, Push, Transfer, push, transfer};
pub(crate) use served::{Found, HubContent, HubFile, ServedFile, Snapshot, View, Wanted, arrived_file};
pub use signatures::{sign, signatures};
pub use space::{
    EvictionReport, Evictor, LastOpened, StoredBlobs, evict_excess, eviction_plan, gc, remove, usage,
};
pub(crate) use space::{
    detail_bytes, partials, remove_partials, residency, sharing, usage_in_detail, user_usage,
};
#[cfg(test)]
pub(crate) use verify::recipe_fault;
pub use verify::verify;

pub use crate::arriving::Arriving;
pub use crate::memory_gauge::MemoryGauge;
pub use crate::requester::Requester;
pub use crate::running_pulls::PullWatch;

/// Formats a time as the protocol does. Times outside the years 1970 to 9999, which a file can have, become the nearest
/// time inside.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    const END_OF_9999: u64 = 253_402_300_799;
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(END_OF_9999));
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

/// Sends progress to the client. If the client does not keep up, it is dropped: the next event replaces it.
fn send_progress<P>(events: &Sender<P>, progress: P) {
    let _ = events.try_send(progress);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outside_1970_to_9999_are_clamped() {
        let day = Duration::from_secs(86_400);
        assert_eq!(rfc3339(UNIX_EPOCH + day), "1970-01-02T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH - day), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH + 4_000_000 * day), "9999-12-31T23:59:59Z");
    }
}
