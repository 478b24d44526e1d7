//! GGUF headers written byte by byte, so that they may be malformed in any way.

/// A little-endian header of version 3. Its two counts may be wrong.
#[derive(Clone, Debug)]
pub struct RawGguf {
    /// The first four bytes.
    pub magic: [u8; 4],
    /// The version.
    pub version: u32,
    /// The declared number of tensors.
    pub tensor_count: u64,
    /// The declared number of metadata keys.
    pub key_count: u64,
    /// The metadata entries as bytes.
    pub keys: Vec<u8>,
    /// The tensor table as bytes.
    pub tensors: Vec<u8>,
}

/// The ids of the types that the tests use.
pub mod id {
    /// Tensor type.
    pub const F32: u32 = 0;
    /// Tensor type.
    pub const I8: u32 = 24;
    /// Tensor type.
    pub const I64: u32 = 27;
    /// Value type.
    pub const U8: u32 = 0;
    /// Value type.
    pub const U32: u32 = 4;
    /// Value type.
    pub const I32: u32 = 5;
    /// Value type.
    pub const FLOAT32: u32 = 6;
    /// Value type.
    pub const STRING: u32 = 8;
    /// Value type.
    pub const ARRAY: u32 = 9;
    /// Value type.
    pub const U64: u32 = 10;
}

impl RawGguf {
    /// An empty header.
    #[must_use]
    pub fn new() -> Self {
        let (keys, tensors) = (Vec::new(), Vec::new());
        Self { magic: *b"GGUF", version: 3, tensor_count: 0, key_count: 0, keys, tensors }
    }

    /// Adds a metadata entry whose value is given as bytes.
    #[must_use]
    pub fn key(mut self, key: impl AsRef<[u8]>, value_type: u32, value: impl AsRef<[u8]>) -> Self {
        self.key_count += 1;
        self.keys.extend(string(key));
        self.keys.extend(value_type.to_le_bytes());
        self.keys.extend(value.as_ref());
        self
    }

    /// Sets the alignment.
    #[must_use]
    pub fn alignment(self, alignment: u32) -> Self {
        self.key("general.alignment", id::U32, alignment.to_le_bytes())
    }

    /// Adds a tensor.
    #[must_use]
    pub fn tensor(mut self, name: impl AsRef<[u8]>, ggml_type: u32, dimensions: &[u64], offset: u64) -> Self {
        self.tensor_count += 1;
        self.tensors.extend(string(name));
        self.tensors.extend(u32::try_from(dimensions.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.tensors.extend(dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
        self.tensors.extend(ggml_type.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    /// Adds bytes in place of the next metadata entry.
    #[must_use]
    pub fn key_bytes(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.keys.extend(bytes.as_ref());
        self
    }

    /// The header, not padded.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.to_le_bytes());
        bytes.extend(self.key_count.to_le_bytes());
        bytes.extend(&self.keys);
        bytes.extend(&self.tensors);
        bytes
    }

    /// The header, padded to 32 bytes, followed by `data`.
    #[must_use]
    pub fn with_data(&self, data: &[u8]) -> Vec<u8> {
        let mut bytes = self.bytes();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}

impl Default for RawGguf {
    fn default() -> Self {
        Self::new()
    }
}

/// A string preceded by its length.
#[must_use]
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}
