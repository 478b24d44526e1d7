//! Tensor indexes, and lists of what refers to a manifest.
//!
//! Invariant: any bytes are refused or make an index with recipes, also as the layers of a model's own manifest, or a list
//! whose candidates are short; and every list takes an index, which is then a candidate, once.
#![no_main]

use blobd_store_format::artifact::Referrers;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::tensor_index::TensorIndex;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The subject of the seeds.
    let subject = Digest::of(b"model");
    if let Ok(index) = TensorIndex::parse(bytes, subject) {
        assert!(!index.is_empty());
        if let Ok(manifest) = Manifest::parse(bytes.to_vec()) {
            assert!(TensorIndex::in_manifest(&manifest) == index);
        }
    }
    let Ok(list) = Referrers::parse(bytes, &TensorIndex::KIND) else { return };
    assert!(list.candidates().iter().all(|candidate| candidate.size <= TensorIndex::MAX_BYTES));
    let own = Descriptor {
        media_type: MediaType::new(MediaType::OCI_MANIFEST),
        digest: Digest::of(b"index"),
        size: 5,
    };
    let Some(longer) = Referrers::with_artifact(Some(bytes), &TensorIndex::KIND, &own).expect("it is a list")
    else {
        return;
    };
    let longer_list = Referrers::parse(&longer, &TensorIndex::KIND).expect("it was a list before");
    assert!(longer_list.candidates().contains(&own));
    assert!(
        Referrers::with_artifact(Some(&longer), &TensorIndex::KIND, &own).expect("it is a list").is_none()
    );
});
