//! Blobs by their digest.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::StoreError;
use crate::bounded_read::digest_of;
use crate::content::Content;
use crate::error::DisplayPath;
use crate::node::Node;
use crate::root::{Directory, FileStatus, Root, open_blob_in};

impl Content {
    /// The path of `blobs/` as it appears in `/proc`.
    #[expect(clippy::disallowed_methods, reason = "a descriptor of this process")]
    pub(crate) fn blobs_location(&self) -> Option<PathBuf> {
        let blobs = &self.blobs_directory().ok()?.file;
        std::fs::read_link(format!("/proc/self/fd/{}", blobs.as_raw_fd())).ok()
    }

    /// Opens a blob read-only, with its own file description, because clients would share the offset and flags of a
    /// common one. The content is not read. A blob that this store lacks is opened in a lower one.
    ///
    /// # Errors
    /// [`StoreError::MissingBlob`], [`StoreError::BlobSize`] if it is shorter than `least_size` bytes (a client that
    /// maps it would get SIGBUS), [`StoreError::Io`].
    pub fn open_blob(&self, digest: Digest, least_size: u64) -> Result<File, StoreError> {
        self.find_blob(digest, least_size).map(|(file, _root)| file)
    }

    /// Like [`Self::open_blob`], with the root of the store that has the blob.
    pub(crate) fn find_blob(&self, digest: Digest, least_size: u64) -> Result<(File, Root), StoreError> {
        let missing = match self.open_own_blob(digest, least_size) {
            Err(missing @ StoreError::MissingBlob { .. }) => missing,
            opened => return opened.map(|file| (file, self.root.clone())),
        };
        let in_root = |root: &Root| Ok(blob_in(root, digest, least_size)?.map(|file| (file, root.clone())));
        match self.lower.find_or_damage(in_root)? {
            Some(found) => Ok(found),
            None => {
                Err(self.lower.problem().map_or(missing, |problem| StoreError::Hidden { digest, problem }))
            }
        }
    }

