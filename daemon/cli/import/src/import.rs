//! `blobd import`

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use blobd_cli_common::advice::instead_of_import;
use blobd_cli_common::batch::{Batch, located};
use blobd_cli_common::connect::{Connected, client_error, connect_or_create};
use blobd_cli_common::model_name::parse_new_name;
use blobd_cli_common::output::{counted, human_bytes, print_text};
use blobd_cli_common::progress::{Bars, Progress};
use blobd_cli_common::{Global, file_error, internal, usage};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams, Sidecar};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::model_folder::Selection;
use clap::Args;

use self::earlier::{Earlier, Files};
use self::from_program::From;
use self::moving::{Finished, Interrupted, Moves};
use self::plan::{ListedModel, PathModel, Planned, plan};
use self::read_once::ReadOnce;
use self::related_files::{LocalSidecar, ModelFile, sidecar_note};
use crate::local_folder::{Identity, Links};
use crate::parallel::run_in_order;
use crate::{Client, ErrorBody, Reference, export};

mod earlier;
mod from_program;
mod gguf_folder;
mod listing;
mod moving;
mod plan;
mod read_once;
mod related_files;
mod report;

pub(crate) use self::report::summary;

/// Store models that are on this machine: GGUF and safetensors files, shards, folders
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd import llama-3-8b-Q4_K_M.gguf               becomes llama-3-8b:Q4_K_M
  blobd import model.gguf --name my/model:v1
  blobd import *.gguf                               stores what they share once
  blobd import gemma-Q4_K_M.gguf --with-sidecars    with mmproj-F16.gguf in the same folder
  blobd import big-Q8_0-00001-of-00003.gguf         with the other shards in the same folder
  blobd import Qwen3-0.6B                           a folder with safetensors files
  blobd import ~/models                             all models of a folder of GGUF files
  blobd import Qwen3-0.6B --list                    its name, files and cost; imports nothing
  blobd import Qwen3-0.6B --exclude 'onnx/'
  blobd import ~/models/*.gguf --move               deletes each file when it is stored
  blobd import --from-ollama --list                 the models of Ollama's store
  blobd import --from-ollama 'llama3:*'             imports those with such names
  blobd import --from-hf=/data/hub                  all models of a Hugging Face cache
  blobd import --from-lmstudio --move               deletes in LM Studio's folder what is stored")]
pub struct Params {
    /// The files and folders; with --from, the names or patterns of models
    #[arg(required_unless_present = "from_program", value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// The model's name; derived from the name of the file or folder, and made distinct, if omitted
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace another model that has the name, even a pinned one; that model goes to the trash. Read files again that were
    /// imported already
    #[arg(long)]
    force: bool,
    /// Store the projector and the draft that are in the file's folder and belong to it in the same model;
    /// always done for a folder
    #[arg(long)]
    with_sidecars: bool,
    /// Take exactly the files of a folder that match one of these patterns, in any format; with --from, of each model
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Leave out the files of a folder that match one of these patterns; with --from, of each model
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Follow links that lead out of a folder or of another program's store
    #[arg(long)]
    follow: bool,
    /// Delete each file when all models that have it are stored
    #[arg(long = "move", conflicts_with = "follow")]
    moves: bool,
    /// Print which models would be imported, what each would add to the store, and with --move what would be deleted, and
    /// import nothing
    #[arg(long)]
    list: bool,
}

impl Params {
    fn selection(&self) -> Selection {
        Selection::new(self.include.iter().map(String::as_str), self.exclude.iter().map(String::as_str))
    }

    const fn links(&self) -> Links {
        if self.follow { Links::Everywhere } else { Links::Inside }
    }
}

/// Stores models, or lists them with `--list`. One that fails does not stop the others.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if let Some(request) = params.from.request(params)? {
        return from_program::run(global, &request);
    }
    if (!params.include.is_empty() || !params.exclude.is_empty())
        && !params.paths.iter().any(|path| path.is_dir())
    {
        return Err(usage("--include and --exclude: choose among the files of a folder: expected a folder"));
    }
    let paths = if params.moves { paths_to_move(global, params)? } else { params.paths.clone() };
    let mut models = plan(&paths, params.with_sidecars, (&params.selection(), params.links()));
    if params.name.is_some() && models.len() > 1 {
        return Err(usage("--name: names one model, but several are given"));
    }
    if params.moves && params.force && models.len() > 1 {
        return Err(usage(
            "--move and --force: expected one model, found several: one of them could replace another",
        ));
    }
    let moves =
        if params.moves { Moves::of_paths(&mut models, params.with_sidecars) } else { Moves::default() };
    if params.list {
        return listing::list(global, params, models, &moves);
    }
    import_all(global, params, (&models, &moves))
}

/// The paths without those that an interrupted command has moved. What it left is deleted first.
fn paths_to_move(global: &Global, params: &Params) -> Result<Vec<PathBuf>, ErrorBody> {
    let mut paths = params.paths.clone();
    if !params.list {
        let finished = finish_interrupted(global, || connect_or_create(global))?;
        // A folder stays, perhaps with nothing in it.
        let is_left =
            |path: &PathBuf| path.read_dir().map_or(path.exists(), |mut left| left.next().is_some());
        paths.retain(|path| is_left(path) || !finished.has(path));
    }
    Ok(paths)
}

/// Deletes what interrupted commands with `--move` have left.
fn finish_interrupted(
    global: &Global,
    connect: impl FnOnce() -> Result<Connected, ErrorBody>,
) -> Result<Finished, ErrorBody> {
    let interrupted = Interrupted::load();
    if interrupted.is_empty() {
        return Ok(Finished::default());
    }
    let models = connect()?.client.models().map_err(client_error)?.models;
    let finished = interrupted.finish(&models.iter().map(|model| model.digest).collect());
    if !finished.is_empty() && !global.json && !global.hides_reports() {
        let (files, bytes) = (counted(finished.files, "file"), human_bytes(finished.bytes));
        print_text(&format!("finished an interrupted import: {files} deleted, {bytes}\n"))?;
    }
    Ok(finished)
}

fn import_all(
    global: &Global,
    params: &Params,
    (models, moves): (&[PathModel], &Moves),
) -> Result<(), ErrorBody> {
    let count = models.len();
    let label = match models {
        [(path, _)] => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        _ => format!("{count} models"),
    };
    let progress = Progress::new(global.hides_progress());
    let connecting = progress.bar(&label, 0);
    connecting.wait("connecting");
    let connected = connect_or_create(global)?;
    connecting.wait("looking for what was imported before");
    // What is deleted must have been read.
    let (mut earlier, stored) =
        Earlier::new(&connected.client, params, models, params.moves || params.force)?;
    let to_read = models.iter().enumerate().filter(|(number, _)| !stored.contains_key(number));
    let sizes = to_read.map(|(_, (path, planned))| size(path, planned.as_ref()));
    let total = sizes.fold(0, u64::saturating_add);
    connecting.clear();
    let bars = progress.bars(&label, total, count);
    let once = ReadOnce::new(models.iter().enumerate().filter_map(|(number, (_, planned))| match planned {
        Ok(Planned::List(model)) if !stored.contains_key(&number) => Some(model.identities()),
        _ => None,
    }));
    let import = |number: usize| match (stored.get(&number), models.get(number)) {
        (Some(stored), _) => Ok(stored.clone()),
        (None, Some((path, Ok(planned)))) => {
            let _admitted = moves.admit(size(path, Ok(planned)));
            let mut imported = import(&bars, params, (&connected.client, &once), (path, planned))?;
            if params.moves && imported.reused_bytes > 0 {
                check_stored(&connected.client, &imported)?;
            }
            let notes = moves.imported(number, &imported);
            imported.effects.notes.extend(notes);
            Ok(imported)
        }
        (None, Some((_, Err(error)))) => Err(error.clone()),
        (None, None) => Err(internal("import: no such model")),
    };
    let mut batch = Batch::new(global, count);
    let reported = run_in_order(&jobs(params, models), import, |number, imported| {
        let Some((path, planned)) = models.get(number) else { return Ok(()) };
        if let (Ok(planned), Ok(imported), false) = (planned, &imported, stored.contains_key(&number)) {
            earlier.add(number, &Files::new(params, path, planned), imported);
        }
        bars.suspend(|| match batch.add(&path.display(), imported) {
            Some(imported) if !global.hides_reports() => print_text(&report::summary(imported)),
            _ => Ok(()),
        })
    });
    bars.clear();
    earlier.save();
    reported?;
    if count > 1 && !batch.done().is_empty() && !global.hides_reports() {
        print_text(&report::sums(batch.done()))?;
    }
    batch.finish("imported", ["files was not imported", "files were not imported"])
}

/// Checks the digests of an imported model that shares data with earlier ones. An import assumes that stored data of the
/// right length is intact, which is not enough when the source is deleted.
fn check_stored(client: &Client, imported: &Imported) -> Result<(), ErrorBody> {
    let reference = imported.name.parse().map_err(internal)?;
    export::check_stored(client, &reference).map_err(|error| {
        let message = format!("{}; the files of {} were not deleted", error.message, imported.name);
        let hint =
            format!("`blobd verify {}` sets damaged data aside; then import the files again", imported.name);
        ErrorBody::new(error.code, message).with_hint(hint)
    })
}

/// Models that would get the same name follow each other, so that the first of them gets it.
fn jobs(params: &Params, models: &[PathModel]) -> Vec<Vec<usize>> {
    let mut jobs: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, (path, planned)) in models.iter().enumerate() {
        let name = planned.as_ref().ok().and_then(|planned| name_of(params, path, planned).ok());
        let name = name.map(|name| name.short().to_lowercase());
        jobs.entry(name.unwrap_or_default()).or_default().push(number);
    }
    let mut jobs: Vec<Vec<usize>> = jobs.into_values().collect();
    jobs.sort_unstable();
    jobs
}

/// The name that a model gets if no other model has it.
fn name_of(params: &Params, path: &Path, planned: &Planned) -> Result<Reference, ErrorBody> {
    if let Some(name) = &params.name {
        return Ok(name.clone());
    }
    let names = match planned {
        Planned::List(model) => DerivedName::from_path(&model.name_source),
        Planned::File { .. } => DerivedName::from_path(&with_folders(path)),
    };
    let refused = |error| usage(format!("{}: no model name can be derived from it: {error}", path.display()));
    names.map(|names| names.first().clone()).map_err(|error| refused(error).with_hint("--name gives it one"))
}

fn size(path: &Path, planned: Result<&Planned, &ErrorBody>) -> u64 {
    match planned {
        Ok(Planned::List(model)) => model.size(),
        Ok(Planned::File { .. }) => path.metadata().map_or(0, |data| data.len()),
        Err(_) => 0,
    }
}

fn import(
    bars: &Bars,
    params: &Params,
    (client, once): (&Client, &ReadOnce),
    (path, planned): (&Path, &Planned),
) -> Result<Imported, ErrorBody> {
    let mut imported = match planned {
        Planned::File { sidecars } => import_file(bars, params, client, (path, sidecars)),
        Planned::List(model) => import_list(bars, params, (client, once), model),
    }?;
    imported.effects.notes.extend(notes(params, planned));
    Ok(imported)
}

fn import_file(
    bars: &Bars,
    params: &Params,
    client: &Client,
    (path, sidecars): (&Path, &[LocalSidecar]),
) -> Result<Imported, ErrorBody> {
    let taken = if params.with_sidecars { sidecars } else { &[] };
    let file = open(path)?;
    let opened = taken.iter().map(|sidecar| open(&sidecar.path)).collect::<Result<Vec<_>, _>>()?;
    let shown = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let sidecar = |LocalSidecar { component, file_name, .. }: &LocalSidecar| Sidecar {
        component: *component,
        file_name: file_name.clone(),
    };
    let request = ImportParams {
        name: params.name.clone(),
        force: params.force,
        sidecars: taken.iter().map(sidecar).collect(),
        ..ImportParams::new(with_folders(path))
    };
    let files: Vec<_> = std::iter::once(&file).chain(&opened).map(File::as_fd).collect();
    let bar = bars.item(&shown, 0);
    let imported = client.import_files(&request, &files, |progress| bar.show(progress));
    let of_file = |error| located(error, None, [(shown.as_ref(), path)]);
    imported.map_err(client_error).map_err(of_file)
}

/// What the user should know about a model besides what the daemon says.
fn notes(params: &Params, planned: &Planned) -> Vec<String> {
    match planned {
        Planned::File { sidecars } if !params.with_sidecars => sidecar_note(sidecars).into_iter().collect(),
        Planned::File { .. } => Vec::new(),
        Planned::List(model) => model.notes(),
    }
}

fn import_list(
    bars: &Bars,
    params: &Params,
    (client, once): (&Client, &ReadOnce),
    model: &ListedModel,
) -> Result<Imported, ErrorBody> {
    model.refuse_faults()?;
    let reading = once.begin(model.identities());
    let listed: Vec<Option<Identity>> = model.paths().into_iter().map(|(_, listed)| listed).collect();
    let file = |(file, listed): (&ModelFile, &Option<Identity>)| {
        let noted = model.noted_digest(file);
        let read = listed.and_then(|listed| reading.digest(listed));
        let read = read.filter(|read| noted.is_none_or(|noted| noted == *read));
        let (path, size, component) = (file.path.clone(), file.size, file.component);
        ImportFile {
            path,
            size,
            component,
            digest: read.or(noted),
            was_read: read.is_some(),
            offset: 0,
            stream: false,
        }
    };
    let request = ImportParams {
        name: params.name.clone(),
        force: params.force,
        files: model.files.iter().zip(&listed).map(file).collect(),
        ..ImportParams::new(model.name_source.clone())
    };
    let open = |number| model.open(number).map(Into::into);
    let bar = bars.item(&model.file_name(), model.size());
    let imported = client.import_listed(&request, open, |progress| bar.show(progress));
    let imported = imported.map_err(client_error).map_err(|error| model.located(error))?;
    let read = imported.files.iter().zip(&listed);
    reading.done(read.filter_map(|(file, listed)| Some(((*listed)?, file.digest))));
    Ok(imported)
}

/// The name of a file or folder with its innermost folders, which distinguish its model from those of files with the same
/// name.
fn with_folders(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let names = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy()),
        _ => None,
    });
    let names: Vec<_> = names.collect();
    let skipped = names.len().saturating_sub(DerivedName::MAX_FOLDERS + 1);
    names.get(skipped..).unwrap_or_default().join("/")
}

/// Opens the file with the caller's rights; the daemon only gets the descriptor. `O_NONBLOCK`, because
/// opening a pipe would wait for its writer; the daemon then refuses the pipe.
fn open(path: &Path) -> Result<File, ErrorBody> {
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)
        .map_err(|error| not_opened(path, &error))
}

/// If the file does not exist, the hint says how to pull a model of that name.
fn not_opened(path: &Path, error: &io::Error) -> ErrorBody {
    let body = file_error(&path.display().to_string(), error);
    match instead_of_import(path).filter(|_| error.kind() == io::ErrorKind::NotFound) {
        Some(hint) => body.with_hint(hint),
        None => body,
    }
}
