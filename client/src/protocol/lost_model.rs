//! Models that have lost their names, in the responses of all verbs that remove, evict or replace models.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

/// A model that was removed or evicted, or whose name was given to another model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostModel {
    /// The name that it had.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// The sum of its files' sizes, as if nothing were shared; 0 if its manifest was damaged.
    pub size: u64,
    /// The bytes that were freed on disk. Of several models, the last that needs a blob counts it.
    pub freed_bytes: u64,
    /// The bytes on disk that nothing needs any more and that `gc` frees, counted in the same way.
    pub reclaimable_bytes: u64,
    /// The bytes on disk that stay, and what needs them.
    pub kept: Vec<Kept>,
    /// Until when the trash keeps the model, if another model has taken its name. Until then `undelete` restores it,
    /// unless its space is needed before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<String>,
}

/// What else has happened when a name was given to a model. Part of the response of every verb that sets a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameEffects {
    /// The other model that had the name; at most one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub displaced: Vec<LostModel>,
    /// The models that were evicted to make space, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<LostModel>,
    /// What the user should know although the request has succeeded, such as a soft quota that is exceeded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl LostModel {
    /// The bytes on disk that stay because something needs them.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add)
    }

    /// The holders of this model's bytes, each once, in order.
    #[must_use]
    pub fn keepers(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.kept.iter().flat_map(|kept| &kept.by).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Bytes that were not freed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The number of bytes, on disk.
    pub bytes: u64,
    /// The models, sessions and programs that need them.
    pub by: Vec<String>,
}
