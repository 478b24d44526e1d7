//! Obtains the head of a file: from an earlier transfer, from a similar file, or by download.

use std::sync::Arc;

use blobd_registry::Sender;
use blobd_store::{PartialFile, Store};
use blobd_store_format::file_format::MAX_HEADER_BYTES;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::split::SplitPlan;

use super::head::{self, Head, Streamed};
use super::head_reuse::{ReusedHead, reuse_head};
use super::policy::RangeFallback;
use super::two_copies::Senders;
use super::{Job, TransferError};

#[derive(Debug)]
pub(super) struct ObtainedHead {
    pub(super) head: Head,
    /// The known parts of the file, each with its offset.
    pub(super) parts: Vec<(u64, Vec<u8>)>,
    pub(super) fetched: u64,
    /// Whether some of them are copied from a similar file, now or by an earlier transfer.
    pub(super) has_reused_head: bool,
}

impl ObtainedHead {
    /// Reads the head from an earlier transfer, or reuses that of the similar file `near` where samples agree, or
    /// downloads it.
    pub(super) fn new(
        job: &Job<'_>,
        store: &Store,
        partial: &PartialFile,
        near: Option<&Recipe>,
    ) -> Result<Self, TransferError> {
        if let Some(obtained) = Self::without_header(job) {
            return obtained;
        }
        let known = partial.claimed_bytes().min(MAX_HEADER_BYTES);
        job.count_header(usize::try_from(known).unwrap_or(usize::MAX))?;
        let bytes = partial.head(MAX_HEADER_BYTES);
        if bytes.is_empty()
            && let Some(similar) = near
            && let Some(obtained) = Self::reused(job, store, similar)?
        {
            return Ok(obtained);
        }
        Self::continuing(job, bytes)
    }

    /// Downloads the head of a second copy, whatever the first copy has. If it is invalid, the head of the first copy
    /// determines how the file is split, and the second is downloaded with the rest.
    pub(super) fn again(job: &Job<'_>, store: &Store, partial: &PartialFile) -> Result<Self, TransferError> {
        if partial.first_copy().is_some() {
            // An earlier transfer has begun the second copy.
            return Self::new(job, store, partial, None);
        }
        let obtained = Self::without_header(job).unwrap_or_else(|| Self::continuing(job, Vec::new()));
        match obtained {
            Err(TransferError::Format(error)) => {
                tracing::debug!("{}: invalid head: {error}", job.file.label());
                Ok(Self { parts: Vec::new(), ..Self::new(job, store, partial, None)? })
            }
            obtained => obtained,
        }
    }

    /// For a file that does not begin with a header.
    fn without_header(job: &Job<'_>) -> Option<Result<Self, TransferError>> {
        let media_type = job.file.media_type();
        match media_type.holds_tensors() {
            false => Some(Ok(Self::whole(job))),
            true => media_type.archive_of_weights().map(|_| Self::from_archive(job)),
        }
    }

    /// Downloads the rest of a head that starts with `bytes`. If it is invalid, the whole head is downloaded once more,
    /// from another server if there is one: the file may be right, and the head damaged on its way.
    fn continuing(job: &Job<'_>, bytes: Vec<u8>) -> Result<Self, TransferError> {
        match Self::fetched(job, bytes) {
            Err(TransferError::Format(error)) if job.file.digest().is_some() => {
                tracing::info!("{}: {error}; the head is downloaded again", job.file.label());
                let (registry, file) = (job.registry.with_fresh_connections(), job.file.avoiding([]));
                Self::fetched(&Job { registry: &registry, file: &file, ..job.clone() }, Vec::new())
            }
            obtained => obtained,
        }
    }

    fn fetched(job: &Job<'_>, mut bytes: Vec<u8>) -> Result<Self, TransferError> {
        let known = bytes.len();
        let head = fetch_head(job, &mut bytes)?;
        let fetched = (bytes.len() - known) as u64;
        // An earlier transfer may have reused these bytes.
        Ok(Self { head, parts: vec![(0, bytes)], fetched, has_reused_head: known > 0 })
    }

    fn whole(job: &Job<'_>) -> Self {
        let head = Head::whole(job.file.size());
        Self { head, parts: Vec::new(), fetched: 0, has_reused_head: false }
    }

    /// Downloads the headers in an archive each time: they are few, and not at its start.
    fn from_archive(job: &Job<'_>) -> Result<Self, TransferError> {
        let archive = job.read_archive(false)?;
        let (plan, facts) = (archive.plan(job.file.size())?, archive.facts());
        let fetched = archive.fetched_bytes();
        let head = Head { plan, facts, whole: None, sender: None };
        Ok(Self { head, parts: archive.parts, fetched, has_reused_head: false })
    }

    fn reused(job: &Job<'_>, store: &Store, similar: &Recipe) -> Result<Option<Self>, TransferError> {
        let Some(ReusedHead { header, mut bytes, fetched }) = reuse_head(job, store, similar)? else {
            return Ok(None);
        };
        let Ok(head) = Head::new(&*header, job.file.size(), Streamed::default()) else { return Ok(None) };
        // Only the head is reused, not the bytes after it.
        bytes.truncate(head_bytes(&head.plan));
        Ok(Some(Self { head, parts: vec![(0, bytes)], fetched, has_reused_head: true }))
    }
}

/// The length of the head with its padding, which is the first blob of each plan.
pub(super) fn head_bytes(plan: &SplitPlan) -> usize {
    plan.blobs().first().map_or(0, |head| usize::try_from(head.size).unwrap_or(usize::MAX))
}

pub(super) fn fetch_head(job: &Job<'_>, bytes: &mut Vec<u8>) -> Result<Head, TransferError> {
    let (whole, mut fallback) = (job.file.without_ranges(), RangeFallback::default());
    job.retried(|received| {
        if !job.file.is_resumable() {
            bytes.clear();
        }
        let before = bytes.len();
        let file = if fallback.is_whole() { &whole } else { job.file };
        let head = head::fetch(&Job { file, ..job.clone() }, bytes);
        // Bytes that must be downloaded again are no progress.
        *received = if job.file.is_resumable() { (bytes.len() - before) as u64 } else { 0 };
        // At the start of a file, the other kind of request costs nothing.
        if head.is_err() {
            fallback.note_failure(bytes.len() as u64);
        }
        head
    })
}

/// Who sent the known parts: only those that were downloaded now have a sender.
pub(super) fn senders(parts: &[(u64, Vec<u8>)], sender: Option<&Arc<Sender>>) -> Senders {
    let mut senders = Senders::default();
    if let Some(sender) = sender {
        let range = |(offset, bytes): &(u64, Vec<u8>)| *offset..offset.saturating_add(bytes.len() as u64);
        parts.iter().map(range).for_each(|range| senders.note(&range, sender));
    }
    senders
}
