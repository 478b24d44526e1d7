//! Responses of pulls and imports: plans, progress, results. Pushes.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use std::fmt;

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::Time;
use super::event::{Phase, Progress, State, progress_types};
use super::naming::{LostModel, NameEffects};
use super::request::SidecarComponent;
use super::upkeep::Eviction;

/// The manifest or files that a source names at its server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resolved {
    /// The manifest's digest; absent if the source is files without a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The digests of its files, as far as the server says them.
    pub files: Vec<Digest>,
    /// Whether it has a file without a digest whose version is not stored: a file that a hub stores in git.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_new_version: bool,
    /// The paths of the files of the named stored model that are others at the source, or are not there any more; absent if
    /// none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<Vec<String>>,
}

/// Response to `Route::PullPlan`: what a pull would download and reuse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullPlan {
    pub name: String,
    /// The manifest's digest, if the model has a manifest already.
    pub digest: Option<Digest>,
    /// An estimate of the bytes that a pull would download, without headers and samples. Similar tensors count as stored.
    pub download_bytes: u64,
    /// Whether the store has space for it now, if necessary after it has evicted models. If not, the pull would fail.
    #[serde(default = "always")]
    pub enough_space: bool,
    /// How much space that is.
    #[serde(default)]
    pub space: PlannedSpace,
    /// The files that were chosen, if the model is some files of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<ChosenFiles>,
    /// The files, in the order in which they would be pulled.
    pub files: Vec<PlannedFile>,
}

const fn always() -> bool {
    true
}

/// The disk space that a planned pull needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSpace {
    /// An estimate of the bytes on disk that the pull would take.
    pub needed_bytes: u64,
    /// The bytes that may still be stored.
    pub available_bytes: u64,
    /// What limits them.
    pub limit: SpaceLimit,
    /// The group whose quota that is; only if `limit` is `group_quota`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How many bytes must become free before the pull; 0 if it fits.
    pub missing_bytes: u64,
    /// If bytes are missing: those of models in the trash that others have replaced. The pull frees them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_bytes: Option<u64>,
    /// If bytes are missing: how many `gc` would free, if known. With eviction, the pull collects too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimable_bytes: Option<u64>,
    /// If bytes are missing and models may be evicted: how many bytes that would free at most, after a collection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evictable_bytes: Option<u64>,
    /// The models that the pull would evict.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<Eviction>,
}

/// What limits the space of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpaceLimit {
    /// The free space of the file system, without what the store leaves free.
    #[default]
    Disk,
    /// The store's quota.
    Quota,
    /// What the quota of the user leaves; evictions and collections do not help.
    UserQuota,
    /// What the quota of one of the user's groups leaves; likewise.
    GroupQuota,
}

/// One file of a planned pull. The last four sizes are disjoint parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// Its component, such as `model`, or its URL.
    pub name: String,
    /// Its digest, if known in advance.
    pub digest: Option<Digest>,
    pub size: u64,
    /// The bytes that are certain to be in the store.
    pub stored_bytes: u64,
    /// The bytes that an earlier, unfinished pull has received.
    pub resumed_bytes: u64,
    /// The bytes of tensors that the store seems to have: the model's tensor index names them, or samples are equal to those
    /// of a similar stored model.
    pub similar_bytes: u64,
    /// The bytes that would be downloaded.
    pub download_bytes: u64,
}

/// The progress of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullProgress {
    /// The current step, for people.
    pub status: String,
    /// Whether the work goes on.
    #[serde(default)]
    pub state: State,
    /// What the client waits for, once the work has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The file in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// How much of it has been received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    /// In the last line of a file: how much of it was already stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reused: Option<u64>,
    /// The bytes of all files of the model, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// How many of them have arrived or were stored already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_bytes: Option<u64>,
    /// How many have arrived per second, in the last seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// How much of a phase after the last byte is done: bytes that are hashed, or tensors that are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_completed: Option<u64>,
    /// How many there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_total: Option<u64>,
    /// Whether an interruption loses what has been received of the file: a compressed archive, or one whose server
    /// ignores range requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarts: bool,
    /// Models that were just evicted to make space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<LostModel>,
}

progress_types!(PullProgress);

