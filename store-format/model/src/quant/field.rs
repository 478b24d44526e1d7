//! The fields of a block.

use std::fmt;

/// A field of a block: an array of numbers, or of bytes with packed bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in ggml's source. Interleaved fields appear several times.
    pub name: &'static str,
    /// Where it starts, in bytes from the start of the block.
    pub offset: u64,
    /// The type of its elements. Their size is the unit in which a file's byte order applies.
    pub field_type: FieldType,
    /// How many elements it has.
    pub count: u64,
}

impl Field {
    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.field_type.bytes() * self.count
    }
}

/// `f16 d` or `u8 qs[16]`.
impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field_type, self.name)?;
        if self.count == 1 { Ok(()) } else { write!(f, "[{}]", self.count) }
    }
}

/// The type of a field's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldType {
    /// Unsigned, 8 bits; also packed bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits; also packed bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits; also packed bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an `F32`.
    Bf16,
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 64 bits.
    F64,
    /// A power of two: 8 bits of exponent with bias 127. Source: OCP Microscaling Formats 1.0.
    E8m0,
    /// Four bits of exponent with bias 7 and three of mantissa; the sign bit is 0.
    Ue4m3,
}

impl FieldType {
    /// The size of an element in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::E8m0 | Self::Ue4m3 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The name in `docs/FORMATS.md`, such as `u8`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::E8m0 => "e8m0",
            Self::Ue4m3 => "ue4m3",
        }
    }
}

impl fmt::Display for FieldType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
