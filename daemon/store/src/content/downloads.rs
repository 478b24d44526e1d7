//! The model and the user of a download, and where its bytes come from: the file `about.json` beside the journal.
//!
//! `df` and `partial` show it. A pull by a user with restricted rights continues a download only if the record shows
//! that the user may have all of its bytes. So the record must never claim less than what has arrived: it is changed
//! before bytes of another origin arrive, and one that is missing or incomplete means that nothing is known.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::Content;
use crate::StoreError;
use crate::node::Node;
use crate::root::Root;

pub(crate) mod extents;
pub(crate) mod journal;

use extents::Extents;
use journal::Record;

/// Beside the journal.
pub(crate) const ABOUT: &str = "about.json";
/// A name and a URL are much shorter.
const MAX_BYTES: u64 = 64 << 10;

/// The model, the source and the user of the latest pull of a download, and where its bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownloadAbout {
    /// The name that the model is to get.
    pub name: String,
    /// The source of the pull; of a URL, without its query.
    pub source: String,
    pub uid: u32,
    /// Where all bytes that have arrived come from; absent if unknown, as in downloads of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_from: Option<BTreeSet<BytesFrom>>,
}

/// Where bytes of a download come from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BytesFrom {
    /// The servers of a source, requested by a user's pull.
    Pull {
        /// As in [`DownloadAbout::source`].
        source: String,
        uid: u32,
    },
    /// Blobs of the stored model with this manifest.
    Model(Digest),
}

impl DownloadAbout {
    /// For a pull that has not received anything yet.
    pub fn for_pull(name: String, source: String, uid: u32) -> Self {
        let own = BytesFrom::Pull { source: source.clone(), uid };
        Self { name, source, uid, bytes_from: Some([own].into()) }
    }

    /// For a pull that continues a download with the record `earlier`.
    pub(crate) fn continuing(self, earlier: Option<Self>) -> Self {
        let earlier = earlier.and_then(|about| about.bytes_from);
        let bytes_from = self.bytes_from.zip(earlier).map(|(own, earlier)| &own | &earlier);
        Self { bytes_from, ..self }
    }

    /// Without the origins of the bytes if the record could not be read again with them.
    fn encode(&self, path: &Path) -> Result<Vec<u8>, StoreError> {
        let json = StoreError::encode(self, path)?;
        if json.len() as u64 <= MAX_BYTES {
            return Ok(json);
        }
        StoreError::encode(&Self { bytes_from: None, ..self.clone() }, path)
    }
}

/// An unfinished download, for users.
#[derive(Clone, Debug)]
pub struct DownloadSummary {
    pub partial: PartialDownload,
    pub about: Option<DownloadAbout>,
    /// The size of the whole file, if the journal says it.
    pub size: Option<u64>,
    /// The bytes that have arrived according to the journal.
    pub received_bytes: u64,
    pub started: Option<SystemTime>,
}

fn about(root: &Root, file: Digest) -> Option<DownloadAbout> {
    let json = root.read_limited(&layout::partial(file).join(ABOUT), MAX_BYTES).ok()??;
    serde_json::from_slice(&json).ok()
}

/// What the unfinished downloads are of, in order, as far as that can be read.
pub(crate) fn names(root: &Root) -> Vec<String> {
    let files = root.parsed_names(layout::PARTIAL, layout::parse_blob_name).unwrap_or_default();
    let mut names: Vec<_> = files.into_iter().filter_map(|file| Some(about(root, file)?.name)).collect();
    names.sort();
    names.dedup();
    names
}

impl Content {
    pub fn download_about(&self, file: Digest) -> Option<DownloadAbout> {
        about(&self.root, file)
    }

    /// All unfinished downloads, in the order of their files' digests.
    pub fn downloads(&self) -> Result<Vec<DownloadSummary>, StoreError> {
        let mut partials = self.partials()?;
        partials.sort_by_key(|partial| partial.file);
        partials.into_iter().map(|partial| self.download_summary(partial)).collect()
    }

    fn download_summary(&self, partial: PartialDownload) -> Result<DownloadSummary, StoreError> {
        let directory = layout::partial(partial.file);
        let journal = journal_in(&self.root, &directory)?;
        let size = journal.as_deref().and_then(|journal| journal::size(journal, partial.file));
        // A complete file has a recipe or a blob of its own.
        let is_complete = self.recipe_outline(partial.file).is_ok_and(|outline| outline.is_some());
        let received = || match (&journal, size) {
            (Some(journal), Some(size)) => {
                claimed(&journal::parse(journal, partial.file, size), None).total().min(size)
            }
            _ => 0,
        };
        let received_bytes = size.filter(|_| is_complete).unwrap_or_else(received);
        let started = self.root.status(&directory.join(ABOUT))?.map(|status| status.modified());
        let about = self.download_about(partial.file);
        Ok(DownloadSummary { partial, about, size, received_bytes, started })
    }

