//! What earlier imports from other programs have read, so that a later one need not read it again.
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

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::{FoundModel, home, variable};

const VERSION: u32 = 1;
/// The most models that are remembered, the newest.
const MAX_MODELS: usize = 20_000;
const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Default)]
pub(crate) struct Record {
    /// `None` without a home directory; then nothing is remembered.
    path: Option<PathBuf>,
    models: BTreeMap<Digest, Entry>,
    /// The number of the next entry.
    next: u64,
    is_changed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    manifest: Digest,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRecord {
    version: u32,
    /// The key of a model and its manifest, in the order in which they were added.
    models: Vec<(Digest, Digest)>,
}

/// Where blobd's commands keep what they remember for this user.
pub(crate) fn state_folder() -> Option<PathBuf> {
    let state = variable("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = state.or_else(|| home().map(|home| home.join(".local/state")));
    state.map(|state| state.join("blobd"))
}

impl Record {
    /// Reads the record of this user.
    pub(crate) fn load() -> Self {
        state_folder().map_or_else(Self::default, |state| Self::load_from(state.join("imported-models.json")))
    }

    fn load_from(path: PathBuf) -> Self {
        let raw = read(&path).unwrap_or(RawRecord { version: VERSION, models: Vec::new() });
        let entries = (0..).zip(raw.models);
        let entries = entries.map(|(number, (key, manifest))| (key, Entry { number, manifest }));
        let models: BTreeMap<_, _> = entries.collect();
        let next = models.values().map(|entry| entry.number.saturating_add(1)).max().unwrap_or_default();
        Self { path: Some(path), models, next, is_changed: false }
    }

    /// The manifest that a model of these files got.
    pub(super) fn manifest(&self, model: &FoundModel) -> Option<Digest> {
        self.models.get(&key(model)).map(|entry| entry.manifest)
    }

    /// Remembers a model that was read. A file that may change again without a change of its times is not remembered.
    pub(crate) fn add(&mut self, model: &FoundModel, manifest: Digest) {
        /// The times of files have steps of up to 10 ms.
        const MARGIN: Duration = Duration::from_millis(100);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(MARGIN);
        let is_settled = |(seconds, nanoseconds): (i64, u64)| {
            let changed = Duration::from_secs(u64::try_from(seconds).unwrap_or(u64::MAX));
            changed.saturating_add(Duration::from_nanos(nanoseconds)) < now
        };
        if model.files.iter().all(|file| is_settled(file.identity.changed())) {
            self.models.insert(key(model), Entry { number: self.next, manifest });
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
        let mut models: Vec<_> =
            self.models.iter().map(|(key, entry)| (entry.number, *key, entry.manifest)).collect();
        models.sort_unstable_by_key(|(number, ..)| *number);
        let skipped = models.len().saturating_sub(MAX_MODELS);
        let models = models.into_iter().skip(skipped).map(|(_, key, manifest)| (key, manifest)).collect();
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

/// Identifies a model by its name and everything that tells its files from others.
fn key(model: &FoundModel) -> Digest {
    let files = model.files.iter().map(|file| {
        let component = file.component.map(|component| format!("{component:?}"));
        format!("{:?} {component:?} {:?}\n", file.path, file.identity)
    });
    let texts: String = std::iter::once(format!("{:?}\n", model.name)).chain(files).collect();
    Digest::of(texts.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_folder::Identity;
    use crate::other_stores::FoundFile;

    fn model(path: &Path) -> FoundModel {
        let identity = Identity::from(&fs::metadata(path).unwrap());
        let file = FoundFile::new("a.gguf".to_owned(), path.to_owned(), identity);
        FoundModel::new("jan/me/a:latest".parse().unwrap(), vec![file])
    }

    fn settled() {
        std::thread::sleep(Duration::from_millis(150));
    }

    #[test]
    fn unchanged_files_are_known_and_changed_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (file, path) = (folder.path().join("a"), folder.path().join("state/record.json"));
        fs::write(&file, "one").unwrap();
        let mut record = Record::load_from(path.clone());
        record.add(&model(&file), Digest::of(b"early"));
        assert_eq!(record.manifest(&model(&file)), None, "it may change within the same step of the clock");
        settled();
        record.add(&model(&file), Digest::of(b"manifest"));
        record.save().unwrap();
        let record = Record::load_from(path);
        assert_eq!(record.manifest(&model(&file)), Some(Digest::of(b"manifest")));
        assert_eq!(fs::read_dir(folder.path().join("state")).unwrap().count(), 1);
        let other = FoundModel { name: "jan/me/b:latest".to_owned(), ..model(&file) };
        assert_eq!(record.manifest(&other), None);
        fs::write(&file, "two").unwrap();
        assert_eq!(record.manifest(&model(&file)), None);
    }

    #[test]
    fn damaged_record_or_one_of_another_version_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        for text in ["", "{", r#"{"version":2,"models":[]}"#, r#"{"version":1,"models":[["a","b"]]}"#, "[]"] {
            fs::write(&path, text).unwrap();
            assert!(Record::load_from(path.clone()).models.is_empty(), "{text}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(Record::load_from(path).models.is_empty());
    }
}
