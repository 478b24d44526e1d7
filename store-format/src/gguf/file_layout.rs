//! Where each tensor of a GGUF file lies.

use super::{GgufError, Header};
use crate::expert::{expert_groups, stacked_experts};
use crate::file_layout::{FileLayout, TensorRange};
use crate::tensor::TensorInfo;

impl Header {
    /// The layout of a file of `file_size` bytes that starts with this header.
    ///
    /// # Errors
    /// [`GgufError`] when a tensor is misaligned, lies outside the file, or overlaps another.
    pub fn file_layout(&self, file_size: u64) -> Result<FileLayout, GgufError> {
        let header_size = self.bytes().len() as u64;
        if file_size < header_size {
            return Err(GgufError::FileSize { header_size, file_size });
        }
        // Without padding after the header, the data section may start after the end of the file.
        let data_size = file_size.saturating_sub(self.data_offset());
        let mut starts: Vec<u64> = self.tensors().map(|info| info.offset()).collect();
        starts.sort_unstable();
        let tensors = self.tensors().map(|info| {
            // A tensor of an unknown type extends to the next one.
            let next = starts.get(starts.partition_point(|start| *start <= info.offset()));
            tensor_range(&info, self.alignment(), next.copied().unwrap_or(data_size))
        });
        let tensors = tensors.collect::<Result<_, _>>()?;
        Ok(FileLayout::new(file_size, self.data_offset(), tensors, expert_groups(self.tensors()))?)
    }
}

/// The range of a tensor; the next tensor or the end of the file is at offset `next`.
fn tensor_range(info: &TensorInfo<'_>, alignment: u64, next: u64) -> Result<TensorRange, GgufError> {
    let (name, offset, known_size) = (|| info.name().to_owned(), info.offset(), info.size_bytes());
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Misaligned { name: name(), offset, alignment });
    }
    if known_size.is_none() && next == offset {
        return Err(GgufError::NoBytes { name: name(), ggml_type: info.ggml_type(), offset });
    }
    Ok(TensorRange {
        name: name(),
        type_name: info.ggml_type().name(),
        shape: info.shape().dimensions().to_vec(),
        offset,
        size: known_size.unwrap_or(next.saturating_sub(offset)),
        // The size of an unknown type includes padding, so the size of one expert is unknown.
        experts: known_size.and_then(|size| stacked_experts(info.name(), &info.shape(), size)),
    })
}
