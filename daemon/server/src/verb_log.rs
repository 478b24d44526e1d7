//! The log of finished work: one line per verb that has changed the store, with its user, and one per model that
//! was removed, evicted or replaced.
//!
//! `tests/tests/it/lost_names.rs` and `docs/OPERATIONS.md` rely on the names of the fields.

use std::collections::BTreeMap;

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::naming::{
    Edited, LostModel, NameEffects, Pinned, Promoted, Removed, Renamed, Tagged, Undeleted, Undone, UndoneName,
};
use blobd_client::protocol::pull::{CorrectedFile, DifferingRange, Imported, PullDone};
use blobd_client::protocol::push::{Publication, Pushed, Transferred};
use blobd_client::protocol::response::{Released, SessionSummary};
use blobd_client::protocol::signatures::Signed;
use blobd_client::protocol::space::DroppedDownloads;
use blobd_client::protocol::upkeep::{GcItem, GcReport, PullLimit, QuarantinedItem, Reindexed, Verified};
use blobd_store_format::digest::Digest;
use blobd_store_format::text::one_line;
use serde_json::{Value, json};

use crate::log_limit::LogLimit;
use crate::requester::Requester;

/// The most characters of a list of names in one line of the log.
const LIST_WIDTH: usize = 200;

/// The result of a verb that may have changed the store.
pub(crate) trait Finished {
    /// What was done, without the [`effects`](Self::effects).
    fn outcome(&self) -> Outcome;

    /// Other models that were displaced or evicted.
    fn effects(&self) -> Option<&NameEffects> {
        None
    }

    /// Writes the lines, except after a dry run.
    fn write(&self, requester: Requester);
}

/// Writes a line with the user and these fields.
macro_rules! log {
    ($requester:expr, $($fields_and_verb:tt)*) => {
        tracing::info!(uid = $requester.uid(), pid = $requester.pid(), $($fields_and_verb)*)
    };
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) model: Option<String>,
    pub(crate) digest: Option<Digest>,
    /// The bytes that the verb moved: downloaded, written, freed, verified, or opened.
    pub(crate) bytes: Option<u64>,
    pub(crate) details: BTreeMap<&'static str, Value>,
    /// Whether the client has requested a dry run, which changes nothing.
    pub(crate) is_dry_run: bool,
    /// Whether the store or the daemon is no longer as it was before. Users may repeat what changes nothing as often as they
    /// like, so that is logged and recorded at a limited rate.
    pub(crate) has_changed: bool,
}

#[derive(Debug)]
pub(crate) struct NewPullLimit {
    pub(crate) limit: PullLimit,
    pub(crate) before: PullLimit,
}

impl Outcome {
    pub(crate) fn new(model: &str, digest: impl Into<Option<Digest>>) -> Self {
        Self { model: Some(model.to_owned()), digest: digest.into(), ..Self::default() }
    }

