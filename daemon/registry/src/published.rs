//! Models as their registries describe them.

use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::remote::{RemoteFile, SeparateBlobs};

/// The result of resolving a source.
#[derive(Debug)]
pub enum RemoteModel {
    /// A model that has a manifest.
    Published(PublishedModel),
    /// Files without a manifest: one file or the shards of one model, and its projector if it has one.
    Files {
        /// The files, shards in order.
        files: Vec<RemoteFile>,
        /// A permanent address from which the files can be pulled again, if one is known.
        origin: Option<String>,
        /// The choice, if the files were chosen from a repository.
        chosen: Option<Chosen>,
    },
}

impl RemoteModel {
    /// The manifest, if it has one.
    pub const fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Published(published) => Some(&published.manifest),
            Self::Files { .. } => None,
        }
    }
}

/// A model that has a manifest.
#[derive(Debug)]
pub struct PublishedModel {
    /// The manifest, including components from the repository that the registry's own manifest does not name.
    pub manifest: Manifest,
    /// The files in the manifest that only the repository has, not the registry.
    pub elsewhere: Vec<RemoteFile>,
    /// The choice, if the model's files were chosen from a repository.
    pub chosen: Option<Chosen>,
    /// The files that the registry has as separate blobs.
    pub(super) separate: BTreeMap<Digest, Arc<SeparateBlobs>>,
}

impl From<Manifest> for PublishedModel {
    fn from(manifest: Manifest) -> Self {
        Self { manifest, elsewhere: Vec::new(), chosen: None, separate: BTreeMap::new() }
    }
}

impl PublishedModel {
    /// The remote file for a file of the manifest; `upstream` is the model at its registry.
    pub fn remote(&self, upstream: &Reference, file: &Descriptor) -> RemoteFile {
        let elsewhere = self.elsewhere.iter().find(|known| known.digest() == Some(file.digest));
        let separate = self.separate.get(&file.digest).cloned();
        let layer = || RemoteFile::layer(upstream, file).with_separate(separate);
        elsewhere.map_or_else(layer, Clone::clone)
    }
}

/// The files that were chosen from a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The files, the weights first.
    pub files: Vec<ChosenFile>,
    /// The number of weight files in the repository; of a GGUF model, the number of GGUF files.
    pub listed: usize,
    /// The number of files without weights that are pulled too, if the model is a folder.
    pub beside: Option<usize>,
    /// What the user should know about files that are left out, or stored whole because a pattern includes them.
    pub notes: Vec<String>,
}

/// A file that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenFile {
    /// The media type, which says what role the file has in the model.
    pub media_type: MediaType,
    /// Its path in the repository.
    pub path: String,
}
