//! The history of a name: what it has meant, and who changed that.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

/// Response to `Route::History`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameHistory {
    /// The name.
    pub name: String,
    /// The changes of the name, the newest first.
    pub changes: Vec<NameChange>,
    /// The number of older changes that are no longer recorded because there were too many.
    #[serde(default)]
    pub dropped: u64,
}

/// A change of a name. Without a record, `time`, `uid` and `verb` are absent: the name had this manifest, and nothing
/// says since when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameChange {
    /// When it happened, RFC 3339 in UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// Who did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The name of that user, if the daemon knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// `import`, `pull`, `edit`, `promote`, `tag`, `rename`, `undelete`, `rm` or `evict`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    /// The manifest that the name got; absent if the name was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Where the model came from, if that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The names that the store has for this manifest now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stored_as: Vec<String>,
    /// Whether the trash has a model with this manifest.
    #[serde(default)]
    pub in_trash: bool,
}
