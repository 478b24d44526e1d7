//! Inventories, deltas, and patches of headers.
//!
//! Invariant: any bytes are refused or are an inventory that is written as the same bytes; any manifest is refused, or the one
//! of a delta, which is read again as it was composed; any patch is refused or makes as many bytes as announced.
#![no_main]

use blobd_store_format::delta::{Delta, patch};
use blobd_store_format::inventory::Inventory;
use blobd_store_format::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(inventory) = Inventory::parse(bytes) {
        assert!(inventory.to_bytes() == bytes);
        assert!(inventory.iter().all(|digest| inventory.has(digest)));
    }
    if let Ok(manifest) = Manifest::parse(bytes.to_vec())
        && let Ok(Some(delta)) = Delta::in_manifest(&manifest)
    {
        let again = delta.compose().expect("it was one before");
        assert!(Delta::in_manifest(&again).expect("it was composed") == Some(delta));
    }
    let [size, base, rest @ ..] = bytes else { return };
    let (base, patch) = rest.split_at(usize::from(*base).min(rest.len()));
    if let Ok(made) = patch::apply(base, patch, u64::from(*size)) {
        assert!(made.len() == usize::from(*size));
    }
    assert!(patch::apply(base, &patch::make(base, patch), patch.len() as u64).expect("it was made") == patch);
});
