//! The trash: models removed by `rm --keep`, and models whose names other models have taken. A record contains the
//! manifest, byte for byte, and protects the files of the model from collection until it expires.
//!
//! A record is named by the digest of its own content, so that damage is detected. Like a manifest, a record that
//! cannot be read stops collections.
//!
//! A record with a removal time in the future was written with a wrong clock. Its time is counted from when it is first
//! seen, so that it expires neither years later nor too early.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};
use tracing_mutex::stdsync::Mutex;

use crate::ledger::charge_limit::{Account, unix_nanos};
use crate::names::Names;
use crate::names::records::NameOrigin;
use crate::root::Root;
use crate::{StoreError, lock};

#[derive(Clone, Debug)]
pub struct TrashedModel {
    /// The record's name.
    pub record: Digest,
    pub reference: Reference,
    pub manifest: Manifest,
    pub removed: SystemTime,
    /// When it may be collected.
    pub expires: SystemTime,
    pub account: Option<Account>,
    /// Where the tag's content came from, and what updated it.
    pub origin: NameOrigin,
    /// Whether another model has taken its name. Such a model is deleted when space is needed.
    pub displaced: bool,
}

impl TrashedModel {
    pub(crate) fn is_expired(&self, now: SystemTime) -> bool {
        self.expires <= now
    }
}

/// A model whose tag now points to another manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Displaced {
    pub reference: Reference,
    /// The content of the manifest that the tag pointed to, which may be damaged.
    pub raw_manifest: Vec<u8>,
    /// Until when the trash keeps the model; `None` if it does not.
    pub kept_until: Option<SystemTime>,
}

impl Displaced {
    pub fn manifest(&self) -> Option<Manifest> {
        Manifest::parse(self.raw_manifest.clone()).ok()
    }
}

/// When records with a removal time in the future were first seen. Forgotten, and so kept longer, at a restart.
#[derive(Debug, Default)]
pub(crate) struct FutureRecords(Mutex<BTreeMap<Digest, SystemTime>>);

impl FutureRecords {
    fn expiry(
        &self,
        record: Digest,
        removed: SystemTime,
        expires: SystemTime,
        now: SystemTime,
    ) -> SystemTime {
        if removed <= now {
            return expires;
        }
        let mut seen = lock(&self.0);
        let seen = seen.entry(record).or_insert(now);
        *seen = now.min(*seen);
        let keep = expires.duration_since(removed).unwrap_or_default();
        seen.checked_add(keep).map_or(expires, |corrected| corrected.min(expires))
    }

    fn forget(&self, record: Digest) {
        lock(&self.0).remove(&record);
    }
}

/// Times are nanoseconds since 1970, so that two removals within a second have an order.
#[derive(Serialize, Deserialize)]
struct Record {
    reference: Reference,
    manifest: String,
    removed: u64,
    expires: u64,
    /// Absent in records of earlier versions. The history of the name may forget it, or have it for another model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    account: Option<Account>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name_origin: Option<NameOrigin>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    displaced: bool,
}

impl Names {
    /// Adds a model to the trash, durably; returns when it expires. Its tag may be removed after that.
    pub fn add_to_trash(
        &self,
        reference: &Reference,
        manifest: &Manifest,
        keep: Duration,
    ) -> Result<SystemTime, StoreError> {
        self.add_record(reference, manifest, keep, false)
    }

    /// Adds a model that loses its tag, for as long as the policy says. If there is no space for the record, space is
    /// needed, and the model is not kept.
    pub(crate) fn keep_displaced(&self, displaced: &mut Displaced) -> Result<(), StoreError> {
        let keep = self.ledger.space_policy().keep_displaced;
        let Some(manifest) = displaced.manifest().filter(|_| !keep.is_zero()) else { return Ok(()) };
        match self.add_record(&displaced.reference, &manifest, keep, true) {
            Err(error) if error.is_no_space() => {
                tracing::warn!(
                    "{}: replaced, and not kept in the trash: {error}",
                    displaced.reference.short()
                );
            }
            kept => displaced.kept_until = Some(kept?),
        }
        Ok(())
    }

    fn add_record(
        &self,
        reference: &Reference,
        manifest: &Manifest,
        keep: Duration,
        displaced: bool,
    ) -> Result<SystemTime, StoreError> {
        let removed = SystemTime::now();
        // A time that cannot be represented becomes the latest one that can.
        let expires = time(unix_nanos(removed.checked_add(keep).unwrap_or(time(u64::MAX))));
        let record = Record {
            reference: reference.clone(),
            // JSON is UTF-8, and a manifest has been parsed.
            manifest: String::from_utf8_lossy(manifest.raw()).into_owned(),
            removed: unix_nanos(removed),
            expires: unix_nanos(expires),
            account: self.account_of(reference, manifest.digest()),
            name_origin: Some(self.name_origin(reference, manifest.digest())),
            displaced,
        };
        let directory = Path::new(layout::TRASH);
        let json = StoreError::encode(&record, directory)?;
        self.content.create_directories(directory)?;
        self.ledger.write_lone_record(&layout::trashed(Digest::of(&json)), &json)?;
        self.ledger.note_charges_changed();
        self.content.disk.sync_dir(directory)?;
        Ok(expires)
    }

