//! The headers and short texts of a model, in the store or at its registry.

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::literal;
use serde::{Deserialize, Serialize};

/// Response to `Route::Heads` and `Route::Inspect`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelHeads {
    /// Its shortest unique name; at a registry, the name that a pull would give it.
    pub name: String,
    /// The digest of its manifest; absent if it has none, such as a file on a web server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Where it is from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Its files, in the order of its manifest, the configuration first.
    pub files: Vec<FileHead>,
}

impl ModelHeads {
    /// The bytes of all headers and texts.
    #[must_use]
    pub fn content_bytes(&self) -> usize {
        let contents = self.files.iter().filter_map(|file| file.content.as_ref());
        contents.fold(0, |sum, content| sum.saturating_add(content.0.len()))
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHead {
    /// Its media type.
    pub media_type: MediaType,
    /// Its original name, if its manifest or server names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Its size.
    pub size: u64,
    /// What was read of it, as base64: the header of a file with tensors, without the padding before its
    /// data section, or all of a short text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
}

/// Bytes that are base64 in JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Content(#[serde(with = "literal")] pub Vec<u8>);

/// The length instead of the bytes, which may be megabytes.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}
