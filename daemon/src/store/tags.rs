//! Tags: the names under `manifests/` and the manifests that they hold.
//!
//! The files are read each time: they are the truth, and there are few.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::error::optional;
use super::staging::{Room, Staging};
use super::{Store, StoreError, disk};

/// What is under `manifests/`.
#[derive(Clone, Debug, Default)]
pub struct Tags {
    /// Every tag, in order.
    pub references: Vec<Reference>,
    /// Files whose place is not a model's name. They may be manifests that someone moved, so a
    /// collection must not ignore them.
    pub foreign: Vec<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Origin {
    origin: String,
}

/// Where a manifest came from, with room for the file that will say so.
#[derive(Debug)]
pub(super) struct OriginRecord {
    json: Vec<u8>,
    room: Room,
}

impl OriginRecord {
    pub(super) fn new(staging: &Staging, origin: &str) -> Result<Self, StoreError> {
        let json = serde_json::to_vec(&Origin { origin: origin.to_owned() })
            .map_err(|error| StoreError::io("encode", layout::ORIGINS)(error.into()))?;
        Ok(Self { room: staging.room(json.len() as u64, || Ok(()))?, json })
    }
}

impl Store {
    /// Lists all tags.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn tags(&self) -> Result<Tags, StoreError> {
        let root = self.path(layout::MANIFESTS);
        let mut tags = Tags::default();
        let mut unvisited = vec![root.clone()];
        while let Some(directory) = unvisited.pop() {
            for (path, is_dir) in entries(&directory)? {
                match (is_dir, reference_of(&root, &path)) {
                    (true, _) => unvisited.push(path),
                    (false, Some(reference)) => tags.references.push(reference),
                    (false, None) => tags.foreign.push(path),
                }
            }
        }
        tags.references.sort();
        Ok(tags)
    }

    /// The tag as it is stored: the same but for upper and lower case.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], [`StoreError::Io`].
    pub fn resolve(&self, reference: &Reference) -> Result<Reference, StoreError> {
        let no_such_model = || StoreError::NoSuchModel { name: reference.short() };
        let stored = self.stored_case(reference)?.ok_or_else(no_such_model)?;
        let pinned_elsewhere = match reference.digest() {
            Some(digest) => self.manifest(&stored)?.digest() != digest,
            None => false,
        };
        if pinned_elsewhere { Err(no_such_model()) } else { Ok(stored) }
    }

    /// The manifest that a tag points to.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], [`StoreError::Manifest`] when it is damaged,
    /// [`StoreError::Io`].
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, StoreError> {
        let path = self.path(layout::manifest(reference));
        let raw = disk::read_limited(&path, Manifest::MAX_BYTES)?
            .ok_or_else(|| StoreError::NoSuchModel { name: reference.short() })?;
        Manifest::parse(raw).map_err(|source| StoreError::Manifest { path, source })
    }

    /// When a tag was last set.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], [`StoreError::Io`].
    pub fn modified(&self, reference: &Reference) -> Result<SystemTime, StoreError> {
        let path = self.path(layout::manifest(reference));
        let modified = fs::metadata(&path).and_then(|metadata| metadata.modified());
        optional(modified, "inspect", &path)?
            .ok_or_else(|| StoreError::NoSuchModel { name: reference.short() })
    }

    /// Where the model with this manifest came from, if that is on record.
    #[must_use]
    pub fn origin(&self, manifest: Digest) -> Option<String> {
        const MAX_BYTES: u64 = 64 << 10;
        let json = disk::read_limited(&self.path(layout::origin(manifest)), MAX_BYTES).ok()??;
        Some(serde_json::from_slice::<Origin>(&json).ok()?.origin)
    }

    /// Removes a tag, durably: only after this may anything that it kept be deleted.
    pub(crate) fn remove_tag(&self, reference: &Reference) -> Result<(), StoreError> {
        let path = self.path(layout::manifest(reference));
        if self.remove_record(&path)?.is_none() {
            return Err(StoreError::NoSuchModel { name: reference.short() });
        }
        self.sync_and_prune(&path)
    }

    /// Makes the removal of a file durable that had a tag's place, and removes the directories
    /// above it that are empty now.
    pub(super) fn sync_and_prune(&self, path: &Path) -> Result<(), StoreError> {
        let directories = path.ancestors().skip(1).take(3);
        for (level, directory) in directories.enumerate() {
            if level == 0 {
                self.disk().sync_dir(directory)?;
            }
            // Fails while other models share it, which is just what is wanted.
            if !self.disk().remove_dir(directory)? {
                break;
            }
        }
        Ok(())
    }

    /// Points a tag at a manifest, durably. The caller has made sure that the model is whole.
    pub(super) fn write_tag(
        &self,
        temporary: &Path,
        reference: &Reference,
        manifest: &Manifest,
        room: Option<Room>,
    ) -> Result<(), StoreError> {
        let relative = layout::manifest(reference);
        let target = self.path(&relative);
        let (Some(above), Some(directory)) = (relative.parent(), target.parent()) else { return Ok(()) };
        self.disk().create_dir_all(&self.root, above)?;
        self.write_record(temporary, &target, manifest.raw(), room)?;
        self.disk().sync_dir(directory)
    }

    /// Records where a manifest came from, durably, unless that is on record already.
    pub(super) fn write_origin(
        &self,
        temporary: &Path,
        manifest: Digest,
        OriginRecord { json, room }: OriginRecord,
    ) -> Result<(), StoreError> {
        let target = self.path(layout::origin(manifest));
        if target.exists() {
            // Whoever recorded it may have died before its name was durable.
            return self.disk().sync_dir(&self.path(layout::ORIGINS));
        }
        self.write_record(temporary, &target, &json, Some(room))?;
        self.disk().sync_dir(&self.path(layout::ORIGINS))
    }

    /// Removes the record of where a manifest came from.
    pub(crate) fn remove_origin(&self, manifest: Digest) -> Result<(), StoreError> {
        self.remove_record(&self.path(layout::origin(manifest))).map(drop)
    }

    /// The stored tag that names the same model.
    pub(super) fn stored_case(&self, reference: &Reference) -> Result<Option<Reference>, StoreError> {
        if self.path(layout::manifest(reference)).is_file() {
            let parts = [reference.host(), reference.namespace(), reference.model(), reference.tag()];
            return Ok(Reference::from_parts(parts[0], parts[1], parts[2], parts[3]).ok());
        }
        Ok(self.tags()?.references.into_iter().find(|stored| stored.same_model(reference)))
    }
}

/// A directory's entries and whether each is a directory, as the listing itself says: one that
/// vanishes meanwhile must not look like a file. None if the directory has just been removed with
/// its last tag.
fn entries(directory: &Path) -> Result<Vec<(PathBuf, bool)>, StoreError> {
    let Some(listing) = optional(fs::read_dir(directory), "list", directory)? else { return Ok(Vec::new()) };
    let look = |entry: fs::DirEntry| {
        let (path, kind) = (entry.path(), entry.file_type()?);
        let is_dir = kind.is_dir() || kind.is_symlink() && path.is_dir();
        Ok((path, is_dir))
    };
    listing.map(|entry| entry.and_then(look).map_err(StoreError::io("list", directory))).collect()
}

fn reference_of(root: &Path, path: &Path) -> Option<Reference> {
    let mut parts = path.strip_prefix(root).ok()?.iter().map(|part| part.to_str());
    let mut next = || parts.next().flatten();
    let reference = Reference::from_parts(next()?, next()?, next()?, next()?).ok()?;
    parts.next().is_none().then_some(reference)
}
