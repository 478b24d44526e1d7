//! The model and the user of a download, and where its bytes come from: the file `about.json` beside the journal.
//!
//! `df` and `partial` show it. A pull by a user whom the policy restricts continues a download only if the record shows
//! that the user may have all of its bytes. So the record must never claim less than what has arrived: it is changed
//! before bytes of another origin arrive, and one that is missing or incomplete means that nothing is known.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::{JOURNAL, MAX_JOURNAL_BYTES, PartialDirectory, PartialDownload, journal};
use crate::assembler::Assembler;
use crate::root::Root;
use crate::{Store, StoreError};

/// Beside the journal.
pub(super) const ABOUT: &str = "about.json";
/// A name and a URL are much shorter.
const MAX_BYTES: u64 = 64 << 10;

/// The model, the source and the user of the latest pull of a download, and where its bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownloadAbout {
    /// The name that the model is to get.
    pub name: String,
    /// The source of the pull; of a URL, without its query.
    pub source: String,
    /// The user who pulls it.
    pub uid: u32,
    /// Where all bytes that have arrived come from; absent if that is not known, as of downloads that an earlier version
    /// began.
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
        /// The user.
        uid: u32,
    },
    /// Blobs of the stored model with this manifest.
    Model(Digest),
}

impl DownloadAbout {
    /// For a pull that has not received anything yet.
    #[must_use]
    pub fn of_pull(name: String, source: String, uid: u32) -> Self {
        let own = BytesFrom::Pull { source: source.clone(), uid };
        Self { name, source, uid, bytes_from: Some([own].into()) }
    }

    /// For a pull that continues a download with the record `earlier`.
    fn continuing(self, earlier: Option<Self>) -> Self {
        let earlier = earlier.and_then(|about| about.bytes_from);
        let bytes_from = self.bytes_from.zip(earlier).map(|(own, earlier)| &own | &earlier);
        Self { bytes_from, ..self }
    }

    /// Without the origins of the bytes if the record could not be read again with them.
    fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let json = serde_json::to_vec(self)?;
        if json.len() as u64 <= MAX_BYTES {
            return Ok(json);
        }
        serde_json::to_vec(&Self { bytes_from: None, ..self.clone() })
    }
}

/// An unfinished download, for users.
#[derive(Clone, Debug)]
pub struct DownloadSummary {
    /// The file, its size on disk and when bytes last arrived.
    pub partial: PartialDownload,
    /// Its model, source and user, if recorded.
    pub about: Option<DownloadAbout>,
    /// The size of the whole file, if the journal says it.
    pub size: Option<u64>,
    /// The bytes that have arrived according to the journal.
    pub received_bytes: u64,
    /// When it began, if recorded.
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

impl Store {
    /// The model, the source and the user of an unfinished download, if recorded.
    #[must_use]
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
        let journal = self.root.read_limited(&directory.join(JOURNAL), MAX_JOURNAL_BYTES)?;
        let size = journal.as_deref().and_then(|journal| journal::size(journal, partial.file));
        // A complete file has a recipe or a blob of its own.
        let is_complete = self.recipe_outline(partial.file).is_ok_and(|outline| outline.is_some());
        let received = || match (&journal, size) {
            (Some(journal), Some(size)) => {
                super::claimed(&journal::parse(journal, partial.file, size), None).total().min(size)
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
    fn record_download(&self, file: Digest, about: &DownloadAbout) -> Result<(), StoreError> {
        let present = self.download_about(file);
        if present.as_ref() == Some(about) {
            return Ok(());
        }
        let directory = layout::partial(file);
        let path = directory.join(ABOUT);
        self.disk().remove_file(&path)?;
        if present.is_some() {
            // The earlier record must not return after a power failure.
            self.disk().sync_dir(&directory)?;
        }
        let json = about.encode().map_err(|error| StoreError::io("encode", &path)(error.into()));
        if let Err(error) = json.and_then(|json| self.write_about(&path, &json)) {
            tracing::debug!("{error}; `blobd partial ls` cannot name the download");
        }
        Ok(())
    }

    fn write_about(&self, path: &Path, json: &[u8]) -> Result<(), StoreError> {
        let file = self.disk().create_file(path, 0o600)?;
        self.disk().write_at(path, &file, json, 0)
    }
}

impl PartialDirectory {
    /// Records the pull that receives the rest of the file. `is_new` says that nothing has arrived.
    pub(super) fn record_pull(&self, is_new: bool) -> Result<(), StoreError> {
        let (store, file) = (&self.download.store, self.download.file);
        let Some(about) = &self.download.about else { return Ok(()) };
        let about = match is_new {
            true => about.clone(),
            false => about.clone().continuing(store.download_about(file)),
        };
        store.record_download(file, &about)
    }

    fn record_models(&self, models: BTreeSet<Digest>) -> Result<(), StoreError> {
        let (store, file) = (&self.download.store, self.download.file);
        // What is not known stays so.
        let Some(mut about) = store.download_about(file) else { return Ok(()) };
        let Some(bytes_from) = &mut about.bytes_from else { return Ok(()) };
        bytes_from.extend(models.into_iter().map(BytesFrom::Model));
        store.record_download(file, &about)
    }
}

impl Assembler {
    /// Records that bytes of the stored models with these manifests are going to be used for the file, if it is a
    /// download.
    pub fn note_models(&self, models: BTreeSet<Digest>) -> Result<(), StoreError> {
        match &self.partial {
            Some(partial) if !models.is_empty() => partial.record_models(models),
            _ => Ok(()),
        }
    }
}