    /// Records what a download is of. Fails if the earlier record stays: it would be wrong about what arrives from now
    /// on. That the new one is not written is only logged: the download does not need it.
    pub(crate) fn record_download(&self, file: Digest, about: &DownloadAbout) -> Result<(), StoreError> {
        let present = self.download_about(file);
        if present.as_ref() == Some(about) {
            return Ok(());
        }
        let directory = layout::partial(file);
        let path = directory.join(ABOUT);
        self.disk.remove_file(&path)?;
        if present.is_some() {
            // The earlier record must not return after a power failure.
            self.disk.sync_dir(&directory)?;
        }
        if let Err(error) = about.encode(&path).and_then(|json| self.write_about(&path, &json)) {
            tracing::debug!("{error}; `blobd partial ls` cannot name the download");
        }
        Ok(())
    }

    fn write_about(&self, path: &Path, json: &[u8]) -> Result<(), StoreError> {
        let file = self.disk.create_file(path, 0o600)?;
        self.disk.write_at(path, &file, json, 0)
    }

    pub fn partial_files(&self) -> Result<Vec<Digest>, StoreError> {
        self.root.parsed_names(layout::PARTIAL, layout::parse_blob_name)
    }

    pub(crate) fn partials(&self) -> Result<Vec<PartialDownload>, StoreError> {
        let described = self.partial_files()?.into_iter().map(|file| {
            let directory = layout::partial(file);
            let changed = |path: &Path| Some(self.root.status(path).ok()??.modified());
            let last_used = changed(&directory.join(JOURNAL)).or_else(|| changed(&directory));
            Ok(PartialDownload { file, bytes: self.partial_bytes(&directory)?, last_used })
        });
        described.collect()
    }

    pub(crate) fn bytes_of_partial(&self, file: Digest) -> Result<Option<u64>, StoreError> {
        let directory = layout::partial(file);
        let exists = self.root.status(&directory)?.is_some();
        exists.then(|| self.partial_bytes(&directory)).transpose()
    }

    /// The size of a download on disk. Its directory is freed with it.
    pub(crate) fn partial_bytes(&self, directory: &Path) -> Result<u64, StoreError> {
        let own = self.root.allocated_bytes(directory)?;
        Ok(self.root.tree_bytes(directory).saturating_add(own))
    }

    /// The data that the download of `file` keeps: published blobs, and the complete file with its blobs.
    pub fn download_needs(&self, file: Digest) -> Result<BTreeSet<Node>, StoreError> {
        let mut needed: BTreeSet<Node> = self.blobs_of_partial(file)?.into_iter().map(Node::Blob).collect();
        // If the recipe cannot be read, the file is incomplete.
        if let Ok(outline) = self.recipe_outline(file) {
            let blobs = outline.map(|outline| outline.digests().to_vec()).unwrap_or_default();
            needed.extend(blobs.into_iter().chain([file]).map(Node::Blob));
            needed.insert(Node::Recipe(file));
        }
        Ok(needed)
    }

    /// The blobs that the download of `file` has published already. No model may need them yet.
    pub(crate) fn blobs_of_partial(&self, file: Digest) -> Result<BTreeSet<Digest>, StoreError> {
        let journal = journal_in(&self.root, &layout::partial(file))?;
        Ok(journal.map(|journal| journal::stored(&journal, file).into_iter().collect()).unwrap_or_default())
    }
}

/// A download that can be resumed, or a file of an incomplete model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialDownload {
    pub file: Digest,
    pub bytes: u64,
    /// When bytes last arrived, if the file system knows.
    pub last_used: Option<SystemTime>,
}

impl PartialDownload {
    /// Whether it was not continued for a week. One with a time in the future counts as recent.
    pub(crate) fn is_abandoned(&self, now: SystemTime) -> bool {
        const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
        self.is_older(now, KEPT)
    }

    /// Whether nothing has arrived for longer than `age`. One with a time in the future, or none, is not older.
    pub fn is_older(&self, now: SystemTime, age: Duration) -> bool {
        self.last_used.is_some_and(|last| now.duration_since(last).is_ok_and(|passed| passed > age))
    }
}

pub(crate) const JOURNAL: &str = "journal";

/// Five million records. The limit protects against another file in the place of the journal.
const MAX_JOURNAL_BYTES: u64 = 256 << 20;

/// The content of the journal in a directory. One that is too long has no valid records, and is not read.
pub(crate) fn journal_in(root: &Root, directory: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    let path = directory.join(JOURNAL);
    let Some(file) = root.find_file(&path)? else { return Ok(None) };
    match Root::excessive_length(&file, MAX_JOURNAL_BYTES) {
        None => root.read_opened(&file, &path, MAX_JOURNAL_BYTES).map(Some),
        Some(_) => Ok(Some(Vec::new())),
    }
}

/// The bytes that have arrived, if a boot is given only since then; of two copies, those of the second.
pub(crate) fn claimed(records: &[Record], since: Option<[u8; 16]>) -> Extents {
    let (mut arrived, mut counts) = (Extents::default(), since.is_none());
    for record in records {
        match *record {
            Record::Session(session) => counts = since.is_none_or(|since| since == session.boot),
            Record::Arrived { offset, length, .. } if counts => {
                arrived.insert(offset..offset.saturating_add(u64::from(length)));
            }
            Record::SecondCopy { .. } => arrived = Extents::default(),
            Record::Arrived { .. } | Record::Stored { .. } | Record::Differs { .. } => {}
        }
    }
    arrived
}

#[cfg(test)]
mod tests;
