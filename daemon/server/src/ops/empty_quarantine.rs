//! `gc --quarantine`: deletes the damaged blobs that were put aside.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

use blobd_client::protocol::response::{GcItem, GcReason, GcReport, QuarantinedItem};
use blobd_store::{QuarantinedBlob, Store};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;

use super::OpError;
use super::time::rfc3339;

/// Deletes every copy in quarantine, or in a dry run lists them. A copy of a blob that a model needs and of which the
/// store has no other one leaves an empty file, so that the damage stays known.
///
/// # Errors
/// [`blobd_store::StoreError`] when a manifest, recipe or trash record cannot be read: then it is unknown which blobs
/// are needed, and nothing is deleted.
pub(super) fn empty_quarantine(store: &Store, dry_run: bool) -> Result<GcReport, OpError> {
    let (copies, markers) = (store.content().quarantined_blobs()?, store.content().quarantine_markers()?);
    let users = Users::of(store, copies.iter().chain(&markers))?;
    let mut marked = BTreeSet::new();
    for marker in &markers {
        if users.need(store, marker.digest)? {
            marked.insert(marker.digest);
        } else if !dry_run {
            store.content().delete_quarantined(marker, false)?;
        }
    }
    let mut deleted = Vec::with_capacity(copies.len());
    for copy in &copies {
        let is_needed = users.need(store, copy.digest)?;
        if !dry_run {
            // One marker is enough.
            store.content().delete_quarantined(copy, is_needed && marked.insert(copy.digest))?;
        }
        deleted.push(item(copy, users.models(copy.digest), is_needed));
    }
    if !dry_run {
        store.content().sync_quarantine()?;
    }
    let freed_bytes = deleted.iter().map(|item| item.size).fold(0, u64::saturating_add);
    Ok(GcReport { dry_run, deleted, freed_bytes, ..GcReport::default() })
}

fn item(copy: &QuarantinedBlob, models: Vec<String>, is_needed: bool) -> GcItem {
    let since = UNIX_EPOCH.checked_add(Duration::from_secs(copy.time)).unwrap_or(UNIX_EPOCH);
    GcItem {
        digest: Some(copy.digest),
        size: copy.bytes,
        reason: GcReason::Quarantined,
        of: None,
        quarantined: Some(QuarantinedItem { since: rfc3339(since), models, is_needed }),
    }
}

/// The models that consist of certain blobs.
#[derive(Debug)]
struct Users(BTreeMap<Digest, BTreeSet<String>>);

impl Users {
    fn of<'b>(store: &Store, blobs: impl Iterator<Item = &'b QuarantinedBlob>) -> Result<Self, OpError> {
        let mut users = Self(blobs.map(|blob| (blob.digest, BTreeSet::new())).collect());
        if users.0.is_empty() {
            return Ok(users);
        }
        for reference in store.names().tags()?.references {
            users.add(store, &store.names().manifest(&reference)?, &reference.short())?;
        }
        for trashed in store.names().trash()? {
            users.add(store, &trashed.manifest, &format!("{} in the trash", trashed.reference.short()))?;
        }
        Ok(users)
    }

    fn add(&mut self, store: &Store, manifest: &Manifest, name: &str) -> Result<(), OpError> {
        for file in manifest.files() {
            let outline = store.content().recipe_outline(file.digest)?;
            let blobs = outline.map(|outline| outline.digests().to_vec()).unwrap_or_default();
            for blob in blobs.into_iter().chain([file.digest]) {
                if let Some(models) = self.0.get_mut(&blob) {
                    models.insert(name.to_owned());
                }
            }
        }
        Ok(())
    }

    fn models(&self, blob: Digest) -> Vec<String> {
        self.0.get(&blob).into_iter().flatten().cloned().collect()
    }

    /// Whether a model consists of the blob and the store has no other copy.
    fn need(&self, store: &Store, blob: Digest) -> Result<bool, OpError> {
        let is_used = self.0.get(&blob).is_some_and(|models| !models.is_empty());
        Ok(is_used && store.content().blob_size(blob)?.is_none())
    }
}
