//! Files of a pull that arrived with wrong bytes, and were corrected by a second download.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

/// A file whose first download had a wrong digest, and whose second download was right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorrectedFile {
    /// Its component and model, or its URL.
    pub name: String,
    /// Its digest.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// The digest of what was received first.
    pub first_digest: Digest,
    /// How many bytes of the two downloads differ.
    pub differing_bytes: u64,
    /// Where they differ, in order. Ranges that lie near each other are one, and of very many the nearest are joined.
    pub ranges: Vec<DifferingRange>,
}

/// A range of a file in which two downloads differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DifferingRange {
    /// Its offset in the file, in bytes.
    pub offset: u64,
    /// Its length, from the first byte that differs to the last.
    pub length: u64,
    /// How many bytes in it differ.
    pub differing_bytes: u64,
    /// Who sent the wrong bytes; absent if an earlier pull received them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_from: Option<String>,
    /// Who sent the right bytes; absent if an earlier pull received them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_from: Option<String>,
    /// The tensors that it belongs to; of very many, only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<String>,
}
