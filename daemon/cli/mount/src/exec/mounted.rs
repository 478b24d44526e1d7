//! Finds the model of a file of `blobd mount`, which the preloaded library names by its inode.

use std::collections::HashMap;
use std::sync::PoisonError;

use blobd_cli_common::connect::client_error;
use blobd_cli_common::model_folder::{self, is_folder};
use tracing_mutex::stdsync::Mutex;

use crate::mount::inode;
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// A file of weights in a stored model.
#[derive(Clone, Debug)]
pub(super) struct MountedFile {
    pub(super) reference: Reference,
    pub(super) digest: Digest,
    pub(super) component: String,
    pub(super) is_in_folder: bool,
}

#[derive(Debug)]
pub(super) struct MountedFiles {
    client: Client,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    models: Vec<(String, Digest)>,
    by_inode: HashMap<u64, MountedFile>,
}

impl MountedFiles {
    pub(super) fn new(client: Client) -> Self {
        Self { client, known: Mutex::default() }
    }

    pub(super) fn find(&self, inode: u64) -> Result<MountedFile, ErrorBody> {
        let models = self.client.models().map_err(client_error)?.models;
        let models: Vec<_> = models.into_iter().map(|model| (model.name, model.digest)).collect();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.models != models {
            known.by_inode =
                models.iter().flat_map(|(name, _)| files(&self.client, name).unwrap_or_default()).collect();
            known.models = models;
        }
        let missing = || {
            ErrorBody::new(
                ErrorCode::NotFound,
                "the mounted file does not hold the weights of a stored model",
            )
        };
        known.by_inode.get(&inode).cloned().ok_or_else(missing)
    }
}

/// The files of a model that have an image; `None` if the model cannot be read.
fn files(client: &Client, name: &str) -> Option<Vec<(u64, MountedFile)>> {
    let reference: Reference = name.parse().ok()?;
    let (_, contents) = model_folder::manifests(client, &reference).ok()?;
    let is_in_folder = is_folder(&contents);
    let count =
        |component: &str| contents.files().filter(|file| file.media_type.component() == component).count();
    let has_image = |component: &str| is_in_folder || component == "model" || count(component) == 1;
    let weights = contents.files().filter(|file| file.media_type.holds_tensors());
    let shown = weights.filter(|file| has_image(file.media_type.component())).map(|file| {
        let component = file.media_type.component().to_owned();
        let reference = reference.clone();
        (inode(file.digest), MountedFile { reference, digest: file.digest, component, is_in_folder })
    });
    Some(shown.collect())
}
