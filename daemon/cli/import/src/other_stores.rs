//! Models that other programs have on this machine, and their import.
//!
//! A scan reads directories, manifests and other small files only, and changes nothing. The order is always: scan (`find`),
//! select and compare with the store (`Plan`), print or execute. Only `--move` deletes in a found store (`Removal`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use blobd_cli_common::{file_error, usage};
use blobd_client::paths::expanded;
use blobd_store_format::model_folder::Selection;

use self::folders::Layout;
use crate::local_folder::Links;
use crate::{ErrorBody, ErrorCode, Reference};

mod boundary;
mod claims;
mod cost;
mod file_list;
mod folders;
mod found_model;
mod hub;
mod imported_models;
mod jan;
mod llama_cpp;
mod ollama;
mod plan;
mod ramalama;
mod registry_stores;
mod removal;

pub(crate) use claims::downloaded_digest;
pub(crate) use cost::{CostOfList, ModelCost, ModelState, UnreadFile, at_most, name_note};
pub(crate) use found_model::{FoundFile, FoundModel};
pub(crate) use imported_models::{ImportedModels, ModelKey, ReadModel, state_folder};
pub(crate) use plan::{FoundModels, Plan, PlannedModel, StoredModels, table};
pub(crate) use removal::{Removal, tidy_files};

/// How stores are read.
#[derive(Debug)]
pub(crate) struct ScanOptions<'s> {
    pub(crate) links: Links,
    /// Which files of each model are taken.
    pub(crate) selection: &'s Selection,
}

/// A program whose models can be imported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// As an argument of `--from`.
    pub(crate) key: &'static str,
    pub(crate) title: &'static str,
    /// Where its models may be, the first place first.
    default_folders: fn() -> Vec<PathBuf>,
    /// Where its models are in its own folder, which a user may name instead of theirs.
    subfolders: &'static [&'static str],
    /// Whether it has models in all of these places, and not only in the first that is there.
    uses_all_folders: bool,
    reader: Reader,
    /// How its models are deleted; `None` if only the program itself can do that.
    removal: Option<&'static Removal>,
}

/// How a program's folder is read.
#[derive(Clone, Copy, Debug)]
enum Reader {
    /// The folders in it are models.
    Folders(&'static Layout),
    Own {
        is_store: fn(&Path) -> bool,
        models: fn(&Path, &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody>,
    },
}

const fn program_of(
    key: &'static str,
    title: &'static str,
    default_folders: fn() -> Vec<PathBuf>,
    reader: Reader,
) -> Program {
    Program { key, title, default_folders, subfolders: &[], uses_all_folders: false, reader, removal: None }
}

const OLLAMA: Reader = Reader::Own { is_store: ollama::is_store, models: ollama::models };
const HUB: Reader = Reader::Own { is_store: hub::is_store, models: hub::models };
const LLAMA_CPP: Reader = Reader::Own { is_store: llama_cpp::is_store, models: llama_cpp::models };
const DOCKER: Reader =
    Reader::Own { is_store: registry_stores::is_docker_store, models: registry_stores::docker_models };
const LLMMAN: Reader =
    Reader::Own { is_store: registry_stores::is_llmman_store, models: registry_stores::llmman_models };
const RAMALAMA: Reader = Reader::Own { is_store: ramalama::is_store, models: ramalama::models };
const LEMONADE: Reader = Reader::Own { is_store: hub::is_lemonade_store, models: hub::lemonade_models };

/// In the order in which `--from all` looks for them.
pub(crate) const PROGRAMS: [Program; 13] = [
    program_of("ollama", "Ollama", ollama::default_folders, OLLAMA)
        .in_subfolders(&["models"])
        .moved_by(&removal::OLLAMA),
    program_of("hf", "Hugging Face", hub::default_folders, HUB)
        .in_subfolders(&["hub"])
        .moved_by(&removal::HUB),
    program_of("llama.cpp", "llama.cpp", llama_cpp::default_folders, LLAMA_CPP)
        .in_all_folders()
        .moved_by(&removal::LLAMA_CPP),
    program_of("lmstudio", "LM Studio", folders::lm_studio_places, Reader::Folders(&folders::LM_STUDIO))
        .in_subfolders(&["models"])
        .moved_by(&removal::LM_STUDIO),
    program_of("docker-model-runner", "Docker Model Runner", registry_stores::docker_places, DOCKER)
        .in_subfolders(&["models"]),
    program_of("ramalama", "RamaLama", ramalama::default_folders, RAMALAMA).in_subfolders(&["store"]),
    program_of("jan", "Jan", folders::jan_places, Reader::Folders(&folders::JAN))
        .in_subfolders(&folders::JAN_SUBFOLDERS)
        .in_all_folders(),
    program_of("gpt4all", "GPT4All", folders::gpt4all_places, Reader::Folders(&folders::GPT4ALL))
        .moved_by(&removal::FILES),
    program_of(
        "modelscope",
        "ModelScope",
        folders::model_scope_places,
        Reader::Folders(&folders::MODEL_SCOPE),
    ),
    program_of("exo", "exo", folders::exo_places, Reader::Folders(&folders::EXO)).in_subfolders(&["models"]),
    program_of("llmman", "llmman", registry_stores::llmman_places, LLMMAN),
    program_of("lemonade", "Lemonade", hub::default_folders, LEMONADE)
        .in_subfolders(&["hub"])
        .moved_by(&removal::HUB),
    program_of(
        "text-generation-webui",
        "text-generation-webui",
        folders::text_generation_webui_places,
        Reader::Folders(&folders::TEXT_GENERATION_WEBUI),
    )
    .in_subfolders(&folders::TEXT_GENERATION_WEBUI_SUBFOLDERS)
    .moved_by(&removal::FILES),
];

impl Program {
    const fn moved_by(self, removal: &'static Removal) -> Self {
        Self { removal: Some(removal), ..self }
    }

    /// How its models are deleted.
    ///
    /// # Errors
    /// When only the program itself can do that.
    pub(crate) fn removal(&self) -> Result<&'static Removal, ErrorBody> {
        self.removal.ok_or_else(|| {
            let message = format!("{}: its models cannot be moved", self.title);
            let body = ErrorBody::new(ErrorCode::InvalidInput, message);
            body.with_hint("import them without --move, then delete them with that program")
        })
    }

    const fn in_subfolders(self, subfolders: &'static [&'static str]) -> Self {
        Self { subfolders, ..self }
    }

