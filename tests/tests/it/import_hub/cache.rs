//! A cache of Hugging Face's libraries that a test fills.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::oracle::sha256;
use serde_json::{Value as Json, json};

/// The commit of `main` in a cache.
pub(super) const COMMIT: &str = "0123456789012345678901234567890123456789";

/// A cache as huggingface_hub 1.x writes it.
pub(super) struct Cache(pub(super) PathBuf);

impl Cache {
    pub(super) fn new(scratch: &Path) -> Self {
        Self(scratch.join("hub"))
    }

    pub(super) fn repository(&self, name: &str) -> PathBuf {
        self.0.join(format!("models--{}", name.replace('/', "--")))
    }

    pub(super) fn snapshot(&self, name: &str) -> PathBuf {
        self.repository(name).join("snapshots").join(COMMIT)
    }

    /// Adds a file to a repository: a blob, and a link to it in the snapshot of `main`.
    pub(super) fn add(&self, name: &str, path: &str, bytes: &[u8]) {
        self.add_to((name, COMMIT), path, bytes);
        fs::write(self.repository(name).join("refs/main"), COMMIT).unwrap();
    }

    pub(super) fn add_to(&self, (name, commit): (&str, &str), path: &str, bytes: &[u8]) {
        self.add_blob((name, commit), path, (bytes, &sha256(bytes)));
    }

    /// Adds a file whose blob has this name.
    pub(super) fn add_blob(&self, (name, commit): (&str, &str), path: &str, (bytes, etag): (&[u8], &str)) {
        let repository = self.repository(name);
        let place = repository.join("snapshots").join(commit).join(path);
        let blob = repository.join("blobs").join(etag);
        for folder in [repository.join("refs"), repository.join("blobs"), place.parent().unwrap().into()] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(&blob, bytes).unwrap();
        let up = "../".repeat(path.matches('/').count() + 2);
        symlink(format!("{up}blobs/{etag}"), place).unwrap();
    }

    /// Replaces the link to a file by the file, as where there are no links.
    pub(super) fn unlink(&self, name: &str, path: &str) -> PathBuf {
        let place = self.snapshot(name).join(path);
        let bytes = fs::read(&place).unwrap();
        fs::remove_file(&place).unwrap();
        fs::write(&place, bytes).unwrap();
        place
    }

    /// Writes what the hub said about the files of `main`: path, size, and SHA-256 or git's SHA-1.
    pub(super) fn add_tree(&self, name: &str, version: u64, files: &[(&str, u64, &str)]) {
        let file = |(path, size, digest): &(&str, u64, &str)| {
            let file = match digest.len() {
                40 => json!({ "size": size, "blob_id": digest }),
                _ => {
                    json!({ "size": size, "blob_id": "0".repeat(40), "lfs_sha256": digest, "lfs_size": size })
                }
            };
            ((*path).to_owned(), file)
        };
        let files: serde_json::Map<String, Json> = files.iter().map(file).collect();
        let folder = self.repository(name).join("trees");
        fs::create_dir_all(&folder).unwrap();
        let tree = json!({ "format_version": version, "files": files });
        fs::write(folder.join(format!("{COMMIT}.json")), tree.to_string()).unwrap();
    }

    pub(super) fn import(&self, daemon: &TestDaemon, more: &[&str]) -> Run {
        let from = format!("--from-hf={}", self.0.display());
        daemon.command().run(["import", &from, "--json"].iter().chain(more))
    }
}
