//! The mark phase: finds what is needed, from the manifests and recipes on disk. It does not use the index.
//!
//! For a million blobs it takes seconds and some 40 MiB: the candidates are one sorted list, and of each recipe only
//! the digests are read.

use std::collections::{BTreeSet, HashSet};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reach::{Marks, mark_listed, reachable};
use blobd_store_format::recipe::RecipeOutline;

use super::Node;
use super::walk::{Snapshot, references, roots_of};
use crate::StoreError;
use crate::liveness::Liveness;
use crate::sys::give_back_memory;

/// Marks which of `candidates` are needed by tags, the trash or downloads. Fails on the first unreadable recipe.
pub(super) fn mark(
    store: &Liveness,
    candidates: Vec<Node>,
    snapshot: &Snapshot,
) -> Result<Marks<Node>, StoreError> {
    let roots = snapshot.needed();
    let marks = with_read_ahead(store, &recipes_in_order(&roots), |ahead| {
        mark_listed(candidates, roots, |node| references(node, |file| ahead.outline(file)))
    });
    give_back_memory();
    marks
}

/// The recipes among the roots, last first, as the mark phase reads them.
fn recipes_in_order(roots: &[Node]) -> Vec<Digest> {
    let mut seen = HashSet::new();
    let recipe = |node: &Node| match node {
        Node::Recipe(file) => seen.insert(*file).then_some(*file),
        Node::Blob(_) => None,
    };
    roots.iter().rev().filter_map(recipe).collect()
}

/// All blobs and recipes that a manifest needs. Fails if a recipe cannot be read.
pub fn needs(store: &Liveness, manifest: &Manifest) -> Result<BTreeSet<Node>, StoreError> {
    reachable(roots_of(manifest), |node| references(node, |file| store.content.recipe_outline(file)))
}

type ReadResult = Result<Option<RecipeOutline>, StoreError>;

pub(super) struct ReadAhead<'a> {
    store: &'a Liveness,
    files: &'a [Digest],
    next: usize,
    readers: Vec<Receiver<ReadResult>>,
}

/// So few recipes are read faster than a thread starts.
const FILES_PER_READER: usize = 16;
const MAX_READERS: usize = 4;
/// How many recipes each reader is ahead; each takes some 10 KiB.
const DEPTH: usize = 8;

/// Calls `work` while the recipes of `files` are read in this order.
pub(super) fn with_read_ahead<T>(
    store: &Liveness,
    files: &[Digest],
    work: impl FnOnce(&mut ReadAhead<'_>) -> T,
) -> T {
    let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let count = (files.len() / FILES_PER_READER).min(processors).min(MAX_READERS);
    thread::scope(|scope| {
        let start = |first: usize| {
            let (sender, receiver) = sync_channel(DEPTH);
            let read = move || {
                for file in files.iter().skip(first).step_by(count) {
                    // The receiver is gone if an error has ended the mark phase.
                    if sender.send(store.content.recipe_outline(*file)).is_err() {
                        break;
                    }
                }
            };
            // If no thread can be started, `outline` reads the recipes itself.
            let _ = thread::Builder::new().name("recipes".to_owned()).spawn_scoped(scope, read);
            receiver
        };
        let readers = (0..count).map(start).collect();
        let mut ahead = ReadAhead { store, files, next: 0, readers };
        let done = work(&mut ahead);
        drop(ahead);
        done
    })
}

impl ReadAhead<'_> {
    /// The recipe of `file`; reads it now if it is not the next in order.
    pub(super) fn outline(&mut self, file: Digest) -> ReadResult {
        if self.readers.is_empty() || self.files.get(self.next) != Some(&file) {
            return self.store.content.recipe_outline(file);
        }
        let reader = self.readers.get(self.next % self.readers.len());
        self.next += 1;
        let read = reader.and_then(|reader| reader.recv().ok());
        read.unwrap_or_else(|| self.store.content.recipe_outline(file))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blobd_store_format::layout;
    use blobd_store_format::recipe::{Piece, Recipe};
    use blobd_store_format::tensor::TensorFormat;

    use super::*;
    use crate::Store;

    fn store_with_recipes(count: u8) -> (tempfile::TempDir, Arc<Store>, Vec<Digest>) {
        let (folder, store) = crate::testing::new_store();
        let write = |number: u8| {
            let piece = Piece::Blob { blob: Digest::of(&[number]), offset: 0, length: 1 };
            let recipe =
                Recipe::new(Digest::of(&[number, 0]), TensorFormat::Gguf, vec![piece], vec![]).unwrap();
            std::fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
            recipe.file()
        };
        let files = (0..count).map(write).collect();
        (folder, store, files)
    }

    #[test]
    fn recipes_are_the_same_in_any_order_of_requests() {
        let (_folder, store, files) = store_with_recipes(100);
        let absent = Digest::of(b"no recipe");
        for requested in [
            files.clone(),
            files.iter().rev().copied().collect(),
            files.iter().flat_map(|file| [*file, absent, *file]).collect(),
            files[..3].to_vec(),
        ] {
            with_read_ahead(&store.liveness, &files, |ahead| {
                for file in requested {
                    let outline = ahead.outline(file).unwrap();
                    assert_eq!(outline, store.content.recipe_outline(file).unwrap());
                }
            });
        }
    }

    #[test]
    fn damaged_recipe_is_an_error_when_it_is_requested() {
        let (_folder, store, files) = store_with_recipes(50);
        std::fs::write(store.path(layout::recipe(files[40])), "damaged").unwrap();
        with_read_ahead(&store.liveness, &files, |ahead| {
            for (number, file) in files.iter().enumerate() {
                assert_eq!(ahead.outline(*file).is_ok(), number != 40);
            }
        });
    }

    #[test]
    fn recipes_of_the_roots_are_read_last_first_and_each_once() {
        let [a, b] = [b"a", b"b"].map(|bytes| Digest::of(bytes));
        let roots = [Node::Recipe(a), Node::Blob(b), Node::Recipe(b), Node::Recipe(a)];
        assert_eq!(recipes_in_order(&roots), [a, b]);
    }

    #[test]
    fn recipes_in_order_come_from_the_readers() {
        let (_folder, store, files) = store_with_recipes(64);
        let expected: Vec<_> =
            files.iter().map(|file| store.content.recipe_outline(*file).unwrap()).collect();
        with_read_ahead(&store.liveness, &files, |ahead| {
            assert!(!ahead.readers.is_empty());
            crate::root::OPENED.take();
            let found: Vec<_> = files.iter().map(|file| ahead.outline(*file).unwrap()).collect();
            assert_eq!(found, expected);
            assert!(crate::root::OPENED.take().is_empty(), "this thread reads none of them");
        });
        with_read_ahead(&store.liveness, &files[..FILES_PER_READER - 1], |ahead| {
            assert!(ahead.readers.is_empty());
        });
    }
}
