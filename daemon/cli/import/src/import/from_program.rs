//! `blobd import --from`: the models of other programs' stores.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::PoisonError;

use blobd_cli_common::batch::{Batch, located};
use blobd_cli_common::connect::{client_error, connect_if_stored, connect_or_create};
use blobd_cli_common::output::{counted, print_json, print_text};
use blobd_cli_common::progress::{Bars, Progress};
use blobd_cli_common::{Global, internal, usage};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportOrigin, ImportParams, TagParams};
use blobd_store_format::digest::Digest;
use blobd_store_format::model_folder::Selection;
use blobd_store_format::name_pattern::NamePattern;
use clap::Args;
use serde::Serialize;
use tracing_mutex::stdsync::Mutex;

use super::moving::{Finished, Moves};
use super::read_once::ReadOnce;
use super::report::LeftOutModel;
use super::{Params, check_stored, finish_interrupted, report};
use crate::local_folder::Links;
use crate::other_stores::{
    self, FoundFile, FoundModels, FoundStore, ImportedModels, ModelKey, ModelState, Plan, PlannedModel,
    ScanOptions, StoredModels, table,
};
use crate::parallel::run_in_order;
use crate::{Client, ErrorBody, ErrorCode};

/// Which other program's models are imported.
#[derive(Debug, Args)]
pub(super) struct From {
    /// Import the models of this program, from its usual folder or from DIR, or those of all programs that are found (all)
    #[arg(long, value_name = "PROGRAM[=DIR]", group = "from_program")]
    from: Option<String>,
    /// Import the models of Ollama, which are in this folder if it is not one of the usual ones
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, group = "from_program")]
    from_ollama: Option<Option<PathBuf>>,
    /// Import the models of Hugging Face's cache, which is this folder if it is not the usual one
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, group = "from_program")]
    from_hf: Option<Option<PathBuf>>,
    /// Import the models of LM Studio, which are in this folder if it is not the usual one
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, group = "from_program")]
    from_lmstudio: Option<Option<PathBuf>>,
    /// Import the models of llama.cpp, which are in this folder if it is not one of the usual ones
    #[arg(
        long = "from-llama.cpp",
        value_name = "DIR",
        num_args = 0..=1,
        require_equals = true,
        group = "from_program"
    )]
    from_llama_cpp: Option<Option<PathBuf>>,
}

impl From {
    /// The program and its folder, if that is not one of the usual ones.
    fn program(&self) -> Option<(&str, Option<PathBuf>)> {
        let Self { from, from_ollama, from_hf, from_lmstudio, from_llama_cpp } = self;
        if let Some(from) = from {
            return Some(match from.split_once('=') {
                Some((program, folder)) => (program, Some(PathBuf::from(folder))),
                None => (from, None),
            });
        }
        let of = |program, folder: &Option<Option<PathBuf>>| folder.clone().map(|folder| (program, folder));
        let (hf, lmstudio) = (of("hf", from_hf), of("lmstudio", from_lmstudio));
        of("ollama", from_ollama).or(hf).or(lmstudio).or_else(|| of("llama.cpp", from_llama_cpp))
    }

    /// What is imported from another program, if that was asked for.
    pub(super) fn request<'r>(&'r self, params: &Params) -> Result<Option<Request<'r>>, ErrorBody> {
        let (program, folders, patterns) = match self.program() {
            Some((program, folder)) => (program, folder.into_iter().collect(), patterns(&params.paths)?),
            // The names of such files say nothing, so the folder is not one model.
            None if params.paths.iter().all(|path| other_stores::is_hub_cache(path)) => {
                ("hf", params.paths.clone(), Vec::new())
            }
            None => return Ok(None),
        };
        if params.name.is_some() || params.with_sidecars {
            return Err(usage(
                "models of other programs have names and files: expected no --name and no --with-sidecars",
            ));
        }
        let (only_list, force, moves, links) = (params.list, params.force, params.moves, params.links());
        if force && moves {
            return Err(usage(
                "--move and --force: one of the models could replace another: expected one of them",
            ));
        }
        let selection = params.selection();
        Ok(Some(Request { program, folders, patterns, selection, only_list, force, moves, links }))
    }
}

fn patterns(texts: &[PathBuf]) -> Result<Vec<NamePattern>, ErrorBody> {
    let pattern = |pattern: &PathBuf| {
        let text = pattern.to_string_lossy();
        text.parse::<NamePattern>().map_err(|error| usage(format!("{text}: {error}")))
    };
    texts.iter().map(pattern).collect()
}

