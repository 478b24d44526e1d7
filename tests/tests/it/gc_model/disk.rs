//! The disk of the model: the current names, and those that a power cut may leave.
//!
//! It guarantees less than any file system: each name that was added, removed or replaced since its directory
//! was synced may have any state that it had since then, independently of other names.

use std::fmt;

/// One of the blobs; a small number stands for the digest.
pub(super) type Blob = u8;

/// A place that holds a manifest; a small number stands for the reference.
pub(super) type Tag = usize;

/// How many places there are.
pub(super) const TAG_COUNT: usize = 3;

/// Where `rm --keep` puts a manifest.
pub(super) const TRASH: Tag = 1;

/// A set of blobs.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct BlobSet(u8);

impl BlobSet {
    pub(super) const NONE: Self = Self(0);
    pub(super) const ALL: Self = Self(0b111);

    pub(super) const fn of(blob: Blob) -> Self {
        Self(1 << blob)
    }

    pub(super) const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) const fn contains(self, other: Self) -> bool {
        other.without(self).is_empty()
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Blob> {
        (0..8).filter(move |blob| self.contains(Self::of(*blob)))
    }

    pub(super) fn first(self) -> Option<Blob> {
        self.iter().next()
    }
}

impl fmt::Debug for BlobSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Three models; any two of them share a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Manifest {
    First,
    Second,
    Third,
}

impl Manifest {
    pub(super) const fn needs(self) -> BlobSet {
        match self {
            Self::First => BlobSet(0b011),
            Self::Second => BlobSet(0b110),
            Self::Third => BlobSet(0b101),
        }
    }
}

/// What a tag may hold: a set of manifests and of "nothing".
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Contents(u8);

impl Contents {
    const EACH: [Option<Manifest>; 4] =
        [None, Some(Manifest::First), Some(Manifest::Second), Some(Manifest::Third)];

    pub(super) const fn only(content: Option<Manifest>) -> Self {
        Self(match content {
            None => 1,
            Some(Manifest::First) => 2,
            Some(Manifest::Second) => 4,
            Some(Manifest::Third) => 8,
        })
    }

    pub(super) const fn or(self, content: Option<Manifest>) -> Self {
        Self(self.0 | Self::only(content).0)
    }

    pub(super) const fn has(self, content: Option<Manifest>) -> bool {
        self.0 & Self::only(content).0 != 0
    }

    fn iter(self) -> impl Iterator<Item = Option<Manifest>> {
        Self::EACH.into_iter().filter(move |content| self.has(*content))
    }
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct TagFile {
    visible: Option<Manifest>,
    /// The contents that a power cut may leave.
    durable: Contents,
}

impl TagFile {
    const fn synced(content: Option<Manifest>) -> Self {
        Self { visible: content, durable: Contents::only(content) }
    }
}

/// `blobs/` and `manifests/`. The content of files is always durable before their names are
/// (`Ingest::sync_content`, `disk::replace_file`), so the model has only names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Disk {
    blobs: BlobSet,
    /// Added or removed since `blobs/` was last synced.
    unsynced: BlobSet,
    tags: [TagFile; TAG_COUNT],
}

impl Disk {
    /// A store with one model.
    pub(super) const fn with_one_model(tag: Tag, manifest: Manifest) -> Self {
        let mut tags = [TagFile::synced(None); TAG_COUNT];
        tags[tag] = TagFile::synced(Some(manifest));
        Self { blobs: manifest.needs(), unsynced: BlobSet::NONE, tags }
    }

    pub(super) const fn blobs(&self) -> BlobSet {
        self.blobs
    }

    pub(super) const fn has(&self, blobs: BlobSet) -> bool {
        self.blobs.contains(blobs)
    }

    pub(super) const fn tag(&self, tag: Tag) -> Option<Manifest> {
        self.tags[tag].visible
    }

    /// Every tag that holds a manifest.
    pub(super) fn tagged(&self) -> impl Iterator<Item = (Tag, Manifest)> {
        self.tags.into_iter().enumerate().filter_map(|(tag, file)| Some((tag, file.visible?)))
    }

    /// `disk::publish`: an existing name stays as it is.
    pub(super) const fn publish(&mut self, blob: BlobSet) {
        self.unsynced = self.unsynced.with(blob.without(self.blobs));
        self.blobs = self.blobs.with(blob);
    }

    /// `Node::remove`.
    pub(super) const fn remove(&mut self, blob: BlobSet) {
        self.blobs = self.blobs.without(blob);
        self.unsynced = self.unsynced.with(blob);
    }

    /// `disk::sync_dir` of `blobs/`.
    pub(super) const fn sync_blobs(&mut self) {
        self.unsynced = BlobSet::NONE;
    }

    /// `disk::replace_file` or `disk::remove_file` of a tag.
    pub(super) const fn set_tag(&mut self, tag: Tag, content: Option<Manifest>) {
        let durable = self.tags[tag].durable.or(content);
        self.tags[tag] = TagFile { visible: content, durable };
    }

    /// `disk::sync_dir` of a tag's directory, in which no other tag is.
    pub(super) const fn sync_tag(&mut self, tag: Tag) {
        self.tags[tag] = TagFile::synced(self.tags[tag].visible);
    }

    /// `disk::sync_file_system`.
    pub(super) fn sync_all(&mut self) {
        self.sync_blobs();
        (0..TAG_COUNT).for_each(|tag| self.sync_tag(tag));
    }

    /// All states of the disk that a power cut now may leave.
    pub(super) fn power_cuts(&self) -> Vec<Self> {
        let mut left = vec![Self { unsynced: BlobSet::NONE, ..*self }];
        for blob in self.unsynced.iter().map(BlobSet::of) {
            let lost = |disk: &Self| Self { blobs: disk.blobs.without(blob), ..*disk };
            let kept = |disk: &Self| Self { blobs: disk.blobs.with(blob), ..*disk };
            left = left.iter().flat_map(|disk| [lost(disk), kept(disk)]).collect();
        }
        for (tag, file) in self.tags.iter().enumerate() {
            let with = |disk: &Self, content| {
                let mut disk = *disk;
                disk.tags[tag] = TagFile::synced(content);
                disk
            };
            left = left.iter().flat_map(|disk| file.durable.iter().map(|c| with(disk, c))).collect();
        }
        left
    }
}
