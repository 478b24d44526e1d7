//! Stores written by earlier blobds: every later version must read them.
//!
//! `golden/2146c82.tar.gz` was written by the daemon of that commit: three GGUF files were imported, of which
//! two share tensors and one has expert groups, one of them under a second name; one tag was pinned; a fourth
//! model was moved to the trash with `rm --keep`; then the daemon was stopped. The reserve, which is empty
//! space, is left out.
//!
//! `golden/91dd949.tar.gz` has recipes of versions 1 to 4, of which the first three are of archives and files that were
//! pulled and imported: an archive, the same archive compressed with gzip and with zstd, a GGUF file. In `lower/` is
//! a store with a GGUF file, which a tag of the store above it names, so that its configuration has a recipe of
//! version 4.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_store_format::recipe::seal;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::oracle::sha256_of;
use blobd_tests::store_dir::check_blobs;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use serde_json::Value;
use tempfile::TempDir;

const STORE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/2146c82.tar.gz");
const ALL_VERSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/91dd949.tar.gz");

/// The models, and the SHA-256 of the file that each was imported from.
const MODELS: [(&str, &str); 4] = [
    ("copy:latest", "e48a5fdde6f28663b5efafbfa949d0f2146db148f82e5eacae19e58e6e1e295d"),
    ("dense:latest", "e48a5fdde6f28663b5efafbfa949d0f2146db148f82e5eacae19e58e6e1e295d"),
    ("experts:latest", "7874dc38a29154a33ff6e9601fae7be7d08487509d710e793cbedfd7762dd34d"),
    ("relative:latest", "7b1ba525c953e2dace26751a5de4c203cc6cf1dbe0298b05404ac510b5481749"),
];
const REMOVED: (&str, &str) =
    ("removed:latest", "a3ea13b9dd8aa2da03976bc7dc9e2adbc923823240afd9f3813a5b1503b00470");

/// A copy of the store in `store`.
fn unpacked() -> TempDir {
    unpacked_from(STORE)
}

fn unpacked_from(archive: &str) -> TempDir {
    let folder = tmpfs_directory();
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--gzip", "--preserve-permissions", "--no-same-owner", "--file", archive]);
    let output = tar.arg("--directory").arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    folder
}

fn check_export(blobd: &Blobd, (name, digest): (&str, &str)) {
    let exported = blobd.run(["export", name, "-o", "-"]).succeeds().stdout;
    assert_eq!(sha256_of(&mut exported.as_slice()), digest, "{name}");
}