#[derive(Debug)]
pub(super) struct Request<'r> {
    /// The program's key, or `all`.
    program: &'r str,
    /// The folders of its models, if they are not the usual ones.
    folders: Vec<PathBuf>,
    patterns: Vec<NamePattern>,
    /// Which files of each model are taken.
    selection: Selection,
    only_list: bool,
    force: bool,
    moves: bool,
    links: Links,
}

/// Imports the selected models, or lists them. A model that fails does not stop the others.
pub(super) fn run(global: &Global, request: &Request<'_>) -> Result<(), ErrorBody> {
    let finished = match request.moves && !request.only_list {
        true => finish_interrupted(global, || connect_or_create(global))?,
        false => Finished::default(),
    };
    let stores = match find(request) {
        // There was nothing but what an interrupted command has left.
        Err(error) if error.code == ErrorCode::NotFound && !finished.is_empty() => Vec::new(),
        found => found?,
    };
    // A list does not create a store.
    let connected = match request.only_list {
        true => connect_if_stored(global)?,
        false => Some(connect_or_create(global)?),
    };
    let client = connected.as_ref().map(|connected| &connected.client);
    let mut record = ImportedModels::load();
    let stored = StoredModels::list(client)?;
    let plan = Plan::new(stores, &request.patterns, (&stored, &record))?;
    if plan.models().is_empty() && !request.patterns.is_empty() && finished.is_empty() {
        return Err(usage("no model there has such a name; `--list` without names shows all"));
    }
    let moves = if request.moves { Moves::of_stores(&plan) } else { Moves::default() };
    let Some(client) = client.filter(|_| !request.only_list) else {
        let document = document(&plan, &stored, &moves)?;
        return if global.json { print_json(&document) } else { print_text(&table(&document)) };
    };
    if !request.patterns.is_empty() && plan.models().len() == plan.left_out().count() {
        let problem =
            plan.left_out().find_map(|model| Some((&model.found.name, model.found.problem.as_ref()?)));
        return problem.map_or(Ok(()), |(name, problem)| Err(located(problem.error(), Some(name), [])));
    }
    execute(global, request, (&plan, &moves, client), &mut record)
}

/// The plan, and what is deleted when all of it is imported.
fn document(plan: &Plan, stored: &StoredModels<'_>, moves: &Moves) -> Result<FoundModels, ErrorBody> {
    let mut document = plan.document(stored)?;
    if moves.is_wanted() {
        let usable = (0..).zip(plan.models()).filter(|(_, model)| model.found.problem.is_none());
        let mut deletes = moves.preview(usable.map(|(number, _)| number));
        for (number, listed) in document.models.iter_mut().enumerate() {
            let paths = deletes.remove(&number).unwrap_or_default();
            listed.deletes = Some(paths.iter().map(|path| path.display().to_string()).collect());
            listed.notes.extend(moves.refusal(number).err().map(|error| error.message));
        }
    }
    Ok(document)
}

fn find(request: &Request<'_>) -> Result<Vec<FoundStore>, ErrorBody> {
    let options = ScanOptions { links: request.links, selection: &request.selection };
    if request.program != "all" {
        let program = other_stores::program(request.program)?;
        return other_stores::find(program, &request.folders, &options);
    }
    if !request.folders.is_empty() {
        return Err(usage("--from all: looks in the usual folders: expected no DIR"));
    }
    if !request.selection.is_default() {
        return Err(usage("--from all: expected one program with --include and --exclude"));
    }
    let found = other_stores::find_all(&options)?;
    if found.is_empty() {
        return Err(other_stores::none_found());
    }
    Ok(found)
}

