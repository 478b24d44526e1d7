//! A tensor as declared by its file, and its size.
//!
//! The size of every [`TensorInfo`], its shape times its type, has been computed without overflow.
//! [`crate::file_layout`] checks that the bytes are in the file.

use serde::{Deserialize, Serialize};

use crate::ggml_type::GgmlType;

/// The format of a file with tensors: it gives the names of their types and the order of their dimensions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TensorFormat {
    /// GGUF: ggml's types, such as `Q4_K`; the fastest dimension first.
    #[default]
    Gguf,
    /// safetensors: its element types, such as `BF16`; the slowest dimension first.
    Safetensors,
}

impl TensorFormat {
    /// The name, as in recipes and registries.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
        }
    }

    /// Whether it is GGUF, which documents of the protocol need not state.
    pub fn is_gguf(&self) -> bool {
        *self == Self::Gguf
    }
}

/// The position of each expert in a stacked tensor: expert `i` has `stride` bytes at `i * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    pub count: u64,
    /// The size of one in bytes.
    pub stride: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    name: &'a str,
    ggml_type: GgmlType,
    shape: Shape<'a>,
    offset: u64,
}

impl<'a> TensorInfo<'a> {
    /// The longest name. llama.cpp allows 63 bytes, stable-diffusion.cpp 127.
    pub const MAX_NAME_BYTES: usize = 127;

    /// Checks a tensor's description; `offset` is in bytes from the start of the data section.
    pub fn new(
        name: &'a str,
        ggml_type: GgmlType,
        shape: Shape<'a>,
        offset: u64,
    ) -> Result<Self, TensorError> {
        check_name(name.as_bytes())?;
        size_bytes(ggml_type, shape)?;
        Ok(Self::checked(name, ggml_type, shape, offset))
    }

    /// A description whose parts have passed [`check_name`] and [`size_bytes`].
    pub(crate) const fn checked(name: &'a str, ggml_type: GgmlType, shape: Shape<'a>, offset: u64) -> Self {
        Self { name, ggml_type, shape, offset }
    }

    /// The name: any text without control characters. Do not use it as a path.
    pub const fn name(&self) -> &'a str {
        self.name
    }

    pub const fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    pub const fn shape(&self) -> Shape<'a> {
        self.shape
    }

    /// The tensor's offset in bytes from the start of the data section.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// The tensor's size in bytes, without padding; `None` if its type is unknown and it has elements.
    pub fn size_bytes(&self) -> Option<u64> {
        size_bytes(self.ggml_type, self.shape).ok().flatten()
    }
}

/// The dimensions of a tensor in GGUF order: the fastest first.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Shape<'a>(&'a [u64]);

impl<'a> Shape<'a> {
    /// The most dimensions of a tensor, in any format. ggml computes with four, but video models have
    /// tensors of five and numpy allows 64. The limit keeps the description of one tensor far below the
    /// size of a frame of the protocol.
    pub const MAX_DIMENSIONS: usize = 1024;

    /// Checks dimensions; a scalar has none.
    pub fn new(dimensions: &'a [u64]) -> Result<Self, TensorError> {
        if dimensions.len() > Self::MAX_DIMENSIONS {
            return Err(TensorError::Rank { found: dimensions.len() as u64 });
        }
        let shape = Self(dimensions);
        if let Some((index, &found)) = dimensions.iter().enumerate().find(|(_, d)| **d > MAX_ELEMENTS) {
            return Err(TensorError::Dimension { index, found: found.cast_signed() });
        }
        match shape.checked_count() {
            Some(_) => Ok(shape),
            None => Err(TensorError::Elements { dimensions: dimensions.to_vec() }),
        }
    }

    pub const fn dimensions(&self) -> &'a [u64] {
        self.0
    }

    /// The number of elements: 1 for a scalar, 0 if any dimension is 0.
    pub fn element_count(&self) -> u64 {
        // `new` has proved that the product fits.
        self.checked_count().unwrap_or(0)
    }

    /// The length of the fastest dimension.
    fn row_elements(&self) -> u64 {
        self.dimensions().first().copied().unwrap_or(1)
    }

    fn checked_count(&self) -> Option<u64> {
        // Zero is checked first: a wrapping product of 2^32 x 2^32 is also 0, and llama.cpp treated
        // such a tensor as empty.
        if self.dimensions().contains(&0) {
            return Some(0);
        }
        let count = self.dimensions().iter().try_fold(1_u64, |count, d| count.checked_mul(*d))?;
        (count <= MAX_ELEMENTS).then_some(count)
    }
}

