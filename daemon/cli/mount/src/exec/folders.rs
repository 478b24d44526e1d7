//! Models that are folders, as the preloaded library shows them: an open model, and a directory with the names of its files.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak};

use blobd_cli_common::connect::client_error;
use blobd_cli_common::file_error;
use blobd_cli_common::model_folder::{self, is_folder};
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use tracing_mutex::stdsync::Mutex;

use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// A folder that programs have open. The model is in use as long as one of them has.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) number: u64,
    pub(super) model: OpenModel,
    /// The directory that stands for it: a link for each file, which leads nowhere.
    pub(super) directory: PathBuf,
    /// The directory that contains nothing else.
    top: PathBuf,
    files: HashMap<String, Digest>,
}

/// A server may start programs that use folders for as long as it runs.
impl Drop for Folder {
    fn drop(&mut self) {
        // What is left goes with the directory of `blobd exec`.
        let _ = fs::remove_dir_all(&self.top);
    }
}

impl Folder {
    /// The layer that is the file with this path in the folder.
    pub(super) fn layer(&self, path: &str) -> Result<usize, ErrorBody> {
        let missing = || ErrorBody::new(ErrorCode::NotFound, format!("{path}: no such file in the model"));
        self.layer_of(*self.files.get(path).ok_or_else(missing)?)
    }

    /// The layer with this digest.
    pub(super) fn layer_of(&self, digest: Digest) -> Result<usize, ErrorBody> {
        let missing = || ErrorBody::new(ErrorCode::NotFound, format!("{digest}: no such file in the model"));
        self.model.layers().iter().position(|layer| layer.digest == digest).ok_or_else(missing)
    }
}

#[derive(Debug)]
pub(super) struct Folders {
    client: Client,
    /// Where directories are made.
    parent: PathBuf,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    by_number: HashMap<u64, Weak<Folder>>,
    by_name: HashMap<String, Weak<Folder>>,
}

impl Folders {
    pub(super) fn new(client: Client, parent: PathBuf) -> Self {
        Self { client, parent, open: Mutex::default() }
    }

    /// The folder that a path is in, and how many bytes of the path are the model's name. Of several models, it is the one
    /// with the longest name.
    pub(super) fn find(&self, path: &str) -> Result<(Arc<Folder>, usize), ErrorBody> {
        let ends = [path.len()].into_iter().chain(path.rmatch_indices('/').map(|(place, _)| place));
        let mut refused = None;
        for end in ends {
            let name = path.get(..end).unwrap_or_default();
            let Ok(reference) = name.parse::<Reference>() else { continue };
            match self.open(name, &reference) {
                Ok(folder) => return Ok((folder, end)),
                // The reason of a model that exists comes first.
                Err(error) if error.code == ErrorCode::NotFound && error.hint.is_none() => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| ErrorBody::new(ErrorCode::NotFound, "")))
    }

    pub(super) fn open_folder(&self, number: u64) -> Option<Arc<Folder>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).by_number.get(&number)?.upgrade()
    }

    pub(super) fn open(&self, name: &str, reference: &Reference) -> Result<Arc<Folder>, ErrorBody> {
        // The lock is held while the model is opened: programs that start together share one folder.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.by_name.get(name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let (_, contents) = match model_folder::manifests(&self.client, reference) {
            Ok(manifests) => manifests,
            Err(error) if error.code() == ErrorCode::NotFound => {
                return Err(ErrorBody::new(ErrorCode::NotFound, ""));
            }
            Err(error) => return Err(client_error(error)),
        };
        if !is_folder(&contents) {
            let error = ErrorBody::new(ErrorCode::NotFound, format!("{name}: the model is not a folder"));
            return Err(error.with_hint(format!("open /blobd/{name}.gguf")));
        }
        let params = OpenParams {
            reference: reference.clone(),
            tensors: TensorSelection::None,
            component: None,
            files: FileSelection::All,
            purpose: OpenPurpose::Exec,
        };
        let model = self.client.open_with(&params).map_err(client_error)?;
        let files: HashMap<_, _> =
            model_folder::files(reference, &contents).map(|(path, file)| (path, file.digest)).collect();
        let number = open.next;
        open.next = number.saturating_add(1);
        let top = self.parent.join(number.to_string());
        let directory = top.join(name);
        make_directory(&directory, name, files.keys())
            .map_err(|error| file_error(&directory.display().to_string(), &error))?;
        let folder = Arc::new(Folder { number, model, directory, top, files });
        open.by_number.retain(|_, known| known.strong_count() > 0);
        open.by_name.retain(|_, known| known.strong_count() > 0);
        open.by_number.insert(number, Arc::downgrade(&folder));
        open.by_name.insert(name.to_owned(), Arc::downgrade(&folder));
        Ok(folder)
    }
}

/// Makes links with the files' names. A program that follows one without the library finds no file.
fn make_directory<'f>(
    directory: &Path,
    name: &str,
    files: impl Iterator<Item = &'f String>,
) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for file in files {
        let link = directory.join(file);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent)?;
        }
        symlink(Path::new("/blobd").join(name).join(file), link)?;
    }
    Ok(())
}
