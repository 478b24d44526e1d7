//! Which of the found models an import stores, as a value that is printed or executed.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use blobd_cli_common::connect::client_error;
use blobd_cli_common::internal;
use blobd_cli_common::output::{Table, counted, human_bytes, or_dash, printable, terminal_width};
use blobd_client::protocol::response::ModelSummary;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::origin::{Origin, program_of_copy};
use serde::Serialize;

use super::cost::{CostOfList, ListCost, ModelCost, ModelState, UnreadFile, at_most, name_note};
use super::found_model::FoundModel;
use super::imported_models::{ImportedModels, ModelKey};
use super::{FoundStore, Program};
use crate::{Client, ErrorBody, ErrorCode, Reference};

/// The models of the found stores that were selected.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<PlannedModel>,
    unselected: Vec<PlannedModel>,
}

#[derive(Debug)]
pub(crate) struct PlannedModel {
    /// The program in whose store it is.
    pub(crate) program: &'static Program,
    /// The folder of that store.
    pub(crate) folder: PathBuf,
    pub(crate) found: FoundModel,
    /// The name under which the store has it.
    pub(crate) stored_as: Option<Reference>,
    /// Whether its name has older content that came from the same place.
    pub(crate) is_update: bool,
    /// Why it may get another name than its own. The import itself says it when it is so.
    name_note: Option<String>,
}

/// The models of the store, by name.
pub(crate) struct StoredModels<'c> {
    /// `None` if there is no store yet.
    client: Option<&'c Client>,
    models: BTreeMap<String, ModelSummary>,
}

impl<'c> StoredModels<'c> {
    pub(crate) fn list(client: impl Into<Option<&'c Client>>) -> Result<Self, ErrorBody> {
        let client = client.into();
        let models = client.map(|client| client.models().map_err(client_error)).transpose()?;
        let models = models.map(|list| list.models).unwrap_or_default();
        Ok(Self { client, models: models.into_iter().map(|model| (model.name.clone(), model)).collect() })
    }

    pub(crate) fn get(&self, name: &Reference) -> Option<&ModelSummary> {
        self.models.get(&name.short())
    }

    fn manifest(&self, name: &Reference) -> Result<Manifest, ErrorBody> {
        let client = self.client.ok_or_else(|| internal("import: no store"))?;
        client.manifest(name).map_err(client_error)
    }

    /// Whether the writable store has this manifest under the name, and nothing of it is damaged.
    pub(crate) fn has_whole(&self, name: &Reference, manifest: Digest) -> bool {
        self.get(name).is_some_and(|stored| {
            stored.digest == manifest && stored.damage.is_none() && stored.store.is_none()
        })
    }

