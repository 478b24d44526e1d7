//! `blobd import PATH --list`: the files of each model, its name, and what it would add to the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::connect_if_stored;
use blobd_cli_common::output::{counted, human_bytes, print_text, printable};
use blobd_cli_common::{Global, internal};
use blobd_client::protocol::pull::Imported;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::FolderKind;
use serde::Serialize;

use super::earlier::Earlier;
use super::moving::Moves;
use super::plan::{ListedModel, PathModel, Planned};
use super::{Params, name_of, open, with_folders};
use crate::local_folder::Identity;
use crate::other_stores::{CostOfList, ModelCost, ModelState, StoredModels, UnreadFile, at_most, name_note};
use crate::{ErrorBody, Reference};

/// A model that would be imported.
#[derive(Debug, Serialize)]
struct PlannedModel {
    path: String,
    /// The name under which it is stored, or that it would get.
    name: String,
    /// What programs the folder is for; absent for GGUF files.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    size: u64,
    #[serde(flatten)]
    cost: ModelCost,
    files: Vec<PlannedFile>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<PlannedFile>,
    /// What is wrong with the folder.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    faults: Vec<PlannedFault>,
    /// What a user should know about it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
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

/// Prints what an import of these models would do. A store that does not exist yet is not created.
pub(super) fn list(
    global: &Global,
    params: &Params,
    models: Vec<PathModel>,
    moves: &Moves,
) -> Result<(), ErrorBody> {
    let connected = connect_if_stored(global)?;
    let client = connected.as_ref().map(|connected| &connected.client);
    let stored = match client {
        Some(client) => Earlier::new(client, params, &models, false)?.1,
        None => BTreeMap::new(),
    };
    let has_new = stored.len() < models.len();
    let names = StoredModels::list(client)?;
    let cost = CostOfList::new(if has_new { names.digests()? } else { BTreeSet::new() });
    let mut listing = Listing { params, names, taken: BTreeSet::new(), cost };
    let mut batch: Batch<'_, PlannedModel> = Batch::new(global, models.len());
    let usable = models.iter().enumerate().filter(|(_, (_, planned))| planned.is_ok());
    let mut deletes = moves.preview(usable.map(|(number, _)| number));
    for (number, (path, planned)) in models.into_iter().enumerate() {
        let paths = deletes.remove(&number).filter(|_| moves.is_wanted());
        let deletes = paths.map(|paths| paths.iter().map(|path| path.display().to_string()).collect());
        let described = planned.and_then(|planned| listing.describe(&path, planned, stored.get(&number)));
        let described = described.map(|model| PlannedModel { deletes, ..model });
        if let Some(model) = batch.add(&path.display(), described)
            && !global.hides_reports()
        {
            print_text(&model.text())?;
        }
    }
    let total = listing.cost.total();
    if batch.done().len() > 1 && !global.hides_reports() {
        print_text(&total.text())?;
    }
    batch.finish_with("models", &total, ["models cannot be imported", "models cannot be imported"])
}

/// Describes the models of a list, one after the other.
struct Listing<'l> {
    params: &'l Params,
    names: StoredModels<'l>,
    /// The names that earlier models of the list get, in lower case.
    taken: BTreeSet<String>,
    cost: CostOfList,
}

impl Listing<'_> {
    fn describe(
        &mut self,
        path: &Path,
        planned: Planned,
        stored: Option<&Imported>,
    ) -> Result<PlannedModel, ErrorBody> {
        let target = match stored {
            Some(stored) => stored.name.parse().map_err(internal)?,
            None => name_of(self.params, path, &planned)?,
        };
        let model = match planned {
            Planned::List(model) => of_several_files(path, model),
            Planned::File { .. } => of_one_file(path)?,
        };
        let Described { mut model, files } = model;
        let is_refused = model.faults.iter().any(|fault| fault.fatal);
        let state = match stored {
            Some(_) => ModelState::Stored,
            None if is_refused => ModelState::Unusable,
            None => ModelState::New,
        };
        if state == ModelState::New {
            model.notes.extend(self.other_model(&target));
        }
        model.name = target.short();
        model.cost = self.cost.add(state, model.size, files.into_iter());
        Ok(model)
    }

    /// Notes that another model has the name, as far as that is known before the files are read.
    fn other_model(&mut self, target: &Reference) -> Option<String> {
        let is_earlier = !self.taken.insert(target.short().to_lowercase());
        let other = match is_earlier {
            true => "an earlier model of this list",
            false => self.names.get(target).map(|_| "a model of the store")?,
        };
        let becomes = match (&self.params.name, self.params.force) {
            (Some(_), true) => "replaces it",
            (Some(_), false) => "is refused without --force",
            (None, _) => "gets a name with its folder or its ID",
        };
        Some(name_note(other, becomes))
    }
}

