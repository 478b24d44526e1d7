//! The element types of safetensors.

use std::fmt;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(non_camel_case_types, reason = "the names are the format's")]
pub enum Dtype {
    /// Eight bits, 0 or 1.
    Bool,
    /// Four bits: sign, two of exponent, one of mantissa.
    F4,
    /// Six bits, three of mantissa.
    F6_E2M3,
    /// Six bits, two of mantissa.
    F6_E3M2,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// 8 bits, two of mantissa.
    F8_E5M2,
    /// 8 bits, three of mantissa.
    F8_E4M3,
    /// 8 bits of exponent only, for scales.
    F8_E8M0,
    /// 8 bits, three of mantissa; no infinity, no negative zero.
    F8_E4M3FNUZ,
    /// 8 bits, two of mantissa; no infinity, no negative zero.
    F8_E5M2FNUZ,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 16 bits.
    U16,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an `F32`.
    BF16,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits; also packed quantised elements.
    U32,
    /// IEEE 754, 32 bits.
    F32,
    /// Two `F32`.
    C64,
    /// IEEE 754, 64 bits.
    F64,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
}

impl Dtype {
    /// The type with this name in a header; `None` if unknown.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|(known, ..)| *known == name).map(|(_, dtype, _)| *dtype)
    }

    /// The name in a header, such as `BF16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// The bits of an element.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.row().2
    }

    /// Whether the elements are real numbers with an exponent. `blobd_model::convert` supports all of
    /// these types but those of less than a byte.
    #[must_use]
    pub const fn is_float(self) -> bool {
        match self {
            Self::F4 | Self::F6_E2M3 | Self::F6_E3M2 => true,
            Self::F8_E5M2 | Self::F8_E4M3 | Self::F8_E8M0 | Self::F8_E4M3FNUZ | Self::F8_E5M2FNUZ => true,
            Self::F16 | Self::BF16 | Self::F32 | Self::F64 => true,
            Self::Bool | Self::C64 => false,
            Self::U8 | Self::I8 | Self::I16 | Self::U16 | Self::I32 | Self::U32 | Self::I64 | Self::U64 => {
                false
            }
        }
    }

    fn row(self) -> Row {
        let row = TABLE.iter().find(|(_, dtype, _)| *dtype == self);
        // Every variant has a row: `every_type_has_its_row` counts them.
        row.copied().unwrap_or(("U8", Self::U8, 8))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Name, type, bits of an element.
type Row = (&'static str, Dtype, u64);

const TABLE: [Row; 22] = [
    ("BOOL", Dtype::Bool, 8),
    ("F4", Dtype::F4, 4),
    ("F6_E2M3", Dtype::F6_E2M3, 6),
    ("F6_E3M2", Dtype::F6_E3M2, 6),
    ("U8", Dtype::U8, 8),
    ("I8", Dtype::I8, 8),
    ("F8_E5M2", Dtype::F8_E5M2, 8),
    ("F8_E4M3", Dtype::F8_E4M3, 8),
    ("F8_E8M0", Dtype::F8_E8M0, 8),
    ("F8_E4M3FNUZ", Dtype::F8_E4M3FNUZ, 8),
    ("F8_E5M2FNUZ", Dtype::F8_E5M2FNUZ, 8),
    ("I16", Dtype::I16, 16),
    ("U16", Dtype::U16, 16),
    ("F16", Dtype::F16, 16),
    ("BF16", Dtype::BF16, 16),
    ("I32", Dtype::I32, 32),
    ("U32", Dtype::U32, 32),
    ("F32", Dtype::F32, 32),
    ("C64", Dtype::C64, 64),
    ("F64", Dtype::F64, 64),
    ("I64", Dtype::I64, 64),
    ("U64", Dtype::U64, 64),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_row() {
        assert_eq!(TABLE.len(), Dtype::U64 as usize + 1);
        for (place, (name, dtype, bits)) in TABLE.into_iter().enumerate() {
            assert_eq!(dtype as usize, place, "{name}");
            assert_eq!((Dtype::from_name(name), dtype.name(), dtype.bits()), (Some(dtype), name, bits));
        }
        assert_eq!(Dtype::from_name("f32"), None);
    }
}
