//! The details of `df`: the data that models share, unfinished downloads with their users, and the quarantine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use blobd_client::protocol::space::{DiskUsage, QuarantinedBlob, SharedPart, SharedWith};
use blobd_store::{ListingSize, Store, StoreError, index};

use super::{Distinct, Model, counted};
use crate::names::Names;
use crate::ops::{OpError, rfc3339};

const MAX_NAMES: usize = 1000;
/// The most parts that are listed: the names of all models of all parts could be very many.
const MAX_PARTS: usize = 1000;
/// What more models share is not compared for each pair of them: ten thousand models can all have the same license.
const MAX_COMPARED: usize = 256;
/// The most entries in the lists of all models together: a response of about ten megabytes.
const MAX_SHARERS: usize = 100_000;

/// The most memory that the details take for a store of this size, as values and as JSON.
pub(crate) fn detail_bytes(listing: ListingSize, limit: usize) -> usize {
    /// More than an entry takes without its name.
    const ENTRY_BYTES: usize = 128;
    let ListingSize { models, text_bytes } = listing;
    let limit = limit.min(MAX_NAMES).min(models);
    let entries = models.saturating_mul(limit).min(MAX_SHARERS.max(models)).saturating_add(MAX_PARTS * limit);
    let name_bytes = text_bytes.checked_div(models).unwrap_or_default();
    entries.saturating_mul(ENTRY_BYTES + 2 * name_bytes)
}

/// Finds the data that several of the models need.
pub(super) fn shared_parts(
    store: &Store,
    models: &[Model],
) -> Result<Arc<Vec<index::SharedPart>>, StoreError> {
    let files = Distinct::new(models).files();
    counted(store, |catalog| store.content().index().shared_parts(catalog, &files))
}

