//! `blobd demo`: a store from one end to the other, on this machine alone.
//!
//! Models are made, one is pulled over HTTP from a registry on the loopback interface, its
//! relatives are imported, two processes open it, the daemon is killed, files are exported and
//! compared. Everything that is shown is done by the parts that do it elsewhere: this very binary
//! as daemon and as command line, the client library in processes of its own. Only the weights are
//! made up, and the registry is a small one.
//!
//! It promises to leave nothing behind, to need neither root nor a network, and to fail when
//! anything that it shows is not what it should be.

mod cast;
mod error;
mod memory;
mod offer;
mod processes;
pub(crate) mod reader;
mod report;
mod screen;
mod stage;

use std::time::Instant;

use blobd_client::protocol::response::{DiskUsage, ModelSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use self::cast::{Cast, ModelFile};
pub(crate) use self::error::DemoError;
use self::error::expect;
use self::processes::{DaemonProcess, ReaderProcess};
use self::reader::{Question, Rehashed};
use self::report::{Findings, Pulled, Reading};
use self::stage::{Stage, digest_of_file};
use crate::size::human_bytes;

/// Runs the demo. Blocks for some seconds; must not be called on an async worker.
///
/// # Errors
/// [`DemoError`] when a part fails or shows something wrong. Processes and files are gone then too.
pub(crate) fn run() -> Result<(), DemoError> {
    let started = Instant::now();
    let stage = Stage::set_up()?;
    let played = play(&stage);
    // Ctrl-C ends the commands too; what they say then is not what happened.
    stage.check_interrupted()?;
    let findings = played?;
    drop(stage);
    screen::heading("Summary")?;
    screen::facts(&report::summary(&findings, started.elapsed()))
}

fn play(stage: &Stage) -> Result<Findings, DemoError> {
    screen::text(&format!(
        "A model store from one end to the other, in {}, which is gone afterwards: BLOBD_ROOT and \
         BLOBD_SOCKET point there. Registry, daemon, commands and clients are real; only the weights \
         are made up.",
        stage.directory().display()
    ))?;
    let cast = make_models(stage)?;
    let (pulled, daemon) = pull(stage, &cast.base)?;
    let disk = import_others(stage, &cast)?;
    let (mut readers, readings) = open(stage, &cast.base)?;
    let daemon = kill_and_restart(stage, daemon, &mut readers)?;
    drop(readers);
    for model in [&cast.base, &cast.separate] {
        export(stage, model)?;
    }
    remove(stage, &cast.tuned)?;
    daemon.stop()?;
    Ok(Findings { pulled, disk, readings })
}

fn make_models(stage: &Stage) -> Result<Cast, DemoError> {
    screen::heading("1  Make four models")?;
    let cast = Cast::make(stage)?;
    screen::output(&cast.table())?;
    Ok(cast)
}

fn pull(stage: &Stage, base: &ModelFile) -> Result<(Pulled, DaemonProcess), DemoError> {
    screen::heading("2  Pull the first")?;
    let reference: Reference = base.reference.parse()?;
    let registry = stage.start_registry()?;
    let size = offer::offer(&registry, &reference, base)?;
    screen::text(&format!("A registry that speaks Ollama's protocol listens on {}.", registry.url()))?;
    screen::command("blobd serve &")?;
    let daemon = DaemonProcess::start(stage)?;
    let started = Instant::now();
    stage.run(&["pull", base.reference])?;
    let pulled = Pulled { bytes: registry.bytes_served(), time: started.elapsed() };
    expect("bytes that the registry has served", &pulled.bytes, &size)?;
    let stored = stored_file(stage, base)?;
    expect(&format!("digest of {}", base.reference), &stored, &base.digest)?;
    base.delete()?;
    Ok((pulled, daemon))
}

/// The digest of a model's weights, as the daemon knows it.
fn stored_file(stage: &Stage, model: &ModelFile) -> Result<Digest, DemoError> {
    let details = stage.client()?.model(&model.reference.parse()?)?;
    let weights = details.layers.iter().find(|layer| layer.media_type.component() == "model");
    Ok(weights.map_or_else(|| Digest::of(b""), |layer| layer.digest))
}

fn import_others(stage: &Stage, cast: &Cast) -> Result<DiskUsage, DemoError> {
    screen::heading("3  Import the others")?;
    for model in [&cast.tuned, &cast.stacked, &cast.separate] {
        let before = stage.client()?.disk_usage()?.physical_bytes;
        stage.run(&["import", &model.file_name(), "--name", model.reference])?;
        let after = stage.client()?.disk_usage()?.physical_bytes;
        let grown = after.saturating_sub(before);
        if model.is_relative && grown > model.size / 10 {
            return Err(DemoError::Mismatch {
                what: format!("disk space taken by {}", model.reference),
                found: human_bytes(grown),
                expected: format!("less than a tenth of {}", human_bytes(model.size)),
            });
        }
        let stored = stored_file(stage, model)?;
        expect(&format!("digest of {}", model.reference), &stored, &model.digest)?;
        model.delete()?;
    }
    screen::text("The original files are deleted now: the store has all that is in them.")?;
    stage.run(&["ls"])?;
    stage.run(&["df"])?;
    Ok(stage.client()?.disk_usage()?)
}

fn open(stage: &Stage, model: &ModelFile) -> Result<(Vec<ReaderProcess>, Vec<Reading>), DemoError> {
    screen::heading(&format!("4  Open {} in two processes", model.reference))?;
    screen::text(
        "Each connects to the socket, gets one descriptor per tensor, maps them all, hashes what it \
         sees and compares with the daemon's table.",
    )?;
    let (mut readers, mut reports) = (Vec::new(), Vec::new());
    // One after the other, so that neither slows down the other's clock.
    for number in 1..=2 {
        let mut reader = ReaderProcess::start(stage, number, model.reference)?;
        let opened = reader.opened()?;
        screen::output(&report::opened(number, reader.pid(), &opened))?;
        expect("tensors opened", &opened.tensor_count, &(model.tensor_count as u64))?;
        readers.push(reader);
        reports.push(opened);
    }
    stage.run(&["ps"])?;
    let mut readings = Vec::new();
    for (reader, opened) in readers.iter_mut().zip(reports) {
        readings.push(Reading { opened, memory: reader.ask(Question::Memory)? });
    }
    screen::output(&report::memory_table(&readings))?;
    check_sharing(&readings)?;
    Ok((readers, readings))
}

/// Shared pages count once in the sum of all PSS; a tenth is left for those that are half empty.
fn check_sharing(readings: &[Reading]) -> Result<(), DemoError> {
    let one_copy = readings.iter().map(|reading| reading.opened.tensor_bytes).max().unwrap_or_default();
    let all = report::memory_of_all(readings).weights_pss_bytes;
    if all <= one_copy / 10 * 11 {
        return Ok(());
    }
    let what = "weights in memory".to_owned();
    Err(DemoError::Mismatch { what, found: human_bytes(all), expected: human_bytes(one_copy) })
}

fn kill_and_restart(
    stage: &Stage,
    daemon: DaemonProcess,
    readers: &mut [ReaderProcess],
) -> Result<DaemonProcess, DemoError> {
    screen::heading("5  Kill the daemon")?;
    let before = models(stage)?;
    screen::command(&format!("kill -9 {}", daemon.pid()))?;
    daemon.kill()?;
    for reader in readers {
        let Rehashed { bytes } = reader.ask(Question::Rehash)?;
        let (number, bytes) = (reader.number(), human_bytes(bytes));
        screen::output(&format!("reader {number} has hashed its maps again: {bytes}, unchanged"))?;
    }
    screen::command("blobd serve &")?;
    let daemon = DaemonProcess::start(stage)?;
    stage.run(&["ls"])?;
    expect("models after the restart", &names(&models(stage)?), &names(&before))?;
    Ok(daemon)
}

fn models(stage: &Stage) -> Result<Vec<ModelSummary>, DemoError> {
    Ok(stage.client()?.models()?.models)
}

fn names(models: &[ModelSummary]) -> String {
    let name = |model: &ModelSummary| format!("{} {}", model.name, model.digest);
    models.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn export(stage: &Stage, model: &ModelFile) -> Result<(), DemoError> {
    const FILE: &str = "exported.gguf";
    if model.reference == cast::BASE {
        screen::heading("6  Export")?;
    }
    stage.run(&["export", model.reference, "-o", FILE])?;
    let found = digest_of_file(&stage.path(FILE))?;
    let rows = [("original", model.digest.to_hex()), ("exported", found.to_hex())];
    screen::facts(&rows)?;
    expect(&format!("digest of the exported {}", model.reference), &found, &model.digest)?;
    std::fs::remove_file(stage.path(FILE)).map_err(DemoError::io(FILE))
}

fn remove(stage: &Stage, model: &ModelFile) -> Result<(), DemoError> {
    screen::heading("7  Remove")?;
    let before = stage.client()?.disk_usage()?.physical_bytes;
    stage.run(&["rm", model.reference])?;
    let after = stage.client()?.disk_usage()?.physical_bytes;
    screen::output(&format!("on disk: {} before, {} after", human_bytes(before), human_bytes(after)))?;
    if after < before {
        return Ok(());
    }
    let what = format!("disk space after the removal of {}", model.reference);
    Err(DemoError::Mismatch {
        what,
        found: human_bytes(after),
        expected: format!("less than {}", human_bytes(before)),
    })
}
