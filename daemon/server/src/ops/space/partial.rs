//! `partial`: lists and drops unfinished downloads.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use blobd_client::protocol::space::{
    DroppedDownload, DroppedDownloads, KeptDownload, RemovePartialsParams, UnfinishedDownload,
    UnfinishedDownloads,
};
use blobd_store::gc::{self, Node};
use blobd_store::{DownloadSummary, Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;

use super::{Model, measure};
use crate::names::Names;
use crate::ops::{OpError, rfc3339};
use crate::transfer::Transfers;

pub(crate) fn partials(store: &Store, transfers: &Transfers) -> Result<UnfinishedDownloads, OpError> {
    let (users, published) = (Names::system(), published_bytes(store));
    let summaries = store.content().downloads()?;
    let row = |summary: &DownloadSummary| {
        let file = summary.partial.file;
        let about = summary.about.as_ref();
        let published = published.get(&file).copied().unwrap_or_default();
        UnfinishedDownload {
            digest: file,
            name: about.map(|about| about.name.clone()),
            source: about.map(|about| about.source.clone()),
            size: summary.size,
            received_bytes: summary.received_bytes,
            disk_bytes: summary.partial.bytes.saturating_add(published),
            started: summary.started.map(rfc3339),
            last_received: summary.partial.last_used.map(rfc3339),
            uid: about.map(|about| about.uid),
            user: about.and_then(|about| users.name_of(about.uid)),
            running: is_running(store, transfers, file),
        }
    };
    let mut downloads: Vec<_> = summaries.iter().map(row).collect();
    downloads.sort_by(|a, b| b.disk_bytes.cmp(&a.disk_bytes).then_with(|| a.digest.cmp(&b.digest)));
    Ok(UnfinishedDownloads { downloads })
}

/// The size on disk of blobs and recipes that were published already, if only the download needs them. Empty if that is
/// unknown, for instance because of a damaged manifest.
fn published_bytes(store: &Store) -> BTreeMap<Digest, u64> {
    let measured = Model::all(store).and_then(|models| measure(store, &models));
    let Ok(totals) = measured else { return BTreeMap::new() };
    totals.downloads.into_iter().zip(totals.measured.download_bytes.iter().copied()).collect()
}

/// Whether a pull transfers the file, or still needs what it has received of it.
fn is_running(store: &Store, transfers: &Transfers, file: Digest) -> bool {
    transfers.is_running(file) || store.liveness().leases().is_leased(file)
}

/// Drops unfinished downloads and what only they need. Downloads that a pull continues are kept, and those of other users
/// unless `may_drop_all` is set.
///
/// # Errors
/// [`OpError::NoSuchDownload`] for a target without a download, [`OpError::DownloadInUse`] and
/// [`OpError::DownloadOfAnother`] for a target that is kept; then none is dropped.
pub(crate) fn remove_partials(
    store: &Store,
    transfers: &Transfers,
    params: &RemovePartialsParams,
    uid: u32,
    may_drop_all: bool,
) -> Result<DroppedDownloads, OpError> {
    let now = SystemTime::now();
    let age = params.older_than_seconds.map(Duration::from_secs);
    let is_old = |summary: &&DownloadSummary| age.is_none_or(|age| summary.partial.is_older(now, age));
    let summaries = store.content().downloads()?;
    let selected = select(&summaries, &params.targets)?;
    let mut dropping =
        Dropping { store, transfers, done: DroppedDownloads::default(), candidates: BTreeSet::new() };
    let mut chosen = Vec::new();
    for summary in selected.into_iter().filter(is_old) {
        let is_own = summary.about.as_ref().is_some_and(|about| about.uid == uid);
        match dropping.why_kept(summary, may_drop_all || is_own) {
            None => chosen.push(summary),
            Some(error) if !params.targets.is_empty() => return Err(error),
            Some(error) => dropping.keep(summary, &error),
        }
    }
    store.ledger().with_reserve(|| {
        chosen.into_iter().try_for_each(|summary| dropping.remove(summary))?;
        dropping.finish()
    })
}

/// The downloads of the targets, each once; all if there are no targets.
fn select<'s>(
    summaries: &'s [DownloadSummary],
    targets: &[String],
) -> Result<Vec<&'s DownloadSummary>, OpError> {
    let mut selected = BTreeSet::new();
    for target in targets {
        let found = (0..summaries.len())
            .filter(|place| summaries.get(*place).is_some_and(|summary| is_meant(summary, target)));
        let found: Vec<usize> = found.collect();
        if found.is_empty() {
            return Err(OpError::NoSuchDownload { target: target.clone() });
        }
        selected.extend(found);
    }
    let is_selected = |place: &usize| targets.is_empty() || selected.contains(place);
    Ok((0..summaries.len()).filter(is_selected).filter_map(|place| summaries.get(place)).collect())
}

/// Whether a target is the name or the source of a download, a pattern of its name, or the start of its digest.
fn is_meant(summary: &DownloadSummary, target: &str) -> bool {
    /// Enough to make an accidental match unlikely.
    const LEAST_DIGITS: usize = 6;
    let hex = target.strip_prefix("sha256:").or_else(|| target.strip_prefix("sha256-")).unwrap_or(target);
    let is_id =
        hex.len() >= LEAST_DIGITS && summary.partial.file.to_hex().starts_with(&hex.to_ascii_lowercase());
    let is_meant = |name: Reference| match NamePattern::is_pattern(target) {
        true => target.parse().is_ok_and(|pattern: NamePattern| pattern.matches(&name)),
        false => target.parse().is_ok_and(|wanted: Reference| wanted.same_model(&name)),
    };
    let is_named = summary
        .about
        .as_ref()
        .is_some_and(|about| about.source == target || about.name.parse().is_ok_and(is_meant));
    is_id || is_named
}

