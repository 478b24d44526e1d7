//! Signatures of models: a file under `signatures/` for each manifest that has some. They are kept as long as the manifest,
//! and belong to it under all its names.

use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::signature::Bundle;
use serde::{Deserialize, Serialize};

use crate::names::Names;
use crate::root::Root;
use crate::{StoreError, lock};

/// The content of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Signatures {
    /// The bundles as they were received, the latest last.
    bundles: Vec<String>,
}

impl Signatures {
    /// As many as a model gets from its publisher and a site's people.
    const MAX_COUNT: usize = 8;
    /// A longer file is not read. Quotation marks take two bytes in it, and most of a bundle is base64.
    const MAX_BYTES: u64 = (Bundle::MAX_BYTES * (Self::MAX_COUNT + 1)) as u64;
}

impl Names {
    /// The bundles with a model's signatures, the latest last. They were checked when they were added, and not since.
    pub fn signatures(&self, manifest: Digest) -> Result<Vec<String>, StoreError> {
        let signatures = |root: &Root| {
            let found = signatures_in(root, manifest)?;
            Ok((!found.is_empty()).then_some(found))
        };
        let own = signatures(&self.content.root)?;
        Ok(own.or_else(|| self.content.lower.find(signatures)).unwrap_or_default())
    }

    /// Adds a bundle to those of a model, durably. Returns whether it is new. If there are too many, the oldest that
    /// `is_dispensable` says is removed.
    ///
    /// # Errors
    /// [`StoreError::TooManySignatures`] if none is.
    pub fn add_signature(
        &self,
        manifest: Digest,
        bundle: &Bundle,
        is_dispensable: impl Fn(&str) -> bool,
    ) -> Result<bool, StoreError> {
        let _one_at_a_time = lock(&self.signing);
        let mut bundles = self.signatures(manifest)?;
        if bundles.iter().any(|known| known == bundle.text()) {
            return Ok(false);
        }
        if bundles.len() >= Signatures::MAX_COUNT {
            let oldest = bundles.iter().position(|known| is_dispensable(known));
            let most = Signatures::MAX_COUNT;
            bundles.remove(oldest.ok_or(StoreError::TooManySignatures { manifest, most })?);
        }
        bundles.push(bundle.text().to_owned());
        let directory = Path::new(layout::SIGNATURES);
        self.content.create_directories(directory)?;
        let json = StoreError::encode(&Signatures { bundles }, layout::SIGNATURES)?;
        self.ledger.write_lone_record(&layout::signatures(manifest), &json)?;
        self.content.disk.sync_dir(directory)?;
        Ok(true)
    }

    /// The manifests that have signatures.
    pub(crate) fn signed(&self) -> Result<Vec<Digest>, StoreError> {
        self.content.root.parsed_names(layout::SIGNATURES, layout::parse_recipe_name)
    }

    pub(crate) fn remove_signatures(&self, manifest: Digest) -> Result<(), StoreError> {
        self.ledger.remove_record(&layout::signatures(manifest)).map(drop)
    }
}

fn signatures_in(root: &Root, manifest: Digest) -> Result<Vec<String>, StoreError> {
    let path = layout::signatures(manifest);
    let Some(json) = root.read_limited(&path, Signatures::MAX_BYTES)? else { return Ok(Vec::new()) };
    let damaged = |error: serde_json::Error| StoreError::io("parse", root.full(&path))(error.into());
    serde_json::from_slice(&json).map(|Signatures { bundles }| bundles).map_err(damaged)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::signature::{SignedFile, Statement};

    use super::*;
    use crate::testing::new_store;

    fn bundle(content: u8) -> Bundle {
        let file = SignedFile { path: "a".to_owned(), digest: Digest::of(b"a") };
        let payload = Statement::new("m", vec![file]).unwrap().to_json().unwrap();
        Bundle::compose("k", &payload, &[content]).unwrap()
    }

    #[test]
    fn signatures_of_a_manifest_are_kept_in_order_and_the_oldest_dispensable_one_is_replaced() {
        let (_folder, store) = new_store();
        let (manifest, other) = (Digest::of(b"m"), Digest::of(b"n"));
        let add = |content, is_dispensable: &dyn Fn(&str) -> bool| {
            store.names.add_signature(manifest, &bundle(content), is_dispensable)
        };
        let kept = || store.names.signatures(manifest).unwrap();
        for content in 0..8 {
            assert!(add(content, &|_| true).unwrap());
            assert!(!add(content, &|_| true).unwrap(), "it is there already");
        }
        assert_eq!(kept().len(), 8);
        let refused = add(8, &|_| false).unwrap_err();
        assert!(matches!(refused, StoreError::TooManySignatures { most: 8, .. }), "{refused}");
        let first = bundle(0);
        assert!(add(8, &|known| known != first.text()).unwrap());
        let expected: Vec<_> =
            [0, 2, 3, 4, 5, 6, 7, 8].map(|content| bundle(content).text().to_owned()).into();
        assert_eq!(kept(), expected);
        assert!(store.names.signatures(other).unwrap().is_empty());
        assert_eq!(store.names.signed().unwrap(), [manifest]);
        store.names.remove_signatures(manifest).unwrap();
        assert!(kept().is_empty() && store.names.signed().unwrap().is_empty());
    }

    #[test]
    fn damaged_record_is_an_error_and_not_an_unsigned_model() {
        let (_folder, store) = new_store();
        let manifest = Digest::of(b"m");
        store.names.add_signature(manifest, &bundle(1), |_| true).unwrap();
        std::fs::write(store.path(layout::signatures(manifest)), "{").unwrap();
        assert!(store.names.signatures(manifest).is_err());
    }
}
