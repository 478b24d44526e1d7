//! Writes GGUF headers.

use super::cursor::ByteOrder;
use super::encoder::Encoder;
use super::error::{GgufError, printable};
use super::value::Value;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT};
use crate::ggml_type::GgmlType;
use crate::tensor::{Shape, TensorError, check_name, size_bytes};

/// Makes the header of a GGUF file from metadata and tensors. The caller writes the tensors' bytes
/// after it, each at its offset ([`GgufWriter::tensor_offsets`]).
///
/// The alignment is the value of `general.alignment`, if that is set, and 32 otherwise.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    order: ByteOrder,
    version: u32,
    metadata: Vec<(Vec<u8>, Value)>,
    tensors: Vec<Planned>,
}

impl GgufWriter {
    /// A writer of an empty version 3, little-endian header.
    pub fn new() -> Self {
        Self { order: ByteOrder::Little, version: 3, metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Sets the byte order of numbers in the header; the caller swaps the tensors' bytes.
    #[must_use]
    pub fn with_byte_order(mut self, order: ByteOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the version; 2 and 3 can be read back.
    #[must_use]
    pub fn with_version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Adds a metadata entry. The key may be any bytes.
    ///
    /// # Errors
    /// [`GgufError`] when the key is empty. Keys that appear twice are refused by
    /// [`GgufWriter::header`].
    pub fn metadata(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl Into<Value>,
    ) -> Result<&mut Self, GgufError> {
        let key = key.as_ref();
        if key.is_empty() {
            return Err(GgufError::EmptyKey { offset: 0 });
        }
        self.metadata.push((key.to_vec(), value.into()));
        Ok(self)
    }

    /// Adds a tensor after the previous one; dimensions are fastest first.
    ///
    /// # Errors
    /// [`GgufError::Unwritable`] when the name, the type or the shape is refused, or the type's
    /// size is unknown.
    pub fn tensor(&mut self, name: &str, ggml_type: GgmlType, shape: &[u64]) -> Result<&mut Self, GgufError> {
        self.add(name, ggml_type, shape, None)
    }

    /// Adds a tensor at an offset in bytes from the start of the data section. The next
    /// [`GgufWriter::tensor`] follows it. A tensor of an unknown type has size 0.
    pub fn tensor_at(
        &mut self,
        name: &str,
        ggml_type: GgmlType,
        shape: &[u64],
        offset: u64,
    ) -> Result<&mut Self, GgufError> {
        self.add(name, ggml_type, shape, Some(offset))
    }

    /// The offset of each tensor in bytes from the start of the data section, in the order added.
    pub fn tensor_offsets(&self) -> Result<Vec<u64>, GgufError> {
        let (alignment, mut next) = (self.alignment(), 0);
        let place = |tensor: &Planned| {
            let offset = tensor.offset.unwrap_or(next);
            next = tensor.padded_end(offset, alignment)?;
            Ok(offset)
        };
        self.tensors.iter().map(place).collect()
    }

    /// The size of the data section in bytes, if the last tensor added is the last in the file and is
    /// padded like the others.
    pub fn data_size(&self) -> Result<u64, GgufError> {
        let offsets = self.tensor_offsets()?;
        match self.tensors.last().zip(offsets.last()) {
            Some((tensor, offset)) => tensor.padded_end(*offset, self.alignment()),
            None => Ok(0),
        }
    }

    /// The header and the padding before the data section, validated by parsing it as a [`Header`](super::Header).
    pub fn header(&self) -> Result<Vec<u8>, GgufError> {
        let mut out = Encoder::new(self.order);
        out.preamble(self.version, self.tensors.len(), self.metadata.len());
        for (key, value) in &self.metadata {
            out.string(key);
            out.typed_value(value);
        }
        for (tensor, offset) in self.tensors.iter().zip(self.tensor_offsets()?) {
            out.tensor(&tensor.name, tensor.ggml_type, &tensor.shape, offset);
        }
        Ok(out.finish()?.into_padded())
    }

    fn add(
        &mut self,
        name: &str,
        ggml_type: GgmlType,
        shape: &[u64],
        offset: Option<u64>,
    ) -> Result<&mut Self, GgufError> {
        let unwritable = |problem| GgufError::Unwritable { name: printable(name.as_bytes()), problem };
        check_name(name.as_bytes()).map_err(unwritable)?;
        let size = Shape::new(shape).and_then(|shape| size_bytes(ggml_type, shape)).map_err(unwritable)?;
        if size.is_none() && offset.is_none() {
            return Err(unwritable(TensorError::UnknownType { ggml_type }));
        }
        let (name, shape, size) = (name.to_owned(), shape.to_vec(), size.unwrap_or(0));
        self.tensors.push(Planned { name, ggml_type, shape, size, offset });
        Ok(self)
    }

    fn alignment(&self) -> u64 {
        let set = self.metadata.iter().find_map(|(key, value)| match value {
            // A zero is refused when the header is read back.
            Value::U32(alignment) if key == ALIGNMENT_KEY.as_bytes() => Some((*alignment).max(1)),
            _ => None,
        });
        set.unwrap_or(DEFAULT_ALIGNMENT).into()
    }
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

/// A tensor to be written at `offset`, or after the previous one.
#[derive(Clone, Debug)]
struct Planned {
    name: String,
    ggml_type: GgmlType,
    shape: Vec<u64>,
    size: u64,
    offset: Option<u64>,
}

impl Planned {
    /// The offset of the next tensor if this one is at `offset`.
    fn padded_end(&self, offset: u64, alignment: u64) -> Result<u64, GgufError> {
        let end = offset.checked_add(self.size).and_then(|end| end.checked_next_multiple_of(alignment));
        end.ok_or_else(|| GgufError::Unwritable {
            name: printable(self.name.as_bytes()),
            problem: TensorError::Size,
        })
    }
}
