//! The invariants after every crash, for all parts of this program.
//!
//! | | invariant |
//! |---|---|
//! | I1 | every name in `blobs/` is the SHA-256 of its file, whose mode is 0444 |
//! | I2 | every manifest parses, its blobs and recipes exist in the right size, and its file can be exported |
//! | I3 | every change that was acknowledged before the crash has happened |
//! | I4 | every other change has happened completely or not at all |
//! | I5 | `staging/` is empty after a start |
//! | I6 | the index equals one that is rebuilt from disk |
//! | I7 | the store opens and works without a manual step; interrupted pulls can be resumed |
//! | I8 | `df` reports the space that the files take on disk |
//! | I9 | every file and directory belongs to the store's owner, although root runs the daemon |
//!
//! The files are read here as `docs/STORE-FORMAT.md` specifies, without any code of blobd.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, lchown};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, names, staged};
use serde_json::Value as Json;

use crate::Outcome;
use crate::history::{Contents, History};
use crate::samples::Sample;
use crate::workload::{import, pull};

/// A store after a crash, and the samples for its checks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CrashedStore<'s> {
    /// The store's directory.
    pub(crate) root: &'s Path,
    /// The configuration of its daemon.
    pub(crate) config: &'s Path,
    /// A model that the store has not seen.
    pub(crate) probe: &'s Sample,
    /// The models of which pulls may have been interrupted.
    pub(crate) pulled: &'s [Sample],
}

/// Starts the real daemon on a store after a crash, uses it, and checks all invariants. Returns the store's
/// contents.
///
/// # Errors
/// The first violation.
pub(crate) fn check(store: CrashedStore<'_>, history: &History, crash: u64) -> Outcome<Contents> {
    let CrashedStore { root, config, probe, pulled } = store;
    caught(|| {
        check_names(root)?;
        check_owners(root)?;
        let daemon = TestDaemon::start_at(root, Some(config));
        ensure(staged(root).is_empty(), || format!("I5: {:?} in staging/ after a start", staged(root)))?;
        check_names(root)?;
        needed_blobs(root)?;
        let contents = exported_models(&daemon.command())?;
        history.check(&contents, crash)?;
        check_usage(&daemon.command(), root)?;
        check_index(&daemon.command())?;
        check_collection(&daemon.command(), root)?;
        check_work(&daemon.command(), probe)?;
        check_pulls(&daemon.command(), root, pulled)?;
        check_owners(root)?;
        ensure(exported_models(&daemon.command())? == contents, || "I7: gc changed the models".to_owned())?;
        Ok(contents)
    })
}

/// Turns a panic into an error: the test harness reports failures by panics.
///
/// # Errors
/// The panic's message, or the error that `work` returns.
pub(crate) fn caught<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or("a panic without a message").to_owned().into())
    })
}

/// Every model that `ls` lists, with the SHA-256 of its exported file.
///
/// # Errors
/// When a model is damaged or cannot be exported.
pub(crate) fn exported_models(blobd: &Blobd) -> Outcome<Contents> {
    let list = blobd.line("ls --json").succeeds().json();
    let mut contents = Contents::new();
    for model in list["models"].as_array().ok_or("ls --json without models")? {
        ensure(model["damage"].is_null(), || format!("I2: {model}"))?;
        let name = model["name"].as_str().ok_or("a model without a name")?;
        contents.insert(name.trim_end_matches(":latest").to_owned(), sha256(&exported(blobd, name)?));
    }
    Ok(contents)
}

/// The file of a model, or its shards one after the other.
fn exported(blobd: &Blobd, name: &str) -> Outcome<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let arguments =
        ["export".as_ref(), name.as_ref(), "-o".as_ref(), folder.path().as_os_str(), "--force".as_ref()];
    blobd.run(arguments).succeeds();
    let mut files = fs::read_dir(folder.path())?.map(|file| Ok(file?.path())).collect::<Outcome<Vec<_>>>()?;
    files.sort();
    let files = files.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?;
    Ok(files.concat())
}

/// The user and group that own the stores of these tests. Their daemon runs as root.
const OWNER: (u32, u32) = (65534, 65533);

/// Creates the directory of a store that belongs to [`OWNER`], durably.
///
/// # Errors
/// When that fails.
pub(crate) fn create_owned(root: &Path) -> Outcome<()> {
    fs::create_dir(root)?;
    give_to_owner(root)?;
    rustix::fs::syncfs(fs::File::open(root)?)?;
    Ok(())
}