struct Dropping<'d> {
    store: &'d Store,
    transfers: &'d Transfers,
    done: DroppedDownloads,
    /// Data that may be unneeded now.
    candidates: BTreeSet<Digest>,
}

impl Dropping<'_> {
    fn why_kept(&self, summary: &DownloadSummary, is_allowed: bool) -> Option<OpError> {
        let name = label(summary);
        if !is_allowed {
            return Some(OpError::DownloadOfAnother {
                name,
                uid: summary.about.as_ref().map(|about| about.uid),
            });
        }
        is_running(self.store, self.transfers, summary.partial.file)
            .then_some(OpError::DownloadInUse { name })
    }

    fn keep(&mut self, summary: &DownloadSummary, error: &OpError) {
        let name = summary.about.as_ref().map(|about| about.name.clone());
        let kept = KeptDownload { digest: summary.partial.file, name, reason: error.to_string() };
        self.done.kept.push(kept);
    }

    /// No pull can begin to continue the download meanwhile.
    fn remove(&mut self, summary: &DownloadSummary) -> Result<(), OpError> {
        let file = summary.partial.file;
        let guard =
            self.transfers.try_acquire(file).filter(|_| !self.store.liveness().leases().is_leased(file));
        if guard.is_none() {
            // A pull has begun since the check.
            self.keep(summary, &OpError::DownloadInUse { name: label(summary) });
            return Ok(());
        }
        let needed = self.store.content().download_needs(file)?;
        self.candidates.extend(needed.into_iter().map(Node::digest));
        let freed = self.store.ledger().remove_partial(file)?;
        self.done.freed_bytes = self.done.freed_bytes.saturating_add(freed);
        let name = summary.about.as_ref().map(|about| about.name.clone());
        self.done.removed.push(DroppedDownload { digest: file, name });
        Ok(())
    }

    /// Collects what only the downloads needed.
    fn finish(mut self) -> Result<DroppedDownloads, OpError> {
        if self.candidates.is_empty() {
            return Ok(self.done);
        }
        match gc::collect_from(self.store.liveness(), self.candidates.clone()) {
            Ok(deleted) => {
                self.done.freed_bytes = self.done.freed_bytes.saturating_add(deleted.freed_bytes());
            }
            // A damaged model may need the blobs. They are collected when it is repaired.
            Err(error @ StoreError::ReadOnly { .. }) => return Err(error.into()),
            Err(error) => {
                tracing::warn!("{error}; blobs of dropped downloads are kept");
                self.store.liveness().condemn(self.candidates);
            }
        }
        Ok(self.done)
    }
}

fn label(summary: &DownloadSummary) -> String {
    let file = || summary.partial.file.short();
    summary.about.as_ref().map_or_else(file, |about| about.name.clone())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use blobd_client::protocol::error::ErrorCode;
    use blobd_store::testing::new_store;
    use blobd_store_format::layout;

    use super::*;

    /// A store with a download that uid 7 began.
    fn store_with_download() -> (tempfile::TempDir, std::sync::Arc<Store>, Digest) {
        let (folder, store) = new_store();
        let file = Digest::of(b"weights");
        let directory = folder.path().join("store").join(layout::partial(file));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("0"), [0; 5000]).unwrap();
        fs::write(directory.join("about.json"), r#"{"name":"a/b:c","source":"r.example/a/b:c","uid":7}"#)
            .unwrap();
        (folder, store, file)
    }

    fn remove(
        store: &Store,
        targets: &[&str],
        uid: u32,
        may_drop_all: bool,
    ) -> Result<DroppedDownloads, OpError> {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        let params = RemovePartialsParams { targets, older_than_seconds: None };
        remove_partials(store, &Transfers::default(), &params, uid, may_drop_all)
    }

    #[test]
    fn download_of_another_user_is_dropped_only_for_an_administrator() {
        let (_folder, store, file) = store_with_download();
        let refused = remove(&store, &["a/b:c"], 8, false).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Denied);
        let all = remove(&store, &[], 8, false).unwrap();
        assert!(all.removed.is_empty() && all.kept[0].reason.contains("uid 7"), "{all:?}");
        let dropped = remove(&store, &["a/b:c"], 8, true).unwrap();
        assert_eq!((dropped.removed[0].digest, dropped.freed_bytes > 5000), (file, true));
        assert!(store.content().downloads().unwrap().is_empty());
    }

    #[test]
    fn own_download_is_found_by_name_source_and_digest() {
        let digest = Digest::of(b"weights");
        let hex = digest.to_hex();
        for target in
            ["a/b:c", "registry.ollama.ai/a/b:c", "r.example/a/b:c", &hex, &hex[..12], &digest.to_string()]
        {
            let (_folder, store, _) = store_with_download();
            assert_eq!(remove(&store, &[target], 7, false).unwrap().removed.len(), 1, "{target}");
        }
        for target in ["a/b", "b:c", &hex[..4], "", "nobody"] {
            let (_folder, store, _) = store_with_download();
            let error = remove(&store, &["a/b:c", target], 7, false).unwrap_err();
            assert_eq!(error.code(), ErrorCode::NotFound, "{target}");
            assert_eq!(store.content().downloads().unwrap().len(), 1, "none is dropped: {target}");
        }
    }

    #[test]
    fn leased_download_is_running() {
        let (_folder, store, file) = store_with_download();
        let lease = store.liveness().leases().grant("pull of a/b:c");
        lease.protect(file);
        assert!(partials(&store, &Transfers::default()).unwrap().downloads[0].running);
        assert_eq!(remove(&store, &["a/b:c"], 7, false).unwrap_err().code(), ErrorCode::Busy);
        drop(lease);
        remove(&store, &["a/b:c"], 7, false).unwrap();
    }
}
