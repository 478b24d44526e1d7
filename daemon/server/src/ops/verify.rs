//! `verify`: reads stored files from the disk and compares them with their digests.
//!
//! Reads the manifests and recipes, which name the blobs that models need; then the blobs; then compares each
//! recipe with the header of its file. Models can be added and removed meanwhile, because nothing is locked or
//! leased. So a missing or damaged file is only a candidate: it is leased, the models are read again, and it is
//! reported if a model still needs it and it is still missing or damaged.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::request::VerifyParams;
use blobd_client::protocol::upkeep::{CorruptBlob, Verified, VerifyProgress};
use blobd_registry::RegistryClient;
use blobd_store::Store;
use blobd_store::scrub::Verdict;
use blobd_store_format::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::policy::CallerPolicy;
use super::{OpError, send_progress};

mod reading;
mod repair;
mod survey;

use reading::{Read, Reading};
use repair::Repair;
#[cfg(test)]
pub(crate) use survey::recipe_fault;
use survey::{Damage, Finding, Need, Needs, Survey};

/// Verifies one model or the whole store, and repairs damage if requested. Blocks the calling thread; the network I/O of
/// repairs runs on `handle`. Stops when the receiver of `events` is dropped.
///
/// # Errors
/// [`OpError`] if something cannot be inspected, or if the requested model is missing or has a damaged manifest. Other
/// damage is part of the result.
pub fn verify(
    store: &Arc<Store>,
    registry: &RegistryClient,
    handle: &Handle,
    policy: &CallerPolicy,
    params: &VerifyParams,
    events: &Sender<VerifyProgress>,
) -> Result<Verified, OpError> {
    send_progress(events, VerifyProgress::working("reading recipes", Phase::Reading));
    let mut blobs = BTreeSet::new();
    let mut survey = Survey::new(store, params.reference.as_ref(), &mut blobs)?;
    if params.reference.is_none() {
        store.content().each_blob(|digest| {
            blobs.insert(digest);
        })?;
    }
    let mut read = Reading::new(store, blobs, events).run()?;
    survey.check_recipes(store, &|_| true)?;
    let unavailable = read.unavailable.take();
    let candidates = std::mem::take(&mut read.not_good);
    let mut verified =
        Verified { checked_blobs: read.blobs, checked_bytes: read.bytes, unavailable, ..Verified::default() };
    let repair = params.repair.then_some(Repair { store, registry, handle, policy, events });
    let again = |missing| Reading::new(store, missing, events).run();
    confirm(store, candidates, survey.findings, &again, repair.as_ref(), &mut verified)?;
    Ok(verified)
}

fn finding(store: &Store, digest: Digest, verdict: Verdict) -> Option<Finding> {
    let (damage, reason) = match verdict {
        Verdict::Good | Verdict::Hidden { .. } | Verdict::Unfinished => return None,
        Verdict::Gone if store.content().is_quarantined(digest) => {
            (Damage::Lost, "was found damaged before and is in quarantine".to_owned())
        }
        Verdict::Gone => (Damage::Lost, "is missing".to_owned()),
        Verdict::Writable { mode } => {
            (Damage::Writable, format!("wrong mode: expected 0444, found {mode:04o}"))
        }
        Verdict::Unreliable { reason } => {
            let machine = "a second read was correct: memory, bus or disk of this machine is faulty";
            (Damage::Unreliable, format!("{reason}; {machine}"))
        }
        Verdict::Unreadable { reason } => {
            (Damage::Unreadable, format!("cannot be read ({reason}); it may be undamaged"))
        }
        Verdict::BadBelow { reason, store } => {
            (Damage::Below, format!("{reason}, in the lower store {store}, which is read-only"))
        }
        Verdict::Bad { reason, quarantined: Ok(()) } => (Damage::Lost, reason),
        Verdict::Bad { reason, quarantined: Err(error) } => {
            (Damage::NotQuarantined, format!("{reason}; it cannot be moved to quarantine: {error}"))
        }
    };
    Some(Finding { digest, damage, reason })
}

type ReadAgain<'r> = dyn Fn(BTreeSet<Digest>) -> Result<Read, OpError> + 'r;

