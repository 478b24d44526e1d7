//! Requests that change what a name means: edit, promote, tag, rename, remove, undelete, pin; and the history of a name.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::error::FailedItem;
use super::{MetadataValue, Time, lists};

/// A model that was removed or evicted, or whose name was given to another model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostModel {
    /// The name that it had.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// The sum of its files' sizes, as if nothing were shared; 0 if its manifest was damaged.
    pub size: u64,
    /// The bytes freed on disk. A blob that several of the listed models needed counts for the last of them.
    pub freed_bytes: u64,
    /// The bytes on disk that nothing needs now: `gc` frees them.
    pub reclaimable_bytes: u64,
    /// The bytes on disk that stay, and what needs them.
    pub kept: Vec<Kept>,
    /// Until when the trash keeps the model, if another model has taken its name. Until then `undelete` restores it,
    /// unless its space is needed before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<Time>,
}

/// What else has happened when a name was given to a model. Part of the response of every verb that sets a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameEffects {
    /// The other model that had the name; at most one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub displaced: Vec<LostModel>,
    /// The models that were evicted to make space, in order; of very many, only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<LostModel>,
    /// What the user should know although the request has succeeded, such as a soft quota that is exceeded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl LostModel {
    /// The bytes on disk that stay because something needs them.
    pub fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add)
    }

    /// The holders of this model's bytes, each once, in order.
    pub fn keepers(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.kept.iter().flat_map(|kept| &kept.by).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// A model that is not removed or evicted, although it could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    pub name: String,
    /// Why it stays.
    pub reason: String,
}

/// Bytes that were not freed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The number of bytes, on disk.
    pub bytes: u64,
    /// The models, sessions and programs that need them.
    pub by: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EditParams {
    pub source: Reference,
    /// The name of the new model.
    pub target: Reference,
    /// The changes of metadata keys.
    #[serde(default, deserialize_with = "lists::keys", skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyChange>,
    /// The text of the manifest's template layer, which engines that follow the manifest use. The layer is
    /// replaced, or added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_layer: Option<String>,
    /// The changes of files without weights, such as `generation_config.json`.
    #[serde(default, deserialize_with = "lists::files", skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileChange>,
    /// Whether another model that has the target's name loses it.
    #[serde(default)]
    pub force: bool,
    /// Only report what would change.
    #[serde(default)]
    pub dry_run: bool,
}

impl EditParams {
    /// The longest body of an edit: files that it replaces are in it.
    pub const MAX_BODY_BYTES: usize = 16 << 20;
}

/// The change of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileChange {
    /// Its path in the model.
    pub path: String,
    /// The new content, if it is text. Without a content, the file is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The new content, encoded in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// The change of a metadata key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyChange {
    pub key: String,
    /// The new value as text, JSON for an array; the key is removed if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The type of the value, such as `uint32` or `array<string>`; if absent, the type that the key has, or for a
    /// new key one that fits the text.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub value_type: Option<String>,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Edited {
    pub name: String,
    /// The manifest's digest; `null` in a dry run, which does not compute it.
    pub digest: Option<Digest>,
    /// The bytes of the blobs that were written, or in a dry run would be at most.
    pub new_bytes: u64,
    /// The keys with another value.
    pub changed: Vec<ChangedKey>,
    /// The files with another content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed_files: Vec<ChangedFile>,
    /// The template layer of the manifest, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_layer: Option<TemplateLayer>,
    /// Whether the name meant the same model before, and nothing was written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// Whether this was a dry run, which writes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// A metadata key with another value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangedKey {
    pub key: String,
    /// The old value; `null` if the key is new.
    pub from: Option<MetadataValue>,
    /// The new value; `null` if the key was removed.
    pub to: Option<MetadataValue>,
}

/// A file with another content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    pub path: String,
    /// The old digest; `null` if the file is new.
    pub from: Option<Digest>,
    /// The new digest; `null` if the file was removed.
    pub to: Option<Digest>,
    /// The size of the new file; 0 if it was removed.
    pub size: u64,
}