fn execute(
    global: &Global,
    request: &Request<'_>,
    (plan, moves, client): (&Plan, &Moves, &Client),
    record: &mut ImportedModels,
) -> Result<(), ErrorBody> {
    // What is deleted must have been read: that a model is stored already is what its program or the record says.
    let wanted: Vec<&PlannedModel> = match request.moves || request.force {
        true => plan.models().iter().collect(),
        false => plan.wanted().collect(),
    };
    let total = wanted.iter().map(|model| model.found.size).fold(0, u64::saturating_add);
    let label = match wanted.as_slice() {
        [only] => only.found.name.clone(),
        _ => counted(wanted.len(), "model"),
    };
    let bars = Progress::new(global.hides_progress()).bars(&label, total, wanted.len());
    let files = wanted.iter().map(|model| model.found.files.iter().map(|file| file.identity));
    let once = ReadOnce::new(files);
    let work = Work { request, client, bars: &bars, models: &wanted, moves, once, done: Mutex::default() };
    let mut batch = Batch::new(global, plan.models().len());
    let reported = run_in_order(
        &jobs(&wanted),
        |number| work.import(number),
        |number, imported| {
            let Some(PlannedModel { found, .. }) = wanted.get(number) else { return Ok(()) };
            if let Ok(imported) = &imported {
                record.add(ModelKey::of_found(found), imported);
            }
            bars.suspend(|| match batch.add(&found.name, imported) {
                Some(imported) if !global.hides_reports() => print_text(&report::summary(imported)),
                _ => Ok(()),
            })
        },
    );
    bars.clear();
    // Without it, the next import reads the files again.
    let _ = record.save();
    reported?;
    let tried = wanted.iter().filter(|model| model.state() != ModelState::LeftOut).count();
    let stored = plan.models().len() - tried - plan.left_out().count();
    let has_only_left_out = stored == 0 && plan.left_out().next().is_some();
    if tried == 0 && !has_only_left_out && !global.json && !global.hides_reports() {
        print_text(&format!("{} stored already\n", counted(stored, "model")))?;
    }
    let left_out = report::left_out(&plan.left_out().collect::<Vec<_>>());
    if !global.json && !global.hides_reports() {
        print_text(&left_out.iter().map(LeftOutModel::text).collect::<String>())?;
    }
    let more = NotImported { left_out };
    batch.finish_with("imported", &more, ["models was not imported", "models were not imported"])
}

/// What the result says besides the models that were imported.
#[derive(Serialize)]
struct NotImported {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<LeftOutModel>,
}

/// Models follow each other in the order of the list if they share their largest file, so that it is read once, and if they
/// would get the same name, so that the first gets it. Those that are left out are in no job.
fn jobs(models: &[&PlannedModel]) -> Vec<Vec<usize>> {
    let (mut by_file, mut by_name, mut jobs) = (BTreeMap::new(), BTreeMap::new(), Jobs::default());
    let imported = models.iter().enumerate().filter(|(_, model)| model.state() != ModelState::LeftOut);
    for (number, model) in imported {
        let name = model.target().map(|target| target.short().to_lowercase());
        let of_file = model.found.largest_file().map(|file| *by_file.entry(file).or_insert(number));
        let of_name = name.map(|name| *by_name.entry(name).or_insert(number));
        jobs.add(number, of_file.into_iter().chain(of_name));
    }
    jobs.into_lists()
}

/// Numbers that are in one list with certain earlier ones.
#[derive(Debug, Default)]
struct Jobs {
    /// The number itself if it is the first of its list, else an earlier one of the list.
    earlier: BTreeMap<usize, usize>,
}

impl Jobs {
    fn add(&mut self, number: usize, with: impl Iterator<Item = usize>) {
        self.earlier.insert(number, number);
        for other in with {
            let (one, other) = (self.first(number), self.first(other));
            self.earlier.insert(one.max(other), one.min(other));
        }
    }

    fn first(&self, mut number: usize) -> usize {
        while let Some(earlier) = self.earlier.get(&number).filter(|earlier| **earlier != number) {
            number = *earlier;
        }
        number
    }

    fn into_lists(self) -> Vec<Vec<usize>> {
        let mut lists: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for number in self.earlier.keys() {
            lists.entry(self.first(*number)).or_default().push(*number);
        }
        lists.into_values().collect()
    }
}

/// Imports the models of a plan.
struct Work<'w> {
    request: &'w Request<'w>,
    client: &'w Client,
    bars: &'w Bars,
    models: &'w [&'w PlannedModel],
    /// Numbers models as `models`, if anything is deleted.
    moves: &'w Moves,
    once: ReadOnce,
    /// The models that are imported, by their numbers.
    done: Mutex<BTreeMap<usize, Imported>>,
}

