//! A model as `show`, `tensor`, `diff` and `fit` describe it, wherever it is: its files, with the headers and short texts that
//! were read.

use std::path::PathBuf;

use blobd_client::protocol::response::{FileHead, ModelHeads};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{ModelHeader, read_header};
use blobd_store_format::gguf::Header;

use crate::{Digest, Reference};

/// A model with the headers and short texts of its files.
#[derive(Debug)]
pub struct DescribedModel {
    /// Its name, or the path that was given.
    pub name: String,
    /// The digest of its manifest; `None` for files on this machine.
    pub digest: Option<Digest>,
    /// Where it was found.
    pub place: ModelLocation,
    /// In the order of the manifest, the configuration first.
    pub files: Vec<DescribedFile>,
}

/// Where a model was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelLocation {
    /// In the store, under this name.
    Store(Reference),
    /// In files that were given by their path.
    LocalFiles,
    /// Not pulled; its source.
    Registry(String),
}

/// A file of a described model.
#[derive(Debug)]
pub struct DescribedFile {
    /// What the file is.
    pub media_type: MediaType,
    /// Its name, if the manifest has one.
    pub name: Option<String>,
    /// Its digest; `None` for a file on this machine, which was not hashed.
    pub digest: Option<Digest>,
    /// Its size in bytes.
    pub size: u64,
    /// The header of a file with tensors, or all of a short text; `None` if neither was read.
    pub content: Option<Vec<u8>>,
    /// Where it is on this machine; `None` for a file that was not given by its path.
    pub path: Option<PathBuf>,
}

impl DescribedModel {
    /// A model that the daemon describes.
    pub(crate) fn new(heads: ModelHeads, place: ModelLocation) -> Self {
        let file = |file: FileHead| DescribedFile {
            media_type: file.media_type,
            name: file.name,
            digest: file.digest,
            size: file.size,
            content: file.content.map(|content| content.0),
            path: None,
        };
        let files = heads.files.into_iter().map(file).collect();
        Self { name: heads.name, digest: heads.digest, place, files }
    }

    /// The headers of the model's weights, or of what takes their place, such as an adapter: one for each shard, in the
    /// order of the manifest.
    pub fn weights(&self) -> impl Iterator<Item = (&DescribedFile, Header)> {
        self.headers(MediaType::weights_component(self.files.iter().map(|file| &file.media_type)))
    }

    /// The headers of the files of a component, such as `projector`. Files that are not GGUF are left out.
    pub fn headers<'m>(&'m self, component: &'m str) -> impl Iterator<Item = (&'m DescribedFile, Header)> {
        let files = self.files.iter().filter(move |file| file.media_type.component() == component);
        files.filter_map(|file| Some((file, file.header()?)))
    }

    /// The short text with this component, such as `template`.
    pub fn text(&self, component: &str) -> Option<&str> {
        self.texts(component).next()
    }

    /// A model may have several texts of a component, such as licenses.
    pub fn texts(&self, component: &str) -> impl Iterator<Item = &str> {
        let files = self.files.iter().filter(move |file| file.media_type.component() == component);
        files.filter_map(|file| std::str::from_utf8(file.content.as_deref()?).ok())
    }
}

impl DescribedFile {
    /// The header of a file with tensors, of any format, if it was read and can be parsed.
    pub fn model_header(&self) -> Option<Box<dyn ModelHeader>> {
        let content = self.content.as_deref().filter(|_| self.media_type.holds_tensors())?;
        read_header(content).ok()
    }

    /// The header of a GGUF file, if it was read and can be parsed.
    pub fn header(&self) -> Option<Header> {
        Header::parse(self.content.as_deref()?).ok()
    }
}
