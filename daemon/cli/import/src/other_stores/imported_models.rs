//! What earlier imports have read, so that a later one need not read it again.
//!
//! A record says which manifest a model got that consisted of certain files: paths, devices, inodes, sizes and times. It
//! only chooses what is skipped: a model counts as stored if the store has that very manifest under its name. A record that
//! is damaged, of another version or of another user is ignored.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::{FoundModel, home, variable};
use crate::local_folder::Identity;

const VERSION: u32 = 2;
/// The most models that are remembered, the newest.
const MAX_MODELS: usize = 20_000;
const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Default)]
pub(crate) struct ImportedModels {
    /// `None` without a home directory; then nothing is remembered.
    path: Option<PathBuf>,
    models: BTreeMap<Digest, Entry>,
    /// The number of the next entry.
    next: u64,
    is_changed: bool,
    /// When the record was read, before any file was looked at.
    loaded: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    read: ReadModel,
}

/// What was learned when a model was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadModel {
    pub(crate) manifest: Digest,
    pub(crate) tensor_count: u64,
}

/// Identifies a model by its name and everything that tells its files from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelKey {
    digest: Digest,
    /// When the last of its files was changed.
    changed: Duration,
}

impl ModelKey {
    /// The key of a model of this name. Of each file: its path in the model, what it is in the model, and what is on the disk.
    pub(crate) fn new<'f>(
        name: &str,
        files: impl Iterator<Item = (&'f str, Option<SidecarComponent>, Identity)>,
    ) -> Self {
        let (mut text, mut last) = (format!("{name:?}\n"), Duration::ZERO);
        for (path, component, identity) in files {
            let component = component.map(|component| format!("{component:?}"));
            text.push_str(&format!("{path:?} {component:?} {identity:?}\n"));
            let (seconds, nanoseconds) = identity.changed();
            let changed = Duration::from_secs(u64::try_from(seconds).unwrap_or(u64::MAX));
            last = last.max(changed.saturating_add(Duration::from_nanos(nanoseconds)));
        }
        Self { digest: Digest::of(text.as_bytes()), changed: last }
    }

