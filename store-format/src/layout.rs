//! Paths in a store: path arithmetic, no file access.
//!
//! Every path is relative to the root and made from checked parts ([`Digest`], [`Reference`]),
//! so none leads out of the store. `docs/STORE-FORMAT.md` describes the whole tree.

use std::path::PathBuf;

use crate::digest::Digest;
use crate::reference::Reference;

/// Format version and identity of the store.
pub const STORE_FILE: &str = "store.json";
/// Immutable blobs, named by their digest.
pub const BLOBS: &str = "blobs";
/// Recipes, named by the digest of the file that they rebuild.
pub const RECIPES: &str = "recipes";
/// Manifests, one per tag: `host/namespace/model/tag`.
pub const MANIFESTS: &str = "manifests";
/// Where each model came from, named by its manifest's digest.
pub const ORIGINS: &str = "origins";
/// What each name has meant, named by a digest of the name.
pub const HISTORY: &str = "history";
/// Files that transactions in progress have written.
pub const STAGING: &str = "staging";
/// Downloads that can be resumed.
pub const PARTIAL: &str = "partial";
/// Removed models that can be restored until they expire.
pub const TRASH: &str = "trash";
/// Pinned models: one empty file each, named like its tag.
pub const PINS: &str = "pins";
/// Blobs that failed verification.
pub const QUARANTINE: &str = "quarantine";
/// The audit log, unless the configuration names another directory.
pub const AUDIT: &str = "audit";
/// The position of the background verification.
pub const SCRUB_FILE: &str = "scrub.json";
/// A cache that can be rebuilt from the rest.
pub const INDEX: &str = "index";
/// Locked by the one process that has the store open.
pub const LOCK_FILE: &str = "lock";
/// The socket of a command that has the store open, for other commands.
pub const COMMAND_SOCKET: &str = "command.sock";
/// Space that is released when the disk is full, so that removing still works.
pub const RESERVE_FILE: &str = "reserve";

/// The file name of a digest's blob: `sha256-` and 64 hexadecimal digits, as in Ollama's store.
#[must_use]
pub fn blob_name(digest: Digest) -> String {
    format!("sha256-{}", digest.to_hex())
}

/// `blobs/sha256-…`.
#[must_use]
pub fn blob(digest: Digest) -> PathBuf {
    [BLOBS, &blob_name(digest)].iter().collect()
}

/// The file name of the recipe for the file with this digest.
#[must_use]
pub fn recipe_name(file: Digest) -> String {
    format!("sha256-{}.json", file.to_hex())
}

/// `recipes/sha256-….json`.
#[must_use]
pub fn recipe(file: Digest) -> PathBuf {
    [RECIPES, &recipe_name(file)].iter().collect()
}

/// `origins/sha256-….json`.
#[must_use]
pub fn origin(manifest: Digest) -> PathBuf {
    [ORIGINS, &recipe_name(manifest)].iter().collect()
}

/// `history/sha256-….json`. A flat name, so that the record of a removed name keeps no directories.
#[must_use]
pub fn history(reference: &Reference) -> PathBuf {
    [HISTORY, &recipe_name(Digest::of(reference.canonical().as_bytes()))].iter().collect()
}

/// `manifests/<host>/<namespace>/<model>/<tag>`.
#[must_use]
pub fn manifest(reference: &Reference) -> PathBuf {
    [MANIFESTS, reference.host(), reference.namespace(), reference.model(), reference.tag()].iter().collect()
}

/// `quarantine/sha256-….<seconds>`: a blob that was quarantined at this Unix time.
#[must_use]
pub fn quarantined(digest: Digest, unix_seconds: u64) -> PathBuf {
    [QUARANTINE, &format!("{}.{unix_seconds}", blob_name(digest))].iter().collect()
}

/// `partial/sha256-…`: the received part of the file with this digest.
#[must_use]
pub fn partial(file: Digest) -> PathBuf {
    [PARTIAL, &blob_name(file)].iter().collect()
}

/// `pins/<host>/<namespace>/<model>/<tag>`.
#[must_use]
pub fn pin(reference: &Reference) -> PathBuf {
    [PINS, reference.host(), reference.namespace(), reference.model(), reference.tag()].iter().collect()
}

/// `trash/sha256-….json`, named by the digest of the record itself.
#[must_use]
pub fn trashed(record: Digest) -> PathBuf {
    [TRASH, &recipe_name(record)].iter().collect()
}

/// Parses a file name in `blobs/`.
#[must_use]
pub fn parse_blob_name(name: &str) -> Option<Digest> {
    Digest::from_hex(name.strip_prefix("sha256-")?).ok()
}

/// Parses a file name in `recipes/`, `origins/`, `history/` or `trash/`.
#[must_use]
pub fn parse_recipe_name(name: &str) -> Option<Digest> {
    parse_blob_name(name.strip_suffix(".json")?)
}

/// Parses a file name in `quarantine/` into digest and Unix time.
#[must_use]
pub fn parse_quarantined_name(name: &str) -> Option<(Digest, u64)> {
    let (blob, seconds) = name.split_once('.')?;
    // `+7` and `07` parse as numbers, but `quarantined` never writes them.
    let time: u64 = seconds.parse().ok().filter(|time: &u64| time.to_string() == seconds)?;
    Some((parse_blob_name(blob)?, time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_their_digest() {
        let digest = Digest::of(b"x");
        assert_eq!(parse_blob_name(&blob_name(digest)), Some(digest));
        assert_eq!(parse_recipe_name(&recipe_name(digest)), Some(digest));
        for name in ["", "sha256-", "sha256-00", ".", "..", "sha256-../../etc/passwd", "index.html"] {
            assert_eq!(parse_blob_name(name), None, "{name:?}");
        }
    }

    #[test]
    fn quarantined_name_reads_back_as_digest_and_time() {
        let digest = Digest::of(b"x");
        let path = quarantined(digest, 1_700_000_000);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap();
        assert_eq!(parse_quarantined_name(name), Some((digest, 1_700_000_000)));
        let blob = blob_name(digest);
        for name in
            [blob.clone(), format!("{blob}."), format!("{blob}.+7"), format!("{blob}.1.2"), ".1".into()]
        {
            assert_eq!(parse_quarantined_name(&name), None, "{name:?}");
        }
    }

    #[test]
    fn names_of_one_model_have_one_history() {
        let path = |name: &str| history(&name.parse().unwrap());
        let name = format!("registry.ollama.ai/library/llama3:8b@{}", Digest::of(b"x"));
        assert_eq!(path("llama3:8b"), path("Llama3:8B"));
        assert_eq!(path("llama3:8b"), path(&name));
        assert_ne!(path("llama3:8b"), path("llama3:9b"));
    }

    #[test]
    fn manifest_path_has_the_four_parts_of_the_name() {
        let reference: Reference = "llama3:8b".parse().unwrap();
        assert_eq!(manifest(&reference).to_str(), Some("manifests/registry.ollama.ai/library/llama3/8b"));
    }
}
