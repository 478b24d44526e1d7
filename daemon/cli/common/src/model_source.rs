//! The models that `show` and `fit` describe: in the store, in local files, or at a registry.
//!
//! Only headers and short texts are read. A model at a registry is not stored.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{FileHead, LayerSummary, ModelHeads};
use blobd_model::kind::ModelKind;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{FileFormat, FileOrigin, FormatError, HeaderReader, Progress};
use blobd_store_format::file_type::ShardName;
use blobd_store_format::gguf::Header;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::source::PullSource;
use clap::Args;

use crate::advice::parse_source;
use crate::connect::{Connected, client_error, connect, note_name};
use crate::model_name::{ModelName, only};
use crate::{Client, Digest, ErrorBody, ErrorCode, Global, Reference, file_error, usage};

/// Names the model that a command describes.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// The model: its name, a GGUF file, or a source as `blobd pull` takes it
    #[arg(value_name = "REF|PATH")]
    model: String,
    /// Look only in the store; otherwise a registry is asked for a model that is not there
    #[arg(long)]
    stored: bool,
}

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
}

impl ModelArgs {
    /// Finds and reads the model: a local file if the text is the path of one, else in the store, else at its registry.
    /// Also returns the connection, if one was needed.
    pub fn describe(&self, global: &Global) -> Result<(DescribedModel, Option<Connected>), ErrorBody> {
        if let Some(path) = self.path() {
            return Ok((describe_files(&path)?, None));
        }
        // Before a daemon is needed.
        if let Err(refused) = parse_source(&self.model)
            && !NamePattern::is_pattern(&self.model)
        {
            return Err(refused);
        }
        let connected = connect(global)?;
        Ok((self.describe_with(global, &connected)?, Some(connected)))
    }

    /// As [`Self::describe`], for a model that is not a local file, over a connection that exists.
    pub fn describe_with(&self, global: &Global, connected: &Connected) -> Result<DescribedModel, ErrorBody> {
        let source = match parse_source(&self.model) {
            Ok(source) => source,
            Err(refused) if !NamePattern::is_pattern(&self.model) => return Err(refused),
            Err(_pattern) => PullSource::Registry(only(global, &connected.client, &self.name()?)?),
        };
        let reference = source.name().map_err(usage)?;
        let model = match describe_stored(&connected.client, &reference) {
            Err(error) if error.code == ErrorCode::NotFound && !self.stored => {
                // Without a tag, one of the stored tags was meant more likely than another one at the registry.
                if reference.omits_tag() && has_tags(&connected.client, &reference)? {
                    return Err(error);
                }
                describe_remote(&connected.client, source, error)
            }
            described => described,
        };
        let model = model?;
        if let ModelLocation::Store(stored) = &model.place {
            note_name(global, &reference, &stored.short());
        }
        Ok(model)
    }

    /// Describes a stored model without its headers and texts, which the policy denies. `denied` is the error of a model
    /// that is not stored.
    pub fn describe_denied(
        &self,
        global: &Global,
        denied: ErrorBody,
    ) -> Result<(DescribedModel, Option<Connected>), ErrorBody> {
        let connected = connect(global)?;
        let reference = only(global, &connected.client, &self.name()?)?;
        let details = match connected.client.model(&reference).map_err(client_error) {
            Err(error) if error.code == ErrorCode::NotFound => return Err(denied),
            details => details?,
        };
        let file = |layer: LayerSummary| FileHead {
            media_type: layer.media_type,
            name: layer.name,
            digest: Some(layer.digest),
            size: layer.size,
            content: None,
        };
        let stored = details.name.parse().map_err(usage)?;
        let files = details.layers.into_iter().map(file).collect();
        let heads = ModelHeads { name: details.name, digest: Some(details.digest), origin: None, files };
        Ok((DescribedModel::new(heads, ModelLocation::Store(stored)), Some(connected)))
    }

    /// The text as the name of a stored model.
    pub fn name(&self) -> Result<ModelName, ErrorBody> {
        self.model.parse()
    }

    /// For a model that was not named by an argument of its own.
    pub fn new(model: &str, stored: bool) -> Self {
        Self { model: model.to_owned(), stored }
    }

    /// The path, if the text can only be a path, or is that of an existing file.
    pub fn path(&self) -> Option<PathBuf> {
        let path = Path::new(&self.model);
        let is_path = ["/", "./", "../"].iter().any(|start| self.model.starts_with(start));
        (is_path || (FileFormat::split_name(&self.model).is_some() && path.is_file()))
            .then(|| path.to_owned())
    }
}

