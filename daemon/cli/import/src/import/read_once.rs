//! Files that several models of a command have, such as a projector or a tokenizer: each is read once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use crate::local_folder::Identity;

/// The files that several models have.
#[derive(Debug, Default)]
pub(super) struct ReadOnce {
    shared: BTreeSet<Identity>,
    /// The digest of each file that was read; `None` while it is read.
    read: Mutex<BTreeMap<Identity, Option<Digest>>>,
    is_read: Condvar,
}

/// A model whose files are being read.
#[derive(Debug)]
pub(super) struct Reading<'r> {
    once: &'r ReadOnce,
    /// The shared files that are read for this model.
    own: BTreeSet<Identity>,
    /// The digests of those that were read for others.
    known: BTreeMap<Identity, Digest>,
}

impl ReadOnce {
    /// Takes the files of each model.
    pub(super) fn new<F: IntoIterator<Item = Identity>>(models: impl IntoIterator<Item = F>) -> Self {
        let (mut seen, mut shared) = (BTreeSet::new(), BTreeSet::new());
        for model in models {
            let files: BTreeSet<Identity> = model.into_iter().collect();
            shared.extend(files.into_iter().filter(|file| !seen.insert(*file)));
        }
        Self { shared, ..Self::default() }
    }

    /// Begins a model with these files. Waits until no other model reads one of them.
    pub(super) fn begin(&self, files: impl IntoIterator<Item = Identity>) -> Reading<'_> {
        let files: BTreeSet<Identity> = files.into_iter().filter(|file| self.shared.contains(file)).collect();
        let mut read = self.lock();
        while files.iter().any(|file| read.get(file) == Some(&None)) {
            read = self.is_read.wait(read).unwrap_or_else(PoisonError::into_inner);
        }
        let mut reading = Reading { once: self, own: BTreeSet::new(), known: BTreeMap::new() };
        for file in files {
            match read.get(&file) {
                Some(Some(digest)) => drop(reading.known.insert(file, *digest)),
                _ => {
                    read.insert(file, None);
                    reading.own.insert(file);
                }
            }
        }
        reading
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Identity, Option<Digest>>> {
        // Each change is complete before anything can panic.
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading<'_> {
    /// The digest of a file that was read for another model.
    pub(super) fn digest(&self, file: Identity) -> Option<Digest> {
        self.known.get(&file).copied()
    }

    /// Notes the digests of the files of this model, which is stored.
    pub(super) fn done(mut self, files: impl IntoIterator<Item = (Identity, Digest)>) {
        let mut read = self.once.lock();
        for (file, digest) in files {
            if self.own.remove(&file) {
                read.insert(file, Some(digest));
            }
        }
    }
}

impl Drop for Reading<'_> {
    /// What was not read is read for the next model that has it.
    fn drop(&mut self) {
        let mut read = self.once.lock();
        read.retain(|file, _| !self.own.contains(file));
        drop(read);
        self.once.is_read.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    fn identity(folder: &tempfile::TempDir, name: &str) -> Identity {
        let path = folder.path().join(name);
        fs::write(&path, name).unwrap();
        Identity::from(&fs::metadata(path).unwrap())
    }

    #[test]
    fn shared_file_is_read_for_one_model_and_known_to_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let [own, shared] = ["own", "shared"].map(|name| identity(&folder, name));
        let once = ReadOnce::new([vec![own, shared], vec![shared], vec![shared, shared]]);
        assert_eq!(once.shared, BTreeSet::from([shared]));
        let read = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let reading = once.begin([shared]);
                    if reading.digest(shared).is_none() {
                        read.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(std::time::Duration::from_millis(20));
                        reading.done([(shared, Digest::of(b"shared"))]);
                    }
                });
            }
        });
        assert_eq!(read.into_inner(), 1);
        assert_eq!(once.begin([own, shared]).digest(shared), Some(Digest::of(b"shared")));
    }

    #[test]
    fn file_of_a_model_that_failed_is_read_for_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let shared = identity(&folder, "shared");
        let once = ReadOnce::new([[shared], [shared]]);
        drop(once.begin([shared]));
        assert_eq!(once.begin([shared]).digest(shared), None);
    }
}
