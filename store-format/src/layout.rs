//! Paths in a store: path arithmetic, no file access.
//!
//! Every path is relative to the root and made from checked parts ([`Digest`], [`Reference`]),
//! so none leads out of the store. `docs/STORE-FORMAT.md` describes the whole tree.

use std::path::{Path, PathBuf};

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
/// The signatures of each model that has some, named by its manifest's digest.
pub const SIGNATURES: &str = "signatures";
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

/// Between the parts of a namespace in its directory.
const NAMESPACE_SEPARATOR: &str = "+";

/// The file name of a digest's blob: `sha256-` and 64 hexadecimal digits, as in Ollama's store.
pub fn blob_name(digest: Digest) -> String {
    format!("sha256-{}", digest.to_hex())
}

/// `blobs/sha256-…`.
pub fn blob(digest: Digest) -> PathBuf {
    [BLOBS, &blob_name(digest)].iter().collect()
}

/// The file name of the recipe for the file with this digest.
pub fn recipe_name(file: Digest) -> String {
    format!("sha256-{}.json", file.to_hex())
}

/// `recipes/sha256-….json`.
pub fn recipe(file: Digest) -> PathBuf {
    [RECIPES, &recipe_name(file)].iter().collect()
}

/// `origins/sha256-….json`.
pub fn origin(manifest: Digest) -> PathBuf {
    [ORIGINS, &recipe_name(manifest)].iter().collect()
}

/// `signatures/sha256-….json`.
pub fn signatures(manifest: Digest) -> PathBuf {
    [SIGNATURES, &recipe_name(manifest)].iter().collect()
}

/// `history/sha256-….json`. A flat name, so that the record of a removed name keeps no directories.
pub fn history(reference: &Reference) -> PathBuf {
    [HISTORY, &recipe_name(Digest::of(reference.canonical().as_bytes()))].iter().collect()
}

/// `manifests/<host>/<namespace>/<model>/<tag>`.
pub fn manifest(reference: &Reference) -> PathBuf {
    Path::new(MANIFESTS).join(tag_place(reference))
}

/// The directory of a namespace. Several parts are one directory, `a+b` for `a/b`: with a directory each, the tag `c`
/// of the repository `a/b` and the repository `a/b/c` would have the same path. No part contains a `+`.
pub fn namespace_directory(reference: &Reference) -> String {
    reference.namespace().replace('/', NAMESPACE_SEPARATOR)
}

/// `<host>/<namespace>/<model>/<tag>`. No two models have the same path, even if case is ignored.
fn tag_place(reference: &Reference) -> PathBuf {
    let namespace = namespace_directory(reference);
    [reference.host(), &namespace, reference.model(), reference.tag()].iter().collect()
}

/// The name of the model whose tag is at this place below [`MANIFESTS`].
pub fn parse_tag_place(place: &Path) -> Option<Reference> {
    let mut parts = place.iter().map(|part| part.to_str());
    let mut next = || parts.next().flatten();
    let (host, namespace, model, tag) = (next()?, next()?, next()?, next()?);
    let namespace = namespace.replace(NAMESPACE_SEPARATOR, "/");
    let reference = Reference::from_parts(host, &namespace, model, tag).ok()?;
    parts.next().is_none().then_some(reference)
}

/// `quarantine/sha256-….<seconds>`: a blob that was quarantined at this Unix time.
pub fn quarantined(digest: Digest, unix_seconds: u64) -> PathBuf {
    [QUARANTINE, &format!("{}.{unix_seconds}", blob_name(digest))].iter().collect()
}

/// `partial/sha256-…`: the received part of the file with this digest.
pub fn partial(file: Digest) -> PathBuf {
    [PARTIAL, &blob_name(file)].iter().collect()
}

/// `pins/<host>/<namespace>/<model>/<tag>`.
pub fn pin(reference: &Reference) -> PathBuf {
    Path::new(PINS).join(tag_place(reference))
}

