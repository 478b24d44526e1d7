//! The log of finished work: one line per verb that has changed the store, with its user, and one per model that
//! was removed, evicted or replaced.
//!
//! `tests/tests/it/lost_names.rs` and `docs/OPERATIONS.md` rely on the names of the fields.

use std::collections::BTreeMap;

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::corrected::{CorrectedFile, DifferingRange};
use blobd_client::protocol::edit::Edited;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::lost_model::{LostModel, NameEffects};
use blobd_client::protocol::promote::Promoted;
use blobd_client::protocol::response::{
    GcItem, GcReport, Imported, PullDone, QuarantinedItem, Released, Removed, Renamed, SessionSummary, Tagged,
};
use blobd_client::protocol::space::DroppedDownloads;
use blobd_client::protocol::upkeep::{Pinned, PullLimit, Reindexed, Undeleted, Verified};
use blobd_store_format::digest::Digest;
use blobd_store_format::text::one_line;
use serde_json::{Value, json};

use crate::log_limit::LogLimit;
use crate::requester::Requester;

/// The most characters of a list of names in one line of the log.
const LIST_WIDTH: usize = 200;

/// The result of a verb that may have changed the store.
pub(crate) trait Finished {
    /// Whether something was changed. Logged, and recorded in the audit log, at a limited rate otherwise: a user may
    /// repeat it as often as it likes.
    fn has_changed(&self) -> bool;

    /// Writes the lines.
    fn write(&self, requester: Requester);

    /// The same for the audit log and the metrics.
    fn outcome(&self) -> Outcome;
}

/// What a verb has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// The model's name in the store.
    pub(crate) model: Option<String>,
    /// Its manifest's digest.
    pub(crate) digest: Option<Digest>,
    /// The bytes that the verb moved: downloaded, written, freed, verified, or opened.
    pub(crate) bytes: Option<u64>,
    /// More facts, by name.
    pub(crate) details: BTreeMap<&'static str, Value>,
    /// Whether nothing was changed because the client has asked for a dry run.
    pub(crate) is_dry_run: bool,
    /// Whether the store or the daemon is no longer as it was before.
    pub(crate) has_changed: bool,
}

/// A new limit of the rate of all pulls.
#[derive(Debug)]
pub(crate) struct NewPullLimit {
    pub(crate) limit: PullLimit,
    pub(crate) before: PullLimit,
}

impl Outcome {
    pub(crate) fn of(model: &str, digest: impl Into<Option<Digest>>) -> Self {
        Self { model: Some(model.to_owned()), digest: digest.into(), ..Self::default() }
    }

    pub(crate) fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.details.insert(name, value.into());
        self
    }

    fn dry_run_if(self, is_dry_run: bool) -> Self {
        Self { is_dry_run, ..self }
    }

    fn with_effects(self, effects: &NameEffects) -> Self {
        let lists = [("displaced", &effects.displaced), ("evicted", &effects.evicted)];
        let lists = lists.into_iter().filter(|(_, models)| !models.is_empty());
        lists.fold(self, |outcome, (name, models)| outcome.with(name, lost_models(models)))
    }
}

/// The most entries of a list in an [`Outcome`], so that its record stays a line that tools can read.
const MAX_LISTED: usize = 50;