impl DescribedModel {
    fn new(heads: ModelHeads, place: ModelLocation) -> Self {
        let file = |file: FileHead| DescribedFile {
            media_type: file.media_type,
            name: file.name,
            digest: file.digest,
            size: file.size,
            content: file.content.map(|content| content.0),
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
    /// The header of a file with tensors, if it was read and can be parsed.
    pub fn header(&self) -> Option<Header> {
        Header::parse(self.content.as_deref()?).ok()
    }
}

/// The component of a stored model's weights, or of what it has in their place, such as an adapter.
///
/// If the daemon does not describe the model, the request that opens it says why, and is the one in the audit log.
pub fn weights_component(client: &Client, reference: &Reference) -> String {
    let layers = client.model(reference).map(|details| details.layers).unwrap_or_default();
    MediaType::weights_component(layers.iter().map(|layer| &layer.media_type)).to_owned()
}

fn describe_stored(client: &Client, reference: &Reference) -> Result<DescribedModel, ErrorBody> {
    let heads = client.heads(reference).map_err(client_error)?;
    // The stored name: the reference may be an ID, or leave out the tag.
    let stored = heads.name.parse().unwrap_or_else(|_malformed| reference.clone());
    Ok(DescribedModel::new(heads, ModelLocation::Store(stored)))
}

fn has_tags(client: &Client, reference: &Reference) -> Result<bool, ErrorBody> {
    let models = client.models().map_err(client_error)?.models;
    let is_tag = |name: &str| name.parse().is_ok_and(|stored: Reference| stored.is_sibling_of(reference));
    Ok(models.iter().any(|model| is_tag(&model.name)))
}

/// If the model's registry cannot be reached, the model was simply not found.
fn describe_remote(
    client: &Client,
    source: PullSource,
    missing: ErrorBody,
) -> Result<DescribedModel, ErrorBody> {
    let is_named = matches!(source, PullSource::Registry(_));
    let params = PullParams::of_source(source);
    let remote = match client.inspect(&params).map_err(client_error) {
        Err(error) if is_named && matches!(error.code, ErrorCode::Upstream | ErrorCode::NotFound) => {
            let message = format!("{}; not at its registry either: {}", missing.message, error.message);
            let body = ErrorBody::new(ErrorCode::NotFound, message);
            return Err(match error.hint.or(missing.hint) {
                Some(hint) => body.with_hint(hint),
                None => body,
            });
        }
        remote => remote?,
    };
    let place = ModelLocation::Registry(remote.origin.clone().unwrap_or_default());
    Ok(DescribedModel::new(remote, place))
}

/// For a shard, the paths of all shards beside it.
pub fn file_paths(path: &Path) -> Vec<PathBuf> {
    match path.to_str().and_then(ShardName::from_path) {
        Some(shard) => shard.all().into_iter().map(PathBuf::from).collect(),
        None => vec![path.to_owned()],
    }
}

/// Reads the header of a file, and those of the other shards if it is a shard.
pub fn describe_files(path: &Path) -> Result<DescribedModel, ErrorBody> {
    let name = path.display().to_string();
    let files = file_paths(path).iter().map(|path| describe_file(path)).collect::<Result<_, _>>()?;
    Ok(DescribedModel { name, digest: None, place: ModelLocation::LocalFiles, files })
}

fn describe_file(path: &Path) -> Result<DescribedFile, ErrorBody> {
    let name = path.display().to_string();
    let io_error = |error| file_error(&name, &error);
    let metadata = path.metadata().map_err(io_error)?;
    if !metadata.is_file() {
        let found = if metadata.is_dir() { "a directory" } else { "a device or pipe" };
        let refused = usage(format!("{name}: wrong kind of file: expected a regular file, found {found}"));
        return Err(refused.with_hint("name a GGUF file"));
    }
    let file = File::open(path).map_err(io_error)?;
    let header = read_header(&file).map_err(io_error)?;
    let header = header.map_err(|error| {
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {error}"));
        body.with_hint(error.advice(FileOrigin::Disk))
    })?;
    if let Some(format) = FileFormat::from_start(&header).filter(|format| !format.tensor_format().is_gguf()) {
        let (expected, found) = (FileFormat::GGUF.title(), format.title());
        let refused =
            usage(format!("{name}: wrong format: expected a {expected} file, found a {found} file"));
        return Err(refused.with_hint("`blobd import FILE` stores it; name the model then"));
    }
    let kind = Header::parse(&header).map(|header| ModelKind::from_header(&header)).unwrap_or_default();
    Ok(DescribedFile {
        media_type: MediaType::new(kind.media_type()),
        name: path.file_name().map(|name| name.to_string_lossy().into_owned()),
        digest: None,
        size: metadata.len(),
        content: Some(header),
    })
}

fn read_header(mut file: &File) -> std::io::Result<Result<Vec<u8>, FormatError>> {
    let (mut reader, mut part) = (HeaderReader::new(), vec![0; 64 << 10]);
    loop {
        let length = file.read(&mut part)?;
        let progress = reader.push(part.get(..length).unwrap_or_default());
        match progress {
            Ok(Progress::NeedMore) if length > 0 => {}
            Ok(_) => return Ok(reader.finish().map(|header| header.bytes().to_vec())),
            Err(error) => return Ok(Err(error)),
        }
    }
}
