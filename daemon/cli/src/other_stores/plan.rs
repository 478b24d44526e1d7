//! Which of the found models an import stores, as a value that is printed or executed.

use std::collections::BTreeMap;
use std::path::PathBuf;

use blobd_client::protocol::response::ModelSummary;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::origin::{Origin, program_of_copy};
use blobd_store_format::source::PullSource;
use serde::Serialize;

use super::found::{FoundModel, distinct_bytes};
use super::{FoundStore, Program, Record};
use crate::connect::client_error;
use crate::output::{Table, counted, human_bytes, printable, terminal_width};
use crate::{Client, ErrorBody, Reference, internal};

/// The models of the found stores that were selected.
#[derive(Debug)]
pub(crate) struct Plan {
    models: Vec<PlannedModel>,
}

#[derive(Debug)]
pub(crate) struct PlannedModel {
    /// The program in whose store it is.
    pub(crate) program: &'static Program,
    /// The folder of that store.
    folder: PathBuf,
    pub(crate) found: FoundModel,
    pub(crate) is_stored: bool,
    /// Whether its name has older content that came from the same place.
    pub(crate) is_update: bool,
}

/// The models of the store, by name.
pub(crate) struct StoredModels<'c> {
    client: &'c Client,
    models: BTreeMap<String, ModelSummary>,
}

impl<'c> StoredModels<'c> {
    pub(crate) fn list(client: &'c Client) -> Result<Self, ErrorBody> {
        let models = client.models().map_err(client_error)?.models;
        Ok(Self { client, models: models.into_iter().map(|model| (model.name.clone(), model)).collect() })
    }

    fn get(&self, name: &Reference) -> Option<&ModelSummary> {
        self.models.get(&name.short())
    }

    /// Whether the store has the model under its name, or under the one that tells it from another model of that name.
    fn has(&self, model: &FoundModel, record: &Record) -> Result<bool, ErrorBody> {
        let Some(target) = &model.target else { return Ok(false) };
        for stored in self.get(target).into_iter().chain(self.distinct_from(target)) {
            let is_it = match &model.manifest {
                Some(manifest) => manifest.digest() == stored.digest,
                None if record.manifest(model) == Some(stored.digest) => true,
                None => {
                    let name = stored.name.parse().map_err(internal)?;
                    model.is_like(&self.client.manifest(&name).map_err(client_error)?)
                }
            };
            if is_it {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The models whose names are this one and an ID.
    fn distinct_from(&self, name: &Reference) -> impl Iterator<Item = &ModelSummary> {
        let start = format!("{}-", name.short());
        let named = self.models.range(start.clone()..).map(|(_, model)| model);
        named.take_while(move |model| model.name.starts_with(&start))
    }

    /// Whether the name has what the same store had earlier. Content that was pulled since may be newer, and a pin says
    /// that it must stay.
    fn is_older(&self, model: &FoundModel, program: &Program) -> bool {
        let (Some(stored), Some(source)) =
            (model.target.as_ref().and_then(|name| self.get(name)), &model.source)
        else {
            return false;
        };
        let modified = humantime::parse_rfc3339(&stored.modified.to_string()).ok();
        let is_newer = model.updated.zip(modified).is_some_and(|(updated, modified)| updated > modified);
        let is_version = |origin: &str| is_copy_of(origin, source, program);
        is_newer && !stored.pinned && stored.origin.as_deref().is_some_and(is_version)
    }
}

/// Whether the origin is this source, at any commit, in a store of the same program.
fn is_copy_of(origin: &str, source: &PullSource, program: &Program) -> bool {
    match Origin::parse(origin) {
        Some(Origin::Copy(copied)) => {
            copied.is_same_model(source) && program_of_copy(origin) == Some(program.key)
        }
        _ => false,
    }
}

/// The models of another program's store, and what an import would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FoundModels {
    pub(crate) models: Vec<ListedModel>,
    /// How many bytes an import would read; a file of several models counts once.
    pub(crate) read_bytes: u64,
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
    pub(crate) state: ModelState,
    /// What a user should know about it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// Why it cannot be imported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// What an import would do with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ModelState {
    /// It would be stored.
    New,
    /// The store has it.
    Stored,
    /// It cannot be imported.
    Unusable,
}

impl Plan {
    /// Selects by `patterns`, or everything if there are none.
    pub(crate) fn new(
        stores: Vec<FoundStore>,
        patterns: &[NamePattern],
        (stored, record): (&StoredModels<'_>, &Record),
    ) -> Result<Self, ErrorBody> {
        let is_selected = |model: &FoundModel| {
            let matches = |pattern: &NamePattern| match &model.target {
                Some(name) => pattern.matches(name),
                None => model.name.parse().is_ok_and(|name| pattern.matches(&name)),
            };
            patterns.is_empty() || patterns.iter().any(matches)
        };
        let mut models = Vec::new();
        for FoundStore { program, folder, models: found } in stores {
            for found in found.into_iter().filter(is_selected) {
                let (is_stored, is_update) = (stored.has(&found, record)?, stored.is_older(&found, program));
                let folder = folder.clone();
                models.push(PlannedModel { program, folder, found, is_stored, is_update });
            }
        }
        Ok(Self { models })
    }

    pub(crate) fn models(&self) -> &[PlannedModel] {
        &self.models
    }

    /// The plan as a document.
    pub(crate) fn document(&self) -> FoundModels {
        let bytes = self.models.iter().filter(|model| model.state() == ModelState::New);
        FoundModels {
            models: self.models.iter().map(PlannedModel::document).collect(),
            read_bytes: distinct_bytes(bytes.flat_map(|model| &model.found.files)),
        }
    }
}

impl PlannedModel {
    pub(crate) fn state(&self) -> ModelState {
        match &self.found.problem {
            Some(_) => ModelState::Unusable,
            None if self.is_stored => ModelState::Stored,
            None => ModelState::New,
        }
    }

    fn document(&self) -> ListedModel {
        ListedModel {
            name: self.found.name.clone(),
            program: self.program.title.to_owned(),
            folder: self.folder.display().to_string(),
            size: self.found.size,
            state: self.state(),
            notes: self.found.notes.clone(),
            reason: self.found.problem.as_ref().map(ToString::to_string),
        }
    }
}

/// The plan as a table.
pub(crate) fn table(plan: &FoundModels) -> String {
    let rows = plan.models.iter().map(|model| {
        let state = match model.state {
            ModelState::New => "new",
            ModelState::Stored => "stored",
            ModelState::Unusable => model.reason.as_deref().unwrap_or("unusable"),
        };
        let notes = model.notes.iter().map(String::as_str);
        let state = printable(&std::iter::once(state).chain(notes).collect::<Vec<_>>().join("; "));
        [printable(&model.name), printable(&model.program), human_bytes(model.size), state]
    });
    let table = Table::with_rows(&["MODEL", "FROM", "SIZE", "STATE"], &[2], rows);
    let new = plan.models.iter().filter(|model| model.state == ModelState::New).count();
    let read = human_bytes(plan.read_bytes);
    format!("{}{}: would read {read}\n", table.render(terminal_width()), counted(new, "new model"))
}
