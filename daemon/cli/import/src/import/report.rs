//! What an import prints about the models that it stored, and about those that it left out.

use blobd_cli_common::lost_models;
use blobd_cli_common::output::{counted, human_bytes, new_and_reused, printable};
use blobd_client::protocol::pull::Imported;
use serde::Serialize;

use crate::other_stores;

pub(super) fn sums(imported: &[Imported]) -> String {
    let sum = |bytes: fn(&Imported) -> u64| imported.iter().map(bytes).fold(0, u64::saturating_add);
    let parts = new_and_reused(sum(|done| done.new_bytes), sum(|done| done.reused_bytes));
    format!("{}: {parts}\n", counted(imported.len(), "model"))
}

pub(crate) fn summary(done: &Imported) -> String {
    let Imported { name, digest, size, new_bytes, reused_bytes, tensor_count, .. } = done;
    let (size, parts) = (human_bytes(*size), new_and_reused(*new_bytes, *reused_bytes));
    let sidecars = done.sidecars.iter().map(|sidecar| format!("with {}\n", printable(&sidecar.file_name)));
    let more = sidecars.collect::<String>() + &lost_models::effects(&done.effects);
    let files = done.file_count.map(|files| format!(" in {}", counted(files, "file"))).unwrap_or_default();
    let (digest, tensors) = (digest.short(), counted(tensor_count, "tensor"));
    format!("{name} {digest}: {size}{files}, {parts}, {tensors}\n{more}")
}

/// A model of another program that is not imported, and nothing is wrong with it.
#[derive(Debug, Serialize)]
pub(super) struct LeftOutModel {
    name: String,
    reason: String,
}

pub(super) fn left_out(models: &[&other_stores::PlannedModel]) -> Vec<LeftOutModel> {
    let model = |model: &&other_stores::PlannedModel| LeftOutModel {
        name: model.found.name.clone(),
        reason: model.reason().unwrap_or_default(),
    };
    models.iter().map(model).collect()
}

impl LeftOutModel {
    pub(super) fn text(&self) -> String {
        format!("left out: {}: {}\n", printable(&self.name), printable(&self.reason))
    }
}
