//! Changes of a store that blobd does not make: damage, foreign files, old downloads.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use blobd_tests::store_dir::flip_byte;

use super::CheckedStore;
use crate::space_model::damage;

impl CheckedStore<'_> {
    pub(super) fn flip(&mut self, blob: usize) {
        let Some(path) = self.blob(blob) else { return };
        self.is_damaged = true;
        let path = self.location.root.join(path);
        let length = fs::metadata(&path).unwrap().len();
        if length > 0 {
            flip_byte(&path, length / 2);
        }
    }

    pub(super) fn truncate(&mut self, blob: usize) {
        let Some(path) = self.blob(blob) else { return };
        self.is_damaged = true;
        let path = self.location.root.join(path);
        let length = fs::metadata(&path).unwrap().len();
        // Root can write despite the mode; an ordinary owner has to change it.
        damage::change(&path, |file| file.set_len(length / 2).unwrap());
    }

    /// A file of a model is not deleted: that would stop collections.
    pub(super) fn lose(&self, blob: usize) {
        let Some(path) = self.blob(blob) else { return };
        if !self.names.values().any(|needs| needs.files.contains(&path)) {
            fs::remove_file(self.location.root.join(path)).unwrap();
        }
    }

    /// Adds a file that is not blobd's.
    pub(super) fn add_foreign(&self, location: usize, pages: usize) {
        const PLACES: [&str; 6] = ["", "blobs", "recipes", "partial", "quarantine/of an admin", "blobs/a/b"];
        let directory = self.location.root.join(PLACES[location % PLACES.len()]);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("notes.txt"), orphan(pages)).unwrap();
    }

    pub(super) fn plant(&self, directory: &str, name: &str, pages: usize) {
        let path = self.location.root.join(directory).join(name);
        // An earlier step may have planted it, and `verify --repair` makes files of the store read-only.
        let _ = fs::remove_file(&path);
        fs::write(path, orphan(pages)).unwrap();
    }

    pub(super) fn age_downloads(&self) {
        const WEEKS: Duration = Duration::from_secs(15 * 86400);
        for name in self.downloads() {
            let path = self.location.root.join("partial").join(name).join("journal");
            // A download that failed before the first byte has none.
            if let Ok(journal) = File::options().write(true).open(path) {
                journal.set_modified(SystemTime::now() - WEEKS).unwrap();
            }
        }
    }
}

pub(super) fn orphan(pages: usize) -> Vec<u8> {
    vec![7; pages * 4096 + 1]
}