fn lost_models(models: &[LostModel]) -> Vec<Value> {
    let entry = |model: &LostModel| {
        let LostModel { name, digest, freed_bytes, .. } = model;
        json!({ "model": name, "digest": digest, "freed_bytes": freed_bytes })
    };
    let left = models.len().saturating_sub(MAX_LISTED);
    let more = (left > 0).then(|| json!({ "more": left }));
    models.iter().take(MAX_LISTED).map(entry).chain(more).collect()
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

/// The record of an eviction, for the audit log.
pub(crate) fn eviction_record(cause: &str, model: &LostModel) -> AuditRecord {
    AuditRecord {
        uid: Requester::own().uid(),
        verb: "evict".to_owned(),
        model: Some(model.name.clone()),
        digest: Some(model.digest),
        bytes: Some(model.freed_bytes),
        result: "ok".to_owned(),
        details: BTreeMap::from([("cause".to_owned(), json!(cause))]),
        ..AuditRecord::default()
    }
}

/// The record of a blob that the background verification has read wrong, for the audit log.
pub(crate) fn scrub_record(blob: Digest, reason: &str, is_quarantined: bool) -> AuditRecord {
    AuditRecord {
        uid: Requester::own().uid(),
        verb: "scrub".to_owned(),
        digest: Some(blob),
        result: ErrorCode::Corrupt.name().to_owned(),
        message: Some(reason.to_owned()),
        details: BTreeMap::from([("quarantined".to_owned(), json!(is_quarantined))]),
        ..AuditRecord::default()
    }
}

fn displaced(requester: Requester, cause: &str, models: &[LostModel]) {
    models.iter().for_each(|model| lost(requester, "displace", cause, model));
}

fn lost(requester: Requester, event: &str, cause: &str, model: &LostModel) {
    let (uid, pid) = (requester.uid(), requester.pid());
    let LostModel { name, digest, size, freed_bytes, reclaimable_bytes, .. } = model;
    let (kept_bytes, kept_by) = (model.kept_bytes(), one_line(&model.keepers(), LIST_WIDTH));
    let kept_until = model.kept_until.as_deref();
    tracing::info!(
        uid, pid, model = %name, %digest, size, freed_bytes, reclaimable_bytes, kept_bytes, kept_by, cause, kept_until,
        "{event}"
    );
}

/// A file that was downloaded twice because its digest was wrong.
fn corrected(requester: Requester, model: &str, file: &CorrectedFile) {
    let (uid, pid) = (requester.uid(), requester.pid());
    let CorrectedFile { digest, differing_bytes, ranges, .. } = file;
    let senders = |from: fn(&DifferingRange) -> Option<&str>| {
        let mut senders: Vec<&str> = ranges.iter().filter_map(from).collect();
        senders.sort_unstable();
        senders.dedup();
        one_line(&senders, LIST_WIDTH)
    };
    let places: Vec<String> =
        ranges.iter().map(|range| format!("{}+{}", range.offset, range.length)).collect();
    let places = one_line(&places.iter().map(String::as_str).collect::<Vec<_>>(), LIST_WIDTH);
    let wrong_from = senders(|range| range.first_from.as_deref());
    let right_from = senders(|range| range.second_from.as_deref());
    tracing::info!(
        uid, pid, model, file = %digest, differing_bytes, ranges = places, wrong_from, right_from, "correct"
    );
}

impl Finished for PullDone {
    fn has_changed(&self) -> bool {
        !self.unchanged
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, digest, downloaded_bytes, reused_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, downloaded_bytes, reused_bytes, "pull");
        self.corrected.iter().for_each(|file| corrected(requester, name, file));
        displaced(requester, "pull", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest)
            .with_bytes(self.downloaded_bytes)
            .with("reused_bytes", self.reused_bytes)
            .with_effects(&self.effects)
    }
}

impl Finished for Imported {
    fn has_changed(&self) -> bool {
        !self.unchanged
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, digest, size, new_bytes, reused_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, size, new_bytes, reused_bytes, "import");
        displaced(requester, "import", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest)
            .with_bytes(self.new_bytes)
            .with("reused_bytes", self.reused_bytes)
            .with_effects(&self.effects)
    }
}

impl Finished for Edited {
    fn has_changed(&self) -> bool {
        !self.dry_run && !self.unchanged
    }

    fn write(&self, requester: Requester) {
        // A dry run has no digest, and changes nothing.
        let Some(digest) = self.digest else { return };
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, new_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, new_bytes, "edit");
        displaced(requester, "edit", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest)
            .with_bytes(self.new_bytes)
            .dry_run_if(self.dry_run)
            .with_effects(&self.effects)
    }
}

impl Finished for Promoted {
    fn has_changed(&self) -> bool {
        !self.dry_run && (self.from.is_some() || self.copied_blobs > 0)
    }