    pub(crate) fn of_found(model: &FoundModel) -> Self {
        let files = model.files.iter().map(|file| (file.path.as_str(), file.component, file.identity));
        Self::new(&model.name, files)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRecord {
    version: u32,
    /// The key of a model, its manifest and the number of its tensors, in the order in which they were added.
    models: Vec<(Digest, Digest, u64)>,
}

/// Where blobd's commands keep what they remember for this user. `None` in the home directory of another user, which
/// `sudo` can leave set: folders of root there would be in the way of that user's programs.
pub(crate) fn state_folder() -> Option<PathBuf> {
    let state = variable("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = state.or_else(|| home().map(|home| home.join(".local/state")))?.join("blobd");
    let owner = state.ancestors().find_map(|folder| folder.metadata().ok())?.uid();
    (owner == 0 || owner == rustix::process::geteuid().as_raw()).then_some(state)
}

impl ImportedModels {
    /// Reads the record of this user.
    pub(crate) fn load() -> Self {
        state_folder().map_or_else(Self::default, |state| Self::load_from(state.join("imported-models.json")))
    }

    fn load_from(path: PathBuf) -> Self {
        let loaded = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let raw = read(&path).unwrap_or(RawRecord { version: VERSION, models: Vec::new() });
        let entries = (0..).zip(raw.models).map(|(number, (key, manifest, tensor_count))| {
            (key, Entry { number, read: ReadModel { manifest, tensor_count } })
        });
        let models: BTreeMap<_, _> = entries.collect();
        let next = models.values().map(|entry| entry.number.saturating_add(1)).max().unwrap_or_default();
        Self { path: Some(path), models, next, is_changed: false, loaded }
    }

    /// What was learned about a model of these files.
    pub(crate) fn get(&self, key: ModelKey) -> Option<ReadModel> {
        self.models.get(&key.digest).map(|entry| entry.read)
    }

    /// Remembers a model that was read. A file that may have changed again without a change of its times is not remembered:
    /// one that had changed just before this command looked at it, or later.
    pub(crate) fn add(&mut self, key: ModelKey, imported: &Imported) {
        /// The times of files have steps of up to 10 ms.
        const MARGIN: Duration = Duration::from_millis(100);
        if key.changed < self.loaded.saturating_sub(MARGIN) {
            let read = ReadModel { manifest: imported.digest, tensor_count: imported.tensor_count };
            self.models.insert(key.digest, Entry { number: self.next, read });
            self.next = self.next.saturating_add(1);
            self.is_changed = true;
        }
    }

    /// Replaces the file, if anything was added.
    ///
    /// # Errors
    /// Those of the file; nothing depends on it.
    pub(crate) fn save(&self) -> io::Result<()> {
        let Some(path) = self.path.as_ref().filter(|_| self.is_changed) else { return Ok(()) };
        let mut models: Vec<_> = self.models.iter().collect();
        models.sort_unstable_by_key(|(_, entry)| entry.number);
        let skipped = models.len().saturating_sub(MAX_MODELS);
        let raw = |(key, Entry { read, .. }): (&Digest, &Entry)| (*key, read.manifest, read.tensor_count);
        let models = models.into_iter().skip(skipped).map(raw).collect();
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let written = write(&temporary, &RawRecord { version: VERSION, models });
        written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| drop(fs::remove_file(&temporary)))
    }
}

fn write(path: &Path, record: &RawRecord) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()
}

fn read(path: &Path) -> Option<RawRecord> {
    let file = File::open(path).ok()?;
    let data = file.metadata().ok()?;
    if !data.is_file() || data.uid() != rustix::process::geteuid().as_raw() || data.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok().filter(|record: &RawRecord| record.version == VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, path: &Path) -> ModelKey {
        let identity = Identity::from(&fs::metadata(path).unwrap());
        ModelKey::new(name, [("a.gguf", None, identity)].into_iter())
    }

    fn imported(manifest: &[u8]) -> Imported {
        let digest = Digest::of(manifest);
        let json = serde_json::json!({
            "name": "a:latest", "digest": digest, "size": 1, "new_bytes": 1, "reused_bytes": 0, "tensor_count": 7,
            "new_blob_count": 1,
        });
        serde_json::from_value(json).unwrap()
    }

    fn settled() {
        std::thread::sleep(Duration::from_millis(150));
    }

    #[test]
    fn unchanged_files_are_known_and_changed_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (file, path) = (folder.path().join("a"), folder.path().join("state/record.json"));
        fs::write(&file, "one").unwrap();
        let mut record = ImportedModels::load_from(path.clone());
        settled();
        record.add(key("a", &file), &imported(b"early"));
        assert_eq!(record.get(key("a", &file)), None, "it changed just before the record was loaded");
        let mut record = ImportedModels::load_from(path.clone());
        record.add(key("a", &file), &imported(b"manifest"));
        record.save().unwrap();
        let record = ImportedModels::load_from(path);
        let read = ReadModel { manifest: Digest::of(b"manifest"), tensor_count: 7 };
        assert_eq!(record.get(key("a", &file)), Some(read));
        assert_eq!(fs::read_dir(folder.path().join("state")).unwrap().count(), 1);
        assert_eq!(record.get(key("b", &file)), None);
        let modified = fs::metadata(&file).unwrap().modified().unwrap();
        fs::write(&file, "two").unwrap();
        File::options().write(true).open(&file).unwrap().set_modified(modified).unwrap();
        assert_eq!(record.get(key("a", &file)), None, "the same size and time of modification");
    }

    #[test]
    fn damaged_record_or_one_of_another_version_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        for text in ["", "{", r#"{"version":1,"models":[]}"#, r#"{"version":2,"models":[["a","b",1]]}"#, "[]"]
        {
            fs::write(&path, text).unwrap();
            assert!(ImportedModels::load_from(path.clone()).models.is_empty(), "{text}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(ImportedModels::load_from(path).models.is_empty());
    }
}