/// Whether the manifest's template layer was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateLayer {
    /// It is that of the source.
    Kept,
    /// It has another text.
    Replaced,
    /// The source had none.
    Added,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromoteParams {
    pub reference: Reference,
    /// Only report what would be copied.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promoted {
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The lower store that the model was in; absent if the writable store had its name already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The bytes of the blobs that were copied, or in a dry run would be.
    pub copied_bytes: u64,
    /// The number of these blobs.
    pub copied_blobs: u64,
    /// Whether this was a dry run, which writes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    #[serde(flatten)]
    pub effects: NameEffects,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The names that were dropped.
    pub removed: Vec<String>,
    /// The bytes freed on disk.
    pub freed_bytes: u64,
    /// The bytes that were not freed, and what needs them.
    pub kept: Vec<Kept>,
    /// Until when `undelete` can restore the models, if they went to the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trashed_until: Option<Time>,
    /// The removed models one by one.
    #[serde(default)]
    pub models: Vec<LostModel>,
    /// The models that match a pattern, or are old or unused, and are not removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spared: Vec<Spared>,
    /// The names and patterns that were refused, if the request says that the others are removed all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedItem>,
    /// Whether this was a dry run, which removes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged {
    /// The new name.
    pub name: String,
    /// The digest of the manifest.
    pub digest: Digest,
    /// Whether the name meant the same model before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    #[serde(flatten)]
    pub effects: NameEffects,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renamed {
    /// The old name.
    pub from: String,
    /// The new name.
    pub name: String,
    /// The digest of the manifest.
    pub digest: Digest,
    #[serde(flatten)]
    pub effects: NameEffects,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashList {
    /// One entry per model that `rm --keep` moved to the trash, sorted by name.
    pub models: Vec<TrashedModel>,
}

/// A model in the trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashedModel {
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// The sum of its files' sizes, as if nothing were shared.
    pub size: u64,
    /// When it was removed.
    pub removed: Time,
    /// When it expires; then it may be collected.
    pub expires: Time,
    /// Whether another model has taken its name; it is deleted before it expires if its space is needed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
    /// The uid that had added the name, and may restore it besides administrators; absent if not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added_by: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undeleted {
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    #[serde(flatten)]
    pub effects: NameEffects,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UndoParams {
    /// The name whose newest change is taken back; the caller's newest change of any name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// The change that is expected, as a dry run has named it: if another one would be taken back by now, nothing is changed
    /// and the answer is `busy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
    /// Only report what would be taken back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// A change of names that was taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undone {
    /// Identifies the change.
    pub change: String,
    /// The verb of the change, such as `rm`.
    pub verb: String,
    /// When it happened.
    pub time: Time,
    /// Who made it.
    pub uid: u32,
    /// The name of that user, if the daemon knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The names that were changed back.
    pub names: Vec<UndoneName>,
    /// The commands that reverse this.
    pub reversed_by: Vec<String>,
    /// Whether this was a dry run, which changes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// A name that was changed back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoneName {
    pub name: String,
    /// The manifest that it has now; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The manifest that it had until now; absent if it was not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Digest>,
    /// The name that the model had until now, if a renaming was taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renamed_from: Option<String>,
    /// Another name of the model, if the name was only removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_as: Option<String>,
    /// Until when the trash keeps the model, if the name was removed and the model moved there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trashed_until: Option<Time>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    pub name: String,
    /// Whether it is pinned now: neither evicted nor removed.
    pub pinned: bool,
    /// Whether this was its state before the request too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameHistory {
    pub name: String,
    /// The changes of the name, the newest first.
    pub changes: Vec<NameChange>,
    /// The number of older changes that are no longer recorded.
    #[serde(default)]
    pub dropped: u64,
}

/// A change of a name. Without a record, `time`, `uid` and `verb` are absent: the name had this manifest, and nothing
/// says since when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameChange {
    /// When it happened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Who did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The name of that user, if the daemon knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// `import`, `pull`, `edit`, `promote`, `tag`, `rename`, `undelete`, `rm`, `undo` or `evict`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    /// The manifest that the name got; absent if the name was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Where the model came from, if that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The names that the store has for this manifest now, at most 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stored_as: Vec<String>,
    /// Whether the trash has a model with this manifest.
    #[serde(default)]
    pub in_trash: bool,
}
