//! Verification of a model that is in memory, compared with one SHA-256 pass per core over the same files.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blobd_tests::model::{Dimensions, ModelFile};

use crate::Setup;
use crate::measure::{Costs, Outcome, digest_of, gib, run as run_command};

/// With fewer, most of the bytes are in the two tensors that a model has once, and the time is that of the
/// largest blob. A real model has 32.
const MIN_BLOCKS: u32 = 12;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let (file, root) = (directory.path().join("model.gguf"), directory.path().join("store"));
    let dimensions = Dimensions { block_count: setup.blocks.max(MIN_BLOCKS), ..Dimensions::LLAMA3_8B };
    let size = ModelFile::llama("bench", dimensions).write_file(&file)?;
    let blobd = || {
        let mut blobd = Command::new(&setup.blobd);
        blobd.arg("--root").arg(&root);
        blobd
    };
    run_command(blobd().arg("import").arg(&file))?;
    std::fs::remove_file(&file)?;
    let blobs: Vec<PathBuf> =
        std::fs::read_dir(root.join("blobs"))?.map(|entry| Ok(entry?.path())).collect::<Outcome<_>>()?;
    println!("\nverification of {:.2} GiB in {} blobs, in memory", gib(size), blobs.len());
    let (mut hash, mut verify) = (Costs::default(), Costs::default());
    for _ in 0..setup.rounds {
        hash.measure(|| hash_all(&blobs))?;
        verify.measure(|| run_command(blobd().arg("verify")))?;
    }
    hash.print("one digest per core", size);
    verify.print("blobd verify", size);
    println!("  speed against one digest per core{:8.2}    (floor 1.4)", verify.wall.ratio(&hash.wall));
    Ok(())
}

/// Each core takes one file after the other.
fn hash_all(files: &[PathBuf]) -> Outcome<()> {
    let next = AtomicUsize::new(0);
    let hash = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            digest_of(file).map_err(|error| error.to_string())?;
        }
        Ok::<(), String>(())
    };
    let cores = thread::available_parallelism()?.get();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(hash)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_panic| "a thread has died")?)
    })
    .map_err(Into::into)
}
