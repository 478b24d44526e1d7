//! Which models the given paths are, and which files each of them has. Only names, sizes and headers are read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_cli_common::batch::located;
use blobd_cli_common::file_error;
use blobd_client::protocol::lists::MAX_IMPORTED_FILES;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::{
    FolderError, FolderFault, FolderFile, FolderKind, FolderPlan, LeftOut, ListedFolder, Reason, Selection,
    UselessPattern,
};
use blobd_store_format::safetensors::Header;

use super::related_files::{LocalSidecar, ModelFile, shards_of, sidecars_of};
use super::{gguf_folder, open, with_folders};
use crate::local_folder::{Folder, Identity, Links};
use crate::other_stores::{downloaded_digest, is_hub_cache, program_with_manifests};
use crate::{Digest, ErrorBody, ErrorCode};

/// A path and the model that was found there, or why none was found.
pub(super) type PathModel = (PathBuf, Result<Planned, ErrorBody>);

/// What is imported from a path.
#[derive(Debug)]
pub(super) enum Planned {
    /// One file, and the sidecars in its folder.
    File {
        sidecars: Vec<LocalSidecar>,
    },
    List(ListedModel),
}

/// A model of several files.
#[derive(Debug)]
pub(super) struct ListedModel {
    /// The path that its name is derived from.
    pub(super) name_source: String,
    pub(super) files: Vec<ModelFile>,
    pub(super) left_out: Vec<LeftOut>,
    /// Absent for the shards of a GGUF file.
    pub(super) kind: Option<FolderKind>,
    faults: Vec<FolderFault>,
    /// The patterns that match nothing in the folder, noted for its first model only.
    pub(super) useless_patterns: Vec<UselessPattern>,
    base: BaseFolder,
}

/// Where the files are.
#[derive(Debug)]
enum BaseFolder {
    Folder(Arc<Folder>),
    /// Files that the user has named one of.
    Beside(PathBuf),
}

/// Plans the models of these paths, in their order. A file that belongs to the model of an earlier path is not one of its own.
pub(super) fn plan(
    paths: &[PathBuf],
    with_sidecars: bool,
    (selection, links): (&Selection, Links),
) -> Vec<PathModel> {
    let (mut models, mut taken) = (Vec::new(), BTreeSet::new());
    for path in paths {
        let planned = match path.is_dir() {
            true => {
                models.extend(plan_folder(path, selection, links));
                continue;
            }
            false if taken.contains(path) => continue,
            false => plan_file(path, with_sidecars),
        };
        if let Ok(Planned::List(ListedModel { files, base: BaseFolder::Beside(folder), .. })) = &planned {
            taken.extend(files.iter().map(|file| folder.join(&file.path)));
        }
        models.push((path.clone(), planned));
    }
    if with_sidecars {
        let sidecars = models.iter().filter_map(|(_, planned)| match planned {
            Ok(Planned::File { sidecars }) => Some(sidecars.iter().map(|sidecar| sidecar.path.clone())),
            _ => None,
        });
        taken.extend(sidecars.flatten().collect::<Vec<_>>());
        models
            .retain(|(path, planned)| !(matches!(planned, Ok(Planned::File { .. })) && taken.contains(path)));
    }
    models
}

/// A folder is one model, holds folders that are models, or has a model in each of its GGUF files.
fn plan_folder(path: &Path, selection: &Selection, links: Links) -> Vec<PathModel> {
    if is_hub_cache(path) {
        let message = format!("{}: a cache of Hugging Face's libraries, not one model", path.display());
        let hint = format!("`blobd import --from-hf={}` imports its models", path.display());
        let error = ErrorBody::new(ErrorCode::InvalidInput, message).with_hint(hint);
        return vec![(path.to_owned(), Err(error))];
    }
    let folder = match Folder::list_without(path, links, &|path| selection.excludes(path)) {
        Ok(folder) => Arc::new(folder),
        Err(error) => return vec![(path.to_owned(), Err(error))],
    };
    let inner = ListedFolder::model_folders(folder.files(), selection);
    let mut models = match ListedFolder::gguf_files(folder.files(), selection) {
        _ if !inner.is_empty() => plan_folders(path, &folder, &inner, (selection, links)),
        Some(files) => plan_gguf_files(path, &folder, &files),
        None => {
            let model = ListedModel::from_folder(path, Arc::clone(&folder), selection);
            let model = model.map(Planned::List).map_err(|error| store_error(path).unwrap_or(error));
            vec![(path.to_owned(), model)]
        }
    };
    let first = models.iter_mut().find_map(|(_, planned)| planned.as_mut().ok());
    if let Some(Planned::List(first)) = first {
        let in_models = folder.paths().filter_map(|path| {
            let (_, inner) =
                inner.iter().find_map(|place| Some((place, path.strip_prefix(place.as_str())?)))?;
            inner.strip_prefix('/')
        });
        first.useless_patterns = selection.useless(&folder.paths().chain(in_models));
    }
    models
}

