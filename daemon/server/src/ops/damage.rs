//! Finds the tensors and files of a model that damaged blobs affect.

use std::collections::BTreeSet;

use blobd_store::{Model, Store, StoreError, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::OpError;

#[derive(Debug, Default)]
struct DamagedParts {
    tensors: Vec<String>,
    /// Such as `its template` and `the header of its model`.
    others: BTreeSet<String>,
}

/// Describes a model's damage for `ls`; `None` if it has none. An unreadable recipe is damage too.
pub(super) fn describe(
    store: &Store,
    reference: &Reference,
    manifest: &Manifest,
    damaged: &BTreeSet<Digest>,
) -> Result<Option<String>, StoreError> {
    if damaged.is_empty() {
        return Ok(None);
    }
    let mut parts = DamagedParts::default();
    let mut seen = BTreeSet::new();
    for file in manifest.files().filter(|file| seen.insert(file.digest)) {
        match store.content().stored_file(file) {
            Ok(file) => parts.add(&file, damaged),
            Err(error @ StoreError::Io { .. }) => return Err(error),
            Err(error) => return Ok(Some(error.to_string())),
        }
    }
    Ok(parts.summary().map(|what| format!("{what} damaged: blobd verify --repair {}", reference.short())))
}

/// Fails if any of the requested blobs is damaged. Other blobs of the model may be damaged.
pub(super) fn refuse(store: &Store, model: &Model, requested: &[(Digest, u64)]) -> Result<(), OpError> {
    let mut damaged = store.content().damaged();
    if damaged.is_empty() {
        return Ok(());
    }
    let requested: BTreeSet<Digest> = requested.iter().map(|(digest, _)| *digest).collect();
    damaged.retain(|digest| requested.contains(digest));
    let mut parts = DamagedParts::default();
    model.files.iter().for_each(|file| parts.add(file, &damaged));
    match parts.list() {
        None => Ok(()),
        Some(parts) => Err(OpError::DamagedParts { model: model.reference.short(), parts }),
    }
}

impl DamagedParts {
    fn add(&mut self, file: &StoredFile, damaged: &BTreeSet<Digest>) {
        let component = file.descriptor.media_type.component();
        match &file.recipe {
            Some(recipe) => self.add_split(component, recipe, damaged),
            None if damaged.contains(&file.descriptor.digest) => {
                self.others.insert(format!("its {component}"));
            }
            None => {}
        }
    }

    fn add_split(&mut self, component: &str, recipe: &Recipe, damaged: &BTreeSet<Digest>) {
        let mut left: BTreeSet<Digest> = recipe.digests().intersection(damaged).copied().collect();
        if left.is_empty() {
            return;
        }
        let held =
            recipe.tensors().iter().filter(|tensor| tensor.size > 0 && damaged.contains(&tensor.digest));
        for tensor in held {
            left.remove(&tensor.digest);
            self.tensors.push(tensor.name.into_owned());
        }
        if recipe.header().is_some_and(|(header, _)| left.remove(&header)) {
            self.others.insert(format!("the header of its {component}"));
        }
        if !left.is_empty() {
            self.others.insert(format!("the bytes between the tensors of its {component}"));
        }
    }

    /// For example `3 of its tensors and its template are`.
    fn summary(&self) -> Option<String> {
        let count = self.tensors.len();
        let tensors = (count > 0).then(|| format!("{count} of its tensors"));
        let mut subjects: Vec<String> = tensors.into_iter().chain(self.others.iter().cloned()).collect();
        let is_one = count + self.others.len() == 1;
        let last = subjects.pop()?;
        let verb = if is_one { "is" } else { "are" };
        Some(if subjects.is_empty() {
            format!("{last} {verb}")
        } else {
            format!("{} and {last} {verb}", subjects.join(", "))
        })
    }

    fn list(&self) -> Option<String> {
        const MAX_NAMED: usize = 3;
        let tensors = self.tensors.iter().map(|name| format!("tensor {name:?}"));
        let all: Vec<String> = self.others.iter().cloned().chain(tensors).collect();
        let named = all.get(..MAX_NAMED).unwrap_or(&all).join(", ");
        match all.len() {
            0 => None,
            count if count > MAX_NAMED => Some(format!("{named} and {} more", count - MAX_NAMED)),
            _ => Some(named),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(tensors: usize, others: &[&str]) -> DamagedParts {
        DamagedParts {
            tensors: (0..tensors).map(|index| format!("blk.{index}")).collect(),
            others: others.iter().map(|other| (*other).to_owned()).collect(),
        }
    }

    #[test]
    fn summary_counts_tensors_and_names_files() {
        for (tensors, others, text) in [
            (1, &[][..], "1 of its tensors is"),
            (3, &[], "3 of its tensors are"),
            (0, &["its template"], "its template is"),
            (1, &["its template"], "1 of its tensors and its template are"),
            (2, &["its license", "its template"], "2 of its tensors, its license and its template are"),
        ] {
            assert_eq!(parts(tensors, others).summary().as_deref(), Some(text));
        }
        assert_eq!(parts(0, &[]).summary(), None);
    }

    #[test]
    fn list_names_the_first_few() {
        assert_eq!(parts(0, &[]).list(), None);
        assert_eq!(parts(1, &["its config"]).list().unwrap(), "its config, tensor \"blk.0\"");
        assert_eq!(
            parts(5, &[]).list().unwrap(),
            "tensor \"blk.0\", tensor \"blk.1\", tensor \"blk.2\" and 2 more"
        );
    }
}
