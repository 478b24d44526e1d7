//! What must hold after every crash, the same for all parts of this program.
//!
//! | | invariant |
//! |---|---|
//! | I1 | every name in `blobs/` is the SHA-256 of its file, whose mode is 0444 |
//! | I2 | every manifest parses, what it needs is there at its right size, and its file comes out |
//! | I3 | every change that was acknowledged before the crash is there |
//! | I4 | every other change has happened wholly or not at all |
//! | I5 | `staging/` is empty after a start |
//! | I6 | the index is what a rebuild makes of the disk |
//! | I7 | the store opens and works without a manual step; pulls that were interrupted go on |
//! | I8 | `df` says what the files take on disk |
//!
//! The files are read here by the letter of `docs/STORE-FORMAT.md`, without any code of the product.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
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
use crate::stock::Sample;
use crate::workload::{import, pull};

/// A store that a crash has left, and what may be done with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'s> {
    /// Where it is.
    pub(crate) root: &'s Path,
    /// The configuration of its daemon.
    pub(crate) config: &'s Path,
    /// A model that the store has not seen.
    pub(crate) probe: &'s Sample,
    /// What may have been on its way.
    pub(crate) pulled: &'s [Sample],
}

/// Starts the real daemon on a store that a crash has left, lets it work, and checks all of the
/// above. Returns what the store holds.
///
/// # Errors
/// The first violation.
pub(crate) fn check(subject: Subject<'_>, history: &History, crash: u64) -> Outcome<Contents> {
    let Subject { root, config, probe, pulled } = subject;
    caught(|| {
        check_names(root)?;
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
        ensure(exported_models(&daemon.command())? == contents, || "I7: other models after gc".to_owned())?;
        Ok(contents)
    })
}

/// Turns a panic into an error: that is how the harness of the tests says no.
///
/// # Errors
/// That, or what `work` returns.
pub(crate) fn caught<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or("a panic without a text").to_owned().into())
    })
}

/// Every model and the SHA-256 of its file, as commands show and export them.
///
/// # Errors
/// A model that is damaged or does not come out.
pub(crate) fn exported_models(blobd: &Blobd) -> Outcome<Contents> {
    let list = blobd.line("ls --json").succeeds().json();
    let mut contents = Contents::new();
    for model in list["models"].as_array().ok_or("ls --json without models")? {
        ensure(model["damage"].is_null(), || format!("I2: {model}"))?;
        let name = model["name"].as_str().ok_or("a model without a name")?;
        let file = blobd.line(&format!("export {name} -o -")).succeeds().stdout;
        contents.insert(name.trim_end_matches(":latest").to_owned(), sha256(&file));
    }
    Ok(contents)
}

/// I1.
fn check_names(root: &Path) -> Outcome<()> {
    let checked = caught(|| Ok(check_blobs(root)));
    checked.map(drop).map_err(|violation| format!("I1: {violation}").into())
}

/// The blobs that the manifests need, those in the trash included, all of which are there (I2).
///
/// # Errors
/// What is missing or does not parse.
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

/// The blobs of one file of a model, each at least as long as is needed of it.
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
        "another file's recipe".to_owned()
    })?;
    let mut blobs = Vec::new();
    for piece in recipe["pieces"].as_array().ok_or("a recipe without pieces")? {
        if let Some(digest) = piece["blob"].as_str() {
            let end =
                piece["offset"].as_u64().unwrap_or_default() + piece["length"].as_u64().unwrap_or_default();
            blobs.push(blob_of_length(root, digest, end)?);
        }
    }
    Ok(blobs)
}

fn blob_of_length(root: &Path, digest: &str, least: u64) -> Outcome<String> {
    let name = digest.replace(':', "-");
    let metadata =
        fs::metadata(root.join("blobs").join(&name)).map_err(|error| format!("{digest}: {error}"))?;
    ensure(metadata.len() >= least, || format!("{digest}: {} bytes, {least} needed", metadata.len()))?;
    Ok(name)
}

/// What a download that is not finished keeps: its own blobs, as far as they are in the store. The
/// journal's end may be torn, so more than that may be named.
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
        for piece in if recipe.exists() { parse(&recipe)? } else { Json::Null }["pieces"]
            .as_array()
            .into_iter()
            .flatten()
        {
            kept.extend(piece["blob"].as_str().map(|digest| digest.replace(':', "-")));
        }
    }
    Ok(kept)
}

/// I8. What files take may change for a moment after they were written, so it is looked at before
/// and after.
fn check_usage(blobd: &Blobd, root: &Path) -> Outcome<()> {
    let before = bytes_on_disk(root)?;
    let reported = blobd.line("df --json").succeeds().json()["physical_bytes"].as_u64();
    let after = bytes_on_disk(root)?;
    ensure(reported == Some(before) || reported == Some(after), || {
        format!("I8: df says {reported:?}, the files take {before}, then {after}")
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
    let answer = blobd.line("reindex --json").succeeds().json();
    ensure(answer["differences"] == 0, || format!("I6: the index is not what is on disk: {answer}"))
}

/// A collection takes all that nothing needs, and nothing else.
fn check_collection(blobd: &Blobd, root: &Path) -> Outcome<()> {
    let answer = collected(blobd);
    let left: BTreeSet<String> = names(&root.join("blobs")).into_iter().collect();
    let (needed, kept) = (needed_blobs(root)?, kept_by_downloads(root)?);
    let is_right = needed.is_subset(&left) && left.difference(&needed).all(|blob| kept.contains(blob));
    ensure(is_right, || {
        format!("I7: after gc ({answer}): {left:?} are there, {needed:?} are needed, {kept:?} may be kept")
    })
}

/// What `gc` answers as soon as it keeps nothing for anybody: the maps of a client that was killed,
/// and the daemon's own reading of what it verifies, are gone a moment later.
fn collected(blobd: &Blobd) -> Json {
    const MAX_WAIT: Duration = Duration::from_secs(10);
    let since = Instant::now();
    loop {
        let answer = blobd.line("gc --json").succeeds().json();
        let keeps = answer["kept"].as_array().is_some_and(|kept| !kept.is_empty());
        if !keeps || since.elapsed() > MAX_WAIT {
            return answer;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// I7: what a user does next is done, and leaves nothing.
fn check_work(blobd: &Blobd, probe: &Sample) -> Outcome<()> {
    import(blobd, probe, "probe").succeeds();
    let file = blobd.line("export probe -o -").succeeds().stdout;
    ensure(sha256(&file) == probe.digest, || "I7: a new model comes out as another one".to_owned())?;
    blobd.line("rm probe").succeeds();
    Ok(())
}

/// I7: a pull that was on its way goes on with what is there, and comes out right.
fn check_pulls(blobd: &Blobd, root: &Path, pulled: &[Sample]) -> Outcome<()> {
    let begun = names(&root.join("partial"));
    for sample in pulled.iter().filter(|sample| begun.contains(&format!("sha256-{}", sample.digest))) {
        pull(blobd, sample, "resumed").succeeds();
        let file = blobd.line("export resumed -o -").succeeds().stdout;
        ensure(sha256(&file) == sample.digest, || "I7: a resumed pull comes out as another file".to_owned())?;
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