/// The error about a folder without weights that is the store of another program.
fn store_error(path: &Path) -> Option<ErrorBody> {
    let (program, shown) = (program_with_manifests(path)?, path.display());
    let message = format!("{shown}: the store of {}, not one model", program.title);
    let hint = format!("`blobd import --from {}={shown}` imports its models", program.key);
    Some(ErrorBody::new(ErrorCode::InvalidInput, message).with_hint(hint))
}

/// The models in these folders of a folder, and in the GGUF files beside them. Other weights are left out, and named with the
/// first model.
fn plan_folders(
    path: &Path,
    folder: &Arc<Folder>,
    inner: &BTreeSet<String>,
    (selection, links): (&Selection, Links),
) -> Vec<PathModel> {
    let model_at = |place: &String| {
        let path = path.join(place);
        let listed = Folder::list_without(&path, links, &|path| selection.excludes(path)).map(Arc::new);
        let model = listed.and_then(|folder| ListedModel::from_folder(&path, folder, selection));
        (path, model.map(Planned::List))
    };
    let mut models: Vec<PathModel> = inner.iter().map(model_at).collect();
    let is_in = |file: &str, place: &String| {
        file.strip_prefix(place.as_str()).is_some_and(|rest| rest.starts_with('/'))
    };
    let outside = folder.files().filter(|file| !inner.iter().any(|place| is_in(&file.path, place)));
    let weights = outside.filter(|file| FileFormat::split_name(&file.path).is_some());
    let (gguf, others): (Vec<_>, Vec<_>) =
        weights.partition(|file| FileFormat::GGUF.stem_of(&file.path).is_some());
    if let Some(files) = ListedFolder::gguf_files(gguf, selection) {
        models.extend(plan_gguf_files(path, folder, &files));
    }
    let first = models.iter_mut().find_map(|(_, planned)| match planned {
        Ok(Planned::List(model)) => Some(model),
        _ => None,
    });
    if let Some(first) = first {
        first.left_out.extend(others.into_iter().map(|file| LeftOut { file, reason: Reason::NoModel }));
    }
    models
}

fn plan_gguf_files(path: &Path, folder: &Arc<Folder>, files: &[FolderFile]) -> Vec<PathModel> {
    // Each file is compared with all others.
    if let Err(error) = refuse_many(path, files.len()) {
        return vec![(path.to_owned(), Err(error))];
    }
    let models = gguf_folder::models(folder, files).into_iter();
    let planned = |files| Planned::List(ListedModel::from_gguf_files(folder, files));
    models.map(|(first, files)| (path.join(first), files.map(planned))).collect()
}

fn plan_file(path: &Path, with_sidecars: bool) -> Result<Planned, ErrorBody> {
    let sidecars = sidecars_of(path);
    Ok(match shards_of(path)? {
        Some(shards) => Planned::List(ListedModel::from_shards(path, shards, sidecars, with_sidecars)?),
        None => Planned::File { sidecars },
    })
}

impl ListedModel {
    fn from_folder(path: &Path, folder: Arc<Folder>, selection: &Selection) -> Result<Self, ErrorBody> {
        let shown = path.display();
        let refused = |error: FolderError| {
            ErrorBody::new(ErrorCode::InvalidInput, format!("{shown}: {error}")).with_hint(error.advice())
        };
        let listed = ListedFolder::new(folder.files(), selection).map_err(refused)?;
        let texts = listed
            .texts()
            .map(|text| Ok((text.to_owned(), folder.read(text, ListedFolder::MAX_TEXT_BYTES)?)));
        let texts: BTreeMap<String, Vec<u8>> = texts.collect::<Result<_, ErrorBody>>()?;
        let plan = listed.plan(&texts).map_err(refused)?;
        plan.files().iter().try_for_each(|file| folder.refuse_other(&file.path))?;
        refuse_many(path, plan.files().len())?;
        let faults = plan.faults().iter().cloned().chain(faults_of_tensors(&folder, &plan)?).collect();
        let file = |file: &FolderFile| {
            let (path, source, size) = (file.path.clone(), file.path.clone(), file.size);
            ModelFile { path, source, size, component: None }
        };
        Ok(Self {
            name_source: name_source(folder.path()),
            files: plan.files().iter().map(file).collect(),
            left_out: plan.left_out().to_vec(),
            kind: Some(plan.kind()),
            faults,
            useless_patterns: Vec::new(),
            base: BaseFolder::Folder(folder),
        })
    }