    pub(crate) fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.details.insert(name, value.into());
        self
    }

    fn with_some(self, name: &'static str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    fn dry_run_if(self, is_dry_run: bool) -> Self {
        Self { is_dry_run, ..self }
    }

    fn changed_if(self, has_changed: bool) -> Self {
        Self { has_changed: has_changed && !self.is_dry_run, ..self }
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

/// Logs a finished verb, and returns what was done.
pub(crate) fn finished(limit: &LogLimit, requester: Requester, verb: &str, done: &impl Finished) -> Outcome {
    let outcome = done.effects().into_iter().fold(done.outcome(), Outcome::with_effects);
    let is_logged = outcome.has_changed || limit.admit(requester.uid()).is_some();
    if is_logged && !outcome.is_dry_run {
        done.write(requester);
        let displaced = done.effects().into_iter().flat_map(|effects| &effects.displaced);
        displaced.for_each(|model| lost(requester, "displace", verb, model));
    }
    outcome
}

/// Logs an eviction because `cause` needed space.
pub(crate) fn evicted(requester: Requester, cause: &str, model: &LostModel) {
    lost(requester, "evict", cause, model);
}

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

/// A blob that the background verification has found damaged.
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

fn lost(requester: Requester, event: &str, cause: &str, model: &LostModel) {
    let LostModel { name, digest, size, freed_bytes, reclaimable_bytes, .. } = model;
    let (kept_bytes, kept_by) = (model.kept_bytes(), one_line(&model.keepers(), LIST_WIDTH));
    let kept_until = model.kept_until.as_deref();
    log!(
        requester, model = %name, %digest, size, freed_bytes, reclaimable_bytes, kept_bytes, kept_by, cause, kept_until,
        "{event}"
    );
}

/// A file that was downloaded twice because its digest was wrong.
fn corrected(requester: Requester, model: &str, file: &CorrectedFile) {
    let CorrectedFile { digest, differing_bytes, ranges, .. } = file;
    let senders = |from: fn(&DifferingRange) -> Option<&str>| {
        let mut senders: Vec<&str> = ranges.iter().filter_map(from).collect();
        senders.sort_unstable();
        senders.dedup();
        one_line(&senders, LIST_WIDTH)
    };
    let places: Vec<String> =
        ranges.iter().map(|range| format!("{}+{}", range.offset, range.length)).collect();
    let places = one_line(&places, LIST_WIDTH);
    let wrong_from = senders(|range| range.first_from.as_deref());
    let right_from = senders(|range| range.second_from.as_deref());
    log!(
        requester, model, file = %digest, differing_bytes, ranges = places, wrong_from, right_from, "correct"
    );
}

impl Finished for PullDone {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest)
            .with_bytes(self.downloaded_bytes)
            .with("reused_bytes", self.reused_bytes)
            .changed_if(!self.unchanged)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        let Self { name, digest, downloaded_bytes, reused_bytes, .. } = self;
        log!(requester, model = %name, %digest, downloaded_bytes, reused_bytes, "pull");
        self.corrected.iter().for_each(|file| corrected(requester, name, file));
    }
}

impl Finished for Pushed {
    fn outcome(&self) -> Outcome {
        published(&self.name, &self.publication)
    }

    fn write(&self, requester: Requester) {
        let Publication { destination, digest, sent_bytes, .. } = &self.publication;
        log!(requester, model = %self.name, destination, %digest, sent_bytes, "push");
    }
}

impl Finished for Transferred {
    fn outcome(&self) -> Outcome {
        published(&self.source, &self.publication)
    }

    fn write(&self, requester: Requester) {
        let Publication { destination, digest, sent_bytes, .. } = &self.publication;
        log!(requester, model = %self.source, destination, %digest, sent_bytes, "transfer");
    }
}

/// The store is as it was, but the registry may not be.
fn published(name: &str, publication: &Publication) -> Outcome {
    Outcome::new(name, publication.digest)
        .with_bytes(publication.sent_bytes)
        .with("destination", &*publication.destination)
        .with_some("replaced", publication.replaced.map(|digest| digest.to_string()))
        .dry_run_if(publication.dry_run)
        .changed_if(!publication.unchanged || publication.sent_bytes > 0)
}

impl Finished for Imported {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest)
            .with_bytes(self.new_bytes)
            .with("reused_bytes", self.reused_bytes)
            .changed_if(!self.unchanged)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        let Self { name, digest, size, new_bytes, reused_bytes, .. } = self;
        log!(requester, model = %name, %digest, size, new_bytes, reused_bytes, "import");
    }
}

impl Finished for Edited {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest)
            .with_bytes(self.new_bytes)
            .dry_run_if(self.dry_run)
            .changed_if(!self.unchanged)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        let digest = self.digest.map(tracing::field::display);
        log!(requester, model = %self.name, digest, new_bytes = self.new_bytes, "edit");
    }
}

impl Finished for Promoted {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest)
            .with_bytes(self.copied_bytes)
            .with_effects(&self.effects)
            .dry_run_if(self.dry_run)
            .changed_if(self.from.is_some() || self.copied_blobs > 0)
    }

    fn write(&self, requester: Requester) {
        let Self { name, digest, copied_bytes, .. } = self;
        log!(requester, model = %name, %digest, copied_bytes, "promote");
    }
}

impl Finished for Signed {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest)
            .with_some("key", self.key_id.clone())
            .changed_if(!self.unchanged)
    }

    fn write(&self, requester: Requester) {
        let key = self.key_id.as_deref().unwrap_or("unknown");
        log!(requester, model = %self.name, digest = %self.digest, key, "sign");
    }
}

