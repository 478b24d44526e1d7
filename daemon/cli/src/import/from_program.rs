//! `blobd import --from`: the models of other programs' stores.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::PoisonError;

use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams, TagParams};
use blobd_store_format::name_pattern::NamePattern;
use clap::Args;
use tracing_mutex::stdsync::Mutex;

use super::{Params, report};
use crate::batch::Batch;
use crate::connect::{client_error, connect_or_create};
use crate::local_folder::Links;
use crate::other_stores::{self, FoundFile, FoundStore, Plan, PlannedModel, Record, StoredModels, table};
use crate::output::{counted, print_json, print_text};
use crate::parallel::run_in_order;
use crate::progress::{Bars, Progress};
use crate::{Client, ErrorBody, Global, internal, usage};

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
        let Some((program, folder)) = self.program() else { return Ok(None) };
        if params.name.is_some() || params.with_sidecars {
            return Err(usage(
                "--from: the models have names and files: expected no --name and no --with-sidecars",
            ));
        }
        let patterns = params.paths.iter().map(|pattern| {
            let text = pattern.to_string_lossy();
            text.parse::<NamePattern>().map_err(|error| usage(format!("{text}: {error}")))
        });
        let (patterns, only_list) = (patterns.collect::<Result<_, _>>()?, params.list);
        let (force, links) = (params.force, params.links());
        Ok(Some(Request { program, folder, patterns, only_list, force, links }))
    }
}

#[derive(Debug)]
pub(super) struct Request<'r> {
    /// The program's key, or `all`.
    program: &'r str,
    /// The folder of its models, if it is not one of the usual ones.
    folder: Option<PathBuf>,
    patterns: Vec<NamePattern>,
    only_list: bool,
    force: bool,
    links: Links,
}

/// Imports the selected models, or lists them. A model that fails does not stop the others.
pub(super) fn run(global: &Global, request: &Request<'_>) -> Result<(), ErrorBody> {
    let stores = find(request)?;
    let connected = connect_or_create(global)?;
    let client = &connected.client;
    let mut record = Record::load();
    let plan = Plan::new(stores, &request.patterns, (&StoredModels::list(client)?, &record))?;
    if plan.models().is_empty() && !request.patterns.is_empty() {
        return Err(usage("no model there has such a name; `--list` without names shows all"));
    }
    if request.only_list {
        let document = plan.document();
        return if global.json { print_json(&document) } else { print_text(&table(&document)) };
    }
    execute(global, request, (&plan, client), &mut record)
}

fn find(request: &Request<'_>) -> Result<Vec<FoundStore>, ErrorBody> {
    if request.program != "all" {
        let program = other_stores::program(request.program)?;
        return other_stores::find(program, request.folder.as_deref(), request.links);
    }
    if request.folder.is_some() {
        return Err(usage("--from all: looks in the usual folders: expected no DIR"));
    }
    let found = other_stores::find_all(request.links)?;
    if found.is_empty() {
        return Err(other_stores::none_found());
    }
    Ok(found)
}

fn execute(
    global: &Global,
    request: &Request<'_>,
    (plan, client): (&Plan, &Client),
    record: &mut Record,
) -> Result<(), ErrorBody> {
    let wanted: Vec<&PlannedModel> = plan.models().iter().filter(|model| !model.is_stored).collect();
    let total = wanted.iter().map(|model| model.found.size).fold(0, u64::saturating_add);
    let label = match wanted.as_slice() {
        [only] => only.found.name.clone(),
        _ => counted(wanted.len(), "model"),
    };
    let bars = Progress::new(global.hides_progress()).bars(&label, total, wanted.len());
    let work = Work { request, client, bars: &bars, models: &wanted, done: Mutex::default() };
    let mut batch = Batch::new(global, plan.models().len());
    let reported = run_in_order(
        &jobs(&wanted),
        |number| work.import(number),
        |number, imported| {
            let Some(PlannedModel { found, .. }) = wanted.get(number) else { return Ok(()) };
            if let Ok(imported) = &imported {
                record.add(found, imported.digest);
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
    let all_stored = batch.done().is_empty() && batch.failed().is_empty();
    if all_stored && !global.json && !global.hides_reports() {
        print_text(&format!("{} stored already\n", counted(plan.models().len(), "model")))?;
    }
    batch.finish("imported", ["models was not imported", "models were not imported"])
}

/// Models that share their largest file follow each other, so that it is read once, or stored once.
fn jobs(models: &[&PlannedModel]) -> Vec<Vec<usize>> {
    let (mut jobs, mut places) = (Vec::<Vec<usize>>::new(), BTreeMap::new());
    for (number, model) in models.iter().enumerate() {
        let largest = model.found.largest_file();
        let place = largest.map_or(jobs.len(), |file| *places.entry(file).or_insert(jobs.len()));
        match jobs.get_mut(place) {
            Some(job) => job.push(number),
            None => jobs.push(vec![number]),
        }
    }
    jobs
}

/// Imports the models of a plan.
struct Work<'w> {
    request: &'w Request<'w>,
    client: &'w Client,
    bars: &'w Bars,
    models: &'w [&'w PlannedModel],
    /// The models that are imported, by their numbers.
    done: Mutex<BTreeMap<usize, Imported>>,
}

impl Work<'_> {
    fn import(&self, number: usize) -> Result<Imported, ErrorBody> {
        let Some(model) = self.models.get(number) else { return Err(internal("import: no such model")) };
        if let Some(problem) = &model.found.problem {
            return Err(problem.error());
        }
        let same = self.same(number);
        let mut imported = match same {
            Some(same) => self.tag(model, &same)?,
            None => self.import_files(model)?,
        };
        imported.effects.notes.extend(model.found.notes.iter().cloned());
        self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(number, imported.clone());
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
        let target = model.found.target.clone().ok_or_else(|| internal("import: a model without a name"))?;
        let params = TagParams { source, target, force: self.force(model) };
        let tagged = self.client.tag(&params).map_err(client_error)?;
        let (name, effects, reused_bytes) = (tagged.name, tagged.effects, same.size);
        Ok(Imported { name, effects, reused_bytes, new_bytes: 0, new_blob_count: 0, ..same.clone() })
    }

    fn import_files(&self, model: &PlannedModel) -> Result<Imported, ErrorBody> {
        let found = &model.found;
        let listed = |file: &FoundFile| ImportFile {
            path: file.path.clone(),
            size: file.size,
            component: file.component,
            digest: file.certain,
        };
        let manifest =
            found.manifest.as_ref().map(|manifest| String::from_utf8_lossy(manifest.raw()).into_owned());
        let params = ImportParams {
            name: found.target.clone(),
            force: self.force(model),
            files: found.files.iter().map(listed).collect(),
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
        let imported = self.client.import_listed(&params, open, |completed, total| bar.set(completed, total));
        imported.map_err(client_error)
    }

    fn force(&self, model: &PlannedModel) -> bool {
        self.request.force || model.is_update
    }
}
