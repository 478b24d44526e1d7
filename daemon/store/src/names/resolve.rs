//! Which stored model a reference means: names that are complete, IDs, and names without a tag.

use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::{few, similar};

use crate::StoreError;
use crate::names::Names;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Read,
    Change {
        /// Whether an error has similar names, which takes much longer to find than the name.
        is_advised: bool,
    },
}

impl Names {
    /// The stored tag that a reader means: the one of this name, ignoring case; if the tag was left out, the only one
    /// that the model has; or the model whose ID, the digest of its manifest, begins with these digits.
    pub fn resolve(&self, reference: &Reference) -> Result<Reference, StoreError> {
        self.resolve_for(reference, Purpose::Read)
    }

    /// Like [`Self::resolve`] for a change: no tag may be left out, and an ID must belong to one name.
    pub fn resolve_for_change(&self, reference: &Reference) -> Result<Reference, StoreError> {
        self.resolve_for(reference, Purpose::Change { is_advised: true })
    }

    /// The same for one of many names: an error has no similar names.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub fn resolve_for_change_without_advice(&self, reference: &Reference) -> Result<Reference, StoreError> {
        self.resolve_for(reference, Purpose::Change { is_advised: false })
    }

    fn resolve_for(&self, reference: &Reference, purpose: Purpose) -> Result<Reference, StoreError> {
        let found = self.resolve_anywhere(reference, purpose).map_err(|error| self.or_hidden(error))?;
        match self.lower_place_of(&found)? {
            Some(store) if purpose != Purpose::Read => {
                Err(StoreError::InLowerStore { name: found.short(), store })
            }
            _ => Ok(found),
        }
    }

    /// Says that a model which was not found may be in a lower store that cannot be used.
    fn or_hidden(&self, error: StoreError) -> StoreError {
        match (error, self.content.lower.left_out()) {
            (StoreError::NoSuchModel { name, similar }, Some((store, problem))) => {
                StoreError::MayBeHidden { name, similar, store, problem }
            }
            (error, _) => error,
        }
    }

    fn resolve_anywhere(&self, reference: &Reference, purpose: Purpose) -> Result<Reference, StoreError> {
        let Some(stored) = self.stored_case_anywhere(reference)? else {
            return self.infer(reference, purpose);
        };
        let pinned_elsewhere = match reference.digest() {
            Some(digest) => self.manifest(&stored)?.digest() != digest,
            None => false,
        };
        match pinned_elsewhere {
            true => Err(StoreError::NoSuchModel { name: reference.short(), similar: Vec::new() }),
            false => Ok(stored),
        }
    }

    /// The model meant by a reference that is not the name of one.
    fn infer(&self, reference: &Reference, purpose: Purpose) -> Result<Reference, StoreError> {
        if purpose == Purpose::Read && reference.omits_tag() && reference.digest().is_none() {
            let tags = self.all_tags()?;
            let mut siblings = tags.iter().filter(|tag| reference.is_sibling_of(tag));
            if let (Some(only), None) = (siblings.next(), siblings.next()) {
                return Ok(only.clone());
            }
        }
        if let Some(id) = reference.id_prefix()
            && let Some(found) = self.model_with_id(&id, purpose)?
        {
            return Ok(found);
        }
        let similar = match purpose {
            Purpose::Change { is_advised: false } => Vec::new(),
            _ => similar(reference, &self.all_tags()?),
        };
        Err(StoreError::NoSuchModel { name: reference.short(), similar })
    }

    fn model_with_id(&self, id: &str, purpose: Purpose) -> Result<Option<Reference>, StoreError> {
        let has_id = |digest: Digest| digest.to_hex().starts_with(id);
        let (mut names, mut digests) = (Vec::new(), BTreeSet::new());
        for tag in self.all_summaries()? {
            let digest = tag.manifest.as_ref().ok().map(|manifest| manifest.digest);
            if let Some(digest) = digest.filter(|digest| has_id(*digest)) {
                names.push((tag.reference.clone(), digest));
                digests.insert(digest);
            }
        }
        match names.as_slice() {
            [] => Ok(None),
            [(only, _)] => Ok(Some(only.clone())),
            [(first, _), ..] if digests.len() == 1 && purpose == Purpose::Read => Ok(Some(first.clone())),
            _ => {
                let named =
                    names.iter().map(|(name, digest)| format!("{} ({})", name.short(), digest.short()));
                Err(StoreError::AmbiguousId { id: id.to_owned(), names: few(named.collect()) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::Store;
    use crate::testing::{begin, manifest, name, new_store};

    fn add(store: &Arc<Store>, reference: &str, content: &str) -> String {
        let mut ingest = begin(store);
        ingest.add_bytes(content.as_bytes()).unwrap();
        let manifest = manifest(&[content.as_bytes()]);
        ingest.commit(&name(reference), &manifest, None).unwrap();
        manifest.digest().to_hex()
    }

    fn found(store: &Store, text: &str) -> String {
        store.names.resolve(&name(text)).unwrap().short()
    }

    fn similar_to(store: &Store, text: &str) -> Vec<String> {
        match store.names.resolve(&name(text)) {
            Err(StoreError::NoSuchModel { similar, .. }) => similar,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn name_with_a_digest_means_that_version_and_no_other() {
        let (_folder, store) = new_store();
        let (present, other) = (add(&store, "minilm:q4", "a"), add(&store, "other", "b"));
        assert_eq!(found(&store, &format!("minilm:q4@sha256:{present}")), "minilm:q4");
        assert!(similar_to(&store, &format!("minilm:q4@sha256:{other}")).is_empty());
    }

    #[test]
    fn only_tag_of_a_model_is_meant_by_readers_and_not_by_changes() {
        let (_folder, store) = new_store();
        add(&store, "minilm:q4", "a");
        assert_eq!(found(&store, "minilm"), "minilm:q4");
        assert_eq!(found(&store, "MiniLM"), "minilm:q4");
        assert!(store.names.resolve(&name("minilm:latest")).is_err(), "a tag that is given is meant");
        assert!(store.names.resolve(&name("me/minilm")).is_err());
        let refused = store.names.resolve_for_change(&name("minilm"));
        assert!(matches!(refused, Err(StoreError::NoSuchModel { similar, .. }) if similar == ["minilm:q4"]));
        add(&store, "minilm:q8", "b");
        assert_eq!(similar_to(&store, "minilm"), ["minilm:q4", "minilm:q8"]);
        add(&store, "minilm", "c");
        assert_eq!(found(&store, "minilm"), "minilm:latest");
    }

    #[test]
    fn beginning_of_an_id_is_its_model_unless_a_model_has_that_name() {
        let (_folder, store) = new_store();
        let id = add(&store, "a:b", "a");
        for text in [&id[..12], &id[..6], &id, &format!("sha256:{id}"), &id[..8].to_ascii_uppercase()] {
            assert_eq!(found(&store, text), "a:b", "{text}");
            assert_eq!(store.names.resolve_for_change(&name(text)).unwrap().short(), "a:b");
        }
        assert!(store.names.resolve(&name(&id[..3])).is_err(), "three digits are too few");
        assert!(store.names.resolve(&name(&format!("{}:latest", &id[..12]))).is_err());
        add(&store, &id[..8], "other");
        assert_eq!(found(&store, &id[..8]), format!("{}:latest", &id[..8]));
    }

    #[test]
    fn id_with_two_names_can_be_read_but_not_changed() {
        let (_folder, store) = new_store();
        let id = add(&store, "a", "same");
        add(&store, "b", "same");
        assert_eq!(found(&store, &id[..12]), "a:latest");
        match store.names.resolve_for_change(&name(&id[..12])) {
            Err(StoreError::AmbiguousId { names, .. }) => assert_eq!(names.len(), 2),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn beginning_of_two_ids_lists_both() {
        let (_folder, store) = new_store();
        let mut beginnings = BTreeMap::new();
        let twice = (0..).map(|number| number.to_string()).find_map(|content| {
            let start = manifest(&[content.as_bytes()]).digest().to_hex()[..4].to_owned();
            let other = beginnings.insert(start.clone(), content.clone())?;
            Some((start, other, content))
        });
        let (start, first, second) = twice.unwrap();
        add(&store, "first", &first);
        assert_eq!(found(&store, &start), "first:latest");
        add(&store, "second", &second);
        assert!(matches!(store.names.resolve(&name(&start)), Err(StoreError::AmbiguousId { .. })));
    }
}