/// `trash/sha256-….json`, named by the digest of the record itself.
pub fn trashed(record: Digest) -> PathBuf {
    [TRASH, &recipe_name(record)].iter().collect()
}

/// Parses a file name in `blobs/`.
pub fn parse_blob_name(name: &str) -> Option<Digest> {
    Digest::from_hex(name.strip_prefix("sha256-")?).ok()
}

/// Parses a file name in `recipes/`, `origins/`, `signatures/`, `history/` or `trash/`.
pub fn parse_recipe_name(name: &str) -> Option<Digest> {
    parse_blob_name(name.strip_suffix(".json")?)
}

/// Parses a file name in `quarantine/` into digest and Unix time.
pub fn parse_quarantined_name(name: &str) -> Option<(Digest, u64)> {
    let (blob, seconds) = name.split_once('.')?;
    // `+7` and `07` parse as numbers, but `quarantined` never writes them.
    let time: u64 = seconds.parse().ok().filter(|time: &u64| time.to_string() == seconds)?;
    Some((parse_blob_name(blob)?, time))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
        for (name, path) in [
            ("llama3:8b", "manifests/registry.ollama.ai/library/llama3/8b"),
            ("localhost:5000/m:1", "manifests/localhost:5000/_/m/1"),
            ("ghcr.io/owner/repo/model:1", "manifests/ghcr.io/owner+repo/model/1"),
            ("ghcr.io/owner/repo:model", "manifests/ghcr.io/owner/repo/model"),
        ] {
            let reference: Reference = name.parse().unwrap();
            assert_eq!(manifest(&reference).to_str(), Some(path));
            assert_eq!(pin(&reference).strip_prefix(PINS), manifest(&reference).strip_prefix(MANIFESTS));
        }
    }

    #[test]
    fn only_places_of_tags_are_names() {
        for place in
            ["", "a", "a/b/c", "a/b/c/d/e", "a/+b/c/d", "a/b+/c/d", "a/b++c/d/e", "a+b/c/d/e", "a/b/c+d/e"]
        {
            assert_eq!(parse_tag_place(Path::new(place)), None, "{place}");
        }
    }

    /// Names made of a few different parts, so that many pairs differ only in case or only in a separator.
    fn alike_name() -> impl Strategy<Value = Reference> {
        let part =
            prop::sample::select(vec!["a", "A", "b", "_", "a.b", "a_b", "a-b", "ab", "_a", "b.", "a..B"]);
        let path = prop::collection::vec(part.clone(), 1..5).prop_map(|parts| parts.join("/"));
        let host = prop::sample::select(vec![
            "",
            "h/",
            "H/",
            "h:80/",
            "hf.co/",
            "HuggingFace.co/",
            "a.b/",
            "[::1]/",
        ]);
        let tag = prop::sample::select(vec!["", ":latest", ":a", ":A", ":b", ":a.b"]);
        let text = (host, path, tag).prop_map(|(host, path, tag)| format!("{host}{path}{tag}"));
        text.prop_filter_map("not a name", |text| text.parse().ok())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn two_names_have_one_path_without_case_only_if_they_are_one_model(a in alike_name(), b in alike_name()) {
            let folded = |reference: &Reference| manifest(reference).to_str().map(str::to_ascii_lowercase);
            prop_assert_eq!(folded(&a) == folded(&b), a.same_model(&b), "{} {}", a, b);
            prop_assert_eq!(history(&a) == history(&b), a.same_model(&b), "{} {}", a, b);
            // No path is both a file's and a directory's.
            prop_assert_eq!(manifest(&a).components().count(), 5);
        }

        #[test]
        fn place_of_a_tag_reads_back_as_its_name(name in alike_name()) {
            let place = manifest(&name);
            let found = parse_tag_place(place.strip_prefix(MANIFESTS).unwrap());
            prop_assert!(found.as_ref().is_some_and(|found| found.same_model(&name)), "{found:?}");
            prop_assert_eq!(found.map(|found| manifest(&found)), Some(place));
        }
    }
}
