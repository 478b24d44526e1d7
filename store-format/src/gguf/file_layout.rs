//! Where each tensor of a GGUF file lies.
//!
//! Forks of llama.cpp use some type ids for types of their own, whose sizes are not in any table. In a packed
//! file, where each tensor starts at the first aligned offset after the one before it, the offsets give the
//! true sizes.

use std::borrow::Cow;

use super::{GgmlType, GgufError, Header};
use crate::expert::{expert_groups, stacked_experts};
use crate::file_layout::{FileLayout, TensorRange, TensorRanges};
use crate::tensor::{TensorFormat, TensorInfo};

impl Header {
    /// The layout of a file of `file_size` bytes that starts with this header.
    ///
    /// Tensors of an unknown type extend to the next one. So do those with a type ID that forks of llama.cpp use for
    /// their own types (41 and 42), if the offsets of a packed file contradict the size of llama.cpp's type; their
    /// type is then called `type-41`.
    pub fn file_layout(&self, file_size: u64) -> Result<FileLayout, GgufError> {
        let header_size = self.bytes().len() as u64;
        if file_size < header_size {
            return Err(GgufError::FileSize { header_size, file_size });
        }
        // Without padding after the header, the data section may start after the end of the file.
        let data_size = file_size.saturating_sub(self.data_offset());
        let offsets = Offsets::new(self, data_size);
        let forks = offsets.fork_types(self);
        let is_fork = |info: &TensorInfo<'_>| forks.contains(&info.ggml_type());
        let tensors = self.tensors().map(|info| offsets.tensor_range(&info, is_fork(&info)));
        let tensors = tensors.collect::<Result<TensorRanges, _>>()?;
        let mut groups = expert_groups(self.tensors());
        if !forks.is_empty() {
            let of_fork: Vec<bool> = self.tensors().map(|info| is_fork(&info)).collect();
            groups.retain(|group| group.members().iter().all(|member| of_fork.get(*member) == Some(&false)));
        }
        let format = TensorFormat::Gguf;
        Ok(FileLayout::new(format, file_size, self.data_offset(), tensors, groups)?)
    }
}

/// Where tensors start, relative to the data section.
struct Offsets {
    /// Sorted.
    starts: Vec<u64>,
    alignment: u64,
    data_size: u64,
}

impl Offsets {
    fn new(header: &Header, data_size: u64) -> Self {
        let mut starts: Vec<u64> = header.tensors().map(|info| info.offset()).collect();
        starts.sort_unstable();
        Self { starts, alignment: header.alignment().into(), data_size }
    }

    /// The start of the next tensor; `None` for the last.
    fn next(&self, offset: u64) -> Option<u64> {
        self.starts.get(self.starts.partition_point(|start| *start <= offset)).copied()
    }

    /// The ids whose tensors in this file are of a fork's type.
    fn fork_types(&self, header: &Header) -> Vec<GgmlType> {
        let candidates = header.tensors().map(|info| info.ggml_type()).filter(|id| id.is_used_by_forks());
        let mut candidates: Vec<GgmlType> = candidates.collect();
        candidates.sort_unstable();
        candidates.dedup();
        if !candidates.is_empty() {
            let is_packed = self.is_packed(header);
            candidates.retain(|ggml_type| self.is_fork_type(header, *ggml_type, is_packed));
        }
        candidates
    }

    /// Whether all tensors of undisputed types end where the next one starts.
    fn is_packed(&self, header: &Header) -> bool {
        let mut undisputed = header.tensors().filter(|info| !info.ggml_type().is_used_by_forks());
        self.starts.first() == Some(&0) && undisputed.all(|info| self.agrees(&info).unwrap_or(true))
    }

    fn is_fork_type(&self, header: &Header, ggml_type: GgmlType, is_packed: bool) -> bool {
        let tensors = || header.tensors().filter(|info| info.ggml_type() == ggml_type);
        if tensors().any(|info| info.size_bytes().is_none()) {
            return true;
        }
        if !is_packed {
            return false;
        }
        let mut verdicts = tensors().filter_map(|info| self.agrees(&info)).peekable();
        match verdicts.peek() {
            Some(_) => verdicts.any(|agrees| !agrees),
            // Only the last tensor of the file is of this type. Others would show that the file is cut.
            None => tensors().any(|info| !self.agrees_with_end(&info)),
        }
    }

    /// Whether a tensor's size by its type agrees with the start of the next one. `None` for the last one,
    /// for one without elements, and for an unknown type.
    fn agrees(&self, info: &TensorInfo<'_>) -> Option<bool> {
        let size = info.size_bytes().filter(|size| *size > 0)?;
        let next = self.next(info.offset())?;
        let padded = size.checked_next_multiple_of(self.alignment);
        Some(padded.and_then(|padded| info.offset().checked_add(padded)) == Some(next))
    }

    /// Whether the last tensor of a file ends at its end, with or without padding.
    fn agrees_with_end(&self, info: &TensorInfo<'_>) -> bool {
        let (size, left) = (info.size_bytes().unwrap_or(0), self.data_size.saturating_sub(info.offset()));
        size == 0 || (size..=size.saturating_add(self.alignment - 1)).contains(&left)
    }