fn check_store(blobd: &Blobd, root: &Path) {
    let listed = blobd.line("ls --json").succeeds().json();
    let names = listed["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap());
    assert!(names.eq(MODELS.map(|(name, _)| name)), "{listed}");
    for model in MODELS {
        check_export(blobd, model);
    }
    blobd.line("verify").succeeds();
    let digests = check_blobs(root);
    let plan = blobd.line("gc --dry-run --json").succeeds().json();
    assert_eq!(plan["freed_bytes"], 0, "{plan}");
    let shown = blobd.line("show experts --json").succeeds().json();
    let experts = |tensor: &Value| {
        tensor["name"].as_str().unwrap().contains("_exps.").then(|| tensor["experts"]["count"].clone())
    };
    let groups: Vec<Value> = shown["tensors"].as_array().unwrap().iter().filter_map(experts).collect();
    assert!(groups.len() == 3 && groups.iter().all(|count| count == 4), "{shown}");
    let pinned = blobd.line("rm dense --json").exits_with(7).error();
    assert!(pinned.message.contains("pinned"), "{pinned}");
    blobd.line("undelete removed").succeeds();
    check_export(blobd, REMOVED);
    assert_eq!(check_blobs(root), digests, "what was in the trash was there");
    blobd.line("rm copy relative removed").succeeds();
    check_export(blobd, MODELS[1]);
    assert!(check_blobs(root).len() < digests.len());
}

#[test]
fn store_of_an_earlier_version_is_read_by_commands() {
    let folder = unpacked();
    let root = folder.path().join("store");
    check_store(&Blobd::at_root(&root), &root);
}

#[test]
fn store_of_an_earlier_version_is_served() {
    let daemon = TestDaemon::start_in(unpacked());
    check_store(&daemon.command(), daemon.root());
}

/// The copy has other inodes and times, so the test writes them into the marker `CLEAN`.
#[test]
fn index_of_an_earlier_version_is_loaded() {
    let folder = unpacked();
    let root = folder.path().join("store");
    let mut marker: Value = serde_json::from_slice(&fs::read(root.join("index/CLEAN")).unwrap()).unwrap();
    for directory in ["blobs", "recipes"] {
        let status = fs::metadata(root.join(directory)).unwrap();
        marker["directories"][directory] =
            [status.ino().cast_signed(), status.ctime(), status.ctime_nsec()].into();
    }
    fs::write(root.join("index/CLEAN"), marker.to_string()).unwrap();
    let daemon = TestDaemon::start_in(folder);
    eventually("the index is ready", || daemon.log().contains("index: "));
    assert!(daemon.log().contains("index: loaded without a rebuild"), "{}", daemon.log());
    let report = daemon.command().line("reindex --json").succeeds().json();
    assert_eq!(report["differences"], 0, "{report}");
    check_store(&daemon.command(), daemon.root());
}

/// Name, what an export of its weights has, and the version of its recipe. The first two share their tensors.
const VERSIONS: [(&str, &str, u32); 5] = [
    ("above", "3cbbcdb422213140784ea45ffb779e7e6012cd04c16953b6ce9bc7c0f26ad76a", 1),
    ("archive", "9eda91031258ee95fcbd3b9596f89879622296fe7b2ff97dec130d5af6282554", 2),
    ("packed", "9eda91031258ee95fcbd3b9596f89879622296fe7b2ff97dec130d5af6282554", 3),
    ("plain", "800d021f11792694463e3907c59e88961bec7ac585dde4350210c78517bb0969", 1),
    ("zpacked", "9eda91031258ee95fcbd3b9596f89879622296fe7b2ff97dec130d5af6282554", 3),
];

/// A daemon on a copy of the store with recipes of all versions, above its lower store.
fn all_versions() -> (TempDir, TestDaemon) {
    let folder = unpacked_from(ALL_VERSIONS);
    let (root, config) = (folder.path().join("store"), folder.path().join("config.toml"));
    let lower = folder.path().join("lower");
    fs::write(&config, format!("lower = [{lower:?}]\n[scrub]\nrate_bytes_per_second = 0\n")).unwrap();
    let daemon = TestDaemon::start_at(&root, Some(&config));
    (folder, daemon)
}

/// The texts of all recipes, by file name.
fn recipes(root: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(root.join("recipes")).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    entries.map(|path| (name(&path), fs::read_to_string(&path).unwrap())).collect()
}

fn versions<'r>(recipes: impl IntoIterator<Item = &'r String>) -> Vec<u64> {
    let version = |text: &String| serde_json::from_str::<Value>(text).unwrap()["version"].as_u64().unwrap();
    let mut versions: Vec<u64> = recipes.into_iter().map(version).collect();
    versions.sort_unstable();
    versions
}

