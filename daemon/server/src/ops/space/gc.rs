//! `gc`: deletes what nothing needs, or with `--quarantine` the damaged blobs that were put aside.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

use blobd_client::protocol::request::GcParams;
use blobd_client::protocol::upkeep::{GcItem, GcReason, GcReport, QuarantinedItem};
use blobd_model::facts::ModelFacts;
use blobd_store::gc::{self, GcPlan, Node, OtherDeletion, Unlisted};
use blobd_store::{QuarantinedBlob, Store};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;

use super::lost_models::kept;
use crate::ops::describe::read_header;
use crate::ops::{OpError, rfc3339};

/// Plans a collection and, unless it is a dry run, executes the plan.
///
/// # Errors
/// [`blobd_store::StoreError`] when a manifest, recipe or trash record cannot be read; then nothing is deleted.
pub fn gc(store: &Store, params: GcParams) -> Result<GcReport, OpError> {
    if params.quarantine {
        return match params.dry_run {
            true => empty_quarantine(store, true),
            false => store.ledger().with_reserve(|| empty_quarantine(store, false)),
        };
    }
    let lower_stores =
        store.content().lower_paths().iter().map(|place| place.display().to_string()).collect();
    let mut report = GcReport { dry_run: params.dry_run, lower_stores, ..GcReport::default() };
    if params.dry_run {
        let plan = gc::plan(store.liveness())?;
        add(&mut report, store, &plan, &Descriptions::new(store, &plan));
        let Unlisted { files, bytes } = plan.unlisted;
        note_unlisted(&mut report, files, bytes);
        return Ok(report);
    }
    store.ledger().with_reserve(|| collect(store, &mut report))?;
    Ok(report)
}

fn collect(store: &Store, report: &mut GcReport) -> Result<(), OpError> {
    loop {
        let mut descriptions = Descriptions::default();
        let deleted =
            gc::collect_batch(store.liveness(), &mut |plan| descriptions = Descriptions::new(store, plan))?;
        add(report, store, &deleted, &descriptions);
        if deleted.is_last_batch() {
            return Ok(());
        }
    }
}

/// Adds what was deleted or would be. Only the first of very many files are listed.
fn add(report: &mut GcReport, store: &Store, plan: &GcPlan, descriptions: &Descriptions) {
    /// With 300 bytes for each, in memory and as JSON.
    const MAX_LISTED: usize = 1 << 16;
    report.freed_bytes = report.freed_bytes.saturating_add(plan.freed_bytes());
    report.kept = plan.kept(store.liveness()).into_iter().map(kept).collect();
    for item in items(plan, descriptions) {
        if report.deleted.len() < MAX_LISTED {
            report.deleted.push(item);
        } else {
            note_unlisted(report, 1, item.size);
        }
    }
}

fn note_unlisted(report: &mut GcReport, files: u64, bytes: u64) {
    if files > 0 {
        let unlisted = report.unlisted.get_or_insert_default();
        unlisted.files = unlisted.files.saturating_add(files);
        unlisted.bytes = unlisted.bytes.saturating_add(bytes);
    }
}

fn items(plan: &GcPlan, descriptions: &Descriptions) -> impl Iterator<Item = GcItem> {
    let items =
        plan.other_deletions.iter().map(other_deletion).chain(plan.deletions.iter().copied().map(deletion));
    let described = move |item: GcItem| {
        let of = item.digest.and_then(|digest| descriptions.get(digest));
        GcItem { of: of.map(ToOwned::to_owned), ..item }
    };
    items.map(described)
}

fn deletion((node, size): (Node, u64)) -> GcItem {
    let reason = match node {
        Node::Recipe(_) => GcReason::UnreferencedRecipe,
        Node::Blob(_) => GcReason::UnreferencedBlob,
    };
    GcItem { digest: Some(node.digest()), size, reason, of: None, quarantined: None }
}

const fn other_deletion(deletion: &OtherDeletion) -> GcItem {
    let (digest, size, reason) = match deletion {
        OtherDeletion::Trash { record, bytes } => (Some(*record), *bytes, GcReason::ExpiredTrash),
        OtherDeletion::Partial { file, bytes } => (Some(*file), *bytes, GcReason::AbandonedDownload),
        OtherDeletion::Staging { bytes, .. } => (None, *bytes, GcReason::AbandonedStaging),
    };
    GcItem { digest, size, reason, of: None, quarantined: None }
}

