//! The files beside a given file that belong to its model: the other shards, the projector and the draft.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use blobd_cli_common::output::printable;
use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::file_format::{FileFormat, HeaderReader, Progress};
use blobd_store_format::file_type::ShardName;
use blobd_store_format::repository::{Choice, RepositoryFiles, Wanted};
use blobd_store_format::shard_set::{FolderShards, ShardHeader, ShardSetError};
use blobd_store_format::source::Components;
use blobd_store_format::tensor::TensorFormat;

use super::open;
use crate::{ErrorBody, ErrorCode};

/// A file of a model of several files.
#[derive(Debug)]
pub(super) struct ModelFile {
    /// Its path in the model.
    pub(super) path: String,
    /// Its path in the folder.
    pub(super) source: String,
    pub(super) size: u64,
    pub(super) component: Option<SidecarComponent>,
}

/// The names of all shards of the model that this file belongs to, in order; `None` if the file is not a shard. Only headers
/// are read.
pub(super) fn shards_of(path: &Path) -> Result<Option<Vec<String>>, ErrorBody> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
    let (folder, names) = names_beside(path);
    let format = FileFormat::split_name(name).map(|(_stem, format)| format.tensor_format());
    if let (Some(TensorFormat::Safetensors), Some(shard)) = (format, ShardName::from_path(name))
        && shard.count() > 1
    {
        return Err(shard_of_folder(path, shard.count()));
    }
    let names = names.iter().map(String::as_str);
    let shards = shards_among((name, names), &path.display(), |name| open(&folder.join(name)).ok())?;
    Ok(shards.map(|shards| shards.into_iter().map(str::to_owned).collect()))
}

/// As [`shards_of`], for a file in a folder of files with these names. `open` opens the file with a name.
pub(super) fn shards_among<'n>(
    (given, names): (&'n str, impl IntoIterator<Item = &'n str>),
    shown: &dyn Display,
    open: impl Fn(&str) -> Option<File>,
) -> Result<Option<Vec<&'n str>>, ErrorBody> {
    let refused = |error: ShardSetError| {
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{shown}: {error}"));
        body.with_hint(error.advice())
    };
    let shards = FolderShards::new(given, names).map_err(refused)?;
    let Some(own) = FileFormat::GGUF.stem_of(given).and_then(|_| header(open(given)?)) else {
        return Ok(None);
    };
    if ShardName::from_path(given).is_none() && own.shard().is_none_or(|shard| shard.count <= 1) {
        return Ok(None);
    }
    let inspected = shards.to_inspect(own.shard()).map_err(refused)?;
    let headers = inspected.into_iter().filter_map(|name| Some((name, header(open(name)?)?)));
    let headers: BTreeMap<&str, ShardHeader> = headers.collect();
    let found = shards.resolve(&headers).map_err(refused)?;
    Ok((found.len() > 1).then_some(found))
}

/// A shard of safetensors files is of no use without the files beside it.
fn shard_of_folder(path: &Path, count: usize) -> ErrorBody {
    let message = format!("{}: one of {count} shards of a safetensors model", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let body = ErrorBody::new(ErrorCode::InvalidInput, message);
    body.with_hint(format!("import the folder: `blobd import {}`", folder.display()))
}

/// What the header of a file says; `None` if it cannot be read or has none, which the daemon then refuses.
fn header(mut file: File) -> Option<ShardHeader> {
    const STEP_BYTES: usize = 64 << 10;
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let (mut reader, mut buffer) = (HeaderReader::new(), vec![0; STEP_BYTES]);
    loop {
        let read = file.read(&mut buffer).ok()?;
        if read == 0 || reader.push(buffer.get(..read)?).ok()? == Progress::Done {
            break;
        }
    }
    Some(ShardHeader::new(&*reader.finish().ok()?))
}

/// The projector or the draft that belongs to a local model file and is in its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalSidecar {
    pub(super) path: PathBuf,
    pub(super) file_name: String,
    pub(super) component: SidecarComponent,
}

/// A note that names the sidecars that were not stored.
pub(super) fn sidecar_note(sidecars: &[LocalSidecar]) -> Option<String> {
    let names: Vec<_> = sidecars.iter().map(|sidecar| printable(&sidecar.file_name)).collect();
    let (are, them) = if names.len() == 1 { ("is", "it") } else { ("are", "them") };
    let joined = names.join(" and ");
    let text = format!("{joined} {are} in the same folder; --with-sidecars stores {them} in the same model");
    (!names.is_empty()).then_some(text)
}

/// Chooses sidecars by the rules for a repository. A folder that cannot be read has none: the file itself may still be
/// readable.
pub(super) fn sidecars_of(path: &Path) -> Vec<LocalSidecar> {
    let Some(own) = path.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let (folder, names) = names_beside(path);
    let files = RepositoryFiles::new(names.iter().map(String::as_str));
    let Ok(Choice { projector, draft, .. }) = files.choose(Wanted::File(own), &Components::DEFAULT) else {
        return Vec::new();
    };
    let sidecar = |(number, component): (usize, SidecarComponent)| {
        let file_name = names.get(number)?.clone();
        Some(LocalSidecar { path: folder.join(&file_name), file_name, component })
    };
    let projector = projector.into_iter().map(|file| (file, SidecarComponent::Projector));
    let draft = draft.into_iter().map(|file| (file, SidecarComponent::Draft));
    projector.chain(draft).filter_map(sidecar).collect()
}

/// The folder of a file, and the sorted names in it; none if it cannot be read.
fn names_beside(path: &Path) -> (PathBuf, Vec<String>) {
    const MAX_ENTRIES: usize = 10_000;
    let folder = path.parent().unwrap_or(Path::new(""));
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(listed).into_iter().flatten().take(MAX_ENTRIES);
    let mut names: Vec<_> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    (folder.to_owned(), names)
}
