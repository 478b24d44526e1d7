//! The types of metadata values.

use std::fmt;

/// Writes the enum and the table.
macro_rules! types {
    ($($variant:ident $name:literal $least_bytes:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ValueType {
            $($variant),*
        }

        impl ValueType {
            /// Each type at the index that is its id.
            const TABLE: &[(Self, &'static str, usize)] = &[$((Self::$variant, $name, $least_bytes)),*];
        }
    };
}

// In the order of their ids: the name in GGUF's specification, and the least size in bytes.
types! {
    U8 "uint8" 1;
    I8 "int8" 1;
    U16 "uint16" 2;
    I16 "int16" 2;
    U32 "uint32" 4;
    I32 "int32" 4;
    F32 "float32" 4;
    Bool "bool" 1;
    String "string" 8;
    Array "array" 12;
    U64 "uint64" 8;
    I64 "int64" 8;
    F64 "float64" 8;
}

impl ValueType {
    /// The type with this id in GGUF, if there is one.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::TABLE.get(usize::try_from(id).ok()?).map(|(value_type, ..)| *value_type)
    }

    /// The type with this name in GGUF's specification, such as `uint32`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::TABLE.iter().find(|(_, known, _)| *known == name).map(|(value_type, ..)| *value_type)
    }

    /// The id in GGUF.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The minimum size in bytes; the exact size of all but strings and arrays.
    pub(super) const fn least_bytes(self) -> usize {
        Self::TABLE[self as usize].2
    }
}

/// The name in GGUF's specification, such as `uint32`.
impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::TABLE[*self as usize].1)
    }
}