/// Deletes every copy in quarantine, or in a dry run lists them. If a model needs the blob and the store has no other copy,
/// an empty file remains, so that the damage stays known.
///
/// # Errors
/// [`blobd_store::StoreError`] when a manifest, recipe or trash record cannot be read: then the needed blobs are unknown,
/// and nothing is deleted.
fn empty_quarantine(store: &Store, dry_run: bool) -> Result<GcReport, OpError> {
    let (copies, markers) = (store.content().quarantined_blobs()?, store.content().quarantine_markers()?);
    let users = Users::new(store, copies.iter().chain(&markers))?;
    let mut marked = BTreeSet::new();
    for marker in &markers {
        if users.need(store, marker.digest)? {
            marked.insert(marker.digest);
        } else if !dry_run {
            store.content().delete_quarantined(marker, false)?;
        }
    }
    let mut deleted = Vec::with_capacity(copies.len());
    for copy in &copies {
        let is_needed = users.need(store, copy.digest)?;
        if !dry_run {
            // One marker is enough.
            store.content().delete_quarantined(copy, is_needed && marked.insert(copy.digest))?;
        }
        deleted.push(item(copy, users.models(copy.digest), is_needed));
    }
    if !dry_run {
        store.content().sync_quarantine()?;
    }
    let freed_bytes = deleted.iter().map(|item| item.size).fold(0, u64::saturating_add);
    Ok(GcReport { dry_run, deleted, freed_bytes, ..GcReport::default() })
}

fn item(copy: &QuarantinedBlob, models: Vec<String>, is_needed: bool) -> GcItem {
    let since = UNIX_EPOCH.checked_add(Duration::from_secs(copy.time)).unwrap_or(UNIX_EPOCH);
    GcItem {
        digest: Some(copy.digest),
        size: copy.bytes,
        reason: GcReason::Quarantined,
        of: None,
        quarantined: Some(QuarantinedItem { since: rfc3339(since), models, is_needed }),
    }
}

#[derive(Debug)]
struct Users(BTreeMap<Digest, BTreeSet<String>>);

impl Users {
    fn new<'b>(store: &Store, blobs: impl Iterator<Item = &'b QuarantinedBlob>) -> Result<Self, OpError> {
        let mut users = Self(blobs.map(|blob| (blob.digest, BTreeSet::new())).collect());
        if users.0.is_empty() {
            return Ok(users);
        }
        for reference in store.names().tags()?.references {
            users.add(store, &store.names().manifest(&reference)?, &reference.short())?;
        }
        for trashed in store.names().trash()? {
            users.add(store, &trashed.manifest, &format!("{} in the trash", trashed.reference.short()))?;
        }
        Ok(users)
    }

    fn add(&mut self, store: &Store, manifest: &Manifest, name: &str) -> Result<(), OpError> {
        for file in manifest.files() {
            let outline = store.content().recipe_outline(file.digest)?;
            let blobs = outline.map(|outline| outline.digests().to_vec()).unwrap_or_default();
            for blob in blobs.into_iter().chain([file.digest]) {
                if let Some(models) = self.0.get_mut(&blob) {
                    models.insert(name.to_owned());
                }
            }
        }
        Ok(())
    }

    fn models(&self, blob: Digest) -> Vec<String> {
        self.0.get(&blob).into_iter().flatten().cloned().collect()
    }

    /// Whether a model consists of the blob and the store has no other copy.
    fn need(&self, store: &Store, blob: Digest) -> Result<bool, OpError> {
        let is_used = self.0.get(&blob).is_some_and(|models| !models.is_empty());
        Ok(is_used && store.content().blob_size(blob)?.is_none())
    }
}

/// The models that unneeded data belonged to, as far as that is still on disk: recipes name the blobs of a file, whose header
/// names the model; the records of the trash have names.
#[derive(Debug, Default)]
struct Descriptions(BTreeMap<Digest, String>);

impl Descriptions {
    fn new(store: &Store, plan: &GcPlan) -> Self {
        /// The data of further recipes is not described.
        const MAX_RECIPES: usize = 1000;
        let mut found = BTreeMap::new();
        // Unreadable data is not described.
        for trashed in store.names().trash().unwrap_or_default() {
            found.insert(trashed.record, trashed.reference.short());
            for file in trashed.manifest.digests() {
                found.entry(file).or_insert_with(|| trashed.reference.short());
            }
        }
        let recipes = plan.deletions.iter().filter_map(|(node, _)| match node {
            Node::Recipe(file) => Some(*file),
            Node::Blob(_) => None,
        });
        for file in recipes.take(MAX_RECIPES) {
            let Ok(Some(recipe)) = store.content().recipe(file) else { continue };
            let name = found.get(&file).cloned().unwrap_or_else(|| name_in_header(store, &recipe));
            for blob in recipe.digests() {
                found.entry(blob).or_insert_with(|| name.clone());
            }
            found.insert(file, name);
        }
        Self(found)
    }

    fn get(&self, digest: Digest) -> Option<&str> {
        self.0.get(&digest).map(String::as_str)
    }
}

/// The model's name and quantisation, or the digest of the file.
fn name_in_header(store: &Store, recipe: &Recipe) -> String {
    const MAX_CHARS: usize = 80;
    let unnamed = || format!("file {}", recipe.file().short());
    let Ok(Some(header)) = read_header(store, recipe) else { return unnamed() };
    let name = header.metadata().find(|(key, _)| *key == b"general.name");
    let name = name.and_then(|(_, value)| value.as_str().map(ToOwned::to_owned));
    let name = name
        .filter(|name| !name.is_empty())
        .map_or_else(unnamed, |name| name.chars().take(MAX_CHARS).collect());
    match ModelFacts::from_header(&*header).quantization {
        Some(quantization) => format!("{name}, {quantization}"),
        None => name,
    }
}
