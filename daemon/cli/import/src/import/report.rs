//! What an import prints: the plan, what was stored, and what was not.

use std::path::Path;

use blobd_cli_common::batch::Batch;
use blobd_cli_common::output::{counted, human_bytes, print_text, printable};
use blobd_cli_common::{Global, lost_models};
use blobd_client::protocol::pull::Imported;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::FolderKind;
use serde::Serialize;

use super::moving::Moves;
use super::plan::{ListedModel, PathModel, Planned};
use super::{open, with_folders};
use crate::{ErrorBody, other_stores};

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
    /// What is deleted when it and all others are stored; only if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    deletes: Option<Vec<String>>,
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
pub(super) fn list(global: &Global, models: Vec<PathModel>, moves: &Moves) -> Result<(), ErrorBody> {
    let mut batch: Batch<'_, PlannedModel> = Batch::new(global, models.len());
    let usable = models.iter().enumerate().filter(|(_, (_, planned))| planned.is_ok());
    let mut deletes = moves.preview(usable.map(|(number, _)| number));
    for (number, (path, planned)) in models.into_iter().enumerate() {
        let paths = deletes.remove(&number).filter(|_| moves.is_wanted());
        let deletes = paths.map(|paths| paths.iter().map(|path| path.display().to_string()).collect());
        let described = planned.and_then(|planned| describe(&path, planned));
        let described = described.map(|model| PlannedModel { deletes, ..model });
        if let Some(model) = batch.add(&path.display(), described)
            && !global.hides_reports()
        {
            print_text(&model.text())?;
        }
    }
    batch.finish("models", ["models cannot be imported", "models cannot be imported"])
}

fn describe(path: &Path, planned: Planned) -> Result<PlannedModel, ErrorBody> {
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
                deletes: None,
            });
        }
    };
    let (size, kind) = (model.size(), model.kind.map(FolderKind::name));
    let useless = model.useless_patterns.iter();
    let useless = useless.map(|pattern| PlannedFault { message: pattern.to_string(), fatal: false });
    let faults = model.faults().iter();
    let faults = faults.map(|fault| PlannedFault { message: fault.to_string(), fatal: fault.is_fatal() });
    let faults = useless.chain(faults).collect();
    let ListedModel { files, left_out, .. } = model;
    let file = |path, size, reason| PlannedFile { path, size, reason };
    let files = files.into_iter().map(|one| file(one.path, one.size, None)).collect();
    let left_out = left_out.into_iter();
    let left_out =
        left_out.map(|left| file(left.file.path, left.file.size, Some(left.reason.to_string()))).collect();
    Ok(PlannedModel { path: shown, kind, size, files, left_out, faults, deletes: None })
}

impl PlannedModel {
    fn text(&self) -> String {
        let Self { path, kind, size, files, left_out, faults, deletes } = self;
        let kind = kind.map(|kind| format!("{kind}, ")).unwrap_or_default();
        let mut text =
            format!("{}: {kind}{}, {}\n", printable(path), counted(files.len(), "file"), human_bytes(*size));
        for PlannedFile { path, size, .. } in files {
            let how =
                if FileFormat::split_name(path).is_some() { "split into tensors" } else { "stored whole" };
            text.push_str(&format!("  {}  {}, {how}\n", printable(path), human_bytes(*size)));
        }
        if let Some(deletes) = deletes {
            text.push_str(&format!("deletes {}\n", counted(deletes.len(), "file")));
            deletes.iter().for_each(|path| text.push_str(&format!("  {}\n", printable(path))));
        }
        if !left_out.is_empty() {
            text.push_str(&format!("left out: {}\n", counted(left_out.len(), "file")));
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

pub(super) fn sums(imported: &[Imported]) -> String {
    let sum = |bytes: fn(&Imported) -> u64| imported.iter().map(bytes).fold(0, u64::saturating_add);
    let [new, reused] = [sum(|done| done.new_bytes), sum(|done| done.reused_bytes)].map(human_bytes);
    format!("{}: {new} new, {reused} shared\n", counted(imported.len(), "model"))
}

pub(crate) fn summary(done: &Imported) -> String {
    let Imported { name, digest, size, new_bytes, reused_bytes, tensor_count, .. } = done;
    let [size, new, reused] = [size, new_bytes, reused_bytes].map(|bytes| human_bytes(*bytes));
    let sidecars = done.sidecars.iter().map(|sidecar| format!("with {}\n", printable(&sidecar.file_name)));
    let more = sidecars.collect::<String>() + &lost_models::effects(&done.effects);
    let files = done.file_count.map(|files| format!(" in {}", counted(files, "file"))).unwrap_or_default();
    let (digest, tensors) = (digest.short(), counted(tensor_count, "tensor"));
    format!("{name} {digest}: {size}{files}, {new} new, {reused} shared, {tensors}\n{more}")
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
