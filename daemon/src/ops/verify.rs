//! `verify`: everything that is stored is read from the disk and compared with its name.
//!
//! First manifests and recipes are read anew, which says what the models need; then the blobs,
//! by two readers; then each recipe is compared with the header of the file that it rebuilds.
//! Nothing is locked and nothing leased meanwhile, so models come and go. What was not there or not
//! right when it was looked at is a finding only if models that exist now need it: it is protected
//! from collection, the models are read once more, and it is looked at again.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_client::protocol::request::VerifyParams;
use blobd_client::protocol::upkeep::{CorruptBlob, Verified, VerifyEvent, VerifyProgress};
use blobd_registry::RegistryClient;
use blobd_store::Store;
use blobd_store::scrub::Verdict;
use blobd_store_format::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::OpError;
use super::repair::Repair;
use super::survey::{Damage, Finding, Needs, Survey};
use super::verify_progress::send_progress;

mod reading;
mod report;

use reading::{Read, Reading};
use report::Report;

/// Verifies one model or everything there is, and mends what is damaged if told to. Blocks the
/// calling thread; a repair's network runs on the runtime of `handle`. Stops when nobody listens
/// to `events` any more.
///
/// # Errors
/// [`blobd_store::StoreError::NoSuchModel`]; a damaged manifest of the one model that was named; another
/// [`OpError`] when something cannot be looked at. Damage that is found is no error.
pub fn verify(
    store: &Arc<Store>,
    registry: &RegistryClient,
    handle: &Handle,
    params: &VerifyParams,
    events: &Sender<VerifyEvent>,
) -> Result<Verified, OpError> {
    send_progress(
        events,
        VerifyProgress { status: "reading recipes".to_owned(), ..VerifyProgress::default() },
    );
    let mut blobs = BTreeSet::new();
    let mut survey = Survey::of(store, params.reference.as_ref(), &mut blobs)?;
    if params.reference.is_none() {
        store.each_blob(|digest| {
            blobs.insert(digest);
        })?;
    }
    let mut read = Reading::new(store, blobs, events).run()?;
    survey.check_recipes(store, &|_| true)?;
    let suspects = std::mem::take(&mut read.strange);
    let mut verified =
        Verified { checked_blobs: read.blobs, checked_bytes: read.bytes, ..Verified::default() };
    let repair = params.repair.then(|| Repair::new(store, registry, handle, events));
    let again = |missing| Reading::new(store, missing, events).run();
    judge(store, suspects, survey.into_findings(), &again, repair.as_ref(), &mut verified)?;
    Ok(verified)
}

fn finding(store: &Store, digest: Digest, verdict: Verdict) -> Option<Finding> {
    let (damage, reason) = match verdict {
        Verdict::Good | Verdict::Unfinished => return None,
        Verdict::Gone if store.is_quarantined(digest) => {
            (Damage::Lost, "was found damaged before and is in quarantine".to_owned())
        }
        Verdict::Gone => (Damage::Lost, "is missing".to_owned()),
        Verdict::Writable { mode } => (Damage::Writable, format!("has mode {mode:04o}, 0444 expected")),
        Verdict::Unreliable { reason } => {
            let machine = "read again it was right: memory, bus or disk of this machine err";
            (Damage::Unreliable, format!("{reason}; {machine}"))
        }
        Verdict::Unreadable { reason } => {
            (Damage::Unreadable, format!("cannot be read ({reason}); it may be right"))
        }
        Verdict::Bad { reason, set_aside: Ok(()) } => (Damage::Lost, reason),
        Verdict::Bad { reason, set_aside: Err(error) } => {
            (Damage::InTheWay, format!("{reason}; it cannot be put aside: {error}"))
        }
    };
    Some(Finding { digest, damage, reason })
}

/// Reads some blobs again.
type ReadAgain<'r> = dyn Fn(BTreeSet<Digest>) -> Result<Read, OpError> + 'r;

/// Says of everything that was not as it should be whether it still is damage, and which models need
/// it now, and repairs what can be.
///
/// From the first step on nothing that is in question is collected. So a blob that a model needs which
/// is found after that, and that is not there after that, was not removed together with the model.
fn judge(
    store: &Store,
    suspects: Vec<(Digest, Verdict)>,
    mut found: Vec<Finding>,
    again: &ReadAgain<'_>,
    repair: Option<&Repair<'_>>,
    verified: &mut Verified,
) -> Result<(), OpError> {
    if suspects.is_empty() && found.is_empty() {
        return Ok(());
    }
    let wanted: BTreeSet<Digest> =
        suspects.iter().map(|(digest, _)| *digest).chain(found.iter().map(|found| found.digest)).collect();
    let lease = store.leases().grant(OWN_VERIFICATION);
    lease.pin_all(wanted.iter().copied());
    let (mut now, needs) = Survey::with_needs(store, &wanted)?;
    now.check_recipes(store, &|file| wanted.contains(&file))?;
    found.retain(|finding| now.confirms(finding));
    let (missing, mut strange): (Vec<_>, Vec<_>) =
        suspects.into_iter().partition(|(_, verdict)| *verdict == Verdict::Gone);
    // Those that were imported again since are read after all.
    let missing = missing.into_iter().map(|(digest, _)| digest).filter(|digest| needs.contains_key(digest));
    let read = again(missing.collect())?;
    verified.checked_blobs = verified.checked_blobs.saturating_add(read.blobs);
    verified.checked_bytes = verified.checked_bytes.saturating_add(read.bytes);
    strange.extend(read.strange);
    found.extend(strange.into_iter().filter_map(|(digest, verdict)| finding(store, digest, verdict)));
    found.sort_by_key(|finding| finding.digest);
    verified.corrupt = report(store, &found, &now, &needs, repair);
    drop(lease);
    Ok(())
}

/// Tells what is damaged, repaired as far as it can be.
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
            && matches!(store.blob_size(finding.digest), Ok(None))
            && !store.is_quarantined(finding.digest);
        if is_missing {
            store.note_missing(finding.digest);
        }
        let entry = report::entry(now, finding, need);
        report.add(match repair {
            Some(repair) => repair.mend(now, finding, need, entry),
            None => entry,
        });
    }
    report.finish()
}

/// The holder of a lease on what is looked at again.
const OWN_VERIFICATION: &str = "blobd's own verification";