    /// A model of GGUF files of a folder. Its name is derived from the path of the first.
    fn from_gguf_files(folder: &Arc<Folder>, files: Vec<ModelFile>) -> Self {
        let first = files.first().map_or("", |file| file.source.as_str());
        Self {
            name_source: with_folders(&folder.path().join(first)),
            files,
            left_out: Vec::new(),
            kind: None,
            faults: Vec::new(),
            useless_patterns: Vec::new(),
            base: BaseFolder::Folder(Arc::clone(folder)),
        }
    }

    fn from_shards(
        path: &Path,
        shards: Vec<String>,
        sidecars: Vec<LocalSidecar>,
        with_sidecars: bool,
    ) -> Result<Self, ErrorBody> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let first = shards.first().map_or_else(|| path.to_owned(), |first| folder.join(first));
        let sidecars = sidecars.into_iter().filter(|_| with_sidecars);
        let sidecars = sidecars.map(|sidecar| (sidecar.file_name, Some(sidecar.component)));
        let files = shards.into_iter().map(|shard| (shard, None)).chain(sidecars).map(|(name, component)| {
            let path = folder.join(&name);
            let size =
                path.metadata().map_err(|error| file_error(&path.display().to_string(), &error))?.len();
            Ok(ModelFile { path: name.clone(), source: name, size, component })
        });
        Ok(Self {
            name_source: with_folders(&first),
            files: files.collect::<Result<_, ErrorBody>>()?,
            left_out: Vec::new(),
            kind: None,
            faults: Vec::new(),
            useless_patterns: Vec::new(),
            base: BaseFolder::Beside(folder),
        })
    }

    /// The name of the folder, or of the first shard.
    pub(super) fn file_name(&self) -> String {
        self.name_source.rsplit('/').next().unwrap_or_default().to_owned()
    }

    pub(super) fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }

    /// The path of each file, and what was listed there; `None` if it was not listed in a folder.
    pub(super) fn paths(&self) -> Vec<(PathBuf, Option<Identity>)> {
        let place = |file: &ModelFile| match &self.base {
            BaseFolder::Folder(folder) => {
                (folder.path().join(&file.source), folder.identity(&file.source).ok())
            }
            BaseFolder::Beside(folder) => (folder.join(&file.source), None),
        };
        self.files.iter().map(place).collect()
    }

    /// The files that were listed in a folder.
    pub(super) fn identities(&self) -> Vec<Identity> {
        self.paths().into_iter().filter_map(|(_, listed)| listed).collect()
    }

    /// The SHA-256 that a file must have, because the hub's library has noted it when it downloaded the file.
    pub(super) fn noted_digest(&self, file: &ModelFile) -> Option<Digest> {
        match &self.base {
            BaseFolder::Folder(folder) => downloaded_digest(folder, &file.source),
            BaseFolder::Beside(_) => None,
        }
    }

    /// An error that says where the file is that it is about.
    pub(super) fn located(&self, error: ErrorBody) -> ErrorBody {
        let folder = match &self.base {
            BaseFolder::Folder(folder) => folder.path(),
            BaseFolder::Beside(folder) => folder,
        };
        let sources: Vec<PathBuf> = self.files.iter().map(|file| folder.join(&file.source)).collect();
        let paths = self.files.iter().map(|file| file.path.as_str());
        located(error, None, paths.zip(sources.iter().map(PathBuf::as_path)))
    }

    /// The folder that is the model, if it is one.
    pub(super) fn folder(&self) -> Option<&Path> {
        match &self.base {
            BaseFolder::Folder(folder) if self.kind.is_some() => Some(folder.path()),
            _ => None,
        }
    }

    /// Opens the file with this number.
    pub(super) fn open(&self, number: usize) -> Result<File, ErrorBody> {
        let path = self.files.get(number).map_or("", |file| file.source.as_str());
        match &self.base {
            BaseFolder::Folder(folder) => folder.open(path),
            BaseFolder::Beside(folder) => open(&folder.join(path)),
        }
    }

    /// Refuses a model that no program can load.
    pub(super) fn refuse_faults(&self) -> Result<(), ErrorBody> {
        const MAX_NAMED: usize = 5;
        let fatal: Vec<_> =
            self.faults.iter().filter(|fault| fault.is_fatal()).map(ToString::to_string).collect();
        if fatal.is_empty() {
            return Ok(());
        }
        let mut message = fatal.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
        if let Some(more @ 1..) = fatal.len().checked_sub(MAX_NAMED) {
            message.push_str(&format!("; and {more} more"));
        }
        let shown = self.folder().map_or_else(|| self.file_name(), |folder| folder.display().to_string());
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{shown}: {message}"));
        let names_index = self.faults.iter().any(|fault| fault.is_fatal() && fault.is_of_index());
        Err(body.with_hint(match names_index {
            true => {
                "download the missing or wrong files again, or leave the index out with `--exclude PATTERN`"
            }
            false => "download the missing files again",
        }))
    }

    /// What is wrong with the folder, for its user to know, and which files of it were left out.
    pub(super) fn notes(&self) -> Vec<String> {
        const MAX_NAMED: usize = 5;
        let faults = self.faults.iter().filter(|fault| !fault.is_fatal()).map(ToString::to_string);
        // Its user may think that they are part of the model.
        let is_noted = |left: &&LeftOut| {
            matches!(left.reason, Reason::Gguf | Reason::NoModel | Reason::Dash | Reason::Partial)
        };
        let noted: Vec<&LeftOut> = self.left_out.iter().filter(is_noted).collect();
        let more = noted.len().checked_sub(MAX_NAMED).filter(|more| *more > 0);
        let named = noted.iter().take(MAX_NAMED).map(|left| format!("left out: {left}"));
        let patterns = self.useless_patterns.iter().map(ToString::to_string);
        patterns
            .chain(faults)
            .chain(named)
            .chain(more.map(|more| format!("left out: {more} more; `--list` names them")))
            .collect()
    }

    /// All that is wrong with the folder.
    pub(super) fn faults(&self) -> &[FolderFault] {
        &self.faults
    }
}

