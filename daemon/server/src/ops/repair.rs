//! Repairs damaged blobs, from these sources in this order:
//!
//! 1. a lower store, whose blob is used where it is;
//! 2. a copy in quarantine, which can be right if the page cache still has what the disk has lost;
//! 3. a file that is stored whole beside its recipe;
//! 4. the registry of a model, which sends only the ranges of the file that contain the blob.
//!
//! The bytes are hashed before they are published.

use std::fmt;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::upkeep::{CorruptBlob, VerifyProgress};
use blobd_registry::RegistryClient;
use blobd_store::{BlobWriter, Ingest, Store, StoreError};
use blobd_store_format::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::policy::CallerPolicy;
use super::progress::send_progress;
use super::relief::Relief;
use super::survey::{Damage, Finding, Need, Survey};

mod local;
mod origin;
mod place;

pub(super) struct Repair<'r> {
    store: &'r Arc<Store>,
    registry: &'r RegistryClient,
    handle: &'r Handle,
    policy: &'r CallerPolicy,
    events: &'r Sender<VerifyProgress>,
}

/// Why a blob could not be repaired, for the user.
type Failure = String;

/// Why bytes were not published.
enum Unpublished {
    /// They have this digest, which is not the blob's.
    Wrong(Digest),
    Failed(Failure),
}

impl From<Failure> for Unpublished {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl fmt::Display for Unpublished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(digest) => write!(f, "the received bytes have the digest {digest}"),
            Self::Failed(failure) => f.write_str(failure),
        }
    }
}

impl<'r> Repair<'r> {
    pub(super) const fn new(
        store: &'r Arc<Store>,
        registry: &'r RegistryClient,
        handle: &'r Handle,
        policy: &'r CallerPolicy,
        events: &'r Sender<VerifyProgress>,
    ) -> Self {
        Self { store, registry, handle, policy, events }
    }

    /// Repairs a finding if possible, and records the outcome in its entry. `survey` must be of all models:
    /// their recipes say where in their files a blob is.
    pub(super) fn repair(
        &self,
        survey: &Survey,
        finding: &Finding,
        need: Option<&Need>,
        mut entry: CorruptBlob,
    ) -> CorruptBlob {
        let status = format!("repairing {}", finding.digest.short());
        send_progress(self.events, VerifyProgress::working(status, Phase::Repairing));
        let repaired = match (&finding.damage, need) {
            (Damage::Lost | Damage::Below, Some(need)) => self.replace(survey, finding.digest, need),
            (Damage::Lost | Damage::Below, None) => Err("no model needs it".to_owned()),
            (Damage::Writable, _) => self.make_read_only(finding.digest).map(|()| None),
            // The reason says what to do.
            _ => return entry,
        };
        match repaired {
            Ok(fetched_bytes) => {
                tracing::info!("blob {}: repaired", finding.digest);
                (entry.repaired, entry.fetched_bytes) = (true, fetched_bytes);
            }
            Err(failure) => entry.reason = format!("{}; not repaired: {failure}", entry.reason),
        }
        entry
    }

    /// Publishes the blob again. Returns the bytes received from the network, if any.
    fn replace(&self, survey: &Survey, digest: Digest, need: &Need) -> Result<Option<u64>, Failure> {
        // A model can use the copy in a lower store.
        if self.store.content().has_good_lower_blob(digest) {
            return Ok(None);
        }
        if self.take_from_quarantine(digest, need) || self.take_from_whole_file(digest, need) {
            return Ok(None);
        }
        if survey.is_whole_weights(need) && !self.store.content().is_quarantined(digest) {
            return Err("neither the file nor its recipe exists; pull or import the model again".to_owned());
        }
        self.take_from_origin(survey, digest, need).map(Some)
    }

    /// Publishes what `fill` writes, if it has the blob's digest. Processes that have the old blob mapped
    /// keep it.
    fn publish(
        &self,
        digest: Digest,
        size: u64,
        fill: impl FnOnce(&mut BlobWriter) -> Result<(), Failure>,
    ) -> Result<(), Unpublished> {
        let failed = |error: StoreError| self.failure(&error);
        let lease = self.store.liveness().leases().grant(format!("repair of blob {}", digest.short()));
        lease.protect(digest);
        let mut ingest = Ingest::begin(self.store, lease).map_err(failed)?;
        // That of a lower store is damaged.
        ingest.keep_own_copy(digest);
        let mut writer = ingest.staging().stage(size);
        fill(&mut writer)?;
        let staged = writer.finish().map_err(failed)?;
        if staged.digest != digest {
            return Err(Unpublished::Wrong(staged.digest));
        }
        ingest.add_blob(staged).and_then(|_| ingest.commit_blobs()).map_err(failed)?;
        Ok(())
    }

    /// The reason of a failure, and what could free space if that is missing.
    fn failure(&self, error: &StoreError) -> Failure {
        if !error.is_no_space() {
            return error.to_string();
        }
        let is_over_quota = matches!(error, StoreError::Quota { .. });
        format!("{error} ({})", Relief::of(self.store).hint(is_over_quota))
    }

    /// Syncs the mode, so that it survives a power failure.
    fn make_read_only(&self, digest: Digest) -> Result<(), Failure> {
        self.store.content().make_blob_read_only(digest).map_err(|error| error.to_string())
    }
}