    const fn in_all_folders(self) -> Self {
        Self { uses_all_folders: true, ..self }
    }

    /// Whether the program's manifests say which files a model has.
    fn has_own_choice(&self) -> bool {
        ["ollama", "docker-model-runner", "llmman"].contains(&self.key)
    }

    /// Whether the folder has models of the program. Reads names only.
    fn has_models(&self, folder: &Path) -> bool {
        match self.reader {
            Reader::Folders(layout) => folders::has_model(folder, layout),
            Reader::Own { is_store, .. } => is_store(folder),
        }
    }

    fn models(&self, folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
        if !self.has_own_choice() || options.selection.is_default() {
            return self.all_models(folder, options);
        }
        let message = format!("--include and --exclude: the manifests of {} list the files", self.title);
        Err(usage(format!("{message}: expected no pattern of files")))
    }

    fn all_models(&self, folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
        let mut models = match self.reader {
            Reader::Folders(layout) => folders::models(folder, options, layout)?,
            Reader::Own { models, .. } => models(folder, options)?,
        };
        make_distinct(&mut models);
        Ok(models)
    }

    /// The usual places that have models of it, each once.
    fn folders(&self) -> Vec<PathBuf> {
        let mut seen = BTreeSet::new();
        let places = (self.default_folders)().into_iter().filter(|place| self.has_models(place));
        let places =
            places.filter(|place| seen.insert(fs::canonicalize(place).unwrap_or_else(|_| place.clone())));
        places.take(self.max_folders()).collect()
    }

    const fn max_folders(&self) -> usize {
        if self.uses_all_folders { usize::MAX } else { 1 }
    }

    /// The folders of models in a folder that a user names: those in the program's own folder, else the folder itself.
    fn folders_in(&self, named: &Path) -> Vec<PathBuf> {
        let places = self.subfolders.iter().map(|subfolder| named.join(subfolder));
        let found: Vec<_> = places.filter(|place| self.has_models(place)).take(self.max_folders()).collect();
        if found.is_empty() { vec![named.to_owned()] } else { found }
    }
}

/// A store of another program, with its models.
#[derive(Debug)]
pub(crate) struct FoundStore {
    pub(crate) program: &'static Program,
    pub(crate) folder: PathBuf,
    pub(crate) models: Vec<FoundModel>,
}

/// The program that `--from` names.
pub(crate) fn program(key: &str) -> Result<&'static Program, ErrorBody> {
    let known = || PROGRAMS.iter().map(|program| program.key).collect::<Vec<_>>().join(", ");
    let found = PROGRAMS.iter().find(|program| program.key == key);
    found.ok_or_else(|| usage(format!("--from: unknown program {key:?}: expected {} or all", known())))
}

/// Whether a path is a cache of Hugging Face's libraries, or one repository in it.
pub(crate) fn is_hub_cache(path: &Path) -> bool {
    hub::is_store(path)
}

/// The program whose store a folder is, if it keeps manifests as a registry serves them: its files do not say what they are.
pub(super) fn program_with_manifests(folder: &Path) -> Option<&'static Program> {
    // A folder of the first ones looks like one of Ollama too.
    let keys = ["docker-model-runner", "llmman", "ollama"].into_iter();
    let mut programs = keys.filter_map(|key| PROGRAMS.iter().find(|program| program.key == key));
    programs.find(|program| program.has_models(folder))
}