fn refuse_many(path: &Path, found: usize) -> Result<(), ErrorBody> {
    if found <= MAX_IMPORTED_FILES {
        return Ok(());
    }
    let shown = path.display();
    let message = format!("{shown}: too many files: expected at most {MAX_IMPORTED_FILES}, found {found}");
    let body = ErrorBody::new(ErrorCode::InvalidInput, message);
    Err(body
        .with_hint("leave files out with `--exclude PATTERN`, or name the files with `--include PATTERN`"))
}

/// Compares the indexes with the headers of the shards that they name. A header that cannot be read is left to the daemon,
/// which says what is wrong with it.
fn faults_of_tensors(folder: &Folder, plan: &FolderPlan) -> Result<Vec<FolderFault>, ErrorBody> {
    let mut headers = Vec::new();
    for path in plan.indexed_files() {
        let size = plan.files().iter().find(|file| file.path == path).map_or(0, |file| file.size);
        headers.extend(header(folder.open(path)?, size).map(|header| (path, header)));
    }
    let tensors = headers.iter().map(|(path, header)| {
        let tensors = header.tensors().iter();
        (*path, tensors.map(|tensor| (tensor.name(), tensor.size_bytes())).collect::<Vec<_>>())
    });
    Ok(plan.check_tensors(tensors))
}

fn header(mut file: File, size: u64) -> Option<Header> {
    let mut start = vec![0; Header::LENGTH_BYTES];
    file.read_exact(&mut start).ok()?;
    let end = Header::end(start.as_slice().try_into().ok()?).ok().filter(|end| *end <= size)?;
    let rest = usize::try_from(end).ok()?.checked_sub(start.len())?;
    let read = file.take(rest as u64).read_to_end(&mut start).ok()?;
    (read == rest).then(|| Header::parse(&start, size).ok()).flatten()
}

/// The path that the name of a folder's model is derived from. A snapshot of the Hugging Face cache has the name of its
/// repository.
fn name_source(folder: &Path) -> String {
    let repository = folder.ancestors().nth(2).and_then(Path::file_name).and_then(|name| name.to_str());
    let is_snapshot = folder.parent().is_some_and(|parent| parent.ends_with("snapshots"));
    match repository.and_then(|name| name.strip_prefix("models--")).filter(|_| is_snapshot) {
        Some(repository) => repository.replace("--", "/"),
        None => with_folders(folder),
    }
}
