//! Import speed: against `cp` and `sync` on the disk, against the bound of two hash passes and
//! one copy in memory.

use std::path::Path;
use std::process::Command;

use blobd::demo::models::{Dimensions, SyntheticModel};

use crate::Setup;
use crate::balloon::Balloon;
use crate::measure::{Daemon, Outcome, Series, digest_of, gib, mib, run as run_command, timed};

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let file = directory.path().join("model.gguf");
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = SyntheticModel::llama("bench", dimensions).write_to(&file)?;
    println!("\nimport of {:.2} GiB, source in the page cache", gib(size));
    to_disk(setup, &file, size)?;
    to_tmpfs(setup, &file, size)?;
    let daemon = Daemon::start(&setup.blobd, &setup.tmpfs)?;
    daemon.import(&file)?;
    println!("  peak RSS of the daemon     {:8.1} MiB (limit 64)", mib(daemon.peak_rss_bytes()?));
    Ok(())
}

fn to_disk(setup: &Setup, file: &Path, size: u64) -> Outcome<()> {
    let (mut copy, mut import) = (Series::default(), Series::default());
    let _balloon = Balloon::inflate()?;
    // Kept to the end: pages that a deletion frees would go back to the hypervisor, and their
    // next use would be measured as somebody's slowness.
    let mut directories = Vec::new();
    for _ in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.disk)?;
        let target = directory.path().join("copy");
        rustix::fs::sync();
        copy.push(
            timed(|| {
                run_command(Command::new("cp").arg(file).arg(&target))?;
                run_command(Command::new("sync").arg(&target))
            })?
            .0,
        );
        rustix::fs::sync();
        import.push(timed(|| import_to(setup, file, directory.path()))?.0);
        directories.push(directory);
    }
    println!(
        "  disk: cp + sync            {:8.2} s  {:6.2} GiB/s",
        copy.seconds(),
        gib(size) / copy.seconds()
    );
    println!(
        "  disk: blobd import         {:8.2} s  {:6.2} GiB/s",
        import.seconds(),
        gib(size) / import.seconds()
    );
    println!("  disk: speed against cp     {:8.2}    (floor 0.8)", import.ratio(&copy));
    Ok(())
}

fn to_tmpfs(setup: &Setup, file: &Path, size: u64) -> Outcome<()> {
    let (mut copy, mut hash, mut import) = (Series::default(), Series::default(), Series::default());
    let mut bound = Series::default();
    for _ in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.tmpfs)?;
        let target = directory.path().join("copy");
        let copied = timed(|| run_command(Command::new("cp").arg(file).arg(&target)))?.0;
        std::fs::remove_file(&target)?;
        let hashed = timed(|| digest_of(file))?.0;
        import.push(timed(|| import_to(setup, file, directory.path()))?.0);
        copy.push(copied);
        hash.push(hashed);
        let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
        // However many cores there are, the whole file's digest is computed on one.
        bound.push(((hashed * 2 + copied) / cores).max(hashed));
    }
    println!("  tmpfs: cp                  {:8.2} s", copy.seconds());
    println!("  tmpfs: one hash pass       {:8.2} s", hash.seconds());
    println!(
        "  tmpfs: bound               {:8.2} s  (two hash passes and one copy over the cores)",
        bound.seconds()
    );
    println!(
        "  tmpfs: blobd import        {:8.2} s  {:6.2} GiB/s",
        import.seconds(),
        gib(size) / import.seconds()
    );
    println!("  tmpfs: speed against bound {:8.2}    (floor 0.8)", import.ratio(&bound));
    Ok(())
}

/// A process of its own, as `cp` is.
fn import_to(setup: &Setup, file: &Path, directory: &Path) -> Outcome<()> {
    run_command(Command::new(&setup.blobd).arg("--root").arg(directory.join("store")).arg("import").arg(file))
}
