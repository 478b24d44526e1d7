//! The element types of safetensors.

use std::fmt;

/// Writes the enum, and what the table says of each type.
macro_rules! types {
    ($($(#[$doc:meta])? $variant:ident $name:literal $bits:literal $is_float:literal;)*) => {
        /// The element type of a tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types, reason = "the names are the format's")]
        pub enum Dtype {
            $($(#[$doc])? $variant),*
        }

        impl Dtype {
            const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in a header, such as `BF16`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }

            /// The size of an element in bits.
            pub const fn bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits),*
                }
            }

            /// Whether the elements are real numbers with an exponent. `blobd_model::convert` supports all of these
            /// types except those of less than a byte.
            pub const fn is_float(self) -> bool {
                match self {
                    $(Self::$variant => $is_float),*
                }
            }
        }
    };
}

// Type, name, bits of an element, whether it is a float.
types! {
    /// 0 or 1.
    Bool "BOOL" 8 false;
    /// A sign, two bits of exponent, one of mantissa.
    F4 "F4" 4 true;
    F6_E2M3 "F6_E2M3" 6 true;
    F6_E3M2 "F6_E3M2" 6 true;
    U8 "U8" 8 false;
    I8 "I8" 8 false;
    F8_E5M2 "F8_E5M2" 8 true;
    F8_E4M3 "F8_E4M3" 8 true;
    /// Only an exponent, for scales.
    F8_E8M0 "F8_E8M0" 8 true;
    /// No infinity, no negative zero.
    F8_E4M3FNUZ "F8_E4M3FNUZ" 8 true;
    /// No infinity, no negative zero.
    F8_E5M2FNUZ "F8_E5M2FNUZ" 8 true;
    I16 "I16" 16 false;
    U16 "U16" 16 false;
    F16 "F16" 16 true;
    /// The upper half of an `F32`.
    BF16 "BF16" 16 true;
    I32 "I32" 32 false;
    /// Also packed quantised elements.
    U32 "U32" 32 false;
    F32 "F32" 32 true;
    /// Two `F32`.
    C64 "C64" 64 false;
    F64 "F64" 64 true;
    I64 "I64" 64 false;
    U64 "U64" 64 false;
}

impl Dtype {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_floats_named_by_their_letter() {
        assert_eq!(Dtype::ALL.len(), 22);
        for dtype in Dtype::ALL.iter().copied() {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(dtype.is_float(), dtype.name().trim_start_matches('B').starts_with('F'), "{dtype}");
        }
        assert_eq!(Dtype::from_name("f32"), None);
    }
}
