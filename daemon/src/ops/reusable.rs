//! Which stored files and unfinished downloads a pull may use instead of downloading them.
//!
//! A manifest, or a header of a web server, can name the digest of any stored file. If the store then had the file
//! count as present, a user could read a model that the policy denies by naming its files in another one. So for a
//! user whom a rule may deny something, a stored file counts only if it is one of a model that the user may read.
//! Any other is downloaded: that proves that the user has a source for it. The store still keeps one copy.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_registry::RemoteFile;
use blobd_store::{DownloadAbout, PartialFile, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::source::PullSource;

use super::OpError;
use super::policy::CallerPolicy;

/// The files that count as present if they are stored.
#[derive(Debug)]
pub(super) struct Reusable(Option<BTreeSet<Digest>>);

impl Reusable {
    /// Which of the files with these digests may be reused.
    pub(super) fn of(
        store: &Store,
        policy: &CallerPolicy,
        wanted: impl IntoIterator<Item = Digest>,
    ) -> Result<Self, OpError> {
        if !policy.is_restricted() {
            return Ok(Self(None));
        }
        let wanted: BTreeSet<Digest> = wanted.into_iter().collect();
        let mut allowed = BTreeSet::new();
        if wanted.is_empty() {
            return Ok(Self(Some(allowed)));
        }
        for tag in store.all_summaries()? {
            if files_of(&tag).iter().any(|file| wanted.contains(file) && !allowed.contains(file)) {
                allowed.extend(allowed_files(store, policy, &tag)?.intersection(&wanted));
            }
        }
        Ok(Self(Some(allowed)))
    }

    /// The same for the files of a model at a registry.
    pub(super) fn of_files<'f>(
        store: &Store,
        policy: &CallerPolicy,
        files: impl IntoIterator<Item = &'f RemoteFile>,
    ) -> Result<Self, OpError> {
        let digest = |file: &RemoteFile| Some(file.descriptor().or_else(|| file.unchanged())?.digest);
        Self::of(store, policy, files.into_iter().filter_map(digest))
    }

    pub(super) fn contains(&self, file: Digest) -> bool {
        self.0.as_ref().is_none_or(|allowed| allowed.contains(&file))
    }
}

fn files_of(tag: &TagSummary) -> &[Digest] {
    tag.manifest.as_ref().map_or(&[], |manifest| &manifest.files)
}

/// The files of a stored model that the user may read; none if the model is denied or damaged.
fn allowed_files(
    store: &Store,
    policy: &CallerPolicy,
    tag: &TagSummary,
) -> Result<BTreeSet<Digest>, OpError> {
    let none = BTreeSet::new();
    let model = match store.model(&tag.reference) {
        Ok(model) => model,
        Err(error) => {
            tracing::debug!("{}: its files are not reused: {error}", tag.reference.short());
            return Ok(none);
        }
    };
    match policy.check_stored(store, &model, None) {
        Ok(()) => Ok(model.manifest.digests().into_iter().collect()),
        Err(OpError::DeniedByPolicy { .. }) => Ok(none),
        // It is replaced by what is downloaded.
        Err(OpError::Damaged { digest, .. }) => {
            store.quarantine_if_damaged(digest)?;
            Ok(none)
        }
        Err(error) => Err(error),
    }
}

/// The file as this user may download it. An unfinished download of the same file by another user may be of a model
/// that the policy denies, and nearly complete. It is continued only if it comes from the same source; otherwise the
/// file is downloaded separately.
pub(super) fn separated(
    store: &Arc<Store>,
    policy: &CallerPolicy,
    file: &RemoteFile,
    (source, uid): (&PullSource, u32),
) -> Result<Option<RemoteFile>, StoreError> {
    let Some(digest) = file.digest().filter(|_| policy.is_restricted()) else { return Ok(None) };
    let is_shared = match store.download_about(digest) {
        Some(DownloadAbout { source: others, uid: other, .. }) => {
            other == uid || others == source.to_string()
        }
        None => PartialFile::open(store, digest, file.size())?.claimed_bytes() == 0,
    };
    Ok((!is_shared).then(|| file.of_one_user(uid)))
}
