//! The number formats of tensors.
//!
//! Source: `enum ggml_type` and the type traits of llama.cpp's `ggml.h` and `ggml.c`.

use std::borrow::Cow;
use std::fmt;

/// The ggml type id of a tensor.
///
/// Unknown ids are allowed: a tensor of an unknown type is stored like any other, but its size is
/// derived from the next tensor's offset.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GgmlType(u32);

impl GgmlType {
    pub const fn from_id(id: u32) -> Self {
        Self(id)
    }

    /// The type with this name, as [`GgmlType::name`] gives it. `None` for `type-41`: it is the type of a
    /// fork, not llama.cpp's type 41.
    pub fn from_name(name: &str) -> Option<Self> {
        let row = TYPES.iter().find(|row| row.name == name).map(|row| Self(row.id));
        let unknown = || name.strip_prefix(UNKNOWN_PREFIX)?.parse().ok().map(Self);
        row.or_else(|| unknown().filter(|ggml_type| ggml_type.row().is_none()))
    }

    pub const fn id(self) -> u32 {
        self.0
    }

    /// The name in llama.cpp, such as `Q4_K`; `type-77` for an id without one.
    pub fn name(self) -> Cow<'static, str> {
        match self.row() {
            Some(row) => Cow::Borrowed(row.name),
            None => Cow::Owned(self.fork_name()),
        }
    }

    /// Elements and bytes of a block; `None` for a removed or unknown type. A tensor's row is a whole
    /// number of blocks.
    pub fn block(self) -> Option<(u64, u64)> {
        self.row().map(|row| (row.elements, row.bytes))
    }

    /// Whether llama.cpp has removed the type, so that nothing can read it.
    pub const fn is_removed(self) -> bool {
        // Q4_3; Q4_0_4_4, Q4_0_4_8, Q4_0_8_8; IQ4_NL_4_4, IQ4_NL_4_8, IQ4_NL_8_8.
        matches!(self.0, 5 | 31..=33 | 36..=38)
    }

    /// The name of a fork's type with this id: `type-41`, whatever llama.cpp calls its own type.
    pub(crate) fn fork_name(self) -> String {
        format!("{UNKNOWN_PREFIX}{}", self.0)
    }

    /// Whether forks of llama.cpp use the id for types of their own. They also use ids that llama.cpp does not:
    /// 43, 44, 142 and 143.
    pub(crate) const fn is_used_by_forks(self) -> bool {
        matches!(self.0, 41 | 42)
    }

    fn row(self) -> Option<&'static Row> {
        TYPES.iter().find(|row| row.id == self.0)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const UNKNOWN_PREFIX: &str = "type-";

struct Row {
    id: u32,
    name: &'static str,
    elements: u64,
    bytes: u64,
}

/// Writes the table of types and a constant for each.
macro_rules! types {
    ($($id:literal $name:ident $elements:literal $bytes:literal;)*) => {
        #[allow(missing_docs)] // the names say it all
        impl GgmlType {
            $(pub const $name: Self = Self($id);)*
        }

        const TYPES: &[Row] = &[
            $(Row { id: $id, name: stringify!($name), elements: $elements, bytes: $bytes }),*
        ];
    };
}

// Id, name, elements of a block, bytes of a block.
types! {
    0 F32 1 4;
    1 F16 1 2;
    2 Q4_0 32 18;
    3 Q4_1 32 20;
    // Id 4 was Q4_2. Ollama's first gpt-oss files reuse it for MXFP4 with another order of the nibbles
    // than type 39, so it has its own name.
    4 MXFP4_OLLAMA 32 17;
    6 Q5_0 32 22;
    7 Q5_1 32 24;
    8 Q8_0 32 34;
    9 Q8_1 32 36;
    10 Q2_K 256 84;
    11 Q3_K 256 110;
    12 Q4_K 256 144;
    13 Q5_K 256 176;
    14 Q6_K 256 210;
    15 Q8_K 256 292;
    16 IQ2_XXS 256 66;
    17 IQ2_XS 256 74;
    18 IQ3_XXS 256 98;
    19 IQ1_S 256 50;
    20 IQ4_NL 32 18;
    21 IQ3_S 256 110;
    22 IQ2_S 256 82;
    23 IQ4_XS 256 136;
    24 I8 1 1;
    25 I16 1 2;
    26 I32 1 4;
    27 I64 1 8;
    28 F64 1 8;
    29 IQ1_M 256 56;
    30 BF16 1 2;
    34 TQ1_0 256 54;
    35 TQ2_0 256 66;
    39 MXFP4 32 17;
    40 NVFP4 64 36;
    41 Q1_0 128 18;
    42 Q2_0 64 18;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_go_both_ways() {
        for id in 0..100 {
            let ggml_type = GgmlType::from_id(id);
            assert_eq!(GgmlType::from_name(&ggml_type.name()), Some(ggml_type));
            assert_eq!(ggml_type.id(), id);
        }
        assert_eq!(GgmlType::Q4_K.name(), "Q4_K");
        assert_eq!(GgmlType::from_id(77).name(), "type-77");
        assert_eq!(GgmlType::from_name("Q9_K"), None);
        assert_eq!(GgmlType::from_name("type-41"), None, "a fork's");
    }

    #[test]
    fn every_id_below_43_is_known_or_removed() {
        for ggml_type in (0..43).map(GgmlType::from_id) {
            assert_ne!(ggml_type.is_removed(), ggml_type.block().is_some(), "{ggml_type}");
        }
        assert_eq!(GgmlType::from_id(43).block(), None);
    }

    #[test]
    fn block_sizes_of_the_k_quants() {
        assert_eq!(GgmlType::Q2_K.block(), Some((256, 84)));
        assert_eq!(GgmlType::Q4_K.block(), Some((256, 144)));
        assert_eq!(GgmlType::Q6_K.block(), Some((256, 210)));
        assert_eq!(GgmlType::from_id(4).block(), GgmlType::MXFP4.block());
    }
}