    pub(crate) fn open_own_blob(&self, digest: Digest, least_size: u64) -> Result<File, StoreError> {
        // Relative to the open directory: opening a model opens hundreds of blobs.
        let blobs = self.blobs_directory()?;
        let (file, status) = match open_blob_in(&blobs.file, &layout::blob_name(digest)) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::MissingBlob { digest });
            }
            Err(error) => return Err(self.root.failure("open", &layout::blob(digest))(error)),
        };
        let found = status.len();
        if found < least_size {
            return Err(StoreError::BlobSize { digest, found, expected: least_size });
        }
        Ok(file)
    }

    /// The content of a blob of at most `limit` bytes; of a longer one, one byte more than `limit`.
    pub fn read_blob(&self, digest: Digest, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let path = layout::blob(digest);
        let own = self.root.read_limited(&path, limit)?;
        Ok(own.or_else(|| self.lower.find(|root| root.read_limited(&path, limit))))
    }

    /// A blob's length; `None` if neither this store nor a lower one has it as a regular file.
    pub fn blob_size(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.own_blob_size(digest)?.or_else(|| self.lower_blob_size(digest)))
    }

    pub(crate) fn own_blob_size(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.blob_status(digest)?.filter(FileStatus::is_file).map(|status| status.len()))
    }

    /// Opens a blob in the first lower store that has it; also returns that store.
    pub(crate) fn open_lower_blob(&self, digest: Digest) -> Option<(File, DisplayPath)> {
        self.lower.find(|root| Ok(blob_in(root, digest, 0)?.map(|file| (file, root.place()))))
    }

    /// The length of a blob in the first lower store that lets this process open it.
    pub(crate) fn lower_blob_size(&self, digest: Digest) -> Option<u64> {
        self.lower.find(|root| {
            let Some(file) = blob_in(root, digest, 0)? else { return Ok(None) };
            let status =
                FileStatus::from_file(&file).map_err(root.failure("inspect", &layout::blob(digest)))?;
            Ok(Some(status.len()))
        })
    }

    pub(crate) fn lower_blobs(&self, digest: Digest, size: u64) -> Vec<(File, Root)> {
        let mut blobs = Vec::new();
        self.lower.each(|_, root| {
            blobs.extend(blob_in(root, digest, size)?.map(|file| (file, root.clone())));
            Ok(())
        });
        blobs
    }

    /// Whether a lower store has a blob with the right bytes. Reads all of it.
    pub fn has_good_lower_blob(&self, digest: Digest) -> bool {
        self.lower_blobs(digest, 0)
            .into_iter()
            .any(|(mut file, _root)| digest_of(&mut file).is_ok_and(|found| found == digest))
    }

    /// All blobs; other files are left out.
    pub fn blobs(&self) -> Result<Vec<Digest>, StoreError> {
        self.root.existing_directory(layout::BLOBS)?.parsed_names(layout::parse_blob_name)
    }

    /// The sum of the lengths that no stored blob has: files of these lengths are certainly not stored yet.
    pub(crate) fn certainly_new(&self, sizes: impl Iterator<Item = u64>) -> Result<u64, StoreError> {
        // The lengths of blobs in lower stores are in no index.
        if !self.lower.is_empty() {
            return Ok(0);
        }
        // Does not wait for an index that is being built: until then nothing is certain.
        let Some(catalog) = self.index.catalog_unless_building()? else { return Ok(0) };
        let is_new = |size: &u64| catalog.blobs_of_length(*size) == 0;
        Ok(sizes.filter(is_new).fold(0, u64::saturating_add))
    }

    /// Whether a stored blob may have this length. Does not wait for an index that is being built: until then any may.
    pub fn may_have_blob_of(&self, length: u64) -> Result<bool, StoreError> {
        let catalog = self.index.catalog_unless_building()?;
        Ok(!self.lower.is_empty() || catalog.is_none_or(|catalog| catalog.blobs_of_length(length) > 0))
    }

    /// Calls `visit` with every blob, without a list of all in memory.
    pub fn each_blob(&self, mut visit: impl FnMut(Digest)) -> Result<(), StoreError> {
        for entry in self.root.existing_directory(layout::BLOBS)?.entries()? {
            entry?.name.to_str().and_then(layout::parse_blob_name).into_iter().for_each(&mut visit);
        }
        Ok(())
    }

    /// All files that have a recipe.
    pub fn recipes(&self) -> Result<Vec<Digest>, StoreError> {
        self.root.existing_directory(layout::RECIPES)?.parsed_names(layout::parse_recipe_name)
    }

    pub(crate) fn blob_status(&self, digest: Digest) -> Result<Option<FileStatus>, StoreError> {
        self.blobs_directory()?.status(layout::blob_name(digest))
    }

    pub fn make_blob_read_only(&self, digest: Digest) -> Result<(), StoreError> {
        let path = layout::blob(digest);
        let file = self.disk.set_mode_of(&path, 0o444)?;
        self.disk.sync_file(&path, &file)
    }

    pub fn bytes_on_disk(&self, node: Node) -> Result<Option<u64>, StoreError> {
        match node {
            Node::Blob(digest) => {
                Ok(self.blob_status(digest)?.map(|status| self.file_system.bytes_on_disk(&status)))
            }
            Node::Recipe(_) => self.file_bytes(&node.path()),
        }
    }

    /// Removes the file; returns its bytes on disk. The caller holds a change, and notes the removal.
    pub(crate) fn remove_node(&self, node: Node) -> Result<Option<u64>, StoreError> {
        let bytes = self.bytes_on_disk(node)?;
        let removed = self.disk.remove_file(&node.path());
        self.forget_recipe(node);
        Ok(removed?.and(bytes))
    }

    pub(crate) fn note_removed(&self, node: Node, bytes: u64) {
        self.forget_recipe(node);
        self.index.note(node);
        self.space.freed(bytes);
    }

    fn forget_recipe(&self, node: Node) {
        if let Node::Recipe(file) = node {
            self.recipes.forget(file);
        }
    }

    pub(crate) fn file_bytes(&self, path: &Path) -> Result<Option<u64>, StoreError> {
        Ok(self.root.status(path)?.map(|status| self.file_system.bytes_on_disk(&status)))
    }

    fn blobs_directory(&self) -> Result<&Directory, StoreError> {
        if let Some(blobs) = self.blobs.get() {
            return Ok(blobs);
        }
        let opened = self.root.existing_directory(layout::BLOBS)?;
        Ok(self.blobs.get_or_init(|| opened))
    }
}

