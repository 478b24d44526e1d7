//! Open: from `connect` to the last tensor mapped, against opening and mapping as many plain files.

use std::path::{Path, PathBuf};

use blobd::demo::models::{Dimensions, SyntheticModel};
use blobd_client::model::{OpenModel, TensorMap};
use blobd_store_format::reference::Reference;

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, timed};
use crate::plain_map;

/// Opens are short, so there are many.
const OPENS_PER_ROUND: usize = 30;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let file = directory.path().join("model.gguf");
    let model = SyntheticModel::llama("bench", Dimensions::SMALL_LLAMA);
    model.write_to(&file)?;
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(&file)?;
    let paths = plain_files(directory.path(), model.tensor_count())?;
    let (mut opens, mut plains) = (Series::default(), Series::default());
    for _ in 0..setup.rounds * OPENS_PER_ROUND {
        opens.push(timed(|| open_and_map(&daemon))?.0);
        plains.push(timed(|| paths.iter().map(|path| plain_map::map(path)).collect::<Outcome<Vec<_>>>())?.0);
    }
    println!(
        "\nopen of {} tensors, daemon warm, from connect to the last tensor mapped",
        model.tensor_count()
    );
    let (median, p90) = (opens.seconds() * 1e3, opens.quantile(0.9) * 1e3);
    println!("  blobd                      {median:8.2} ms median, {p90:.2} ms p90 (limit 2)");
    println!("  open + mmap, plain files   {:8.2} ms median", plains.seconds() * 1e3);
    Ok(())
}

/// The model is returned too: what it takes to close it is not part of opening it.
fn open_and_map(daemon: &Daemon) -> Outcome<(OpenModel, Vec<TensorMap>)> {
    let reference: Reference = "bench".parse()?;
    let model = daemon.client()?.open(&reference)?;
    let maps = model.map_all()?;
    Ok((model, maps))
}

fn plain_files(directory: &Path, count: usize) -> Outcome<Vec<PathBuf>> {
    let paths: Vec<_> = (0..count).map(|number| directory.join(number.to_string())).collect();
    for path in &paths {
        std::fs::write(path, vec![1; 128 << 10])?;
    }
    Ok(paths)
}
