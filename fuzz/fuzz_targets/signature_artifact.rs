//! The manifest of a signature beside a model, and the index of an image layout, which lists such manifests.
//!
//! Invariant: any bytes are refused or name one bundle, of this model and no other; or are an index whose models and signatures
//! are the same after they were written and read again.
#![no_main]

use blobd_store_format::digest::Digest;
use blobd_store_format::index::ManifestIndex;
use blobd_store_format::signature::{Bundle, SignatureArtifact};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The subject of the seeds.
    if let Ok(artifact) = SignatureArtifact::parse(bytes, Digest::of(b"model")) {
        assert_eq!(artifact.bundle().media_type.as_str(), Bundle::MEDIA_TYPE);
        assert!(SignatureArtifact::parse(bytes, Digest::of(b"another")).is_err());
    }
    let Ok((models, signatures)) = ManifestIndex::parse_layout(bytes) else { return };
    let written = ManifestIndex::compose_layout(&models, &signatures).expect("as many as were read");
    assert_eq!(ManifestIndex::parse_layout(&written).expect("it was written here"), (models, signatures));
});