impl std::fmt::Debug for Shape<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dimensions().fmt(f)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    #[error("name too long: expected at most {} bytes, found {found}", TensorInfo::MAX_NAME_BYTES)]
    NameLength { found: u64 },
    #[error("name is not printable text")]
    NameText,
    #[error("too many dimensions: expected at most {}, found {found}", Shape::MAX_DIMENSIONS)]
    Rank { found: u64 },
    #[error("dimension {index} is {found}")]
    Dimension { index: usize, found: i64 },
    #[error("shape {} has more than 2^63 - 1 elements", shown(dimensions))]
    Elements { dimensions: Vec<u64> },
    #[error("type {} was removed from llama.cpp; quantise the original model again", ggml_type.id())]
    RemovedType { ggml_type: GgmlType },
    #[error("rows of {row} elements, {ggml_type} has blocks of {block}")]
    Row { ggml_type: GgmlType, row: u64, block: u64 },
    #[error("ends beyond 2^64 bytes")]
    Size,
    #[error("{ggml_type} has no known size")]
    UnknownType { ggml_type: GgmlType },
}

/// The first dimensions of a shape that may be very long.
pub(crate) fn shown(dimensions: &[u64]) -> String {
    const SHOWN: usize = 8;
    match dimensions.get(..SHOWN) {
        Some(first) if dimensions.len() > SHOWN => {
            format!("{first:?} and {} more dimensions", dimensions.len() - SHOWN)
        }
        _ => format!("{dimensions:?}"),
    }
}

/// Checks that a name is short, valid UTF-8 and has no control characters.
pub(crate) fn check_name(name: &[u8]) -> Result<&str, TensorError> {
    if name.len() > TensorInfo::MAX_NAME_BYTES {
        return Err(TensorError::NameLength { found: name.len() as u64 });
    }
    let text = std::str::from_utf8(name).map_err(|_not_utf8| TensorError::NameText)?;
    if text.chars().any(char::is_control) { Err(TensorError::NameText) } else { Ok(text) }
}

/// The size of a tensor in bytes: its shape times its type; `None` if that type is unknown, or if it must be
/// that of a fork, since rows are not whole blocks of llama.cpp's type with this id.
pub(crate) fn size_bytes(ggml_type: GgmlType, shape: Shape<'_>) -> Result<Option<u64>, TensorError> {
    if ggml_type.is_removed() {
        return Err(TensorError::RemovedType { ggml_type });
    }
    let count = shape.element_count();
    let Some((block, block_bytes)) = ggml_type.block() else {
        return Ok((count == 0).then_some(0));
    };
    let row = shape.row_elements();
    if !row.is_multiple_of(block) && ggml_type.is_used_by_forks() {
        return Ok(None);
    }
    if !row.is_multiple_of(block) {
        return Err(TensorError::Row { ggml_type, row, block });
    }
    // Rows are whole blocks, so the division has no remainder.
    (count / block).checked_mul(block_bytes).map(Some).ok_or(TensorError::Size)
}

/// ggml counts elements in an `int64_t`.
const MAX_ELEMENTS: u64 = i64::MAX.cast_unsigned();

#[cfg(test)]
mod tests {
    use super::*;

    fn size(ggml_type: GgmlType, dimensions: &[u64]) -> Result<Option<u64>, TensorError> {
        size_bytes(ggml_type, Shape::new(dimensions)?)
    }

    #[test]
    fn sizes_of_ordinary_tensors() {
        assert_eq!(size(GgmlType::F32, &[8, 2]), Ok(Some(64)));
        assert_eq!(size(GgmlType::F32, &[]), Ok(Some(4)));
        assert_eq!(size(GgmlType::Q4_K, &[4096, 14336, 8]), Ok(Some(4096 / 256 * 144 * 14336 * 8)));
        assert_eq!(size(GgmlType::from_id(77), &[5, 7]), Ok(None));
    }

