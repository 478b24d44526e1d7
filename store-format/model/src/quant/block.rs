//! The layout of a block.

use blobd_store_format::gguf::GgmlType;

use super::field::Field;
use super::table::{ROWS, Row};

/// The layout of one block of a type, and the formula of its numbers.
///
/// All types that have a block have a layout. A tensor is a sequence of blocks without padding.
#[derive(Clone, Copy, Debug)]
pub struct BlockLayout {
    elements: u64,
    bytes: u64,
    row: &'static Row,
}

impl BlockLayout {
    /// The layout of this type; `None` for a removed or unknown type.
    pub fn for_type(ggml_type: GgmlType) -> Option<Self> {
        let (elements, bytes) = ggml_type.block()?;
        let row = ROWS.iter().find(|row| row.ggml_type == ggml_type)?;
        Some(Self { elements, bytes, row })
    }

    /// The layouts of all types, by id.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().filter_map(|row| Self::for_type(row.ggml_type))
    }

    pub const fn ggml_type(&self) -> GgmlType {
        self.row.ggml_type
    }

    pub const fn elements(&self) -> u64 {
        self.elements
    }

    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bits that an element takes, the block's scales included.
    #[expect(clippy::cast_precision_loss, reason = "both numbers have at most four digits")]
    pub const fn bits_per_weight(&self) -> f64 {
        (self.bytes * 8) as f64 / self.elements as f64
    }

    /// The fields of a block, in order. They cover it without a gap.
    pub fn fields(&self) -> impl Iterator<Item = Field> + use<> {
        self.row.fields.iter().scan(0, |offset, &(name, field_type, count)| {
            let field = Field { name, offset: *offset, field_type, count };
            *offset += field.bytes();
            Some(field)
        })
    }

    /// The formula of an element, in the terms of the [fields](Self::fields): element `i` of the block has the
    /// quantised number `q`, taken from `qs` and other bits.
    pub const fn formula(&self) -> &'static str {
        self.row.formula
    }

    /// The source of the formula.
    pub const fn source(&self) -> &'static str {
        self.row.source
    }

    /// The file types (`general.file_type`) whose weights are mostly of this type. A file of such a type has
    /// tensors of other types too.
    pub const fn file_types(&self) -> &'static [u32] {
        self.row.file_types
    }
}
