//! What an import prints: the plan, and what was stored.

use blobd_client::protocol::pull::Imported;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::FolderKind;
use serde::Serialize;

use super::plan::{ListedModel, PathModel, Planned};
use super::{open, with_folders};
use crate::batch::Batch;
use crate::output::{human_bytes, print_text, printable};
use crate::{ErrorBody, Global, lost_models};

/// A model that would be imported.
#[derive(Debug, Serialize)]
struct PlannedModel {
    path: String,
    /// What programs the folder is for; absent for GGUF files.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    size: u64,
    files: Vec<PlannedFile>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<PlannedFile>,
    /// What is wrong with the folder.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    faults: Vec<PlannedFault>,
}

#[derive(Debug, Serialize)]
struct PlannedFile {
    path: String,
    size: u64,
    /// Why it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct PlannedFault {
    message: String,
    /// Whether the import would be refused.
    fatal: bool,
}

/// Prints the files of each model.
pub(super) fn list(global: &Global, models: Vec<PathModel>) -> Result<(), ErrorBody> {
    let mut batch: Batch<'_, PlannedModel> = Batch::new(global, models.len());
    for (path, planned) in models {
        let described = planned.and_then(|planned| describe(&path, planned));
        if let Some(model) = batch.add(&path.display(), described)
            && !global.hides_reports()
        {
            print_text(&model.text())?;
        }
    }
    batch.finish("models", ["models cannot be imported", "models cannot be imported"])
}

fn describe(path: &std::path::Path, planned: Planned) -> Result<PlannedModel, ErrorBody> {
    let shown = path.display().to_string();
    let model = match planned {
        Planned::List(model) => model,
        Planned::File { .. } => {
            let size = open(path)?.metadata().map(|found| found.len()).unwrap_or_default();
            let name = with_folders(path).rsplit('/').next().unwrap_or_default().to_owned();
            let files = vec![PlannedFile { path: name, size, reason: None }];
            return Ok(PlannedModel {
                path: shown,
                kind: None,
                size,
                files,
                left_out: Vec::new(),
                faults: Vec::new(),
            });
        }
    };
    let (size, kind) = (model.size(), model.kind.map(FolderKind::name));
    let faults = model.faults().iter();
    let faults =
        faults.map(|fault| PlannedFault { message: fault.to_string(), fatal: fault.is_fatal() }).collect();
    let ListedModel { files, left_out, .. } = model;
    let file = |path, size, reason| PlannedFile { path, size, reason };
    let files = files.into_iter().map(|one| file(one.path, one.size, None)).collect();
    let left_out = left_out.into_iter();
    let left_out =
        left_out.map(|left| file(left.file.path, left.file.size, Some(left.reason.to_string()))).collect();
    Ok(PlannedModel { path: shown, kind, size, files, left_out, faults })
}

impl PlannedModel {
    fn text(&self) -> String {
        let Self { path, kind, size, files, left_out, faults } = self;
        let kind = kind.map(|kind| format!("{kind}, ")).unwrap_or_default();
        let mut text =
            format!("{}: {kind}{}, {}\n", printable(path), count(files.len(), "file"), human_bytes(*size));
        for PlannedFile { path, size, .. } in files {
            let how =
                if FileFormat::split_name(path).is_some() { "split into tensors" } else { "stored whole" };
            text.push_str(&format!("  {}  {}, {how}\n", printable(path), human_bytes(*size)));
        }
        if !left_out.is_empty() {
            text.push_str(&format!("left out: {}\n", count(left_out.len(), "file")));
        }
        for PlannedFile { path, size, reason } in left_out {
            let reason = reason.as_deref().unwrap_or_default();
            text.push_str(&format!("  {}  {}: {reason}\n", printable(path), human_bytes(*size)));
        }
        for PlannedFault { message, fatal } in faults {
            let what = if *fatal { "error" } else { "note" };
            text.push_str(&format!("{what}: {}\n", printable(message)));
        }
        text
    }
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

pub(super) fn sums(imported: &[Imported]) -> String {
    let sum = |bytes: fn(&Imported) -> u64| imported.iter().map(bytes).fold(0, u64::saturating_add);
    let [new, reused] = [sum(|done| done.new_bytes), sum(|done| done.reused_bytes)].map(human_bytes);
    let models = if imported.len() == 1 { "model" } else { "models" };
    format!("{} {models}: {new} new, {reused} shared\n", imported.len())
}

pub(super) fn summary(done: &Imported) -> String {
    let Imported { name, digest, size, new_bytes, reused_bytes, tensor_count, .. } = done;
    let [size, new, reused] = [size, new_bytes, reused_bytes].map(|bytes| human_bytes(*bytes));
    let sidecars = done.sidecars.iter().map(|sidecar| format!("with {}\n", printable(&sidecar.file_name)));
    let more = sidecars.collect::<String>() + &lost_models::effects(&done.effects);
    let files = done.file_count.map(|files| format!(" in {files} files")).unwrap_or_default();
    let digest = digest.short();
    format!("{name} {digest}: {size}{files}, {new} new, {reused} shared, {tensor_count} tensors\n{more}")
}
