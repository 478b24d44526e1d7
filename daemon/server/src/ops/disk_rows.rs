//! The rows of `df`: disjoint parts whose sum is what the store's directory takes on disk.

use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::space::{UsageKind, UsageRow};
use blobd_store::gc::{GcPlan, Litter};
use blobd_store::{OtherFiles, Store};
use blobd_store_format::digest::Digest;

use super::measure::{Model, Totals};

/// The input for the rows.
pub(super) struct Parts<'p> {
    pub(super) store: &'p Store,
    pub(super) models: &'p [Model],
    pub(super) totals: &'p Totals,
    /// What nothing needs.
    pub(super) plan: &'p GcPlan,
    pub(super) others: &'p OtherFiles,
}

/// Files other than blobs and recipes that nothing needs. They are subtracted from the rows that they would be
/// part of.
#[derive(Default)]
struct Unneeded {
    trash: u64,
    staging: u64,
    downloads: BTreeMap<Digest, u64>,
}

impl Parts<'_> {
    /// Models first, the largest first; then downloads, and one row of each other kind.
    pub(super) fn rows(&self) -> Vec<UsageRow> {
        let (measured, others) = (&self.totals.measured, self.others);
        let unneeded = self.unneeded();
        let mut rows = self.models();
        rows.push(row(UsageKind::Shared, measured.shared_bytes));
        rows.push(self.in_use());
        rows.extend(self.downloads(&unneeded));
        let trash = others.trash_bytes().saturating_sub(unneeded.trash).saturating_add(measured.trash_bytes);
        rows.extend([
            row(UsageKind::Staging, others.staging_bytes().saturating_sub(unneeded.staging)),
            row(UsageKind::Trash, trash),
            row(UsageKind::Quarantine, others.quarantine),
            row(UsageKind::Unneeded, self.plan.freed_bytes()),
            row(UsageKind::Records, others.records),
            row(UsageKind::Index, others.index),
            row(UsageKind::Audit, others.audit),
            row(UsageKind::Reserve, others.reserve),
            row(UsageKind::Directories, others.directories),
        ]);
        let by = others.foreign_paths.iter().map(|path| path.display().to_string()).collect();
        rows.push(UsageRow { by, ..row(UsageKind::Other, others.foreign) });
        rows
    }

    fn models(&self) -> Vec<UsageRow> {
        let shares = self.models.iter().zip(&self.totals.measured.models);
        let rows = shares.map(|(model, share)| UsageRow {
            name: Some(model.reference().short()),
            ..row(UsageKind::Model, share.unique_bytes)
        });
        sorted(rows.collect())
    }

    /// Bytes that nothing needs but that are leased, or open or mapped in a program.
    fn in_use(&self) -> UsageRow {
        let measured = &self.totals.measured;
        let mut by = BTreeSet::new();
        if !measured.kept.is_empty() {
            by.extend(self.store.liveness().leases().holders_of_any(&measured.kept));
        }
        by.extend(self.plan.kept(self.store.liveness()).into_iter().flat_map(|kept| kept.by));
        let bytes = measured.kept_bytes.saturating_add(self.plan.held_bytes());
        UsageRow { by: by.into_iter().collect(), ..row(UsageKind::InUse, bytes) }
    }

    fn downloads(&self, unneeded: &Unneeded) -> Vec<UsageRow> {
        let mut bytes = self.others.downloads.clone();
        for (file, abandoned) in &unneeded.downloads {
            bytes.entry(*file).and_modify(|bytes| *bytes = bytes.saturating_sub(*abandoned));
        }
        let published = self.totals.downloads.iter().zip(&self.totals.measured.download_bytes);
        for (file, published) in published {
            let sum = bytes.entry(*file).or_default();
            *sum = sum.saturating_add(*published);
        }
        let rows = bytes.into_iter().map(|(file, bytes)| UsageRow {
            name: self.store.content().download_about(file).map(|about| about.name),
            digest: Some(file),
            ..row(UsageKind::Download, bytes)
        });
        sorted(rows.collect())
    }

    fn unneeded(&self) -> Unneeded {
        let mut unneeded = Unneeded::default();
        for litter in &self.plan.litter {
            match litter {
                Litter::Trash { bytes, .. } => unneeded.trash = unneeded.trash.saturating_add(*bytes),
                Litter::Staging { bytes, .. } => unneeded.staging = unneeded.staging.saturating_add(*bytes),
                Litter::Partial { file, bytes } => drop(unneeded.downloads.insert(*file, *bytes)),
            }
        }
        unneeded
    }
}

const fn row(kind: UsageKind, bytes: u64) -> UsageRow {
    UsageRow {
        kind,
        name: None,
        digest: None,
        bytes,
        size: None,
        received_bytes: None,
        user: None,
        by: Vec::new(),
    }
}

/// The largest first.
fn sorted(mut rows: Vec<UsageRow>) -> Vec<UsageRow> {
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    rows
}
