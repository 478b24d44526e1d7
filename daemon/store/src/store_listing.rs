//! Names of what a store contains, for the completion of words in shells.
//!
//! The store is not opened: nothing is created, locked or written, and another process may have it open. What cannot be
//! read is left out, so nothing may be decided from the result.

use std::path::Path;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use crate::StoreError;
use crate::content::downloads;
use crate::lock_file::{self, LockHolder};
use crate::names::{tags, trash};
use crate::root::Root;

/// A store that is only looked at.
#[derive(Debug)]
pub struct StoreListing {
    root: Root,
}

impl StoreListing {
    /// The store at `root`.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        Root::open(root).map(|root| Self { root })
    }

    /// Whether a process would find neither a store here nor the files of anything else.
    pub fn is_empty(&self) -> bool {
        self.root.find_directory(Path::new("")).ok().flatten().is_some_and(|directory| directory.is_empty())
    }

    /// The process that last had the store open. It may have ended.
    pub fn holder(&self) -> Option<LockHolder> {
        let file = self.root.find_file(Path::new(layout::LOCK_FILE)).ok()??;
        lock_file::recorded_holder(&file)
    }

    /// The models, in order.
    pub fn models(&self) -> Vec<Reference> {
        tags::names(&self.root)
    }

    /// The models in the trash, in order.
    pub fn trash(&self) -> Vec<Reference> {
        trash::names(&self.root)
    }

    /// What the unfinished downloads are of, in order.
    pub fn downloads(&self) -> Vec<String> {
        downloads::names(&self.root)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use blobd_store_format::digest::Digest;

    use super::*;
    use crate::DownloadAbout;
    use crate::testing::{manifest, name, new_store};

    #[test]
    fn names_of_an_open_store_are_listed_in_order_and_each_once() {
        let (folder, store) = new_store();
        let write = |path: std::path::PathBuf, content: &[u8]| {
            let path = store.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        for tag in ["b", "a:8b", "a"] {
            write(layout::manifest(&name(tag)), manifest(&[b"x"]).raw());
        }
        for removed in ["d", "c", "d"] {
            let keep = Duration::from_secs(60);
            store.names.add_to_trash(&name(removed), &manifest(&[b"x"]), keep).unwrap();
        }
        for (file, model) in [(&b"1"[..], "f"), (b"2", "e"), (b"3", "f")] {
            let about = DownloadAbout::for_pull(model.to_owned(), "a source".to_owned(), 7);
            let about = serde_json::to_vec(&about).unwrap();
            write(layout::partial(Digest::of(file)).join(downloads::ABOUT), &about);
        }
        let listing = StoreListing::open(&folder.path().join("store")).unwrap();
        assert_eq!(listing.models(), [name("a:8b"), name("a"), name("b")]);
        assert_eq!(listing.trash(), [name("c"), name("d")]);
        assert_eq!(listing.downloads(), ["e", "f"]);
        assert!(!listing.is_empty());
        store.content.announce(Some(Path::new("/run/x")), None);
        let holder = LockHolder { pid: std::process::id(), socket: Some("/run/x".into()), command: None };
        assert_eq!(listing.holder(), Some(holder));
    }

    #[test]
    fn directory_without_a_store_has_no_names() {
        let folder = tempfile::tempdir().unwrap();
        let listing = StoreListing::open(folder.path()).unwrap();
        assert!(listing.is_empty() && listing.models().is_empty() && listing.trash().is_empty());
        assert!(listing.downloads().is_empty() && listing.holder().is_none());
        fs::write(folder.path().join("thesis.tex"), "").unwrap();
        assert!(!listing.is_empty());
        assert!(StoreListing::open(&folder.path().join("absent")).is_err());
    }
}
