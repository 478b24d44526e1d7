//! Blobs by their digest.

use std::fs::{self, File};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use rustix::fs::{Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::error::optional;
use super::{Store, StoreError};

impl Store {
    /// Opens a blob for one reader: read-only, with a file description of its own, because a
    /// shared one would share its offset and flags between clients. Nothing of it is read.
    ///
    /// # Errors
    /// [`StoreError::MissingBlob`], [`StoreError::BlobSize`] when it is shorter than
    /// `least_size` bytes (mapping it would end in SIGBUS), [`StoreError::Io`].
    pub fn open_blob(&self, digest: Digest, least_size: u64) -> Result<File, StoreError> {
        let path = || self.path(layout::blob(digest));
        // Relative to the open directory: opening a model takes hundreds of these, and the way
        // from the root of the file system would be walked each time.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match openat(self.blobs_directory(), layout::blob_name(digest), flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT) => return Err(StoreError::MissingBlob { digest }),
            Err(errno) => return Err(StoreError::errno("open", path())(errno)),
        };
        let status = fstat(&file).map_err(|errno| StoreError::errno("inspect", path())(errno))?;
        let found = u64::try_from(status.st_size).unwrap_or_default();
        if found < least_size {
            return Err(StoreError::BlobSize { digest, found, expected: least_size });
        }
        Ok(file)
    }

    /// A blob's length, or `None` when there is none.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn blob_size(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.inspect_blob(digest)?.map(|metadata| metadata.len()))
    }

    /// What a blob takes on disk, or `None` when there is none.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn blob_bytes_on_disk(&self, digest: Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.inspect_blob(digest)?.map(|metadata| self.file_system.bytes_on_disk(&metadata)))
    }

    /// Every blob there is. Names that no digest gives are left out: they are not blobd's.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn blobs(&self) -> Result<Vec<Digest>, StoreError> {
        self.digests_in(layout::BLOBS, layout::parse_blob_name)
    }

    /// What files of these lengths add up to, but for those whose length some blob has: they may
    /// be there already.
    pub(super) fn certainly_new(&self, sizes: impl Iterator<Item = u64>) -> Result<u64, StoreError> {
        // Nobody waits for an index that is being built: until then nothing is certain.
        let Some(catalog) = self.catalog_unless_building()? else { return Ok(0) };
        let is_new = |size: &u64| catalog.blobs_of_length(*size) == 0;
        Ok(sizes.filter(is_new).fold(0, u64::saturating_add))
    }

    /// Calls `visit` with every blob there is. A million of them need no list of their own.
    ///
    /// # Errors
    /// As for [`Self::blobs`].
    pub(crate) fn each_blob(&self, visit: impl FnMut(Digest)) -> Result<(), StoreError> {
        self.each_digest_in(layout::BLOBS, layout::parse_blob_name, visit)
    }

    /// Every file that there is a recipe for.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn recipes(&self) -> Result<Vec<Digest>, StoreError> {
        self.digests_in(layout::RECIPES, layout::parse_recipe_name)
    }

    /// Every manifest whose origin is on record.
    pub(crate) fn origins(&self) -> Result<Vec<Digest>, StoreError> {
        self.digests_in(layout::ORIGINS, layout::parse_recipe_name)
    }

    fn digests_in(
        &self,
        directory: &str,
        parse: impl Fn(&str) -> Option<Digest>,
    ) -> Result<Vec<Digest>, StoreError> {
        let mut digests = Vec::new();
        self.each_digest_in(directory, parse, |digest| digests.push(digest))?;
        Ok(digests)
    }

    fn each_digest_in(
        &self,
        directory: &str,
        parse: impl Fn(&str) -> Option<Digest>,
        visit: impl FnMut(Digest),
    ) -> Result<(), StoreError> {
        let (path, mut visit) = (self.path(directory), visit);
        for entry in fs::read_dir(&path).map_err(StoreError::io("list", &path))? {
            let name = entry.map_err(StoreError::io("list", &path))?.file_name();
            name.to_str().and_then(&parse).into_iter().for_each(&mut visit);
        }
        Ok(())
    }

    fn inspect_blob(&self, digest: Digest) -> Result<Option<fs::Metadata>, StoreError> {
        let path = self.path(layout::blob(digest));
        optional(fs::symlink_metadata(&path), "inspect", &path)
    }
}