/// Gives a file or directory to [`OWNER`] if this process is root.
///
/// # Errors
/// When that fails.
pub(crate) fn give_to_owner(path: &Path) -> Outcome<()> {
    if rustix::process::geteuid().is_root() {
        lchown(path, Some(OWNER.0), Some(OWNER.1))?;
    }
    Ok(())
}

/// I9.
fn check_owners(root: &Path) -> Outcome<()> {
    // If the directory was not yet durable, there is no store, and the daemon creates one that belongs to its own user.
    let Ok(owner) = fs::symlink_metadata(root).map(|found| (found.uid(), found.gid())) else { return Ok(()) };
    let mut next = vec![root.to_path_buf()];
    while let Some(path) = next.pop() {
        // The daemon may have removed it meanwhile.
        let Ok(status) = fs::symlink_metadata(&path) else { continue };
        let found = (status.uid(), status.gid());
        ensure(found == owner, || {
            format!("I9: {} belongs to {found:?}, the store to {owner:?}", path.display())
        })?;
        if status.is_dir() {
            next.extend(names(&path).iter().map(|name| path.join(name)));
        }
    }
    Ok(())
}

/// I1.
fn check_names(root: &Path) -> Outcome<()> {
    let checked = caught(|| Ok(check_blobs(root)));
    checked.map(drop).map_err(|violation| format!("I1: {violation}").into())
}

/// The blobs that the manifests need, including manifests in the trash. Checks that all of them exist (I2).
///
/// # Errors
/// The first blob that is missing or file that does not parse.
fn needed_blobs(root: &Path) -> Outcome<BTreeSet<String>> {
    let mut needed = BTreeSet::new();
    let mut manifests = Vec::new();
    for path in files_below(&root.join("manifests"))? {
        manifests.push((parse(&path)?, path));
    }
    for path in files_below(&root.join("trash"))? {
        let record = parse(&path)?;
        let manifest = record["manifest"].as_str().ok_or("a record in the trash without a manifest")?;
        manifests.push((serde_json::from_str(manifest)?, path));
    }
    for (manifest, path) in manifests {
        let layers = manifest["layers"].as_array().ok_or_else(|| format!("{}: no layers", path.display()))?;
        for file in layers.iter().chain([&manifest["config"]]) {
            let of_file =
                blobs_of_file(root, file).map_err(|lack| format!("I2: {}: {lack}", path.display()))?;
            needed.extend(of_file);
        }
    }
    Ok(needed)
}

/// The blobs of one file of a model. Checks that each is long enough.
fn blobs_of_file(root: &Path, file: &Json) -> Outcome<Vec<String>> {
    let digest = file["digest"].as_str().ok_or("a file without a digest")?;
    let recipe = root.join("recipes").join(format!("{}.json", digest.replace(':', "-")));
    if !recipe.exists() {
        return Ok(vec![blob_of_length(
            root,
            digest,
            file["size"].as_u64().ok_or("a file without a size")?,
        )?]);
    }
    let recipe = parse(&recipe)?;
    ensure(recipe["file"] == digest && recipe["size"] == file["size"], || {
        "the recipe names another file or size".to_owned()
    })?;
    let mut blobs = Vec::new();
    for piece in recipe["pieces"].as_array().ok_or("a recipe without pieces")? {
        if let Some(digest) = blob_of(&recipe, piece) {
            let end =
                piece["offset"].as_u64().unwrap_or_default() + piece["length"].as_u64().unwrap_or_default();
            blobs.push(blob_of_length(root, digest, end)?);
        }
    }
    Ok(blobs)
}

/// The digest of the blob that a piece of a recipe names.
fn blob_of<'r>(recipe: &'r Json, piece: &Json) -> Option<&'r str> {
    let number = usize::try_from(piece["blob"].as_u64()?).ok()?;
    recipe["blobs"].get(number)?.as_str()
}

fn blob_of_length(root: &Path, digest: &str, least: u64) -> Outcome<String> {
    let name = digest.replace(':', "-");
    let metadata =
        fs::metadata(root.join("blobs").join(&name)).map_err(|error| format!("{digest}: {error}"))?;
    ensure(metadata.len() >= least, || format!("{digest}: {} bytes, {least} needed", metadata.len()))?;
    Ok(name)
}