impl Work<'_> {
    fn import(&self, number: usize) -> Result<Imported, ErrorBody> {
        let Some(model) = self.models.get(number) else { return Err(internal("import: no such model")) };
        let files = || model.found.files.iter().map(|file| (file.path.as_str(), file.source.as_path()));
        self.import_model(number, model).map_err(|error| located(error, Some(&model.found.name), files()))
    }

    fn import_model(&self, number: usize, model: &PlannedModel) -> Result<Imported, ErrorBody> {
        if let Some(problem) = &model.found.problem {
            return Err(problem.error());
        }
        self.moves.refusal(number)?;
        let _admitted = self.moves.admit(model.found.size);
        let same = self.same(number);
        let mut imported = match same {
            Some(same) => self.tag(model, &same)?,
            None => self.import_files(model)?,
        };
        imported.effects.notes.extend(model.found.notes.iter().cloned());
        self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(number, imported.clone());
        let notes = self.moves.imported(number, &imported);
        imported.effects.notes.extend(notes);
        Ok(imported)
    }

    /// The model of the same files that is imported already.
    fn same(&self, number: usize) -> Option<Imported> {
        let model = self.models.get(number)?;
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |other: &usize| {
            self.models.get(*other).is_some_and(|other| other.found.has_files_of(&model.found))
        };
        done.iter().find(|(other, _)| is_same(other)).map(|(_, imported)| imported.clone())
    }

    /// Gives the name to a model of the same files.
    fn tag(&self, model: &PlannedModel, same: &Imported) -> Result<Imported, ErrorBody> {
        let source = same.name.parse().map_err(internal)?;
        let target = model.target().ok_or_else(|| internal("import: a model without a name"))?;
        let (file_name, copied_from) = (model.found.name.clone(), model.found.source.clone());
        let program = Some(model.program.key.to_owned());
        let origin = Some(ImportOrigin { file_name, copied_from, program });
        let params = TagParams { source, target, force: self.force(model), origin };
        let tagged = self.client.tag(&params).map_err(client_error)?;
        let (name, effects, reused_bytes) = (tagged.name, tagged.effects, same.size);
        Ok(Imported { name, effects, reused_bytes, new_bytes: 0, new_blob_count: 0, ..same.clone() })
    }

    fn import_files(&self, model: &PlannedModel) -> Result<Imported, ErrorBody> {
        let found = &model.found;
        let reading = self.once.begin(found.files.iter().map(|file| file.identity));
        let listed = |file: &FoundFile| {
            let (path, size, component) = (file.path.clone(), file.size, file.component);
            // What makes a model count as stored: without that, it would be another model under the name.
            let digest = file.checked()?.or(file.claimed.filter(|_| model.stored_as.is_some()));
            let read =
                reading.digest(file.identity).filter(|read| digest.is_none_or(|digest| digest == *read));
            Ok(ImportFile {
                path,
                size,
                component,
                digest: read.or(digest),
                was_read: read.is_some(),
                offset: 0,
                stream: false,
            })
        };
        let manifest =
            found.manifest.as_ref().map(|manifest| String::from_utf8_lossy(manifest.raw()).into_owned());
        let params = ImportParams {
            name: model.target(),
            force: self.force(model),
            files: found.files.iter().map(listed).collect::<Result<_, ErrorBody>>()?,
            manifest,
            copied_from: found.source.clone(),
            program: Some(model.program.key.to_owned()),
            ..ImportParams::new(found.name.clone())
        };
        let open = |number: usize| {
            let file = found.files.get(number);
            let file = file.ok_or_else(|| internal("import: a file that was not listed"))?;
            file.open().map(OwnedFd::from)
        };
        let bar = self.bars.item(&found.name, found.size);
        let imported = self.client.import_listed(&params, open, |progress| bar.show(progress));
        let imported = imported.map_err(client_error)?;
        let paths: BTreeMap<&str, Digest> =
            imported.files.iter().map(|file| (file.path.as_str(), file.digest)).collect();
        // The files of a manifest have the digests that it gives them.
        let of_manifest = |file: &FoundFile| file.claimed.filter(|_| found.manifest.is_some());
        reading.done(found.files.iter().filter_map(|file| {
            Some((file.identity, paths.get(file.path.as_str()).copied().or_else(|| of_manifest(file))?))
        }));
        if self.moves.is_wanted() && imported.reused_bytes > 0 {
            check_stored(self.client, &imported)?;
        }
        Ok(imported)
    }

    fn force(&self, model: &PlannedModel) -> bool {
        self.request.force || model.is_update
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_common_ones_are_in_one_list() {
        let mut jobs = Jobs::default();
        for (number, with) in
            [(0, vec![]), (1, vec![]), (2, vec![0]), (4, vec![1]), (7, vec![4, 2]), (8, vec![8])]
        {
            jobs.add(number, with.into_iter());
        }
        assert_eq!(jobs.into_lists(), [vec![0, 1, 2, 4, 7], vec![8]]);
    }
}
