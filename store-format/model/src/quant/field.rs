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

/// Writes the enum, and what the table says of each type.
macro_rules! field_types {
    ($($(#[$doc:meta])? $variant:ident $name:literal $bytes:literal;)*) => {
        /// The type of a field's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum FieldType {
            $($(#[$doc])? $variant),*
        }

        impl FieldType {
            /// The size of an element in bytes.
            pub const fn bytes(self) -> u64 {
                match self {
                    $(Self::$variant => $bytes),*
                }
            }

            /// The name in `docs/FORMATS.md`, such as `u8`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }
        }
    };
}

// Unsigned numbers may be packed bits.
field_types! {
    U8 "u8" 1;
    I8 "i8" 1;
    U16 "u16" 2;
    I16 "i16" 2;
    U32 "u32" 4;
    I32 "i32" 4;
    I64 "i64" 8;
    F16 "f16" 2;
    /// The upper half of an `F32`.
    Bf16 "bf16" 2;
    F32 "f32" 4;
    F64 "f64" 8;
    /// A power of two: 8 bits of exponent with bias 127. Source: OCP Microscaling Formats 1.0.
    E8m0 "e8m0" 1;
    /// Four bits of exponent with bias 7 and three of mantissa; the sign bit is 0.
    Ue4m3 "ue4m3" 1;
}

impl fmt::Display for FieldType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
