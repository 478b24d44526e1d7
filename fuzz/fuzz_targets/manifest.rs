//! Manifests.
//!
//! Invariant: any bytes are refused or make a manifest that keeps them unchanged under their own
//! digest, has at least one layer and one size per digest, names every file it keeps alive, and
//! can be written again in Ollama's form with the same files.
#![no_main]

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(manifest) = Manifest::parse(bytes.to_vec()) else { return };
    assert_eq!(manifest.raw(), bytes);
    assert_eq!(manifest.digest(), Digest::of(bytes));
    assert!((1..=Manifest::MAX_LAYERS).contains(&manifest.layers().len()));

    let mut sizes = BTreeMap::new();
    let mut sum = 0_u128;
    for file in manifest.files() {
        assert_eq!(*sizes.entry(file.digest).or_insert(file.size), file.size, "one digest, two sizes");
        sum += u128::from(file.size);
        // A layer of tensors has a known component; asking must not panic for any media type.
        assert!(!file.media_type.holds_tensors() || file.media_type.component().len() <= "projector".len());
    }
    assert_eq!(u128::from(manifest.size()), sum);
    assert!(sizes.into_keys().eq(manifest.digests()));

    let again = Manifest::compose(manifest.config().clone(), manifest.layers().to_vec());
    let again = again.expect("its files were accepted before");
    assert!(again.files().eq(manifest.files()));
});