/// Exports the weights of a model whose archive has other files too.
fn weights(blobd: &Blobd, folder: &Path, name: &str) -> String {
    let target = folder.join(format!("out-{name}"));
    fs::create_dir(&target).unwrap();
    blobd.run(["export", name, "-o", target.to_str().unwrap()]).succeeds();
    let files = walk(&target).into_iter().filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    let files: Vec<_> = files.collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::File::open(&files[0]).map(|mut file| sha256_of(&mut file)).unwrap()
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(walk(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

#[test]
fn recipes_of_all_earlier_versions_are_read_and_not_rewritten() {
    let (folder, daemon) = all_versions();
    let (blobd, root) = (daemon.command(), daemon.root());
    let before = recipes(root);
    assert_eq!(versions(before.values()), [1, 1, 2, 3, 3, 4]);
    for (name, digest, _) in VERSIONS {
        assert_eq!(weights(&blobd, folder.path(), name), digest, "{name}");
        let shown = blobd.run(["show", name, "--json"]).succeeds().json();
        let formats = shown["tensors"].as_array().unwrap().iter().map(|tensor| &tensor["format"]);
        assert!(formats.clone().count() > 5 && formats.into_iter().all(|format| format == "gguf"), "{shown}");
    }
    blobd.line("verify").succeeds();
    check_blobs(root);
    let report = blobd.line("reindex --json").succeeds().json();
    assert_eq!(report["differences"], 0, "{report}");
    blobd.line("doctor").succeeds();
    let plan = blobd.line("gc --dry-run --json").succeeds().json();
    assert_eq!(plan["freed_bytes"], 0, "{plan}");
    // The same file again.
    let plain = folder.path().join("out-plain/plain-latest.gguf");
    let plain = if plain.exists() { plain } else { walk(&folder.path().join("out-plain")).remove(0) };
    blobd.run(["import", plain.to_str().unwrap(), "--name", "again"]).succeeds();
    blobd.line("tag above beside").succeeds();
    assert_eq!(recipes(root), before);
    // The file in the archive is a new file of the store.
    let inner =
        walk(&folder.path().join("out-archive")).into_iter().find(|path| path.ends_with("m/tiny.gguf"));
    blobd.run(["import", inner.unwrap().to_str().unwrap(), "--name", "inner"]).succeeds();
    let after = recipes(root);
    assert_eq!(versions(after.values()), [1, 1, 2, 3, 3, 4, 6]);
    assert!(before.iter().all(|(name, text)| after.get(name) == Some(text)));
    blobd.line("verify").succeeds();
}

#[test]
fn archives_of_earlier_versions_are_collected_without_shared_blobs() {
    let (folder, daemon) = all_versions();
    let (blobd, root) = (daemon.command(), daemon.root());
    blobd.line("rm archive packed").succeeds();
    assert_eq!(versions(recipes(root).values()), [1, 1, 3, 4]);
    let (name, digest, _) = VERSIONS[4];
    assert_eq!(weights(&blobd, folder.path(), name), digest);
    blobd.line("verify").succeeds();
    blobd.line("rm zpacked plain above").succeeds();
    blobd.line("gc").succeeds();
    assert!(recipes(root).is_empty() && fs::read_dir(root.join("blobs")).unwrap().count() == 0);
    assert_eq!(recipes(&folder.path().join("lower")).len(), 1, "the lower store is not changed");
}

/// What a blobd of this version does not know, it does not touch, and it says which build does.
#[test]
fn recipe_of_a_later_version_stops_a_collection_and_is_kept() {
    let (_folder, daemon) = all_versions();
    let (blobd, root) = (daemon.command(), daemon.root());
    let name = format!("sha256-{}.json", VERSIONS[3].1);
    let text = recipes(root)[&name].replace("\"version\":1", "\"version\":8,\"kind\":\"folded\"");
    let body = text.split(",\"check\"").next().unwrap();
    let later = seal(format!("{body}}}").into_bytes());
    let path = root.join("recipes").join(&name);
    fs::remove_file(&path).unwrap();
    fs::write(&path, &later).unwrap();
    let error = blobd.run(["export", "plain", "-o", "-", "--json"]).exits_with(5).error();
    assert!(error.message.contains("version 8, this blobd reads 1 to 7; upgrade blobd"), "{error}");
    let error = blobd.line("gc --json").exits_with(5).error();
    assert!(error.message.contains("version 8, this blobd reads 1 to 7"), "{error}");
    blobd.line("rm archive").succeeds();
    check_export(&blobd, ("above", VERSIONS[0].1));
    assert!(fs::read(&path).unwrap() == later);
    check_blobs(root);
}
