//! `history`: what a name has meant, and who changed that.

use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::history::{NameChange, NameHistory};
use blobd_store::{HistoryRow, Store};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};
use crate::names::Names;

/// The history of a name, the newest change first. The name may have been removed.
///
/// # Errors
/// [`blobd_store::StoreError::NoSuchModel`] if there never was a model with this name.
pub fn history(store: &Store, reference: &Reference) -> Result<NameHistory, OpError> {
    let blobd_store::NameHistory { reference, rows, dropped } = store.names().history(reference)?;
    let (users, stored) = (Names::system(), Stored::of(store)?);
    let changes = rows.into_iter().map(|row| stored.complete(change(row, &users))).collect();
    Ok(NameHistory { name: reference.short(), changes, dropped })
}

fn change(row: HistoryRow, users: &Names) -> NameChange {
    match row {
        HistoryRow::Unrecorded(digest) => NameChange { digest, ..NameChange::default() },
        HistoryRow::Recorded(entry) => NameChange {
            time: Some(rfc3339(entry.time)),
            uid: Some(entry.actor.uid),
            user: users.name_of(entry.actor.uid),
            verb: Some(entry.actor.verb.name().to_owned()),
            digest: entry.digest,
            origin: entry.origin,
            ..NameChange::default()
        },
    }
}

/// The most names in one list. A manifest can have many thousands, and a history names it many times.
const MAX_NAMES: usize = 100;

/// The manifests that the store has now.
struct Stored {
    names: BTreeMap<Digest, Vec<String>>,
    trashed: BTreeSet<Digest>,
}

impl Stored {
    fn of(store: &Store) -> Result<Self, OpError> {
        let mut names: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for tag in store.names().all_summaries()? {
            if let Ok(manifest) = &tag.manifest {
                names.entry(manifest.digest).or_default().push(tag.reference.short());
            }
        }
        // A damaged record in the trash is reported by other verbs.
        let trash = store.names().trash().unwrap_or_default();
        Ok(Self { names, trashed: trash.into_iter().map(|trashed| trashed.manifest.digest()).collect() })
    }

    fn complete(&self, change: NameChange) -> NameChange {
        let Some(digest) = change.digest else { return change };
        let names = self.names.get(&digest).into_iter().flatten();
        let stored_as = names.take(MAX_NAMES).cloned().collect();
        NameChange { stored_as, in_trash: self.trashed.contains(&digest), ..change }
    }
}