    #[test]
    fn any_zero_dimension_means_no_bytes() {
        assert_eq!(size(GgmlType::F16, &[7, 0]), Ok(Some(0)));
        assert_eq!(size(GgmlType::Q4_0, &[0, 1 << 62, 1 << 62]), Ok(Some(0)));
        assert_eq!(size(GgmlType::from_id(77), &[0]), Ok(Some(0)));
    }

    #[test]
    fn product_that_wraps_to_zero_is_refused() {
        let dimensions = vec![1 << 32, 1 << 32];
        let error = size(GgmlType::I8, &dimensions).unwrap_err();
        assert_eq!(error, TensorError::Elements { dimensions });
    }

    #[test]
    fn element_count_up_to_an_int64_is_accepted() {
        assert_eq!(size(GgmlType::I8, &[MAX_ELEMENTS]), Ok(Some(MAX_ELEMENTS)));
        assert!(matches!(size(GgmlType::I8, &[1 << 31, 1 << 32]), Err(TensorError::Elements { .. })));
        assert_eq!(size(GgmlType::I64, &[MAX_ELEMENTS]), Err(TensorError::Size));
    }

    #[test]
    fn negative_dimension_is_refused_even_beside_a_zero() {
        let error = TensorError::Dimension { index: 1, found: -1 };
        assert_eq!(Shape::new(&[0, u64::MAX]), Err(error));
    }

    #[test]
    fn any_number_of_dimensions_up_to_the_limit_is_accepted() {
        for rank in [0, 1, 4, 5, 6, 64, 65, Shape::MAX_DIMENSIONS] {
            let mut dimensions = vec![1; rank];
            dimensions.iter_mut().take(2).for_each(|dimension| *dimension = 32);
            let count = 32_u64.pow(u32::try_from(rank.min(2)).unwrap());
            assert_eq!(size(GgmlType::F32, &dimensions), Ok(Some(4 * count)), "{rank}");
        }
        let found = Shape::MAX_DIMENSIONS + 1;
        assert_eq!(Shape::new(&vec![1; found]), Err(TensorError::Rank { found: found as u64 }));
    }

    #[test]
    fn shape_in_a_message_is_short() {
        let error = TensorError::Elements { dimensions: vec![1 << 40; 1000] };
        assert!(error.to_string().len() < 300, "{error}");
        assert!(error.to_string().contains("and 992 more dimensions"), "{error}");
    }

    #[test]
    fn row_of_an_incomplete_block_is_refused() {
        let error = TensorError::Row { ggml_type: GgmlType::Q4_K, row: 384, block: 256 };
        assert_eq!(size(GgmlType::Q4_K, &[384, 256]), Err(error));
        assert!(matches!(size(GgmlType::Q4_0, &[]), Err(TensorError::Row { row: 1, .. })));
    }

    #[test]
    fn row_of_an_incomplete_block_belongs_to_the_type_of_a_fork_if_forks_use_the_id() {
        assert_eq!(size(GgmlType::Q1_0, &[256, 2]), Ok(Some(72)));
        assert_eq!(size(GgmlType::Q1_0, &[96]), Ok(None));
        assert_eq!(size(GgmlType::Q2_0, &[96]), Ok(None));
    }

    #[test]
    fn removed_types_are_refused() {
        for id in [5, 31, 32, 33, 36, 37, 38] {
            assert!(matches!(size(GgmlType::from_id(id), &[256]), Err(TensorError::RemovedType { .. })));
        }
    }

    #[test]
    fn names_that_could_harm_a_terminal_are_refused() {
        let info = |name: &str| TensorInfo::new(name, GgmlType::F32, Shape::new(&[1]).unwrap(), 0).map(drop);
        for name in ["", "blk.0.attn_q.weight", "../../etc/passwd", "a/b", "größe"] {
            assert!(info(name).is_ok(), "{name:?}");
        }
        for name in ["a\0b", "\u{1b}[2J", "a\nb", "\u{7f}", "\u{9b}31m"] {
            assert_eq!(info(name).unwrap_err(), TensorError::NameText, "{name:?}");
        }
        assert!(info(&"x".repeat(127)).is_ok());
        assert_eq!(info(&"x".repeat(128)).unwrap_err(), TensorError::NameLength { found: 128 });
        assert_eq!(check_name(b"\xff\xfe"), Err(TensorError::NameText));
    }
}
