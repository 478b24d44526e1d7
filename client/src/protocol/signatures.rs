//! Signatures of models: adding one, and what the signatures of a model say.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use std::fmt;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::SignedFile;
use serde::{Deserialize, Serialize};

/// Body of `Route::Sign`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignParams {
    pub reference: Reference,
    /// The text of the bundle.
    pub bundle: String,
}

/// Body of `Route::Signatures`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignaturesParams {
    pub reference: Reference,
    /// The keys to verify with; if there are none, those of the daemon's configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<GivenKey>,
    /// The text of a bundle that is not in the store, to verify instead of the stored ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<String>,
}

impl SignaturesParams {
    /// The longest body: the longest bundle, with its escapes, and some keys.
    pub const MAX_BODY_BYTES: usize = 6 << 20;
    /// The most keys.
    pub const MAX_KEYS: usize = 64;

    /// Verifies the stored signatures with these keys.
    #[must_use]
    pub const fn new(reference: Reference, keys: Vec<GivenKey>) -> Self {
        Self { reference, keys, bundle: None }
    }
}

/// A public key to verify with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenKey {
    /// What the answer calls it.
    pub name: String,
    /// The text of its PEM file.
    pub pem: String,
}

/// What is known about the signatures of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SignatureState {
    /// The model has no signature.
    Unsigned,
    /// Its signatures were made by other keys than the given ones.
    UnknownKey,
    /// A signature does not verify with its key, or lists other files.
    Wrong,
    /// A key has signed all files of the model.
    Signed,
}

impl fmt::Display for SignatureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unsigned => "unsigned",
            Self::UnknownKey => "unknown key",
            Self::Wrong => "wrong",
            Self::Signed => "signed",
        })
    }
}

/// The signatures of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignatureReport {
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The state of the best signature.
    pub state: SignatureState,
    /// The name of the key that has signed the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The rule of the daemon's configuration that applies to the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<TrustDecision>,
    /// The files that a signature of the model lists: all except for the configuration of its manifest.
    pub files: Vec<SignedFile>,
    /// The signatures one by one, the oldest first.
    pub signatures: Vec<SignatureDetails>,
}

/// A rule about signatures, and whether a model is signed as it demands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustDecision {
    /// The names that it is for.
    pub pattern: String,
    /// `warn` or `enforce`.
    pub mode: String,
    pub satisfied: bool,
}

/// One signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignatureDetails {
    pub state: SignatureState,
    /// The name of the key that has made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The ID of the key that the bundle names: the SHA-256 of the public key's PEM file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// The number of files that it lists.
    pub signed_files: u64,
    /// Files that it lists and the model lacks; of many, only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// Why it is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The text of the bundle.
    pub bundle: String,
}

/// The result of adding a signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signed {
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The ID of the key that the bundle names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// The number of files that are signed.
    pub files: u64,
    /// Files that the signature lists and the model lacks; of many, only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// The model had this signature already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
}