impl Finished for Tagged {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest).changed_if(!self.unchanged)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        log!(requester, model = %self.name, digest = %self.digest, "tag");
    }
}

impl Finished for Renamed {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest).with("from", &*self.from).changed_if(self.from != self.name)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        log!(requester, model = %self.name, from = %self.from, digest = %self.digest, "rename");
    }
}

impl Finished for Undeleted {
    /// The model is no longer in the trash.
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, self.digest).changed_if(true)
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        log!(requester, model = %self.name, digest = %self.digest, "undelete");
    }
}

impl Finished for Undone {
    fn outcome(&self) -> Outcome {
        let outcome = match self.names.as_slice() {
            [only] => Outcome::new(&only.name, only.digest),
            several => {
                let entry = |one: &UndoneName| json!({ "model": one.name, "digest": one.digest });
                let names: Vec<Value> = several.iter().take(MAX_LISTED).map(entry).collect();
                Outcome::default().with("names", names)
            }
        };
        outcome
            .with("undone", &*self.verb)
            .with("undone_time", &*self.time)
            .dry_run_if(self.dry_run)
            .changed_if(!self.names.is_empty())
    }

    fn effects(&self) -> Option<&NameEffects> {
        Some(&self.effects)
    }

    fn write(&self, requester: Requester) {
        let undone = &self.verb;
        for UndoneName { name, digest, .. } in &self.names {
            let digest = digest.map(tracing::field::display);
            log!(requester, model = %name, digest, undone, "undo");
        }
    }
}

impl Finished for Removed {
    fn outcome(&self) -> Outcome {
        // One model is the record's own; several are in its details.
        let outcome = match self.models.as_slice() {
            [only] => Outcome::new(&only.name, only.digest),
            several => Outcome::default().with("removed", lost_models(several)),
        };
        outcome
            .with_some("trashed_until", self.trashed_until.as_deref())
            .with_bytes(self.freed_bytes)
            .dry_run_if(self.dry_run)
            .changed_if(!self.models.is_empty())
    }

    fn write(&self, requester: Requester) {
        let cause = match &self.trashed_until {
            Some(until) => format!("rm --keep, in the trash until {until}"),
            None => "rm".to_owned(),
        };
        self.models.iter().for_each(|model| lost(requester, "rm", &cause, model));
    }
}

impl Finished for DroppedDownloads {
    fn outcome(&self) -> Outcome {
        let names = self.removed.iter().map(|one| one.name.clone().unwrap_or_else(|| one.digest.to_string()));
        let names: Vec<String> = names.take(MAX_LISTED).collect();
        Outcome::default()
            .with_bytes(self.freed_bytes)
            .with("downloads", self.removed.len())
            .with("names", names)
            .changed_if(!self.removed.is_empty())
    }

    fn write(&self, requester: Requester) {
        let names = self.removed.iter().map(|one| one.name.clone().unwrap_or_else(|| one.digest.short()));
        let names: Vec<String> = names.collect();
        let models = one_line(&names, LIST_WIDTH);
        log!(requester, downloads = names.len(), models, freed_bytes = self.freed_bytes, "partial rm");
    }
}

impl Finished for Pinned {
    fn outcome(&self) -> Outcome {
        Outcome::new(&self.name, None).changed_if(!self.unchanged)
    }

    fn write(&self, requester: Requester) {
        let verb = if self.pinned { "pin" } else { "unpin" };
        log!(requester, model = %self.name, "{verb}");
    }
}

impl Finished for GcReport {
    fn outcome(&self) -> Outcome {
        let quarantined: Vec<Value> = quarantined(self)
            .take(MAX_LISTED)
            .map(|(blob, item)| json!({ "digest": blob.digest, "bytes": blob.size, "since": item.since, "models": item.models }))
            .collect();
        Outcome::default()
            .with_some("quarantine", (!quarantined.is_empty()).then_some(quarantined))
            .with_bytes(self.freed_bytes)
            .with("deleted", self.deleted.len())
            .dry_run_if(self.dry_run)
            .changed_if(!self.deleted.is_empty())
    }

