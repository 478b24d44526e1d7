//! Repair: the bytes of a damaged blob, from wherever they can be had.
//!
//! In this order: a copy in quarantine that reads right after all, which is so when the page
//! cache still holds what the disk has lost; a file that is stored whole beside its recipe; the
//! registry that a model came from, which is asked for just the ranges of the file that the blob
//! is. Whatever comes is hashed before it gets its name.

use std::sync::Arc;

use blobd_client::protocol::upkeep::{CorruptBlob, VerifyEvent, VerifyProgress};
use blobd_registry::RegistryClient;
use blobd_store::{BlobWriter, Ingest, Store, StoreError};
use blobd_store_format::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::survey::{Damage, Finding, Need, Survey};
use super::verify_progress::send_progress;

mod local;
mod origin;
mod place;

/// A repair of what one verification has found.
pub(super) struct Repair<'r> {
    store: &'r Arc<Store>,
    registry: &'r RegistryClient,
    handle: &'r Handle,
    events: &'r Sender<VerifyEvent>,
}

/// Why a blob could not be mended, for people.
type Failure = String;

impl<'r> Repair<'r> {
    /// A repair that has done nothing yet.
    pub(super) const fn new(
        store: &'r Arc<Store>,
        registry: &'r RegistryClient,
        handle: &'r Handle,
        events: &'r Sender<VerifyEvent>,
    ) -> Self {
        Self { store, registry, handle, events }
    }

    /// Mends a finding if that is possible, and says so in its entry. `survey` is of all models:
    /// their recipes say where in their files a blob is.
    pub(super) fn mend(
        &self,
        survey: &Survey,
        finding: &Finding,
        need: Option<&Need>,
        mut entry: CorruptBlob,
    ) -> CorruptBlob {
        let status = format!("repairing {}", finding.digest.short());
        send_progress(self.events, VerifyProgress { status, ..VerifyProgress::default() });
        let mended = match (&finding.damage, need) {
            (Damage::Lost, Some(need)) => self.replace(survey, finding.digest, need),
            (Damage::Lost, None) => Err("no model needs it".to_owned()),
            (Damage::Writable, _) => self.make_read_only(finding.digest).map(|()| None),
            // The reason says what to do already.
            _ => return entry,
        };
        match mended {
            Ok(fetched_bytes) => {
                tracing::info!("blob {}: repaired", finding.digest);
                (entry.repaired, entry.fetched_bytes) = (true, fetched_bytes);
            }
            Err(failure) => entry.reason = format!("{}; not repaired: {failure}", entry.reason),
        }
        entry
    }

    /// Publishes the blob anew; says how much came over the network for that.
    fn replace(&self, survey: &Survey, digest: Digest, need: &Need) -> Result<Option<u64>, Failure> {
        if self.take_from_quarantine(digest, need) || self.take_from_whole_file(digest, need) {
            return Ok(None);
        }
        if survey.is_whole_weights(need) && !self.store.is_quarantined(digest) {
            return Err("neither the file nor its recipe is there; pull or import the model again".to_owned());
        }
        self.take_from_origin(survey, digest, need).map(Some)
    }

    /// Publishes what `fill` writes, if it is the blob. The old one, if it is mapped, stays with
    /// those who have it.
    fn publish(
        &self,
        digest: Digest,
        size: u64,
        fill: impl FnOnce(&mut BlobWriter) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let failed = |error: StoreError| error.to_string();
        let lease = self.store.leases().grant(format!("repair of blob {}", digest.short()));
        lease.pin(digest);
        let mut ingest = Ingest::begin(self.store, lease).map_err(failed)?;
        let mut writer = ingest.staging().stage(size);
        fill(&mut writer)?;
        let staged = writer.finish().map_err(failed)?;
        if staged.digest != digest {
            return Err(format!("what came has the digest {}", staged.digest));
        }
        ingest.add_blob(staged).and_then(|_| ingest.commit_blobs()).map_err(failed)
    }

    /// Synced, or the blob could be writable again after a power cut.
    fn make_read_only(&self, digest: Digest) -> Result<(), Failure> {
        self.store.make_blob_read_only(digest).map_err(|error| error.to_string())
    }
}