/// Decides which candidates are damaged and which models need them, and repairs what it can.
///
/// All candidates are leased first. So if a blob is missing after that, and a model that is read after that needs it, it
/// was not removed together with the model.
fn confirm(
    store: &Store,
    candidates: Vec<(Digest, Verdict)>,
    mut found: Vec<Finding>,
    again: &ReadAgain<'_>,
    repair: Option<&Repair<'_>>,
    verified: &mut Verified,
) -> Result<(), OpError> {
    if candidates.is_empty() && found.is_empty() {
        return Ok(());
    }
    let leased: BTreeSet<Digest> =
        candidates.iter().map(|(digest, _)| *digest).chain(found.iter().map(|found| found.digest)).collect();
    let lease = store.liveness().leases().grant("blobd's own verification");
    lease.protect_all(leased.iter().copied());
    let (mut now, needs) = Survey::with_needs(store, &leased)?;
    now.check_recipes(store, &|file| leased.contains(&file))?;
    found.retain(|finding| now.confirms(finding));
    let (missing, mut not_good): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|(_, verdict)| *verdict == Verdict::Gone);
    // They may have been imported again since, and are then read like the others.
    let missing = missing.into_iter().map(|(digest, _)| digest).filter(|digest| needs.contains_key(digest));
    let read = again(missing.collect())?;
    verified.checked_blobs = verified.checked_blobs.saturating_add(read.blobs);
    verified.checked_bytes = verified.checked_bytes.saturating_add(read.bytes);
    not_good.extend(read.not_good);
    found.extend(not_good.into_iter().filter_map(|(digest, verdict)| finding(store, digest, verdict)));
    found.sort_by_key(|finding| finding.digest);
    verified.corrupt = report(store, &found, &now, &needs, repair);
    drop(lease);
    Ok(())
}

fn report(
    store: &Store,
    found: &[Finding],
    now: &Survey,
    needs: &Needs,
    repair: Option<&Repair<'_>>,
) -> Vec<CorruptBlob> {
    let mut report = Report::default();
    for finding in found {
        let need = needs.get(&finding.digest);
        let is_missing = finding.damage == Damage::Lost
            && matches!(store.content().blob_size(finding.digest), Ok(None))
            && !store.content().is_quarantined(finding.digest)
            && store.content().lower_problem().is_none();
        if is_missing {
            store.content().note_missing(finding.digest);
        }
        let entry = entry(now, finding, need);
        report.add(match repair {
            Some(repair) => repair.repair(now, finding, need, entry),
            None => entry,
        });
    }
    report.finish()
}

/// The report is sent as one line, and clients accept lines of up to 1 MiB.
const MAX_REPORT_BYTES: usize = 900 << 10;
/// A tensor may be part of very many models, and a name has up to 500 bytes.
const MAX_MODELS: usize = 20;

/// The entry of a finding that is not repaired, with the models that need it.
fn entry(survey: &Survey, finding: &Finding, need: Option<&Need>) -> CorruptBlob {
    let models = match &finding.damage {
        Damage::Recipe => survey.names_with(finding.digest),
        Damage::Manifest { model } => BTreeSet::from([model.as_str()]),
        _ => need.map(|need| survey.names_of(&need.files)).unwrap_or_default(),
    };
    let surplus = models.len().saturating_sub(MAX_MODELS);
    let mut models: Vec<String> = models.into_iter().take(MAX_MODELS).map(str::to_owned).collect();
    if surplus > 0 {
        models.push(format!("and {surplus} more"));
    }
    CorruptBlob {
        digest: finding.digest,
        models,
        repaired: false,
        reason: finding.reason.clone(),
        fetched_bytes: None,
    }
}

/// Collects as many entries as fit into [`MAX_REPORT_BYTES`].
#[derive(Debug, Default)]
struct Report {
    listed: Vec<CorruptBlob>,
    bytes: usize,
    surplus: usize,
}

impl Report {
    fn add(&mut self, entry: CorruptBlob) {
        let length = serde_json::to_vec(&entry).map_or(0, |json| json.len() + 1);
        self.bytes = self.bytes.saturating_add(length);
        if self.bytes <= MAX_REPORT_BYTES {
            self.listed.push(entry);
        } else {
            self.surplus += 1;
        }
    }

    /// The entries; the last one says how many did not fit.
    fn finish(mut self) -> Vec<CorruptBlob> {
        let surplus = self.surplus;
        if let Some(last) = self.listed.last_mut().filter(|_| surplus > 0) {
            last.reason.push_str(&format!("; {surplus} more are damaged: repair these, then verify again"));
        }
        self.listed
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    #[test]
    fn report_that_is_too_long_says_how_much_is_left_out() {
        let entry = |index: u32| CorruptBlob {
            digest: Digest::of(&index.to_le_bytes()),
            models: vec!["m".repeat(400)],
            repaired: false,
            reason: "is missing".to_owned(),
            fetched_bytes: None,
        };
        let reported = |count: u32| {
            let mut report = Report::default();
            (0..count).map(entry).for_each(|entry| report.add(entry));
            report.finish()
        };
        assert_eq!(reported(10).len(), 10);
        let listed = reported(10_000);
        let surplus = 10_000 - listed.len();
        assert!(listed.len() > 1000 && surplus > 1000, "{surplus}");
        assert!(listed.last().unwrap().reason.contains(&format!("{surplus} more are damaged")));
        assert!(serde_json::to_vec(&listed).unwrap().len() < 1 << 20);
    }
}