/// A pull's last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullDone {
    /// Always `success`.
    pub status: String,
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The size of the files: the sum of the next three.
    #[serde(default)]
    pub size: u64,
    /// The bytes that were downloaded.
    pub downloaded_bytes: u64,
    /// The bytes that were taken from other stored models.
    pub reused_bytes: u64,
    /// The bytes of files that were stored already, and of those that an earlier pull had begun.
    #[serde(default)]
    pub already_stored_bytes: u64,
    /// Whether the name meant the same model before, and nothing was downloaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// The files that were chosen, if the model is some files of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<ChosenFiles>,
    /// The files whose first download had a wrong digest, and whose second download was right.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corrected: Vec<CorrectedFile>,
    /// The model's tensor index at its registry, if it named tensors that were reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<UsedIndex>,
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// A tensor index that was used by a pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedIndex {
    /// The bytes of it that were downloaded, apart from those of the files.
    pub size: u64,
    /// The bytes of files that were reused because it named them.
    pub spared_bytes: u64,
}

/// The files that were chosen of a repository at Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenFiles {
    /// The files, the weights first, shards in order.
    pub files: Vec<ChosenFile>,
    /// How many files of weights the repository has; of a GGUF model, how many GGUF files.
    pub listed: u64,
    /// How many files without weights are pulled too, if the model is a folder of files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<u64>,
    /// What the user should know about files that are left out, or stored whole because a pattern includes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A file that was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenFile {
    /// What it is in the model: `model`, `projector` or `draft`.
    pub component: String,
    /// Its path in the repository.
    pub path: String,
}

/// `chose a-Q4_K_M.gguf with mmproj-F16.gguf of 23 GGUF files`. Of shards, the first is named. Of a folder:
/// `chose the folder with model-00001-of-00003.safetensors (3 files of weights) and 9 other files`.
impl fmt::Display for ChosenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(beside) = self.beside {
            return self.fmt_folder(f, beside);
        }
        let mut before = "chose ";
        let mut rest = self.files.as_slice();
        while let Some(first) = rest.first() {
            let is_same = |file: &ChosenFile| file.component == first.component;
            let (same, others) = rest.split_at(rest.iter().take_while(|file| is_same(file)).count());
            write!(f, "{before}{}", first.path)?;
            if same.len() > 1 {
                write!(f, " ({} shards)", same.len())?;
            }
            (rest, before) = (others, if before == "chose " { " with " } else { " and " });
        }
        match self.listed {
            1 => f.write_str(", the only GGUF file"),
            listed => write!(f, " of {listed} GGUF files"),
        }
    }
}

impl ChosenFiles {
    fn fmt_folder(&self, f: &mut fmt::Formatter<'_>, beside: u64) -> fmt::Result {
        f.write_str("chose the folder")?;
        let count = self.files.len() as u64;
        if let Some(first) = self.files.first() {
            write!(f, " with {}", first.path)?;
        }
        if count > 1 {
            write!(f, " ({count} files of weights)")?;
        }
        match beside {
            0 => f.write_str(", and no other file")?,
            1 => f.write_str(" and 1 other file")?,
            others => write!(f, " and {others} other files")?,
        }
        match self.listed.saturating_sub(count) {
            0 => Ok(()),
            1 => f.write_str("; not another file of weights, which a tag or a pattern chooses"),
            others => write!(f, "; not {others} other files of weights, which a tag or a pattern chooses"),
        }
    }
}

/// A file whose first download had a wrong digest, and whose second download was right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorrectedFile {
    /// Its component and model, or its URL.
    pub name: String,
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// The digest of what was received first.
    pub first_digest: Digest,
    /// How many bytes of the two downloads differ.
    pub differing_bytes: u64,
    /// Where they differ, in order. Neighbouring ranges are joined; of very many, the nearest.
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
    /// Who sent the wrong bytes: `HOST` or `HOST (redirected by HOST)`; absent if an earlier pull received them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_from: Option<String>,
    /// Who sent the right bytes; absent if an earlier pull received them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_from: Option<String>,
    /// The tensors that it belongs to; of very many, only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningPulls {
    /// One entry per pull, push or transfer, the oldest first.
    pub pulls: Vec<RunningPull>,
}

/// Where a model in progress comes from, and where it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunningKind {
    /// From a server into the store.
    #[default]
    Pull,
    /// From the store to a registry.
    Push,
    /// From one registry to another.
    Transfer,
}