/// The stores of a program: those in the `given` folders, or in its usual places.
///
/// # Errors
/// When a folder has no store of the program, or the models cannot be listed.
pub(crate) fn find(
    program: &'static Program,
    given: &[PathBuf],
    options: &ScanOptions<'_>,
) -> Result<Vec<FoundStore>, ErrorBody> {
    let given: Vec<PathBuf> = given.iter().flat_map(|named| program.folders_in(named)).collect();
    if let Some(other) = given.iter().find(|folder| !program.has_models(folder)) {
        let listed = fs::read_dir(other);
        if let Err(error) = listed
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            return Err(file_error(&other.display().to_string(), &error));
        }
        return Err(not_found(program, std::slice::from_ref(other), true));
    }
    let folders = if given.is_empty() { program.folders() } else { given };
    if folders.is_empty() {
        return Err(not_found(program, &(program.default_folders)(), false));
    }
    let store =
        |folder: PathBuf| Ok(FoundStore { program, models: program.models(&folder, options)?, folder });
    folders.into_iter().map(store).collect()
}

/// All stores that are in the usual places of their programs. A folder of several programs counts for the first.
pub(crate) fn find_all(options: &ScanOptions<'_>) -> Result<Vec<FoundStore>, ErrorBody> {
    let (mut stores, mut seen) = (Vec::new(), BTreeSet::new());
    for program in &PROGRAMS {
        for folder in program.folders() {
            let place = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
            // Lemonade reads other models than the hub's libraries do in the same folder.
            let is_new = seen.insert(place) || program.key == "lemonade";
            if is_new {
                stores.push(FoundStore { program, models: program.models(&folder, options)?, folder });
            }
        }
    }
    Ok(stores)
}

/// Which programs' models are in their usual places on this machine, and the command that imports them; `None` if there are
/// none. Only names are read.
pub fn present() -> Option<String> {
    let mut seen = BTreeSet::new();
    let has_own = |program: &&Program| program.folders().into_iter().any(|folder| seen.insert(folder));
    let found: Vec<&Program> = PROGRAMS.iter().filter(has_own).collect();
    let titles: Vec<&str> = found.iter().map(|program| program.title).collect();
    let key = match found.as_slice() {
        [] => return None,
        [only] => only.key,
        _ => "all",
    };
    let titles = match titles.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => titles.concat(),
    };
    Some(format!("this machine has models of {titles}; `blobd import --from {key}` imports them"))
}

fn not_found(program: &Program, places: &[PathBuf], is_given: bool) -> ErrorBody {
    let looked: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    let message = format!("{}: no models found: looked at {}", program.title, looked.join(", "));
    let body = ErrorBody::new(ErrorCode::NotFound, message);
    match is_given {
        true => body,
        false => body.with_hint(format!("name the folder: --from {}=DIR", program.key)),
    }
}

pub(crate) fn none_found() -> ErrorBody {
    let titles: Vec<_> = PROGRAMS.iter().map(|program| program.title).collect();
    let message = format!("no models of other programs found: looked for those of {}", titles.join(", "));
    ErrorBody::new(ErrorCode::NotFound, message)
}

/// Gives models of one store that would have the same name names that differ, in the order of the list.
fn make_distinct(models: &mut [FoundModel]) {
    let mut taken = BTreeSet::new();
    for model in models {
        let Some(target) = model.target.clone() else { continue };
        let names = (2..).map(|number| {
            let tag = format!("{}-{number}", target.tag());
            Reference::from_parts(target.host(), target.namespace(), target.model(), &tag)
        });
        let mut names = std::iter::once(Ok(target.clone())).chain(names).map_while(Result::ok);
        let free = names.find(|name| taken.insert(name.short().to_lowercase()));
        if let Some(free) = free.filter(|free| *free != target) {
            let (wanted, named) = (target.short(), free.short());
            model.rename(free);
            model.notes.push(format!("{wanted} is another model there; this one is named {named}"));
        }
    }
}

/// A path in a variable of the environment.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// A path in a variable that the hub's libraries, or other programs in Python, expand.
fn python_variable(name: &str) -> Option<PathBuf> {
    variable(name).map(|path| expanded(path, |name| std::env::var_os(name)))
}

fn home() -> Option<PathBuf> {
    variable("HOME").filter(|home| home.is_absolute())
}

fn cache_home() -> Option<PathBuf> {
    variable("XDG_CACHE_HOME").or_else(|| home().map(|home| home.join(".cache")))
}

fn data_home() -> Option<PathBuf> {
    variable("XDG_DATA_HOME").or_else(|| home().map(|home| home.join(".local/share")))
}

/// The content of a regular file that may be as long as a manifest; `None` if it is longer or cannot be read.
fn read_small(path: &Path) -> Option<Vec<u8>> {
    const MAX_BYTES: u64 = 32 << 20;
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= MAX_BYTES).then_some(bytes)
}
