//! Repairs damaged blobs, from these sources in this order:
//!
//! 1. a lower store, whose blob is used where it is;
//! 2. a copy in quarantine, which can be right if the page cache still has what the disk has lost;
//! 3. a file that is stored whole beside its recipe;
//! 4. the registry of a model, which sends only the ranges of the file that contain the blob.
//!
//! The bytes are hashed before they are published.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::upkeep::{CorruptBlob, VerifyProgress};
use blobd_registry::RegistryClient;
use blobd_store::{BlobWriter, FileReader, Ingest, Store, StoreError};
use blobd_store_format::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::survey::{Damage, Finding, Need, Survey};
use crate::ops::space::space_hint;
use crate::ops::{CallerPolicy, send_progress};

mod blob_part;
mod origin;

use blob_part::{BlobPart, parts_of_blob};

pub(super) struct Repair<'r> {
    pub(super) store: &'r Arc<Store>,
    pub(super) registry: &'r RegistryClient,
    pub(super) handle: &'r Handle,
    pub(super) policy: &'r CallerPolicy,
    pub(super) events: &'r Sender<VerifyProgress>,
}

/// Why a blob could not be repaired, for the user.
type Failure = String;

#[derive(Debug, thiserror::Error)]
enum Unpublished {
    /// The digest is not the blob's.
    #[error("the received bytes have the digest {0}")]
    Wrong(Digest),
    #[error("{0}")]
    Failed(Failure),
}

impl From<Failure> for Unpublished {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Repair<'_> {
    /// Repairs a finding if possible, and records the outcome in its entry. `survey` must cover all models: their recipes
    /// say where in their files a blob is.
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
            (Damage::Writable, _) => {
                let made = self.store.content().make_blob_read_only(finding.digest);
                made.map(|()| None).map_err(|error| error.to_string())
            }
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
        // The copy in a lower store, if there is one, is damaged.
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

    /// The reason of a failure, with a hint if disk space is missing.
    fn failure(&self, error: &StoreError) -> Failure {
        if !error.is_no_space() {
            return error.to_string();
        }
        let is_over_quota = matches!(error, StoreError::Quota { .. });
        format!("{error} ({})", space_hint(self.store, is_over_quota))
    }

    /// A copy in quarantine may be right if the page cache still has what the disk has lost, or if the machine has read it
    /// wrong. So it is read through the page cache.
    fn take_from_quarantine(&self, digest: Digest, need: &Need) -> bool {
        let copies = self.store.content().quarantined_copies(digest).unwrap_or_default();
        copies.into_iter().any(|time| {
            let copy = self.store.content().open_quarantined(digest, time, need.size);
            let copy = copy.map_err(|error| error.to_string());
            let copied = copy.and_then(|copy| self.copy(digest, need, copy, &[BlobPart::whole(need.size)]));
            self.is_ok_or_log(&copied, digest, "its copy in quarantine")
        })
    }

    /// A file that was stored whole before it was split contains all of its blobs.
    fn take_from_whole_file(&self, digest: Digest, need: &Need) -> bool {
        let content = self.store.content();
        let split: BTreeSet<Digest> = content.recipes().unwrap_or_default().into_iter().collect();
        let whole = content.blobs().unwrap_or_default();
        whole.into_iter().filter(|file| split.contains(file)).any(|file| {
            let Ok(Some(recipe)) = content.recipe(file) else { return false };
            let parts = parts_of_blob(&recipe, digest);
            // A compressed file is not what its recipe rebuilds.
            if parts.is_empty() || recipe.unpacked().is_some() {
                return false;
            }
            let _reading = content.begin_internal_read(file);
            let whole = FileReader::for_blob(content, file, recipe.size());
            self.is_ok_or_log(&self.copy(digest, need, whole, &parts), digest, "the whole file")
        })
    }

    fn copy(
        &self,
        digest: Digest,
        need: &Need,
        mut file: FileReader<'_>,
        parts: &[BlobPart],
    ) -> Result<(), Failure> {
        let published = self.publish(digest, need.size, |writer| {
            let copied = parts.iter().try_for_each(|part| copy(&mut file, *part, writer));
            copied.map_err(|error| self.failure(&error))
        });
        published.map_err(|unpublished| unpublished.to_string())
    }

    fn is_ok_or_log(&self, copied: &Result<(), Failure>, digest: Digest, source: &str) -> bool {
        if let Err(failure) = copied {
            tracing::debug!("blob {digest}: not repaired from {source}: {failure}");
        }
        copied.is_ok()
    }
}

fn copy(file: &mut FileReader<'_>, part: BlobPart, writer: &mut BlobWriter) -> Result<(), StoreError> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let mut offset = part.offset_in_file;
    while offset < part.end_in_file() {
        let end = offset.saturating_add(CHUNK_BYTES).min(part.end_in_file());
        writer.append(&file.read_range(offset..end)?)?;
        offset = end;
    }
    Ok(())
}