/// A pull, a push or a transfer in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningPull {
    /// What is in progress.
    #[serde(default)]
    pub kind: RunningKind,
    /// The name that the model is to get; of a push, the name that it has.
    pub model: String,
    /// The reference or the URL that is pulled, without credentials and query; of a push, the name that the model has.
    pub source: String,
    /// The name under which a push or a transfer publishes the model. Absent for a pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// The process that requested it.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
    /// When it began.
    pub since: Time,
    /// What is being done, for people: the status of the last event.
    pub status: String,
    /// Whether it goes on: that of the last event.
    #[serde(default)]
    pub state: State,
    /// The step that it is in: that of the last event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The size of the model's files, or of those that a push or transfer sends, if known.
    pub total_bytes: Option<u64>,
    /// How many of these bytes are there; of a push or a transfer, how many of those that the registry lacked.
    pub completed_bytes: u64,
    /// How many bytes have moved in each second recently.
    pub bytes_per_second: u64,
}

/// The last frame of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The file's digest. Absent for a model that was imported as a list of files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<Digest>,
    /// The size of the file without its sidecars, or of all files of a list.
    pub size: u64,
    /// How many files a list had. Absent for one file with its sidecars.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_count: Option<u64>,
    /// The files of a list, if there are at most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<ImportedFile>,
    /// The bytes of the blobs that were written, the model's configuration of a few hundred bytes included.
    pub new_bytes: u64,
    /// The bytes of the file that were already stored.
    pub reused_bytes: u64,
    pub tensor_count: u64,
    /// The number of blobs that were written.
    pub new_blob_count: u64,
    /// The sidecars that are components of the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<ImportedSidecar>,
    /// Whether the name meant the same model before, and nothing was written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    #[serde(flatten)]
    pub effects: NameEffects,
}

impl Imported {
    /// The most files that are listed one by one: with the longest paths they take a small part of a frame.
    pub const MAX_LISTED: usize = 256;
}

/// A file of an imported model of several files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedFile {
    /// Its path in the model.
    pub path: String,
    pub digest: Digest,
    pub size: u64,
}

/// A file that was stored as a component of an imported model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedSidecar {
    /// What it is in the model.
    pub component: SidecarComponent,
    pub file_name: String,
    pub digest: Digest,
    pub size: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(files: &[(&str, &str)], listed: u64) -> String {
        chosen(files, listed, None)
    }

    fn chosen(files: &[(&str, &str)], listed: u64, beside: Option<u64>) -> String {
        let file = |(component, path): &(&str, &str)| ChosenFile {
            component: (*component).to_owned(),
            path: (*path).to_owned(),
        };
        ChosenFiles { files: files.iter().map(file).collect(), listed, beside, notes: Vec::new() }.to_string()
    }

    #[test]
    fn chosen_files_are_named_with_how_many_there_were() {
        let (model, projector, draft) =
            (("model", "a.gguf"), ("projector", "mmproj.gguf"), ("draft", "mtp-a.gguf"));
        assert_eq!(text(&[model], 1), "chose a.gguf, the only GGUF file");
        assert_eq!(text(&[model, projector], 23), "chose a.gguf with mmproj.gguf of 23 GGUF files");
        assert_eq!(
            text(&[model, projector, draft], 3),
            "chose a.gguf with mmproj.gguf and mtp-a.gguf of 3 GGUF files"
        );
        let shards = [("model", "b-00001-of-00002.gguf"), ("model", "b-00002-of-00002.gguf"), draft];
        let expected = "chose b-00001-of-00002.gguf (2 shards) with mtp-a.gguf of 9 GGUF files";
        assert_eq!(text(&shards, 9), expected);
    }

    #[test]
    fn chosen_folders_are_named_with_what_is_beside_the_weights() {
        let weights = [("model", "model.safetensors")];
        let text = |listed, beside| chosen(&weights, listed, Some(beside));
        assert_eq!(text(1, 0), "chose the folder with model.safetensors, and no other file");
        assert_eq!(text(1, 1), "chose the folder with model.safetensors and 1 other file");
        assert_eq!(
            text(2, 9),
            "chose the folder with model.safetensors and 9 other files; not another file of weights, which a tag or a pattern \
             chooses"
        );
    }
}