    fn write(&self, requester: Requester) {
        if self.dry_run {
            return;
        }
        let (uid, pid) = (requester.uid(), requester.pid());
        let Self { name, digest, copied_bytes, .. } = self;
        tracing::info!(uid, pid, model = %name, %digest, copied_bytes, "promote");
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest)
            .with_bytes(self.copied_bytes)
            .dry_run_if(self.dry_run)
            .with_effects(&self.effects)
    }
}

impl Finished for Tagged {
    fn has_changed(&self) -> bool {
        !self.unchanged
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, digest = %self.digest, "tag");
        displaced(requester, "tag", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest).with_effects(&self.effects)
    }
}

impl Finished for Renamed {
    fn has_changed(&self) -> bool {
        self.from != self.name
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, from = %self.from, digest = %self.digest, "rename");
        displaced(requester, "rename", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest).with("from", self.from.as_str()).with_effects(&self.effects)
    }
}

impl Finished for Undeleted {
    /// It is no longer in the trash.
    fn has_changed(&self) -> bool {
        true
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, model = %self.name, digest = %self.digest, "undelete");
        displaced(requester, "undelete", &self.effects.displaced);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(&self.name, self.digest).with_effects(&self.effects)
    }
}

impl Finished for Removed {
    fn has_changed(&self) -> bool {
        !self.dry_run && !self.models.is_empty()
    }

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

    fn outcome(&self) -> Outcome {
        // One model is the record's own; several are in its details.
        let outcome = match self.models.as_slice() {
            [only] => Outcome::of(&only.name, only.digest),
            several => Outcome::default().with("removed", lost_models(several)),
        };
        let outcome = outcome.with_bytes(self.freed_bytes).dry_run_if(self.dry_run);
        match &self.trashed_until {
            Some(until) => outcome.with("trashed_until", until.as_str()),
            None => outcome,
        }
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

    fn outcome(&self) -> Outcome {
        let names = self.removed.iter().map(|one| one.name.clone().unwrap_or_else(|| one.digest.to_string()));
        let names: Vec<String> = names.take(MAX_LISTED).collect();
        Outcome::default()
            .with_bytes(self.freed_bytes)
            .with("downloads", self.removed.len())
            .with("names", names)
    }
}

impl Finished for Pinned {
    fn has_changed(&self) -> bool {
        !self.unchanged
    }

    fn write(&self, requester: Requester) {
        let (uid, pid, verb) = (requester.uid(), requester.pid(), if self.pinned { "pin" } else { "unpin" });
        tracing::info!(uid, pid, model = %self.name, "{verb}");
    }

    fn outcome(&self) -> Outcome {
        Outcome { model: Some(self.name.clone()), ..Outcome::default() }
    }
}

impl Finished for GcReport {
    fn has_changed(&self) -> bool {
        !self.dry_run && !self.deleted.is_empty()
    }

    fn write(&self, requester: Requester) {
        if self.dry_run {
            return;
        }
        let (uid, pid) = (requester.uid(), requester.pid());
        for (blob, item) in quarantined(self) {
            let (digest, since, models) = (blob.digest, &item.since, item.models.join(", "));
            tracing::info!(
                uid,
                pid,
                digest = digest.map(tracing::field::display),
                since,
                models,
                "gc: damaged blob deleted"
            );
        }
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

    fn outcome(&self) -> Outcome {
        let outcome = Outcome::default()
            .with_bytes(self.freed_bytes)
            .with("deleted", self.deleted.len())
            .dry_run_if(self.dry_run);
        let quarantined: Vec<Value> = quarantined(self)
            .take(MAX_LISTED)
            .map(|(blob, item)| json!({ "digest": blob.digest, "bytes": blob.size, "since": item.since, "models": item.models }))
            .collect();
        if quarantined.is_empty() { outcome } else { outcome.with("quarantine", quarantined) }
    }
}

/// The damaged blobs that were deleted from quarantine.
fn quarantined(report: &GcReport) -> impl Iterator<Item = (&GcItem, &QuarantinedItem)> {
    report.deleted.iter().filter_map(|item| Some((item, item.quarantined.as_ref()?)))
}

impl Finished for Verified {
    fn has_changed(&self) -> bool {
        self.corrupt.iter().any(|blob| blob.repaired)
    }

