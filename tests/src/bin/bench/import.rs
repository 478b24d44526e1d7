//! Import speed: on disk compared with `cp` and `sync`, on tmpfs compared with the bound of one pass for both
//! digests and one copy.

use std::path::Path;
use std::process::Command;

use blobd_tests::model::{Dimensions, ModelFile};

use crate::Setup;
use crate::balloon::Balloon;
use crate::measure::{
    Costs, Daemon, Outcome, Series, digest_of, digests_of_file_and_part, gib, header_bytes, mib,
    run as run_command, timed,
};

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let file = directory.path().join("model.gguf");
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = ModelFile::llama("bench", dimensions).write_file(&file)?;
    println!("\nimport of {:.2} GiB, source in the page cache", gib(size));
    to_disk(setup, &file, size)?;
    to_tmpfs(setup, &file, size)?;
    let daemon = Daemon::start(&setup.blobd, &setup.tmpfs)?;
    daemon.import(&file)?;
    println!("  peak RSS of the daemon     {:8.1} MiB (limit 64)", mib(daemon.peak_rss_bytes()?));
    Ok(())
}

fn to_disk(setup: &Setup, file: &Path, size: u64) -> Outcome<()> {
    let (mut copy, mut import) = (Costs::default(), Costs::default());
    let _balloon = Balloon::inflate()?;
    // Deleted only at the end: freed pages would be returned to the hypervisor, and their next use would be
    // slow.
    let mut directories = Vec::new();
    for round in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.disk)?;
        let target = directory.path().join("copy");
        // The order alternates, because the first run may make the second one faster or slower.
        let copy_first = round % 2 == 0;
        for copy_is_next in [copy_first, !copy_first] {
            rustix::fs::sync();
            if copy_is_next {
                copy.measure(|| {
                    run_command(Command::new("cp").arg(file).arg(&target))?;
                    run_command(Command::new("sync").arg(&target))
                })?;
            } else {
                import.measure(|| import_to(setup, file, directory.path()))?;
            }
        }
        directories.push(directory);
    }
    copy.print("disk: cp + sync", size);
    import.print("disk: blobd import", size);
    println!("  disk: speed against cp     {:8.2}    (floor 0.8)", import.wall.ratio(&copy.wall));
    println!("  disk: processor time / cp's{:8.2}", copy.processor.ratio(&import.processor));
    Ok(())
}

fn to_tmpfs(setup: &Setup, file: &Path, size: u64) -> Outcome<()> {
    let (mut copy, mut hash, mut lanes) = (Series::default(), Series::default(), Series::default());
    let (mut import, mut bound) = (Costs::default(), Series::default());
    let header = header_bytes(file)?;
    let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
    for _ in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.tmpfs)?;
        let target = directory.path().join("copy");
        let copied = timed(|| run_command(Command::new("cp").arg(file).arg(&target)))?.0;
        // The copy and the import use pages that were freed just before, not yet returned to the hypervisor.
        std::fs::remove_file(&target)?;
        import.measure(|| import_to(setup, file, directory.path()))?;
        let hashed = timed(|| digest_of(file))?.0;
        let both = timed(|| digests_of_file_and_part(file, header))?.0;
        copy.push(copied);
        hash.push(hashed);
        lanes.push(both);
        // The whole file's digest is always computed on one core.
        bound.push(((both + copied) / cores).max(hashed));
    }
    for (what, series) in [
        ("tmpfs: cp", &copy),
        ("tmpfs: one digest", &hash),
        ("tmpfs: both digests", &lanes),
        ("tmpfs: bound", &bound),
    ] {
        println!("  {what:<25} {:8.2} s", series.seconds());
    }
    import.print("tmpfs: blobd import", size);
    println!("  tmpfs: speed against bound {:8.2}    (floor 0.9)", import.wall.ratio(&bound));
    Ok(())
}

/// A process of its own, as `cp` is.
fn import_to(setup: &Setup, file: &Path, directory: &Path) -> Outcome<()> {
    run_command(Command::new(&setup.blobd).arg("--root").arg(directory.join("store")).arg("import").arg(file))
}