    /// The models in the trash, expired ones included, ordered by name. A damaged record and any other file are errors.
    pub fn trash(&self) -> Result<Vec<TrashedModel>, StoreError> {
        let Some(directory) = self.content.root.find_directory(Path::new(layout::TRASH))? else {
            return Ok(Vec::new());
        };
        let mut models = Vec::new();
        for entry in directory.entries()? {
            let name = entry?.name;
            match name.to_str().and_then(layout::parse_recipe_name) {
                Some(record) => models.extend(self.trashed(record)?),
                None => return Err(StoreError::ForeignFile { path: directory.place.join(name) }),
            }
        }
        models.sort_by(|a, b| (&a.reference, a.removed).cmp(&(&b.reference, b.removed)));
        Ok(models)
    }

    /// Removes a record, durably; returns the bytes freed. Blobs that it needed may be deleted only after this.
    pub fn remove_from_trash(&self, record: Digest) -> Result<Option<u64>, StoreError> {
        let freed = self.ledger.remove_record(&layout::trashed(record))?;
        self.ledger.note_charges_changed();
        self.content.disk.sync_dir(Path::new(layout::TRASH))?;
        self.future_records.forget(record);
        Ok(freed)
    }

    pub(crate) fn trashed_bytes(&self, record: Digest) -> Result<u64, StoreError> {
        self.content.root.allocated_bytes(&layout::trashed(record))
    }

    /// `None` if it was just removed.
    fn trashed(&self, record: Digest) -> Result<Option<TrashedModel>, StoreError> {
        let path = layout::trashed(record);
        let Some(json) = self.content.root.read_limited(&path, MAX_BYTES)? else { return Ok(None) };
        let damaged = |what: String| StoreError::Trash { path: self.content.root.full(&path), what };
        if Digest::of(&json) != record {
            return Err(damaged("its content does not have the digest in its name".to_owned()));
        }
        let parsed: Record = serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
        let manifest =
            Manifest::parse(parsed.manifest.into_bytes()).map_err(|error| damaged(error.to_string()))?;
        let (removed, expires) = (time(parsed.removed), time(parsed.expires));
        let expires = self.future_records.expiry(record, removed, expires, SystemTime::now());
        let account = parsed.account.or_else(|| self.account_of(&parsed.reference, manifest.digest()));
        let origin =
            parsed.name_origin.unwrap_or_else(|| self.name_origin(&parsed.reference, manifest.digest()));
        let (reference, displaced) = (parsed.reference, parsed.displaced);
        Ok(Some(TrashedModel { record, reference, manifest, removed, expires, account, origin, displaced }))
    }
}

/// In a JSON string, each byte of the manifest takes at most six.
const MAX_BYTES: u64 = Manifest::MAX_BYTES * 6 + 4096;

/// The names of the models in the trash, in order, as far as they can be read.
pub(crate) fn names(root: &Root) -> Vec<Reference> {
    let records = root.parsed_names(layout::TRASH, layout::parse_recipe_name).unwrap_or_default();
    let name = |record: Digest| {
        let json = root.read_limited(&layout::trashed(record), MAX_BYTES).ok()??;
        Some(serde_json::from_slice::<Record>(&json).ok()?.reference)
    };
    let mut names: Vec<_> = records.into_iter().filter_map(name).collect();
    names.sort();
    names.dedup();
    names
}

fn time(unix_nanos: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_nanos(unix_nanos)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86400);

    #[test]
    fn record_with_a_future_time_is_kept_its_full_time_from_when_it_is_first_seen() {
        let (records, record) = (FutureRecords::default(), Digest::of(b"record"));
        let now = UNIX_EPOCH + 20_000 * DAY;
        let expiry = |removed, expires, now| records.expiry(record, removed, expires, now);
        assert_eq!(expiry(now, now + 7 * DAY, now), now + 7 * DAY);
        let (removed, expires) = (now + 30_000 * DAY, now + 30_007 * DAY);
        assert_eq!(expiry(removed, expires, now), now + 7 * DAY);
        assert_eq!(expiry(removed, expires, now + DAY), now + 7 * DAY, "it was seen a day ago");
        assert_eq!(expiry(removed, expires, now - DAY), now + 6 * DAY, "the clock was set back again");
        assert_eq!(expiry(removed, expires, removed), expires, "the clock reached the time in the record");
    }

    #[test]
    fn times_of_a_record_do_not_overflow() {
        let (records, record) = (FutureRecords::default(), Digest::of(b"record"));
        let now = UNIX_EPOCH + 20_000 * DAY;
        let end = time(u64::MAX);
        for (removed, expires) in [(end, end), (end, UNIX_EPOCH), (UNIX_EPOCH, end), (now + DAY, end)] {
            assert!(records.expiry(record, removed, expires, now) <= expires);
        }
    }
}
