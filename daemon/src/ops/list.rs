//! `ls`: the models there are.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::response::{ModelList, ModelSummary};
use blobd_store::{Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;

use super::{OpError, damage};

/// Lists every tag. One whose manifest is damaged is listed with what is wrong, not left out.
///
/// # Errors
/// [`blobd_store::StoreError::Io`].
pub fn list(store: &Store) -> Result<ModelList, OpError> {
    let has_pins = store.has_pins();
    let pinned = |tag: &TagSummary| has_pins && store.is_pinned(&tag.reference);
    let summaries = store.summaries()?;
    let mut models: Vec<_> =
        summaries.iter().map(|tag| ModelSummary { pinned: pinned(tag), ..summary(tag) }).collect();
    let damaged = store.damaged();
    if !damaged.is_empty() {
        for (tag, model) in summaries.iter().zip(&mut models) {
            note_damage(store, tag, model, &damaged)?;
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(ModelList { models, read_only: store.read_only_reason().map(ToOwned::to_owned) })
}

/// Looks for damage, which takes reading the model's recipes.
fn note_damage(
    store: &Store,
    tag: &TagSummary,
    model: &mut ModelSummary,
    damaged: &BTreeSet<Digest>,
) -> Result<(), StoreError> {
    match store.manifest(&tag.reference) {
        Ok(manifest) => model.damage = damage::of_model(store, &tag.reference, &manifest, damaged)?,
        // Removed since it was listed; or damaged itself, which the summary says.
        Err(
            StoreError::NoSuchModel { .. } | StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. },
        ) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

fn summary(tag: &TagSummary) -> ModelSummary {
    let manifest = tag.manifest.as_ref();
    ModelSummary {
        name: tag.reference.short(),
        digest: manifest.map_or_else(|_| Digest::of(b""), |manifest| manifest.digest),
        size: manifest.map_or(0, |manifest| manifest.size),
        modified: rfc3339(tag.modified),
        pinned: false,
        origin: tag.origin.clone(),
        damage: manifest.err().cloned(),
    }
}

/// A time as JSON carries it. A file's may be any: one that cannot be written with four digits of year is the nearest
/// that can.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    const END_OF_9999: u64 = 253_402_300_799;
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(END_OF_9999));
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_of_a_file_is_too_strange() {
        let day = Duration::from_secs(86_400);
        assert_eq!(rfc3339(UNIX_EPOCH + day), "1970-01-02T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH - day), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH + 4_000_000 * day), "9999-12-31T23:59:59Z");
    }
}
