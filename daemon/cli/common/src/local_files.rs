//! Models in files of this machine, as `show`, `tensor`, `diff` and `fit` describe them: a file, all shards of a file, or a
//! folder. Only headers and short texts are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use blobd_model::config::QUANTIZATION_FILES;
use blobd_model::kind::ModelKind;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{
    FileFormat, FileOrigin, FormatError, HeaderReader, ModelHeader, Progress,
};
use blobd_store_format::file_type::ShardName;
use blobd_store_format::model_file::layer_type;
use blobd_store_format::model_folder::{FolderError, FolderFile, ListedFolder, Selection};
use blobd_store_format::tensor::TensorFormat;

use crate::described_model::{DescribedFile, DescribedModel, ModelLocation};
use crate::local_folder::{Folder, Links};
use crate::{ErrorBody, ErrorCode, file_error, usage};

/// The JSON files that describe a model, besides [`QUANTIZATION_FILES`].
const MODEL_INDEX: &str = "model_index.json";
/// The longest JSON file that is read. Those of models have some KiB.
const MAX_JSON_BYTES: u64 = 1 << 20;

/// Describes the model in a folder, in a file, or in the shards that a file is one of.
///
/// # Errors
/// When a file cannot be read or has no tensors, and when the folder is not one model.
pub fn describe_path(path: &Path) -> Result<DescribedModel, ErrorBody> {
    let files = if path.is_dir() { describe_folder(path)? } else { describe_shards(path)? };
    let name = path.display().to_string();
    Ok(DescribedModel { name, digest: None, place: ModelLocation::LocalFiles, files })
}

/// For a shard of a GGUF file, the paths of all shards beside it.
fn shards(path: &Path) -> Vec<PathBuf> {
    let is_gguf = |path: &&str| FileFormat::GGUF.stem_of(path).is_some();
    match path.to_str().filter(is_gguf).and_then(ShardName::from_path) {
        Some(shard) => shard.all().into_iter().map(PathBuf::from).collect(),
        None => vec![path.to_owned()],
    }
}

fn describe_shards(path: &Path) -> Result<Vec<DescribedFile>, ErrorBody> {
    shards(path).iter().map(|path| describe_file(path)).collect()
}

fn describe_file(path: &Path) -> Result<DescribedFile, ErrorBody> {
    let shown = path.display().to_string();
    let io_error = |error| file_error(&shown, &error);
    let metadata = path.metadata().map_err(io_error)?;
    if !metadata.is_file() {
        let refused = usage(format!(
            "{shown}: wrong kind of file: expected a regular file or a folder, found a device or pipe"
        ));
        return Err(refused.with_hint("name a GGUF or safetensors file, or a folder with safetensors files"));
    }
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    described(&File::open(path).map_err(io_error)?, metadata.len(), &name, path)
}

/// Describes a file with tensors. `name` is its path in the model.
fn described(file: &File, size: u64, name: &str, path: &Path) -> Result<DescribedFile, ErrorBody> {
    let shown = path.display().to_string();
    let header = read_header(file).map_err(|error| file_error(&shown, &error))?;
    let header = header.map_err(|error| {
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{shown}: {error}"));
        body.with_hint(error.advice(FileOrigin::Disk))
    })?;
    let media_type = match header.as_gguf() {
        Some(gguf) => MediaType::new(ModelKind::from_header(gguf).media_type()),
        None => layer_type(name, Some(TensorFormat::Safetensors)),
    };
    let (name, content) = (Some(name.to_owned()), header.bytes().map(<[u8]>::to_vec));
    Ok(DescribedFile { media_type, name, digest: None, size, content, path: Some(path.to_owned()) })
}

/// Describes the files that an import of the folder would store.
fn describe_folder(path: &Path) -> Result<Vec<DescribedFile>, ErrorBody> {
    let refused = |error: FolderError| {
        let message = format!("{}: {error}", path.display());
        ErrorBody::new(ErrorCode::InvalidInput, message).with_hint(error.advice())
    };
    refuse_other_folder(path)?;
    let folder = Folder::list(path, Links::Inside)?;
    let selection = Selection::default();
    let not_one = |found: &str, example: &str| {
        let message = format!("{}: expected one model, found {found}", path.display());
        Err(usage(message).with_hint(format!("name one of them, such as {}", path.join(example).display())))
    };
    if let Some(inner) = ListedFolder::model_folders(folder.files(), &selection).first() {
        return not_one("folders of models", inner);
    }
    if let Some([first, others @ ..]) = ListedFolder::gguf_files(folder.files(), &selection).as_deref() {
        let shards = shards(&path.join(&first.path));
        let is_shard = |file: &FolderFile| shards.contains(&path.join(&file.path));
        return match others.iter().all(is_shard) {
            true => describe_shards(&path.join(&first.path)),
            false => not_one("several GGUF models", &first.path),
        };
    }
    let listed = ListedFolder::new(folder.files(), &selection).map_err(refused)?;
    let texts = listed.texts();
    let texts = texts.map(|text| Ok((text.to_owned(), folder.read(text, ListedFolder::MAX_TEXT_BYTES)?)));
    let texts: BTreeMap<String, Vec<u8>> = texts.collect::<Result<_, ErrorBody>>()?;
    let plan = listed.plan(&texts).map_err(refused)?;
    plan.files().iter().map(|file| describe_member(&folder, file)).collect()
}

/// Refuses a folder that cannot be a model without listing what is below it: it may be a home directory.
fn refuse_other_folder(path: &Path) -> Result<(), ErrorBody> {
    let shown = path.display().to_string();
    let entries = path.read_dir().map_err(|error| file_error(&shown, &error))?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    if names.any(|name| ListedFolder::is_sign_of_model(&name)) {
        return Ok(());
    }
    let message = format!("{shown}: expected a file, or the folder of a model, found another folder");
    Err(usage(message).with_hint("name a GGUF or safetensors file, or a folder with safetensors files"))
}

fn describe_member(
    folder: &Folder,
    FolderFile { path, size }: &FolderFile,
) -> Result<DescribedFile, ErrorBody> {
    let place = folder.path().join(path);
    if FileFormat::split_name(path).is_some() {
        return described(&folder.open(path)?, *size, path, &place);
    }
    let is_read =
        (QUANTIZATION_FILES.contains(&path.as_str()) || path == MODEL_INDEX) && *size <= MAX_JSON_BYTES;
    let content = if is_read { Some(folder.read(path, MAX_JSON_BYTES)?) } else { None };
    let (media_type, name) = (layer_type(path, None), Some(path.clone()));
    Ok(DescribedFile { media_type, name, digest: None, size: *size, content, path: Some(place) })
}

fn read_header(mut file: &File) -> io::Result<Result<Box<dyn ModelHeader>, FormatError>> {
    let (mut reader, mut part) = (HeaderReader::new(), vec![0; 64 << 10]);
    loop {
        let length = file.read(&mut part)?;
        let progress = reader.push(part.get(..length).unwrap_or_default());
        match progress {
            Ok(Progress::NeedMore) if length > 0 => {}
            Ok(_) => return Ok(reader.finish()),
            Err(error) => return Ok(Err(error)),
        }
    }
}
