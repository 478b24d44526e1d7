//! The log of finished work: one line per verb that has changed the store, with its user, and one per model that
//! was removed, evicted or replaced.
//!
//! `tests/tests/it/verb_log.rs` and `docs/OPERATIONS.md` rely on the names of the fields.

use blobd_client::protocol::edit::Edited;
use blobd_client::protocol::lost_model::LostModel;
use blobd_client::protocol::response::{GcReport, Imported, PullDone, Released, Removed, Renamed, Tagged};
use blobd_client::protocol::space::DroppedDownloads;
use blobd_client::protocol::upkeep::{Pinned, PullLimit, Reindexed, Undeleted, Verified};

use crate::log_limit::{LogLimit, Omitted};
use crate::output::one_line;
use crate::requester::Requester;

/// The most characters of a list of names in one line of the log.
const LIST_WIDTH: usize = 200;

/// The result of a verb that may have changed the store.
pub(crate) trait Finished {
    /// Whether something was changed. What any user may repeat without changing anything is logged at a limited rate.
    fn has_changed(&self) -> bool {
        true
    }

    /// Writes the lines.
    fn write(&self, requester: Requester);
}

/// Logs a finished verb.
pub(crate) fn finished(limit: &LogLimit, requester: Requester, done: &impl Finished) {
    if done.has_changed() || limit.admit(requester.uid()).is_some() {
        done.write(requester);
    }
}

/// A model that was evicted because `cause` needed space.
pub(crate) fn evicted(requester: Requester, cause: &str, model: &LostModel) {
    lost(requester, "evict", cause, model);
}

/// Leases that were ended.
pub(crate) fn released(requester: Requester, released: &Released, omitted: Omitted) {
    let (uid, pid) = (requester.uid(), requester.pid());
    let models: Vec<_> = released.released.iter().map(|session| session.model.as_str()).collect();
    let (leases, models) = (models.len(), one_line(&models, LIST_WIDTH));
    tracing::info!(uid, pid, leases, models, "release{omitted}");
}

fn displaced(requester: Requester, cause: &str, models: &[LostModel]) {
    models.iter().for_each(|model| lost(requester, "displace", cause, model));
}

fn lost(requester: Requester, event: &str, cause: &str, model: &LostModel) {
    let (uid, pid) = (requester.uid(), requester.pid());
    let LostModel { name, digest, size, freed_bytes, reclaimable_bytes, .. } = model;
    let (kept_bytes, kept_by) = (model.kept_bytes(), one_line(&model.keepers(), LIST_WIDTH));
    tracing::info!(
        uid, pid, model = %name, %digest, size, freed_bytes, reclaimable_bytes, kept_bytes, kept_by, cause,
        "{event}"
    );
}

impl Finished for PullDone {
    fn has_changed(&self) -> bool {
        self.downloaded_bytes > 0 || !self.displaced.is_empty()
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, digest, downloaded_bytes, reused_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, downloaded_bytes, reused_bytes, "pull");
        displaced(requester, "pull", &self.displaced);
    }
}

impl Finished for Imported {
    fn has_changed(&self) -> bool {
        self.new_bytes > 0 || !self.displaced.is_empty()
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, digest, size, new_bytes, reused_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, size, new_bytes, reused_bytes, "import");
        displaced(requester, "import", &self.displaced);
    }
}

impl Finished for Edited {
    fn has_changed(&self) -> bool {
        self.new_bytes > 0 || !self.displaced.is_empty()
    }

    fn write(&self, requester: Requester) {
        // A dry run has no digest, and changes nothing.
        let Some(digest) = self.digest else { return };
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, new_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, new_bytes, "edit");
        displaced(requester, "edit", &self.displaced);
    }
}

impl Finished for Tagged {
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, digest = %self.digest, "tag");
        displaced(requester, "tag", &self.displaced);
    }
}

impl Finished for Renamed {
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, from = %self.from, digest = %self.digest, "rename");
        displaced(requester, "rename", &self.displaced);
    }
}

impl Finished for Undeleted {
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, digest = %self.digest, "undelete");
        displaced(requester, "undelete", &self.displaced);
    }
}

impl Finished for Removed {
    fn write(&self, requester: Requester) {
        if self.dry_run {
            return;
        }
        let cause = match &self.trashed_until {
            Some(until) => format!("rm --keep, in the trash until {until}"),
            None => "rm".to_owned(),
        };
        self.models.iter().for_each(|model| lost(requester, "rm", &cause, model));
    }
}

impl Finished for DroppedDownloads {
    fn has_changed(&self) -> bool {
        !self.removed.is_empty()
    }

    fn write(&self, requester: Requester) {
        let (uid, pid, freed_bytes) = (requester.uid(), requester.pid(), self.freed_bytes);
        let names = self.removed.iter().map(|one| one.name.clone().unwrap_or_else(|| one.digest.short()));
        let names: Vec<String> = names.collect();
        let models = one_line(&names, LIST_WIDTH);
        tracing::info!(uid, pid, downloads = names.len(), models, freed_bytes, "partial rm");
    }
}

impl Finished for Pinned {
    fn write(&self, requester: Requester) {
        let (uid, pid, verb) = (requester.uid(), requester.pid(), if self.pinned { "pin" } else { "unpin" });
        tracing::info!(uid, pid, model = %self.name, "{verb}");
    }
}

impl Finished for GcReport {
    fn write(&self, requester: Requester) {
        if self.dry_run {
            return;
        }
        let (uid, pid) = (requester.uid(), requester.pid());
        let kept_bytes = self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add);
        tracing::info!(
            uid,
            pid,
            deleted = self.deleted.len(),
            freed_bytes = self.freed_bytes,
            kept_bytes,
            "gc"
        );
    }
}

impl Finished for Verified {
    /// Only if there is damage: the rest has changed nothing.
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        for blob in &self.corrupt {
            let models: Vec<_> = blob.models.iter().map(String::as_str).collect();
            let (models, repaired, reason) = (one_line(&models, LIST_WIDTH), blob.repaired, &blob.reason);
            tracing::warn!(uid, pid, digest = %blob.digest, models, repaired, reason, "verify");
        }
    }
}

impl Finished for PullLimit {
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, bytes_per_second = self.bytes_per_second, "limit");
    }
}

impl Finished for Reindexed {
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, differences = self.differences, "reindex");
    }
}