    /// Only if there is damage.
    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        for blob in &self.corrupt {
            let models: Vec<_> = blob.models.iter().map(String::as_str).collect();
            let (models, repaired, reason) = (one_line(&models, LIST_WIDTH), blob.repaired, &blob.reason);
            tracing::warn!(uid, pid, digest = %blob.digest, models, repaired, reason, "verify");
        }
    }

    fn outcome(&self) -> Outcome {
        let damaged = self.corrupt.iter().take(MAX_LISTED).map(|blob| blob.digest.to_string());
        let outcome = Outcome::default().with_bytes(self.checked_bytes).with("blobs", self.checked_blobs);
        if self.corrupt.is_empty() {
            return outcome;
        }
        let repaired = self.corrupt.iter().filter(|blob| blob.repaired).count();
        outcome
            .with("damaged", self.corrupt.len())
            .with("repaired", repaired)
            .with("damaged_blobs", damaged.collect::<Vec<_>>())
    }
}

impl Finished for NewPullLimit {
    fn has_changed(&self) -> bool {
        self.limit != self.before
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, bytes_per_second = self.limit.bytes_per_second, "limit");
    }

    fn outcome(&self) -> Outcome {
        Outcome::default().with("bytes_per_second", self.limit.bytes_per_second)
    }
}

/// Leases that were ended.
impl Finished for Released {
    /// Any user may end its own leases, as often as it opens models.
    fn has_changed(&self) -> bool {
        false
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        let models: Vec<_> = self.released.iter().map(|session| session.model.as_str()).collect();
        let (leases, models) = (models.len(), one_line(&models, LIST_WIDTH));
        tracing::info!(uid, pid, leases, models, "release");
    }

    fn outcome(&self) -> Outcome {
        let ended = self.released.iter().take(MAX_LISTED).map(|session| {
            let SessionSummary { pid, uid, model, .. } = session;
            json!({ "pid": pid, "uid": uid, "model": model })
        });
        Outcome::default().with("leases", self.released.len()).with("released", ended.collect::<Vec<_>>())
    }
}

impl Finished for Reindexed {
    fn has_changed(&self) -> bool {
        self.differences > 0
    }

    fn write(&self, requester: Requester) {
        let (uid, pid) = (requester.uid(), requester.pid());
        tracing::info!(uid, pid, differences = self.differences, "reindex");
    }

    fn outcome(&self) -> Outcome {
        Outcome::default().with("differences", self.differences)
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CorruptBlob;

    use super::*;

    fn promoted(dry_run: bool, copied_blobs: u64) -> Promoted {
        let (name, digest, from) = ("m".to_owned(), Digest::of(b"m"), None);
        Promoted {
            name,
            digest,
            from,
            copied_bytes: 7,
            copied_blobs,
            dry_run,
            effects: NameEffects::default(),
        }
    }

    #[test]
    fn dry_run_of_a_promotion_is_recorded_as_one() {
        let plan = promoted(true, 1);
        assert!(plan.outcome().is_dry_run && !plan.has_changed());
        assert!(!promoted(false, 1).outcome().is_dry_run);
        assert!(promoted(false, 1).has_changed() && !promoted(false, 0).has_changed());
    }

    #[test]
    fn what_changes_nothing_is_no_change() {
        assert!(!DroppedDownloads::default().has_changed());
        assert!(!Reindexed::default().has_changed());
        assert!(!GcReport::default().has_changed());
        let limit = |rate| PullLimit { bytes_per_second: rate };
        assert!(!NewPullLimit { limit: limit(Some(1)), before: limit(Some(1)) }.has_changed());
        assert!(NewPullLimit { limit: limit(None), before: limit(Some(1)) }.has_changed());
    }

    #[test]
    fn verification_that_has_repaired_is_a_change() {
        let blob = |repaired| CorruptBlob {
            digest: Digest::of(b"b"),
            models: Vec::new(),
            repaired,
            reason: String::new(),
            fetched_bytes: None,
        };
        let verified = |corrupt| Verified { corrupt, ..Verified::default() };
        assert!(!verified(vec![blob(false)]).has_changed());
        assert!(verified(vec![blob(false), blob(true)]).has_changed());
    }
}