    fn write(&self, requester: Requester) {
        for (blob, item) in quarantined(self) {
            let digest = blob.digest.map(tracing::field::display);
            let models = item.models.join(", ");
            log!(requester, digest, since = &item.since, models, "gc: damaged blob deleted");
        }
        let kept_bytes = self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add);
        let (deleted, freed_bytes) = (self.deleted.len(), self.freed_bytes);
        log!(requester, deleted, freed_bytes, kept_bytes, "gc");
    }
}

/// The damaged blobs that were deleted from quarantine.
fn quarantined(report: &GcReport) -> impl Iterator<Item = (&GcItem, &QuarantinedItem)> {
    report.deleted.iter().filter_map(|item| Some((item, item.quarantined.as_ref()?)))
}

impl Finished for Verified {
    fn outcome(&self) -> Outcome {
        let outcome = Outcome::default().with_bytes(self.checked_bytes).with("blobs", self.checked_blobs);
        if self.corrupt.is_empty() {
            return outcome;
        }
        let damaged = self.corrupt.iter().take(MAX_LISTED).map(|blob| blob.digest.to_string());
        let repaired = self.corrupt.iter().filter(|blob| blob.repaired).count();
        outcome
            .with("damaged", self.corrupt.len())
            .with("repaired", repaired)
            .with("damaged_blobs", damaged.collect::<Vec<_>>())
            .changed_if(repaired > 0)
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
}

impl Finished for NewPullLimit {
    fn outcome(&self) -> Outcome {
        let outcome = Outcome::default().with("bytes_per_second", self.limit.bytes_per_second);
        outcome.changed_if(self.limit != self.before)
    }

    fn write(&self, requester: Requester) {
        log!(requester, bytes_per_second = self.limit.bytes_per_second, "limit");
    }
}

impl Finished for Released {
    /// Not a change: any user may end its own leases, as often as it opens models.
    fn outcome(&self) -> Outcome {
        let ended = self.released.iter().take(MAX_LISTED).map(|session| {
            let SessionSummary { pid, uid, model, .. } = session;
            json!({ "pid": pid, "uid": uid, "model": model })
        });
        Outcome::default().with("leases", self.released.len()).with("released", ended.collect::<Vec<_>>())
    }

    fn write(&self, requester: Requester) {
        let models: Vec<_> = self.released.iter().map(|session| session.model.as_str()).collect();
        log!(requester, leases = models.len(), models = one_line(&models, LIST_WIDTH), "release");
    }
}

impl Finished for Reindexed {
    fn outcome(&self) -> Outcome {
        Outcome::default().with("differences", self.differences).changed_if(self.differences > 0)
    }

    fn write(&self, requester: Requester) {
        log!(requester, differences = self.differences, "reindex");
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CorruptBlob;

    use super::*;

    fn promoted(dry_run: bool, copied_blobs: u64) -> Promoted {
        let (name, digest, effects) = ("m".to_owned(), Digest::of(b"m"), NameEffects::default());
        Promoted { name, digest, from: None, copied_bytes: 7, copied_blobs, dry_run, effects }
    }

    #[test]
    fn dry_run_of_a_promotion_is_recorded_as_one() {
        let plan = promoted(true, 1);
        assert!(plan.outcome().is_dry_run && !plan.outcome().has_changed);
        assert!(!promoted(false, 1).outcome().is_dry_run);
        assert!(promoted(false, 1).outcome().has_changed && !promoted(false, 0).outcome().has_changed);
    }

    #[test]
    fn request_that_changes_nothing_is_not_a_change() {
        assert!(!DroppedDownloads::default().outcome().has_changed);
        assert!(!Reindexed::default().outcome().has_changed);
        assert!(!GcReport::default().outcome().has_changed);
        let limit = |rate| PullLimit { bytes_per_second: rate };
        assert!(!NewPullLimit { limit: limit(Some(1)), before: limit(Some(1)) }.outcome().has_changed);
        assert!(NewPullLimit { limit: limit(None), before: limit(Some(1)) }.outcome().has_changed);
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
        assert!(!verified(vec![blob(false)]).outcome().has_changed);
        assert!(verified(vec![blob(false), blob(true)]).outcome().has_changed);
    }
}