    /// The digests of all files of the store's models.
    pub(crate) fn digests(&self) -> Result<BTreeSet<Digest>, ErrorBody> {
        let mut digests = BTreeSet::new();
        let mut seen = BTreeSet::new();
        for model in self.models.values().filter(|model| seen.insert(model.digest)) {
            let name = model.name.parse().map_err(internal)?;
            match self.manifest(&name) {
                Ok(manifest) => digests.extend(manifest.files().map(|file| file.digest)),
                // It was removed meanwhile.
                Err(error) if error.code == ErrorCode::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(digests)
    }

    /// The name under which the store has the model: its own, or the one that tells it from another model of that name.
    fn name_of(&self, model: &FoundModel, record: &ImportedModels) -> Result<Option<Reference>, ErrorBody> {
        let Some(target) = &model.target else { return Ok(None) };
        let read = record.get(ModelKey::of_found(model)).map(|read| read.manifest);
        let found = self.get(target).into_iter().chain(self.distinct_from(target));
        // What is damaged is stored again.
        for stored in found.filter(|stored| stored.damage.is_none()) {
            let name = stored.name.parse().map_err(internal)?;
            let is_it = match &model.manifest {
                Some(manifest) => manifest.digest() == stored.digest,
                None if read == Some(stored.digest) => true,
                None => model.is_like(&self.manifest(&name)?),
            };
            if is_it {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// The models whose names are this one and an ID.
    fn distinct_from(&self, name: &Reference) -> impl Iterator<Item = &ModelSummary> {
        let start = format!("{}-", name.short());
        let named = self.models.range(start.clone()..).map(|(_, model)| model);
        named.take_while(move |model| model.name.starts_with(&start))
    }

    /// Whether the name has what the same store had earlier. Content that was pulled since may be newer, and a pin says
    /// that it must stay. Of one commit, a model of fewer files is not a newer version, since a program can have only some of
    /// them; one of more files is, whenever they came.
    fn is_older(&self, model: &FoundModel, program: &Program) -> Result<bool, ErrorBody> {
        let Some(stored) = model.target.as_ref().and_then(|name| self.get(name)) else { return Ok(false) };
        let Some(origin) = stored.origin.as_deref().and_then(|text| earlier(text, model, program)) else {
            return Ok(false);
        };
        if stored.pinned {
            return Ok(false);
        }
        let modified = humantime::parse_rfc3339(&stored.modified.to_string()).ok();
        let is_newer = model.updated().zip(modified).is_some_and(|(updated, modified)| updated > modified);
        let (Origin::Copy(copied), Some(source), None) = (&origin, &model.source, &model.manifest) else {
            return Ok(is_newer);
        };
        let is_same_commit = copied.is_same_commit(source);
        if !is_same_commit && copied != source {
            return Ok(is_newer);
        }
        let name = stored.name.parse().map_err(internal)?;
        let manifest = self.manifest(&name)?;
        Ok(match model.files.len().cmp(&manifest.layers().len()) {
            Ordering::Less => false,
            Ordering::Equal => is_newer,
            Ordering::Greater => is_newer || is_same_commit,
        })
    }
}

/// The origin, if it is an earlier version of the model in a store of the same program: its name there, or its source at any
/// commit.
fn earlier(origin: &str, model: &FoundModel, program: &Program) -> Option<Origin> {
    let parsed = Origin::parse(origin)?;
    let is_earlier = match (&parsed, &model.source) {
        (Origin::Import(name), None) => *name == printable(&model.name),
        (Origin::Copy(copied), Some(source)) => {
            // Each GGUF file of a commit is a model of its own. A folder may have got more files since, also one that sorts
            // before the first.
            let is_other = copied.is_same_commit(source) && copied != source && model.is_gguf();
            copied.is_same_repository(source) && !is_other && program_of_copy(origin) == Some(program.key)
        }
        _ => false,
    };
    is_earlier.then_some(parsed)
}

/// The models of another program's store, and what an import would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FoundModels {
    pub(crate) models: Vec<ListedModel>,
    #[serde(flatten)]
    pub(crate) total: ListCost,
}

/// A model in another program's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ListedModel {
    /// The name that it would get.
    pub(crate) name: String,
    /// The program that has it.
    pub(crate) program: String,
    /// The folder of its store.
    pub(crate) folder: String,
    /// The size of its files in bytes.
    pub(crate) size: u64,
    #[serde(flatten)]
    pub(crate) cost: ModelCost,
    /// What a user should know about it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// Why it is left out or cannot be imported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// What is deleted when it and all others are stored; only if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deletes: Option<Vec<String>>,
}

impl Plan {
    /// Selects by `patterns`, or everything if there are none.
    pub(crate) fn new(
        stores: Vec<FoundStore>,
        patterns: &[NamePattern],
        (stored, record): (&StoredModels<'_>, &ImportedModels),
    ) -> Result<Self, ErrorBody> {
        let is_selected = |model: &FoundModel| {
            let matches = |pattern: &NamePattern| match &model.target {
                Some(name) => pattern.matches(name),
                None => model.name.parse().is_ok_and(|name| pattern.matches(&name)),
            };
            patterns.is_empty() || patterns.iter().any(matches)
        };
        let (mut models, mut unselected) = (Vec::new(), Vec::new());
        for FoundStore { program, folder, models: found } in stores {
            for found in found {
                let (mut stored_as, mut is_update, name_note, folder) = (None, false, None, folder.clone());
                let list = if is_selected(&found) {
                    stored_as = stored.name_of(&found, record)?;
                    is_update = stored_as.is_none() && stored.is_older(&found, program)?;
                    &mut models
                } else {
                    &mut unselected
                };
                list.push(PlannedModel { program, folder, found, stored_as, is_update, name_note });
            }
        }
        settle_names(&mut models, stored);
        Ok(Self { models, unselected })
    }

    pub(crate) fn models(&self) -> &[PlannedModel] {
        &self.models
    }

    /// The models that an import tries to store.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = &PlannedModel> {
        self.models.iter().filter(|model| matches!(model.state(), ModelState::New | ModelState::Unusable))
    }

    pub(crate) fn left_out(&self) -> impl Iterator<Item = &PlannedModel> {
        self.models.iter().filter(|model| model.state() == ModelState::LeftOut)
    }

    /// The other models of the stores.
    pub(crate) fn unselected(&self) -> &[PlannedModel] {
        &self.unselected
    }

    /// The plan as a document.
    pub(crate) fn document(&self, stored: &StoredModels<'_>) -> Result<FoundModels, ErrorBody> {
        let has_new = self.models.iter().any(|model| model.state() == ModelState::New);
        let mut list = CostOfList::new(if has_new { stored.digests()? } else { BTreeSet::new() });
        let models: Vec<_> = self.models.iter().map(|model| model.document(&mut list)).collect();
        Ok(FoundModels { models, total: list.total() })
    }
}

/// Notes which models may get other names than their own. What another model of the list has is not replaced.
fn settle_names(models: &mut [PlannedModel], stored: &StoredModels<'_>) {
    let key = |name: &Reference| name.short().to_lowercase();
    let kept: BTreeSet<String> =
        models.iter().filter_map(|model| model.stored_as.as_ref()).map(key).collect();
    let mut taken = BTreeMap::<String, usize>::new();
    for number in 0..models.len() {
        let (earlier, [model, ..]) = models.split_at_mut(number) else { return };
        let new = model.found.target.clone().filter(|_| model.state() == ModelState::New);
        let Some(target) = new else { continue };
        let name = key(&target);
        let before = taken.get(&name).and_then(|before| earlier.get(*before));
        model.is_update &= before.is_none() && !kept.contains(&name);
        let other = match before {
            Some(before) if before.found.is_same_content(&model.found) => None,
            Some(_) => Some("an earlier model of this list"),
            None if !model.is_update && stored.get(&target).is_some() => Some("a model of the store"),
            None => None,
        };
        let becomes = "gets the first digits of its ID behind the tag";
        model.name_note = other.map(|other| name_note(other, becomes));
        taken.entry(name).or_insert(number);
    }
}

impl PlannedModel {
    /// The name that it gets: the one under which it is stored, or its own.
    pub(crate) fn target(&self) -> Option<Reference> {
        self.stored_as.clone().or_else(|| self.found.target.clone())
    }

    pub(crate) fn state(&self) -> ModelState {
        match &self.found.problem {
            Some(problem) if problem.is_left_out() => ModelState::LeftOut,
            Some(_) => ModelState::Unusable,
            None if self.stored_as.is_some() => ModelState::Stored,
            None => ModelState::New,
        }
    }

    fn document(&self, list: &mut CostOfList) -> ListedModel {
        let files = self.found.files.iter();
        let files =
            files.map(|file| UnreadFile { size: file.size, identity: file.identity, claimed: file.claimed });
        let cost = list.add(self.state(), self.found.size, files);
        let name = self.target().map_or_else(|| self.found.name.clone(), |name| name.short());
        ListedModel {
            name,
            program: self.program.title.to_owned(),
            folder: self.folder.display().to_string(),
            size: self.found.size,
            cost,
            notes: self.found.notes.iter().chain(&self.name_note).cloned().collect(),
            reason: self.reason(),
            deletes: None,
        }
    }

    /// Why it is not imported.
    pub(crate) fn reason(&self) -> Option<String> {
        self.found.problem.as_ref().map(ToString::to_string)
    }
}

/// The plan as a table.
pub(crate) fn table(plan: &FoundModels) -> String {
    let rows = plan.models.iter().map(|model| {
        let state = match (model.cost.state, model.reason.as_deref()) {
            (ModelState::New, _) => "new".to_owned(),
            (ModelState::Stored, _) => "stored".to_owned(),
            (ModelState::LeftOut, reason) => format!("left out: {}", reason.unwrap_or_default()),
            (ModelState::Unusable, reason) => reason.unwrap_or("unusable").to_owned(),
        };
        let deletes = model.deletes.as_ref().map(|paths| format!("deletes {}", counted(paths.len(), "file")));
        let notes = deletes.into_iter().chain(model.notes.iter().cloned());
        let state = printable(&std::iter::once(state).chain(notes).collect::<Vec<_>>().join("; "));
        let adds = or_dash(model.cost.max_new_bytes.map(at_most));
        let shares = or_dash(model.cost.shared_bytes.map(human_bytes));
        let size = human_bytes(model.size);
        [printable(&model.name), printable(&model.program), size, adds, shares, state]
    });
    let columns = ["MODEL", "FROM", "SIZE", "ADDS", "SHARES", "STATE"];
    let table = Table::with_rows(&columns, &[2, 3, 4], rows);
    let table = table.leaving_out_first(&["SHARES", "FROM", "SIZE"]);
    table.render(terminal_width()) + &plan.total.text()
}
