//! The model and the user of a download: the file `about.json` beside the journal. Only `df` and `partial` read it,
//! and a download without it, such as one of an earlier version, continues as well.

use std::path::Path;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use super::{PartialDownload, journal, journal_in};
use crate::root::Root;
use crate::{Store, StoreError};

/// Beside the journal.
pub(super) const ABOUT: &str = "about.json";
/// A name and a URL are much shorter.
const MAX_BYTES: u64 = 64 << 10;

/// The model, the source and the user of a download.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownloadAbout {
    /// The name that the model is to get.
    pub name: String,
    /// Where it comes from; of a URL, without its query.
    pub source: String,
    /// The user who pulls it.
    pub uid: u32,
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
        let journal = journal_in(&self.root, &directory)?;
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

    /// Records what a download is of, unless that is recorded already. A failure is only logged: the download does
    /// not need it.
    pub(super) fn record_download(&self, file: Digest, about: &DownloadAbout) {
        if self.download_about(file).as_ref() == Some(about) {
            return;
        }
        let path = layout::partial(file).join(ABOUT);
        let written = serde_json::to_vec(about)
            .map_err(|error| StoreError::io("encode", &path)(error.into()))
            .and_then(|json| self.replace_about(&path, &json));
        if let Err(error) = written {
            tracing::debug!("{error}; `blobd partial ls` cannot name the download");
        }
    }

    fn replace_about(&self, path: &Path, json: &[u8]) -> Result<(), StoreError> {
        self.disk().remove_file(path)?;
        let file = self.disk().create_file(path, 0o600)?;
        self.disk().write_at(path, &file, json, 0)
    }
}
