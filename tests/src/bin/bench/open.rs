//! Open: the time from `connect` until the last tensor is mapped. The bound: one thread opens the same files
//! and passes them in the same batches to another, which maps them, without any protocol.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::connection::{receive_message, send_message};
use blobd_store_format::reference::Reference;
use blobd_tests::model::{Dimensions, ModelFile};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, timed};
use crate::plain_map;

/// Many, because opens are short.
const OPENS_PER_ROUND: usize = 30;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    open_of_a_dense_model(setup)?;
    open_with_few_files(setup)
}

/// A mixture of experts has more tensors than a process may have open files on some systems. Then each is
/// mapped when it arrives, and its descriptor is closed.
fn open_with_few_files(setup: &Setup) -> Outcome<()> {
    const FEW: u64 = 256;
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let model = ModelFile::deepseek_v3();
    let file = model.write_to(directory.path(), "bench.gguf");
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(&file)?;
    let paths = plain_files(directory.path(), model.tensors.len(), 4 << 10)?;
    println!("\nopen of {} tensors, from connect to the last tensor mapped", model.tensors.len());
    let allowed = getrlimit(Resource::Nofile);
    for limit in [allowed.current.unwrap_or(u64::MAX), FEW] {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: allowed.maximum })?;
        let (mut opens, mut floors) = (Series::default(), Series::default());
        for _ in 0..setup.rounds * OPENS_PER_ROUND {
            opens.push(timed(|| open_and_map(&daemon))?.0);
            floors.push(timed(|| pass_and_map(&paths))?.0);
        }
        let (median, p90) = (opens.seconds() * 1e3, opens.quantile(0.9) * 1e3);
        println!("  {limit:8} files allowed     {median:8.2} ms median, {p90:.2} ms p90 (limit 5)");
        println!("    bare system calls        {:8.2} ms median", floors.seconds() * 1e3);
        println!("    time against bare calls  {:8.2}", floors.ratio(&opens));
    }
    Ok(setrlimit(Resource::Nofile, allowed)?)
}

fn open_of_a_dense_model(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let file = directory.path().join("model.gguf");
    let model = ModelFile::llama("bench", Dimensions::SMALL_LLAMA);
    model.write_file(&file)?;
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(&file)?;
    let paths = plain_files(directory.path(), model.tensors.len(), 128 << 10)?;
    let (mut opens, mut floors) = (Series::default(), Series::default());
    for _ in 0..setup.rounds * OPENS_PER_ROUND {
        opens.push(timed(|| open_and_map(&daemon))?.0);
        floors.push(timed(|| pass_and_map(&paths))?.0);
    }
    println!(
        "\nopen of {} tensors, daemon warm, from connect to the last tensor mapped",
        model.tensors.len()
    );
    let (median, p90) = (opens.seconds() * 1e3, opens.quantile(0.9) * 1e3);
    println!("  blobd                      {median:8.2} ms median, {p90:.2} ms p90 (limit 2)");
    println!("  bare system calls          {:8.2} ms median", floors.seconds() * 1e3);
    println!(
        "  time against bare calls    {:8.2}    (limit 2.5: 2 ms where they take 0.8)",
        floors.ratio(&opens)
    );
    Ok(())
}

/// Returns the model, too, so that closing it is not measured.
fn open_and_map(daemon: &Daemon) -> Outcome<(OpenModel, Vec<TensorMap>)> {
    let reference: Reference = "bench".parse()?;
    let model = daemon.client()?.open(&reference)?;
    let maps = model.map_all()?;
    Ok((model, maps))
}

fn pass_and_map(paths: &[PathBuf]) -> Outcome<Vec<memmap2::Mmap>> {
    let (ours, theirs) = UnixStream::pair()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || -> std::io::Result<()> {
            for batch in paths.chunks(MAX_FDS_PER_BATCH) {
                let files: Vec<File> = batch.iter().map(File::open).collect::<Result<_, _>>()?;
                let fds: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
                send_message(&theirs, &[0], &fds)?;
            }
            Ok(())
        });
        let (mut byte, mut fds) = ([0], VecDeque::<OwnedFd>::new());
        let mut maps = Vec::with_capacity(paths.len());
        while maps.len() < paths.len() && receive_message(&ours, &mut byte, &mut fds, MAX_FDS_PER_BATCH)? > 0
        {
            for fd in fds.drain(..) {
                maps.push(plain_map::map_file(&fd.into())?);
            }
        }
        sender.join().map_err(|_panic| "the sender panicked")??;
        Ok(maps)
    })
}

fn plain_files(directory: &Path, count: usize, length: usize) -> Outcome<Vec<PathBuf>> {
    let paths: Vec<_> = (0..count).map(|number| directory.join(number.to_string())).collect();
    for path in &paths {
        std::fs::write(path, vec![1; length])?;
    }
    Ok(paths)
}