/// The blobs that unfinished downloads protect from collection. The end of a journal may be incomplete, so it
/// may name blobs that do not exist.
fn kept_by_downloads(root: &Path) -> Outcome<BTreeSet<String>> {
    const HEAD_BYTES: usize = 48;
    const RECORD_BYTES: usize = 52;
    const STORED: u32 = 3;
    let mut kept = BTreeSet::new();
    for download in names(&root.join("partial")) {
        let journal = fs::read(root.join("partial").join(&download).join("journal")).unwrap_or_default();
        for record in journal.get(HEAD_BYTES..).unwrap_or_default().chunks_exact(RECORD_BYTES) {
            let (kind, digest) = (&record[..4], &record[16..48]);
            if kind == STORED.to_le_bytes() {
                kept.insert(format!(
                    "sha256-{}",
                    digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
                ));
            }
        }
        kept.insert(download.clone());
        let recipe = root.join("recipes").join(format!("{download}.json"));
        let recipe = if recipe.exists() { parse(&recipe)? } else { Json::Null };
        let blobs = recipe["blobs"].as_array().into_iter().flatten();
        kept.extend(blobs.filter_map(Json::as_str).map(|digest| digest.replace(':', "-")));
    }
    Ok(kept)
}

/// I8. The allocated size of files may change shortly after they were written, so it is read before and
/// after.
fn check_usage(blobd: &Blobd, root: &Path) -> Outcome<()> {
    let before = bytes_on_disk(root)?;
    let reported = blobd.line("df --json").succeeds().json()["physical_bytes"].as_u64();
    let after = bytes_on_disk(root)?;
    ensure(reported == Some(before) || reported == Some(after), || {
        format!("I8: df reports {reported:?}, the files took {before} before and {after} after it")
    })
}

fn bytes_on_disk(root: &Path) -> Outcome<u64> {
    let mut blocks = 0;
    for folder in ["blobs", "recipes"] {
        for path in files_below(&root.join(folder))? {
            blocks += fs::symlink_metadata(path)?.blocks();
        }
    }
    Ok(blocks * 512)
}

/// I6.
fn check_index(blobd: &Blobd) -> Outcome<()> {
    let response = blobd.line("reindex --json").succeeds().json();
    ensure(response["differences"] == 0, || format!("I6: the index differs from the disk: {response}"))
}

/// A collection deletes all unneeded blobs, and nothing else.
fn check_collection(blobd: &Blobd, root: &Path) -> Outcome<()> {
    let response = collected(blobd);
    let left: BTreeSet<String> = names(&root.join("blobs")).into_iter().collect();
    let (needed, kept) = (needed_blobs(root)?, kept_by_downloads(root)?);
    let is_right = needed.is_subset(&left) && left.difference(&needed).all(|blob| kept.contains(blob));
    ensure(is_right, || {
        format!("I7: after gc ({response}): {left:?} exist, {needed:?} are needed, {kept:?} may be kept")
    })
}

/// The response of the first `gc` that keeps no unneeded blob for a program. The maps of a killed client, and
/// the files that the daemon verifies, may stay open for a moment.
fn collected(blobd: &Blobd) -> Json {
    const MAX_WAIT: Duration = Duration::from_secs(10);
    let since = Instant::now();
    loop {
        let response = blobd.line("gc --json").succeeds().json();
        let keeps = response["kept"].as_array().is_some_and(|kept| !kept.is_empty());
        if !keeps || since.elapsed() > MAX_WAIT {
            return response;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// I7: a model can be imported, exported and removed.
fn check_work(blobd: &Blobd, probe: &Sample) -> Outcome<()> {
    import(blobd, probe, "probe").succeeds();
    let file = blobd.line("export probe -o -").succeeds().stdout;
    ensure(sha256(&file) == probe.digest, || "I7: a new model is exported with other bytes".to_owned())?;
    blobd.line("rm probe").succeeds();
    Ok(())
}

/// I7: an interrupted pull is resumed and gives the right file.
fn check_pulls(blobd: &Blobd, root: &Path, pulled: &[Sample]) -> Outcome<()> {
    let begun = names(&root.join("partial"));
    for sample in pulled.iter().filter(|sample| begun.contains(&format!("sha256-{}", sample.digest))) {
        pull(blobd, sample, "resumed").succeeds();
        let file = blobd.line("export resumed -o -").succeeds().stdout;
        ensure(sha256(&file) == sample.digest, || "I7: a resumed pull gives other bytes".to_owned())?;
        blobd.line("rm resumed").succeeds();
    }
    Ok(())
}

fn files_below(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let mut files = Vec::new();
    for name in names(folder) {
        let path = folder.join(name);
        if fs::symlink_metadata(&path)?.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

fn parse(path: &Path) -> Outcome<Json> {
    let bytes = fs::read(path)?;
    Ok(serde_json::from_slice(&bytes).map_err(|error| format!("I2: {}: {error}", path.display()))?)
}

fn ensure(holds: bool, violation: impl FnOnce() -> String) -> Outcome<()> {
    if holds { Ok(()) } else { Err(violation().into()) }
}
