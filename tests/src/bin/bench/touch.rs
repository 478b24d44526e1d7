//! First touch: every page of a warm model once, compared with one plain file of the same bytes.

use std::process::Command;

use blobd_client::residency::Prefetch;
use blobd_store_format::reference::Reference;
use blobd_tests::model::{Dimensions, ModelFile};

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, run as run_command, timed};
use crate::plain_map;

/// 4.4 GiB.
const BLOCKS: u32 = 30;
const PAGE_BYTES: usize = 4096;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let (file, copy) = (directory.path().join("model.gguf"), directory.path().join("copy.gguf"));
    let dimensions = Dimensions { block_count: BLOCKS, ..Dimensions::LLAMA3_8B };
    ModelFile::llama("bench", dimensions).write_file(&file)?;
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(&file)?;
    run_command(Command::new("cp").arg(&file).arg(&copy))?;
    std::fs::remove_file(&file)?;
    let (mut opened, mut plain) = (Series::default(), Series::default());
    let reference: Reference = "bench".parse()?;
    // An import bypasses the page cache.
    for map in daemon.client()?.open(&reference)?.map_all()? {
        map.bytes().prefetch(Prefetch::Populate)?;
    }
    for _ in 0..setup.rounds {
        let map = plain_map::map(&copy)?;
        plain.push(timed(|| Ok(touch(&map)))?.0);
        drop(map);
        let maps = daemon.client()?.open(&reference)?.map_all()?;
        opened.push(timed(|| Ok(maps.iter().map(|map| touch(map)).sum::<u64>()))?.0);
    }
    println!("\nfirst touch of every page, model of 4.4 GiB in the page cache");
    println!("  one file written by cp     {:8.1} ms", plain.seconds() * 1e3);
    println!("  blobd, mapped per tensor   {:8.1} ms", opened.seconds() * 1e3);
    println!("  time against one file      {:8.2}    (limit 1.5)", plain.ratio(&opened));
    Ok(())
}

fn touch(bytes: &[u8]) -> u64 {
    std::hint::black_box(bytes.iter().step_by(PAGE_BYTES).map(|byte| u64::from(*byte)).sum())
}