/// A model whose name and cost are not determined yet, and what is known of its files.
struct Described {
    model: PlannedModel,
    files: Vec<UnreadFile>,
}

impl PlannedModel {
    fn new(path: &Path, size: u64, files: Vec<PlannedFile>) -> Self {
        let cost = ModelCost { state: ModelState::New, max_new_bytes: None, shared_bytes: None };
        Self {
            path: path.display().to_string(),
            name: String::new(),
            kind: None,
            size,
            cost,
            files,
            left_out: Vec::new(),
            faults: Vec::new(),
            notes: Vec::new(),
            deletes: None,
        }
    }
}

fn of_one_file(path: &Path) -> Result<Described, ErrorBody> {
    let data = open(path)?.metadata().map_err(|error| super::not_opened(path, &error))?;
    let name = with_folders(path).rsplit('/').next().unwrap_or_default().to_owned();
    let model = PlannedModel::new(path, data.len(), vec![PlannedFile::new(name, data.len(), None)]);
    let file = UnreadFile { size: data.len(), identity: Identity::from(&data), claimed: None };
    Ok(Described { model, files: vec![file] })
}

fn of_several_files(path: &Path, listed: ListedModel) -> Described {
    let places = listed.paths().into_iter().zip(&listed.files);
    let unread = places.filter_map(|((place, identity), file)| {
        let identity = identity.or_else(|| Some(Identity::from(&fs::metadata(place).ok()?)))?;
        Some(UnreadFile { size: file.size, identity, claimed: listed.noted_digest(file) })
    });
    let unread = unread.collect();
    let useless = listed.useless_patterns.iter();
    let useless = useless.map(|pattern| PlannedFault { message: pattern.to_string(), fatal: false });
    let faults = listed.faults().iter();
    let faults = faults.map(|fault| PlannedFault { message: fault.to_string(), fatal: fault.is_fatal() });
    let faults = useless.chain(faults).collect();
    let (size, kind) = (listed.size(), listed.kind.map(FolderKind::name));
    let ListedModel { files, left_out, .. } = listed;
    let files = files.into_iter().map(|file| PlannedFile::new(file.path, file.size, None)).collect();
    let left_out = left_out.into_iter();
    let left_out = left_out
        .map(|left| PlannedFile::new(left.file.path, left.file.size, Some(left.reason.to_string())))
        .collect();
    let model = PlannedModel { kind, left_out, faults, ..PlannedModel::new(path, size, files) };
    Described { model, files: unread }
}

impl PlannedFile {
    const fn new(path: String, size: u64, reason: Option<String>) -> Self {
        Self { path, size, reason }
    }
}

impl PlannedModel {
    fn text(&self) -> String {
        let Self { path, kind, size, files, left_out, faults, notes, deletes, .. } = self;
        let kind = kind.map(|kind| format!("{kind}, ")).unwrap_or_default();
        let mut text =
            format!("{}: {kind}{}, {}\n", printable(path), counted(files.len(), "file"), human_bytes(*size));
        text.push_str(&self.effect());
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
        notes.iter().for_each(|note| text.push_str(&format!("note: {}\n", printable(note))));
        text
    }

    /// The line about its name and about what it would add to the store.
    fn effect(&self) -> String {
        let ModelCost { state, max_new_bytes, shared_bytes } = self.cost;
        let name = printable(&self.name);
        match state {
            ModelState::Stored => format!("stored as {name}\n"),
            ModelState::New => {
                let adds = at_most(max_new_bytes.unwrap_or_default());
                let reuses = shared_bytes.filter(|bytes| *bytes > 0).map(human_bytes);
                let reuses = reuses.map(|bytes| format!(", reuses {bytes}")).unwrap_or_default();
                format!("new: becomes {name}, adds {adds}{reuses}\n")
            }
            ModelState::LeftOut | ModelState::Unusable => "not imported: see the errors below\n".to_owned(),
        }
    }
}
