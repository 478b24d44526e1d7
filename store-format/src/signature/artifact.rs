//! A bundle as an artifact beside a model at a registry, in the form that cosign 3 writes: one layer with the bundle.

use std::collections::BTreeMap;

use super::{Bundle, Statement};
use crate::artifact::{Artifact, ArtifactError, ArtifactKind, Entry};
use crate::descriptor::{Descriptor, MediaType};
use crate::digest::Digest;

/// The manifest of a signature at a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignatureArtifact {
    bundle: Descriptor,
}

impl SignatureArtifact {
    pub const KIND: ArtifactKind = ArtifactKind {
        artifact_type: Bundle::MEDIA_TYPE,
        // Cosign's have 1 KiB.
        max_manifest_bytes: 16 << 10,
        is_single: false,
    };

    /// The descriptor of a bundle as a layer.
    pub fn layer(bundle: &Bundle) -> Descriptor {
        let text = bundle.text().as_bytes();
        let media_type = MediaType::new(Bundle::MEDIA_TYPE);
        Descriptor { media_type, digest: Digest::of(text), size: text.len() as u64 }
    }

    /// The bytes of the manifest of a bundle, which depend on the bundle and the subject only.
    ///
    /// # Errors
    /// [`ArtifactError::Json`] if they cannot be written as JSON.
    pub fn compose(subject: &Descriptor, bundle: &Bundle) -> Result<Vec<u8>, ArtifactError> {
        let annotations = [
            ("dev.sigstore.bundle.content", "dsse-envelope"),
            ("dev.sigstore.bundle.predicateType", Statement::PREDICATE_TYPE),
        ];
        let annotations: BTreeMap<_, _> =
            annotations.map(|(name, value)| (name.to_owned(), value.into())).into();
        let layers = vec![Entry::new(&Self::layer(bundle))];
        Artifact::compose(&Self::KIND, subject, layers, Some(annotations))
    }

    /// Checks the bytes of a signature beside the manifest `subject`.
    ///
    /// # Errors
    /// [`ArtifactError`] if it is of another type or another manifest, or is not one bundle.
    pub fn parse(raw: &[u8], subject: Digest) -> Result<Self, ArtifactError> {
        let layers = Artifact::parse(raw, &Self::KIND, subject)?.layers;
        let found = layers.len();
        let [bundle] =
            <[Entry; 1]>::try_from(layers).map_err(|_layers| ArtifactError::Layers { expected: 1, found })?;
        match bundle.media_type.as_str() == Bundle::MEDIA_TYPE {
            true => Ok(Self { bundle: bundle.into_descriptor() }),
            false => Err(ArtifactError::Kind { expected: Bundle::MEDIA_TYPE }),
        }
    }

    /// The descriptor of the bundle.
    pub const fn bundle(&self) -> &Descriptor {
        &self.bundle
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::manifest::Manifest;
    use crate::signature::SignedFile;

    fn bundle() -> Bundle {
        let file = SignedFile { path: "a".to_owned(), digest: Digest::of(b"a") };
        let payload = Statement::new("m", vec![file]).unwrap().to_json().unwrap();
        Bundle::compose("k", &payload, b"signed").unwrap()
    }

    proptest! {
        #[test]
        fn changed_artifact_is_refused_or_names_one_bundle_of_its_model(
            place in any::<Index>(),
            removed in 0_usize..20,
            added in vec(any::<u8>(), 0..20),
        ) {
            let media_type = MediaType::new(MediaType::OCI_MANIFEST);
            let subject = Descriptor { media_type, digest: Digest::of(b"model"), size: 5 };
            let mut raw = SignatureArtifact::compose(&subject, &bundle()).unwrap();
            let begin = place.index(raw.len());
            let end = (begin + removed).min(raw.len());
            raw.splice(begin..end, added);
            if let Ok(artifact) = SignatureArtifact::parse(&raw, subject.digest) {
                prop_assert_eq!(artifact.bundle().media_type.as_str(), Bundle::MEDIA_TYPE);
                prop_assert!(SignatureArtifact::parse(&raw, Digest::of(b"other")).is_err());
            }
        }
    }

    #[test]
    fn artifact_of_a_bundle_is_a_manifest_that_names_its_subject() {
        let media_type = MediaType::new(MediaType::DOCKER_MANIFEST);
        let subject = Descriptor { media_type, digest: Digest::of(b"model"), size: 5 };
        let raw = SignatureArtifact::compose(&subject, &bundle()).unwrap();
        let parsed = SignatureArtifact::parse(&raw, subject.digest).unwrap();
        assert_eq!(parsed.bundle(), &SignatureArtifact::layer(&bundle()));
        assert_eq!(Manifest::parse(raw.clone()).unwrap().layers(), [parsed.bundle().clone()]);
        let other = SignatureArtifact::parse(&raw, Digest::of(b"other"));
        assert!(matches!(other, Err(ArtifactError::Subject { .. })));
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8(raw.clone()).unwrap().replacen(from, to, 1);
            SignatureArtifact::parse(text.as_bytes(), subject.digest)
        };
        assert!(matches!(
            changed("\"artifactType\":\"application", "\"artifactType\":\"x"),
            Err(ArtifactError::Kind { .. })
        ));
        assert!(matches!(
            changed("\"layers\":[", "\"layers\":[],\"x\":["),
            Err(ArtifactError::Layers { found: 0, .. })
        ));
    }
}