    fn tensor_range<'t>(&self, info: &TensorInfo<'t>, is_fork: bool) -> Result<TensorRange<'t>, GgufError> {
        let (name, offset) = (|| info.name().to_owned(), info.offset());
        let known_size = info.size_bytes().filter(|size| !is_fork || *size == 0);
        let next = self.next(offset).unwrap_or(self.data_size);
        if !offset.is_multiple_of(self.alignment) {
            return Err(GgufError::Misaligned { name: name(), offset, alignment: self.alignment });
        }
        if known_size.is_none() && next == offset {
            return Err(GgufError::NoBytes { name: name(), ggml_type: info.ggml_type(), offset });
        }
        Ok(TensorRange {
            name: info.name(),
            type_name: match is_fork {
                true => Cow::Owned(info.ggml_type().fork_name()),
                false => info.ggml_type().name(),
            },
            shape: info.shape().dimensions(),
            offset,
            size: known_size.unwrap_or(next.saturating_sub(offset)),
            // The size of an unknown type includes padding, so the size of one expert is unknown.
            experts: known_size.and_then(|size| stacked_experts(info.name(), info.shape(), size)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgufWriter;

    const F32: GgmlType = GgmlType::F32;
    const Q1_0: GgmlType = GgmlType::Q1_0;
    const Q2_0: GgmlType = GgmlType::Q2_0;

    /// Name, type, shape and offset of each tensor, and the size of the data section.
    fn ranges(
        tensors: &[(&str, GgmlType, &[u64], u64)],
        data_size: u64,
    ) -> Result<Vec<(String, u64)>, GgufError> {
        let mut writer = GgufWriter::new();
        for (name, ggml_type, shape, offset) in tensors {
            writer.tensor_at(name, *ggml_type, shape, *offset).unwrap();
        }
        let header = Header::parse(&writer.header().unwrap()).unwrap();
        let layout = header.file_layout(header.data_offset() + data_size)?;
        Ok(layout.tensors().iter().map(|tensor| (tensor.type_name.to_string(), tensor.size)).collect())
    }

    fn row(type_name: &str, size: u64) -> (String, u64) {
        (type_name.to_owned(), size)
    }

    #[test]
    fn tensors_of_llama_cpps_own_type_keep_their_size() {
        // 256 elements of Q1_0 are 36 bytes, which are padded to 64.
        let tensors: [(_, _, &[u64], _); 3] =
            [("a", Q1_0, &[256], 0), ("b", F32, &[8], 64), ("c", Q1_0, &[256], 96)];
        let expected = [row("Q1_0", 36), row("F32", 32), row("Q1_0", 36)];
        for data_size in [132, 160, 1000] {
            assert_eq!(ranges(&tensors, data_size).unwrap(), expected, "{data_size}");
        }
        assert!(ranges(&tensors, 131).is_err(), "a cut file is refused");
    }

    #[test]
    fn offsets_that_contradict_the_table_indicate_the_type_of_a_fork() {
        let wide: [(_, _, &[u64], _); 3] =
            [("a", Q1_0, &[256], 0), ("b", F32, &[8], 96), ("c", Q1_0, &[256], 128)];
        assert_eq!(ranges(&wide, 224).unwrap(), [row("type-41", 96), row("F32", 32), row("type-41", 96)]);
        let narrow: [(_, _, &[u64], _); 2] = [("a", Q2_0, &[256], 0), ("b", Q2_0, &[256], 32)];
        assert_eq!(ranges(&narrow, 64).unwrap(), [row("type-42", 32), row("type-42", 32)]);
    }

    #[test]
    fn only_tensor_of_a_disputed_type_is_compared_with_the_end_of_the_file() {
        let last: [(_, _, &[u64], _); 2] = [("a", F32, &[8], 0), ("b", Q1_0, &[256], 32)];
        assert_eq!(ranges(&last, 68).unwrap()[1], row("Q1_0", 36));
        assert_eq!(ranges(&last, 96).unwrap()[1], row("Q1_0", 36));
        assert_eq!(ranges(&last, 64).unwrap()[1], row("type-41", 32));
        assert_eq!(ranges(&last, 128).unwrap()[1], row("type-41", 96));
    }

    #[test]
    fn rows_of_incomplete_blocks_indicate_the_type_of_a_fork() {
        // 96 elements are less than a block of 128.
        let bytes = |ggml_type: u32, offset: u64| {
            let mut writer = GgufWriter::new();
            writer.tensor_at("a", GgmlType::I8, &[96], offset).unwrap();
            let mut header = writer.header().unwrap();
            let place = header.windows(4).rposition(|word| word == 24_u32.to_le_bytes()).unwrap();
            header[place..place + 4].copy_from_slice(&ggml_type.to_le_bytes());
            header
        };
        let header = Header::parse(&bytes(41, 0)).unwrap();
        let layout = header.file_layout(header.data_offset() + 24).unwrap();
        assert_eq!(
            (&*layout.tensors().get(0).unwrap().type_name, layout.tensors().get(0).unwrap().size),
            ("type-41", 24)
        );
        assert!(Header::parse(&bytes(12, 0)).is_err(), "no fork uses Q4_K's id");
    }

    #[test]
    fn gaps_in_a_file_do_not_indicate_a_fork() {
        let gaps: [(_, _, &[u64], _); 3] =
            [("a", F32, &[8], 0), ("b", F32, &[8], 64), ("c", Q1_0, &[256], 128)];
        assert_eq!(ranges(&gaps, 1000).unwrap()[2], row("Q1_0", 36));
    }

    #[test]
    fn separate_experts_of_the_type_of_a_fork_are_not_a_group() {
        let mut writer = GgufWriter::new();
        // 4096 elements of Q1_0 are 576 bytes, which would be a group's stride.
        for expert in 0..3 {
            let name = format!("blk.0.ffn_up.{expert}.weight");
            writer.tensor_at(&name, Q1_0, &[4096], expert * 640).unwrap();
        }
        let header = Header::parse(&writer.header().unwrap()).unwrap();
        let layout = header.file_layout(header.data_offset() + 3 * 640).unwrap();
        assert!(layout.groups().is_empty(), "{layout:?}");
        assert!(layout.tensors().iter().all(|tensor| tensor.size == 640), "{layout:?}");
    }
}