/// Adds the details to `usage`; `parts` is what the models share. A list has at most `limit` names.
pub(super) fn add(
    store: &Store,
    (models, parts): (&Distinct<'_>, &[index::SharedPart]),
    limit: usize,
    usage: &mut DiskUsage,
) -> Result<(), OpError> {
    let limit = limit.min(MAX_NAMES);
    let all_names: Vec<Vec<String>> = models.models.iter().map(|names| short_names(names)).collect();
    let names: Vec<String> = all_names.iter().filter_map(|names| names.first().cloned()).collect();
    add_sharers(parts, (&names, &all_names), limit, usage);
    usage.shared_parts = parts.iter().take(MAX_PARTS).map(|part| named(part, &names, limit)).collect();
    add_downloads(store, usage)?;
    let quarantined = store.content().quarantined_blobs()?.into_iter().map(|blob| QuarantinedBlob {
        digest: blob.digest,
        bytes: blob.bytes,
        since: rfc3339(UNIX_EPOCH.checked_add(Duration::from_secs(blob.time)).unwrap_or(UNIX_EPOCH)),
    });
    usage.quarantined = quarantined.collect();
    Ok(())
}

fn short_names(models: &[&Model]) -> Vec<String> {
    models.iter().map(|model| model.reference().short()).collect()
}

fn named(part: &index::SharedPart, names: &[String], limit: usize) -> SharedPart {
    let of_part = part.models.iter().filter_map(|place| names.get(*place));
    SharedPart {
        bytes: part.bytes,
        model_count: part.models.len() as u64,
        models: of_part.take(limit).cloned().collect(),
    }
}

/// Adds to each name those that it shares the most with: the other names of its model, then the first names of others.
fn add_sharers(
    parts: &[index::SharedPart],
    (names, all_names): (&[String], &[Vec<String>]),
    limit: usize,
    usage: &mut DiskUsage,
) {
    let most = limit.min((MAX_SHARERS / names.len().max(1)).max(1));
    let mut parts_of: Vec<Vec<&index::SharedPart>> = vec![Vec::new(); names.len()];
    for part in parts {
        for model in &part.models {
            parts_of.get_mut(*model).into_iter().for_each(|parts| parts.push(part));
        }
    }
    let mut rows: BTreeMap<String, _> = usage.models.iter_mut().map(|row| (row.name.clone(), row)).collect();
    for ((model, parts), own_names) in parts_of.into_iter().enumerate().zip(all_names) {
        let others = sharers(model, &parts, names, most);
        for name in own_names {
            let Some(row) = rows.get_mut(name) else { continue };
            let same = own_names.iter().filter(|other| *other != name);
            let same = same.map(|other| SharedWith { name: other.clone(), bytes: row.shared_bytes });
            row.shared_with = same.chain(others.iter().cloned()).take(most).collect();
        }
    }
}

fn sharers(model: usize, parts: &[&index::SharedPart], names: &[String], most: usize) -> Vec<SharedWith> {
    let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
    let (small, large): (Vec<&index::SharedPart>, Vec<_>) =
        parts.iter().partition(|part| part.models.len() <= MAX_COMPARED);
    for part in &small {
        for other in part.models.iter().filter(|other| **other != model) {
            let sum = bytes.entry(*other).or_default();
            *sum = sum.saturating_add(part.bytes);
        }
    }
    // Those that share nothing smaller with this one differ only if large parts overlap, so the first ones are enough.
    for part in &large {
        let others = part.models.iter().filter(|other| **other != model && !bytes.contains_key(other));
        let first: Vec<usize> = others.take(most).copied().collect();
        bytes.extend(first.into_iter().map(|other| (other, 0)));
    }
    for part in &large {
        for (_, sum) in bytes.iter_mut().filter(|(other, _)| part.models.binary_search(other).is_ok()) {
            *sum = sum.saturating_add(part.bytes);
        }
    }
    let named = bytes.into_iter().filter_map(|(other, bytes)| Some((bytes, names.get(other)?)));
    let mut named: Vec<_> = named.collect();
    named.sort_by(|a, b| (b.0, a.1).cmp(&(a.0, b.1)));
    named.into_iter().take(most).map(|(bytes, name)| SharedWith { name: name.clone(), bytes }).collect()
}

/// Adds to the rows of downloads how much has arrived, and who pulls them.
fn add_downloads(store: &Store, usage: &mut DiskUsage) -> Result<(), OpError> {
    if usage.rows.iter().all(|row| row.digest.is_none()) {
        return Ok(());
    }
    let (users, downloads) = (Names::system(), store.content().downloads()?);
    for row in &mut usage.rows {
        let found = downloads.iter().find(|download| Some(download.partial.file) == row.digest);
        row.size = found.and_then(|download| download.size);
        row.received_bytes = found.map(|download| download.received_bytes);
        row.user = found.and_then(|download| download.about.as_ref()).map(|about| users.user_id(about.uid));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_share_the_most_come_first_however_many_share_a_part() {
        let names: Vec<String> = (0..2000).map(|number| format!("m{number:04}")).collect();
        let part = |models: &[usize], bytes| index::SharedPart { models: models.to_vec(), bytes };
        let (all, even): (Vec<usize>, Vec<usize>) = ((0..2000).collect(), (0..2000).step_by(2).collect());
        let parts = [part(&all, 5), part(&even, 100), part(&[0, 9, 1998], 3), part(&[0, 11], 4)];
        let parts: Vec<&index::SharedPart> = parts.iter().collect();
        let found = sharers(0, &parts, &names, 4);
        let found: Vec<_> = found.iter().map(|shared| (shared.name.as_str(), shared.bytes)).collect();
        assert_eq!(found, [("m1998", 108), ("m0002", 105), ("m0004", 105), ("m0006", 105)]);
        let odd = sharers(9, &[parts[0], parts[2]], &names, 3);
        let odd: Vec<_> = odd.iter().map(|shared| (shared.name.as_str(), shared.bytes)).collect();
        assert_eq!(odd, [("m0000", 8), ("m1998", 8), ("m0001", 5)]);
    }
}
