//! The rows of `df`, each compared with what the model of the store says.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::space::{DiskUsage, UsageKind};
use blobd_tests::store_dir::check_rows;
use serde_json::Value as Json;

use super::checked_store::{CheckedStore, NAMES};
use super::disk_snapshot::DiskSnapshot;
use super::needs::{Content, file_and_blobs};

/// Bytes by kind, and by the model's name or the download's file.
type Rows = BTreeMap<(UsageKind, String), u64>;

impl CheckedStore<'_> {
    /// Asserts that the rows of `df` add up to what `du` reports, and that each is what the model of the store says.
    pub(super) fn check_rows(&self, on_disk: &DiskSnapshot) {
        let usage = check_rows(&self.location.root, || self.client.disk_usage());
        let expected = self.expected_rows(on_disk);
        for (key, bytes) in found_rows(&usage) {
            // The daemon writes to these at any time, and the sum is checked already.
            let is_fixed = [UsageKind::Index, UsageKind::Audit, UsageKind::Directories, UsageKind::Reserve]
                .contains(&key.0);
            let expected = expected.get(&key).copied().unwrap_or_default();
            assert!(
                is_fixed || bytes == expected,
                "{key:?}: expected {expected} bytes, found {bytes}: {usage:#?}"
            );
        }
    }

    fn expected_rows(&self, on_disk: &DiskSnapshot) -> Rows {
        let mut rows = Rows::new();
        let content = on_disk.content();
        for (path, bytes) in &on_disk.files {
            let key = if content.contains(path) { self.owner(path) } else { self.purpose(path) };
            *rows.entry(key).or_default() += bytes;
        }
        rows
    }

    /// The row of a blob or recipe.
    fn owner(&self, path: &str) -> (UsageKind, String) {
        let models = self.models_that_need(path);
        let is_trashed = self.is_needed_by_trash(path);
        let download = self.downloads().into_iter().find(|file| self.download_keeps(file).contains(path));
        match (models.as_slice(), is_trashed, download) {
            ([name], false, _) => (UsageKind::Model, name.clone()),
            ([], true, _) => (UsageKind::Trash, String::new()),
            ([], false, Some(file)) => (UsageKind::Download, file),
            ([], false, None) if self.is_leased_or_held(path) => (UsageKind::InUse, String::new()),
            ([], false, None) => (UsageKind::Unneeded, String::new()),
            _ => (UsageKind::Shared, String::new()),
        }
    }

    fn download_keeps(&self, file: &str) -> Content {
        match self.location.root.join(format!("recipes/{file}.json")).exists() {
            true => file_and_blobs(&self.location.root, file),
            false => Content::new(),
        }
    }

    /// The row of any other file, or of a directory that is not in the root.
    fn purpose(&self, path: &str) -> (UsageKind, String) {
        let (top, rest) = path.split_once('/').unwrap_or((path, ""));
        let is_dir = self.location.root.join(path).is_dir();
        let kind = match top {
            "partial" if rest.starts_with("sha256-") => {
                let file = rest.split('/').next().unwrap_or_default();
                if is_abandoned(&self.location.root.join("partial").join(file)) {
                    UsageKind::Unneeded
                } else {
                    return (UsageKind::Download, file.to_owned());
                }
            }
            "trash" if is_expired(&self.location.root.join(path)) => UsageKind::Unneeded,
            "trash" => UsageKind::Trash,
            // No transaction is in progress.
            "staging" => UsageKind::Unneeded,
            "quarantine" => UsageKind::Quarantine,
            "audit" => UsageKind::Audit,
            "reserve" => UsageKind::Reserve,
            "manifests" | "origins" | "signatures" | "history" | "pins" if is_dir => UsageKind::Directories,
            "manifests" | "origins" | "signatures" | "history" | "pins" | "store.json" | "lock"
            | "scrub.json" => UsageKind::Records,
            _ => UsageKind::Other,
        };
        (kind, String::new())
    }

    /// The first names of the models that need a blob or recipe, as `df` shows them: names of the same files are one model.
    fn models_that_need(&self, path: &str) -> Vec<String> {
        let mut models: BTreeMap<&Content, String> = BTreeMap::new();
        for name in self.names_that_need(path) {
            let shown = shown(NAMES[name]);
            let first = models.entry(self.content_of(name)).or_insert_with(|| shown.clone());
            *first = shown.min(first.clone());
        }
        models.into_values().collect()
    }
}

fn found_rows(usage: &DiskUsage) -> Rows {
    let mut rows = Rows::new();
    for row in &usage.rows {
        let name = match row.kind {
            UsageKind::Model => row.name.clone().unwrap(),
            UsageKind::Download => format!("sha256-{}", row.digest.unwrap().to_hex()),
            _ => String::new(),
        };
        *rows.entry((row.kind, name)).or_default() += row.bytes;
    }
    rows
}

/// A name as `df` shows it.
pub(super) fn shown(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

/// Whether a collection removes a download: nothing was received for a week.
fn is_abandoned(download: &Path) -> bool {
    const WEEK: Duration = Duration::from_secs(7 * 86400);
    let status = fs::metadata(download.join("journal")).or_else(|_| fs::metadata(download)).unwrap();
    SystemTime::now().duration_since(status.modified().unwrap()).is_ok_and(|age| age > WEEK)
}

fn is_expired(record: &Path) -> bool {
    let json: Json = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    let expires = Duration::from_nanos(json["expires"].as_u64().unwrap());
    UNIX_EPOCH + expires <= SystemTime::now()
}
