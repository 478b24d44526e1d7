//! Signatures of models, as OpenSSF's model signing 1.0 defines them: a bundle with a signed statement that lists the
//! files of a model with their digests.
//!
//! A [`Bundle`] is parsed, and compared with the files of a model ([`Statement::compare`]). Whether a key has made its
//! signature is the caller's to check, over [`Bundle::signed_bytes`]: this crate has no cryptography. Bundles come from
//! registries and users, so nothing in them is trusted before that, and everything has a limit.

mod artifact;
mod bundle;
mod statement;

pub use self::artifact::SignatureArtifact;
pub use self::bundle::{Bundle, signed_bytes};
pub use self::statement::{Difference, ModelFile, Statement};

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::json_error::reason;

/// A file that a statement lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedFile {
    /// Its path below the model's folder; `.` if the model is one file.
    pub path: String,
    pub digest: Digest,
}

/// Why a bundle is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    #[error("signature: too long: expected at most {most} bytes, found {found}")]
    TooLong { most: usize, found: usize },
    #[error("signature: not a Sigstore bundle: {}", reason(.0))]
    Json(#[from] serde_json::Error),
    #[error("signature: wrong {what}: expected {expected}, found {found:?}")]
    Kind { what: &'static str, expected: &'static str, found: String },
    #[error("signature: wrong number of {what}: expected 1, found {found}")]
    Count { what: &'static str, found: usize },
    #[error("signature: {what}: expected text in base64")]
    Base64 { what: &'static str },
    #[error("signature: no {what}: expected a DSSE envelope and the hint of a public key")]
    Missing { what: &'static str },
    #[error("signature: signed with a certificate: expected a signature with a key")]
    Certificate,
    #[error("signature: statement: {}", reason(.0))]
    Statement(serde_json::Error),
    #[error("signature: file {name:?}: expected a path below the model's folder")]
    Path { name: String },
    #[error("signature: file {name:?}: listed twice")]
    Twice { name: String },
    #[error("signature: file {name:?}: wrong digest: expected 64 hexadecimal digits, found {found:?}")]
    Digest { name: String, found: String },
    #[error("signature: no files in it")]
    NoFiles,
    #[error("signature: wrong digest of the list of files: expected {expected}, found {found}")]
    Root { expected: String, found: String },
}
