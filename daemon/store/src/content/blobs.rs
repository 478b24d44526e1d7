//! Blobs by their digest.

use crate::bounded_read::digest_of;
use crate::node::Node;
use crate::root::Directory;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::StoreError;
use crate::content::Content;
use crate::place::Place;
use crate::root::{FileStatus, Root, open_blob_in};

impl Content {
    /// The path of `blobs/` as it appears in `/proc`.
    #[expect(clippy::disallowed_methods, reason = "a descriptor of this process")]
    pub(crate) fn blobs_location(&self) -> Option<PathBuf> {
        let blobs = self.blobs_directory().ok()?.file();
        std::fs::read_link(format!("/proc/self/fd/{}", blobs.as_raw_fd())).ok()
    }

    /// Opens a blob read-only, with its own file description, because clients would share the offset and
    /// flags of a common one. The content is not read. A blob that this store lacks is opened in a lower one.
    ///
    /// # Errors
    /// [`StoreError::MissingBlob`], [`StoreError::BlobSize`] if it is shorter than `least_size` bytes (a
    /// client that maps it would get SIGBUS), [`StoreError::Io`].
    pub fn open_blob(&self, digest: Digest, least_size: u64) -> Result<File, StoreError> {
        self.find_blob(digest, least_size).map(|(file, _root)| file)
    }

    /// The same, with the root of the store that has the blob.
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

    /// The same without the lower stores.
    pub(crate) fn open_own_blob(&self, digest: Digest, least_size: u64) -> Result<File, StoreError> {
        // Relative to the open directory: opening a model opens hundreds of blobs, and the path
        // from the root would be resolved each time.
        let blobs = self.blobs_directory()?;
        let (file, status) = match open_blob_in(blobs.file(), &layout::blob_name(digest)) {
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

    /// The content of a blob of at most `limit` bytes; `None` if it does not exist. Of a longer one, one
    /// byte more than `limit`.
    pub fn read_blob(&self, digest: Digest, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let path = layout::blob(digest);
        match self.root.read_limited(&path, limit)? {
            None => Ok(self.lower.find(|root| root.read_limited(&path, limit))),
            read => Ok(read),
        }
    }

    /// A blob's length; `None` if neither this store nor a lower one has it as a regular file.
    pub fn blob_size(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        match self.own_blob_size(digest)? {
            None => Ok(self.lower_blob_size(digest)),
            size => Ok(size),
        }
    }

    /// The same without the lower stores.
    pub(crate) fn own_blob_size(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.blob_status(digest)?.filter(FileStatus::is_file).map(|status| status.len()))
    }

    /// Opens a blob in the first lower store that has it; also returns that store.
    pub(crate) fn open_lower_blob(&self, digest: Digest) -> Option<(File, Place)> {
        self.lower.find(|root| Ok(blob_in(root, digest, 0)?.map(|file| (file, root.place()))))
    }

    /// The length of a blob in the first lower store in which it can be opened: a blob that cannot be read is not
    /// there for anybody.
    pub(crate) fn lower_blob_size(&self, digest: Digest) -> Option<u64> {
        self.lower.find(|root| {
            let Some(file) = blob_in(root, digest, 0)? else { return Ok(None) };
            let status = FileStatus::of(&file).map_err(root.failure("inspect", &layout::blob(digest)))?;
            Ok(Some(status.len()))
        })
    }

    /// The blob in each lower store that has it.
    pub(crate) fn lower_blobs(&self, digest: Digest, size: u64) -> Vec<(File, Root)> {
        let mut blobs = Vec::new();
        self.lower.each(|_, root| {
            blobs.extend(blob_in(root, digest, size)?.map(|file| (file, root.clone())));
            Ok(())
        });
        blobs
    }

    /// Whether a lower store has a blob with the right bytes. Reads all of it.
    #[must_use]
    pub fn has_good_lower_blob(&self, digest: Digest) -> bool {
        self.lower_blobs(digest, 0)
            .into_iter()
            .any(|(mut file, _root)| digest_of(&mut file).is_ok_and(|found| found == digest))
    }

    /// All blobs. Files whose name is no digest are left out.
    pub fn blobs(&self) -> Result<Vec<Digest>, StoreError> {
        self.root.existing_directory(layout::BLOBS)?.parsed_names(layout::parse_blob_name)
    }

    /// The sum of those lengths that no stored blob has: files of these are certainly not stored yet.
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

    /// Makes a blob read-only again.
    pub fn make_blob_read_only(&self, digest: Digest) -> Result<(), StoreError> {
        let path = layout::blob(digest);
        let file = self.disk().set_mode_of(&path, 0o444)?;
        self.disk().sync_file(&path, &file)
    }

    /// The size of a blob or recipe on disk, or `None` when it is not there.
    pub fn bytes_on_disk(&self, node: Node) -> Result<Option<u64>, StoreError> {
        match node {
            Node::Blob(digest) => {
                Ok(self.blob_status(digest)?.map(|status| self.file_system.bytes_on_disk(&status)))
            }
            Node::Recipe(_) => self.file_bytes(&node.path()),
        }
    }

    /// Removes the file; returns its bytes on disk, or `None` if it did not exist. The caller holds a change,
    /// and notes the removal.
    pub(crate) fn remove_node(&self, node: Node) -> Result<Option<u64>, StoreError> {
        let bytes = self.bytes_on_disk(node)?;
        let removed = self.disk.remove_file(&node.path());
        self.forget_recipe(node);
        Ok(removed?.and(bytes))
    }

    /// Subtracts a removed blob or recipe of `bytes` on disk, and notes it in the index.
    pub(crate) fn note_removed(&self, node: Node, bytes: u64) {
        self.forget_recipe(node);
        self.index.note(node);
        self.space.freed(bytes);
    }

    /// Removes a recipe from the cache, before or after it is deleted or replaced.
    fn forget_recipe(&self, node: Node) {
        if let Node::Recipe(file) = node {
            self.recipes.forget(file);
        }
    }

    /// A file's bytes on disk; `None` if it does not exist.
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

/// Opens a blob of a lower store; `None` if it has none of this digest.
fn blob_in(root: &Root, digest: Digest, least_size: u64) -> Result<Option<File>, StoreError> {
    let Some(blobs) = root.find_directory(Path::new(layout::BLOBS))? else { return Ok(None) };
    match open_blob_in(blobs.file(), &layout::blob_name(digest)) {
        Ok((file, status)) if status.len() >= least_size => Ok(Some(file)),
        Ok((_, status)) => Err(StoreError::BlobSize { digest, found: status.len(), expected: least_size }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(root.failure("open", &layout::blob(digest))(error)),
    }
}
