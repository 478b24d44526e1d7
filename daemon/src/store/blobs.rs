//! Blobs by their digest.

use std::fs::{self, File};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use rustix::fs::{Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::error::optional;
use super::{Store, StoreError, disk};

/// A blob that the daemon itself reads, until this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct OwnReading<'s> {
    store: &'s Store,
    digest: Digest,
}

impl Drop for OwnReading<'_> {
    fn drop(&mut self) {
        let mut digests = super::lock(&self.store.own_readings);
        if let Some(place) = digests.iter().position(|digest| *digest == self.digest) {
            digests.swap_remove(place);
        }
    }
}

impl Store {
    /// Notes that the daemon reads a blob for itself: to the kernel that is a use like any other.
    pub(crate) fn own_reading(&self, digest: Digest) -> OwnReading<'_> {
        super::lock(&self.own_readings).push(digest);
        OwnReading { store: self, digest }
    }

    /// What the daemon reads for itself just now.
    pub(crate) fn own_readings(&self) -> Vec<Digest> {
        super::lock(&self.own_readings).clone()
    }

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
        Ok(self.inspect_blob(digest)?.map(|metadata| disk::bytes_on_disk(&metadata)))
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
        let catalog = self.catalog()?;
        let is_new = |size: &u64| catalog.blobs_of_length(*size) == 0;
        Ok(sizes.filter(is_new).fold(0, u64::saturating_add))
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
        let path = self.path(directory);
        let mut digests = Vec::new();
        for entry in fs::read_dir(&path).map_err(StoreError::io("list", &path))? {
            let name = entry.map_err(StoreError::io("list", &path))?.file_name();
            digests.extend(name.to_str().and_then(&parse));
        }
        Ok(digests)
    }

    fn inspect_blob(&self, digest: Digest) -> Result<Option<fs::Metadata>, StoreError> {
        let path = self.path(layout::blob(digest));
        optional(fs::symlink_metadata(&path), "inspect", &path)
    }
}
