//! A model in local files: its tensors are read from the files, not from the store.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use blobd_cli_common::described_model::DescribedModel;
use blobd_cli_common::file_error;
use blobd_cli_common::progress::Bar;
use blobd_model::diff::{DiffTensor, TensorFile};
use blobd_store_format::digest::Hasher;
use blobd_store_format::file_format::ModelHeader;
use blobd_store_format::file_layout::{FileLayout, TensorRange};
use blobd_store_format::gguf::{ByteOrder, Header};
use blobd_store_format::recipe::TensorEntry;
use blobd_store_format::tensor::TensorFormat;

use crate::tensor_choice::file_of_described;
use crate::{ErrorBody, ErrorCode};

#[derive(Debug)]
pub(crate) struct LocalModel {
    files: Vec<LocalFile>,
}

#[derive(Debug)]
struct LocalFile {
    path: String,
    tensor_file: Arc<TensorFile>,
    file: File,
    header: Box<dyn ModelHeader>,
    layout: FileLayout,
}

/// A tensor in one of the files.
#[derive(Clone, Debug)]
pub(crate) struct LocalTensor<'m> {
    pub(crate) file: &'m TensorFile,
    pub(crate) format: TensorFormat,
    pub(crate) range: TensorRange<'m>,
}

const PART_BYTES: u64 = 1 << 20;

impl LocalModel {
    /// Opens the files with tensors of a described model.
    pub(crate) fn open(model: &DescribedModel) -> Result<Self, ErrorBody> {
        let mut files = Vec::new();
        for described in model.files.iter().filter(|file| file.media_type.holds_tensors()) {
            let Some(path) = &described.path else { continue };
            let name = path.display().to_string();
            let invalid = |error: &dyn std::fmt::Display| {
                ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {error}"))
            };
            let header = described
                .model_header()
                .ok_or_else(|| invalid(&"it has no header of GGUF or safetensors"))?;
            let layout = header.file_layout(described.size).map_err(|error| invalid(&error))?;
            let file = File::open(path).map_err(|error| file_error(&name, &error))?;
            files.push(LocalFile {
                path: name,
                tensor_file: Arc::new(file_of_described(described)),
                file,
                header,
                layout,
            });
        }
        Ok(Self { files })
    }

    /// The header of the first GGUF file.
    pub(crate) fn header(&self) -> Option<&Header> {
        self.files.iter().find_map(|file| file.header.as_gguf())
    }

    pub(crate) fn byte_order(&self) -> ByteOrder {
        self.header().map_or(ByteOrder::Little, Header::byte_order)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors().map(|(_, tensor)| tensor.name)
    }

    /// The tensors of this name, with their files.
    pub(crate) fn named(&self, name: &str) -> Vec<LocalTensor<'_>> {
        let named = self.tensors().filter(|(_, tensor)| tensor.name == name);
        named
            .map(|(file, range)| LocalTensor { file: &file.tensor_file, format: file.format(), range })
            .collect()
    }

    /// Reads the tensor of this name in this file.
    pub(crate) fn read(&self, in_file: &TensorFile, name: &str) -> Result<Option<Vec<u8>>, ErrorBody> {
        let is_wanted = |(file, tensor): &(&LocalFile, TensorRange<'_>)| {
            *file.tensor_file == *in_file && tensor.name == name
        };
        let Some((file, tensor)) = self.tensors().find(is_wanted) else { return Ok(None) };
        // The layout has proved that the file had these bytes, so no more than its length is allocated.
        let mut bytes = vec![0; usize::try_from(tensor.size).unwrap_or(usize::MAX)];
        file.read(&tensor, 0, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// The tensors with the digests of their contents, in the order of the files. Reads all of them.
    pub(crate) fn entries(&self, label: &str, is_quiet: bool) -> Result<Vec<DiffTensor>, ErrorBody> {
        let total = self.tensors().fold(0_u64, |sum, (_, tensor)| sum.saturating_add(tensor.size));
        let (bar, mut done) = (Bar::new(label, total, is_quiet), 0_u64);
        let mut part = vec![0; usize::try_from(PART_BYTES).unwrap_or(usize::MAX)];
        let mut entries = Vec::new();
        for (file, tensor) in self.tensors() {
            let (mut hasher, mut offset) = (Hasher::new(), 0);
            while offset < tensor.size {
                let length = PART_BYTES.min(tensor.size - offset);
                let part = part.get_mut(..usize::try_from(length).unwrap_or(usize::MAX)).unwrap_or_default();
                file.read(&tensor, offset, part)?;
                hasher.update(part);
                offset += length;
                done = done.saturating_add(length);
                bar.set(done, total);
            }
            entries.push(DiffTensor {
                format: file.format(),
                file: Arc::clone(&file.tensor_file),
                entry: TensorEntry { digest: hasher.finish(), ..entry(&tensor) },
            });
        }
        bar.clear();
        Ok(entries)
    }

    fn tensors(&self) -> impl Iterator<Item = (&LocalFile, TensorRange<'_>)> {
        self.files.iter().flat_map(|file| file.layout.tensors().iter().map(move |tensor| (file, tensor)))
    }
}

impl LocalFile {
    fn format(&self) -> TensorFormat {
        self.header.format().tensor_format()
    }

    fn read(&self, tensor: &TensorRange<'_>, offset: u64, bytes: &mut [u8]) -> Result<(), ErrorBody> {
        let start = self.header.data_offset().saturating_add(tensor.offset).saturating_add(offset);
        self.file.read_exact_at(bytes, start).map_err(|error| file_error(&self.path, &error))
    }
}

/// A tensor whose content is not known: the digest is that of empty content.
pub(crate) fn entry(tensor: &TensorRange<'_>) -> TensorEntry<'static> {
    let experts = tensor
        .experts
        .map(|experts| blobd_store_format::tensor::Experts { count: experts.count, stride: experts.stride });
    TensorEntry {
        name: tensor.name.to_owned().into(),
        type_name: tensor.type_name.to_string().into(),
        shape: tensor.shape.to_vec().into(),
        digest: Hasher::new().finish(),
        offset: 0,
        size: tensor.size,
        experts,
    }
}