fn blob_in(root: &Root, digest: Digest, least_size: u64) -> Result<Option<File>, StoreError> {
    let Some(blobs) = root.find_directory(Path::new(layout::BLOBS))? else { return Ok(None) };
    match open_blob_in(&blobs.file, &layout::blob_name(digest)) {
        Ok((file, status)) if status.len() >= least_size => Ok(Some(file)),
        Ok((_, status)) => Err(StoreError::BlobSize { digest, found: status.len(), expected: least_size }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(root.failure("open", &layout::blob(digest))(error)),
    }
}

#[cfg(test)]
mod tests {

    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::testing::{add_blobs, new_store, new_store_with, store_with};
    use crate::{Store, StoreOptions};

    /// A store above one that has the blobs `below`.
    fn above(below: &[&[u8]]) -> ([tempfile::TempDir; 2], Arc<Store>) {
        let (lower_folder, lower) = new_store();
        add_blobs(&lower, below);
        drop(lower);
        let lower = vec![lower_folder.path().join("store")];
        let (folder, store) = new_store_with(StoreOptions { lower, ..StoreOptions::default() });
        ([folder, lower_folder], store)
    }

    #[test]
    fn only_lengths_that_no_blob_has_are_certainly_new() {
        let (_folder, store) = new_store();
        add_blobs(&store, [&b"four"[..], b"seven77"]);
        let new = |sizes: &[u64]| store.content.certainly_new(sizes.iter().copied()).unwrap();
        assert_eq!([new(&[4, 5, 7, 9]), new(&[4, 7]), new(&[])], [14, 0, 0]);
        let may_have = |length| store.content.may_have_blob_of(length).unwrap();
        assert!(may_have(4) && may_have(7) && !may_have(5));
        store.content.index().set_building(true);
        assert!(new(&[5]) == 0 && may_have(5), "until it is known, any may be stored");
        store.content.index().set_building(false);
        let (_folders, store) = above(&[]);
        assert_eq!(store.content.certainly_new([5].into_iter()).unwrap(), 0, "a lower store may have one");
        assert!(store.content.may_have_blob_of(5).unwrap());
    }

    #[test]
    fn blob_is_found_in_this_store_first_and_then_in_lower_stores() {
        let (_folders, store) = above(&[b"below", b"both"]);
        add_blobs(&store, [b"above"]);
        let [above, below, absent] = [&b"above"[..], b"below", b"absent"].map(Digest::of);
        let root = |digest| store.content.find_blob(digest, 0).map(|(_, root)| root.place());
        assert_eq!(root(above).unwrap(), store.content.place());
        assert_eq!(root(below).unwrap(), store.content.lower_paths()[0]);
        assert!(matches!(root(absent), Err(StoreError::MissingBlob { .. })));
        for (digest, own, size) in [(above, Some(5), Some(5)), (below, None, Some(5)), (absent, None, None)] {
            assert_eq!(
                (store.content.own_blob_size(digest).unwrap(), store.content.blob_size(digest).unwrap()),
                (own, size)
            );
            assert_eq!(store.content.lower_blob_size(digest).is_some(), digest == below);
            assert_eq!(store.content.open_lower_blob(digest).is_some(), digest == below);
            assert_eq!(store.content.has_own_blob(digest), own.is_some());
        }
        assert_eq!(store.content.read_blob(below, 9).unwrap().as_deref(), Some(&b"below"[..]));
        assert_eq!(store.content.read_blob(below, 3).unwrap().as_deref(), Some(&b"belo"[..]));
        assert_eq!(store.content.read_blob(absent, 3).unwrap(), None);
        let lower = |size| store.content.lower_blobs(below, size).len();
        assert_eq!((lower(5), lower(6)), (1, 0), "it is too short");
    }

    #[test]
    fn removed_data_is_no_longer_counted() {
        let (_folder, store, digest) = store_with(b"weights");
        let node = Node::Blob(digest);
        let bytes = store.content.bytes_on_disk(node).unwrap().unwrap();
        assert_eq!(bytes, store.content.blob_status(digest).unwrap().unwrap().allocated_bytes());
        let used = store.ledger.used_bytes();
        assert_eq!(store.content.remove_node(node).unwrap(), Some(bytes));
        store.content.note_removed(node, bytes);
        assert_eq!(used - store.ledger.used_bytes(), bytes);
        assert_eq!(
            (store.content.remove_node(node).unwrap(), store.content.bytes_on_disk(node).unwrap()),
            (None, None)
        );
        assert_eq!(store.content.blobs().unwrap(), []);
    }

    #[test]
    fn all_blobs_are_visited_and_are_where_proc_shows_them() {
        let (folder, store, digest) = store_with(b"weights");
        let other = add_blobs(&store, [b"other"])[0];
        fs::write(store.path("blobs/notes.txt"), "").unwrap();
        let mut visited = Vec::new();
        store.content.each_blob(|digest| visited.push(digest)).unwrap();
        visited.sort();
        let mut expected = vec![digest, other];
        expected.sort();
        assert_eq!(visited, expected);
        let location = fs::canonicalize(folder.path().join("store/blobs")).unwrap();
        assert_eq!(store.content.blobs_location(), Some(location));
    }

    #[test]
    fn blob_is_made_read_only() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(layout::blob(digest));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
        store.content.make_blob_read_only(digest).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o444);
        assert!(store.content.make_blob_read_only(Digest::of(b"absent")).is_err());
    }
}
