//! `blobd demo`: demonstrates a complete store, from pull to removal, without a network.
//!
//! Generates models, pulls one over HTTP from a registry on the loopback interface, imports related models,
//! opens a model in two processes, kills the daemon, and exports and compares files. The daemon and the
//! commands are this binary, and the readers use the client library; only the weights and the registry are
//! made for the demo.
//!
//! It needs neither root nor a network, removes all its files and processes, and fails if any step has an
//! unexpected result.

use std::io;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Instant;

use blobd_cli_common::output::print_json;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::response::ModelSummary;
use blobd_client::protocol::space::DiskUsage;
use blobd_fixtures::model::ModelError;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::{Reference, ReferenceError};
use blobd_store_format::size::human_bytes;

use self::models::{DemoModels, ModelFile};
use self::processes::{DaemonProcess, ReaderProcess};
use self::reader::{Rehashed, Request};
use self::report::{Findings, Pulled, Reading};
use self::sandbox::{Sandbox, digest_of_file};

mod models;
mod processes;
pub(crate) mod reader;
mod report;
mod sandbox;
mod screen;

/// Runs the demo and prints its steps; with `is_json` only its figures. Blocks for some seconds; must not be called on an
/// async worker.
pub(crate) fn run(is_json: bool) -> Result<(), DemoError> {
    let started = Instant::now();
    if is_json {
        screen::silence();
    }
    let sandbox = Sandbox::set_up()?;
    let result = run_steps(&sandbox);
    // Ctrl-C ends the commands too, so their errors do not matter then.
    sandbox.check_interrupted()?;
    let findings = result?;
    drop(sandbox);
    if is_json {
        return Ok(print_json(&report::figures(&findings, started.elapsed()))?);
    }
    screen::heading("Summary")?;
    screen::facts(&report::summary(&findings, started.elapsed()))
}

fn run_steps(sandbox: &Sandbox) -> Result<Findings, DemoError> {
    screen::text(&format!(
        "This demo runs a complete store in {} and deletes it afterwards. BLOBD_ROOT and BLOBD_SOCKET \
         point there. Daemon, commands and clients are the real ones; the registry is a small local one, and \
         the weights are random numbers.",
        sandbox.directory().display()
    ))?;
    let models = generate_models(sandbox)?;
    let (pulled, daemon) = pull(sandbox, &models.base)?;
    let disk = import_others(sandbox, &models)?;
    let (mut readers, readings) = open(sandbox, &models.base)?;
    let daemon = kill_and_restart(sandbox, daemon, &mut readers)?;
    drop(readers);
    for model in [&models.base, &models.separate] {
        export(sandbox, model)?;
    }
    remove(sandbox, &models.tuned)?;
    daemon.stop()?;
    Ok(Findings { pulled, disk, readings })
}

fn generate_models(sandbox: &Sandbox) -> Result<DemoModels, DemoError> {
    screen::heading("1  Generate four models")?;
    let models = DemoModels::generate(sandbox)?;
    screen::output(&models.table())?;
    Ok(models)
}

fn pull(sandbox: &Sandbox, base: &ModelFile) -> Result<(Pulled, DaemonProcess), DemoError> {
    screen::heading("2  Pull the first model")?;
    let reference: Reference = base.reference.parse()?;
    let registry = sandbox.start_registry()?;
    let size = models::publish(&registry, &reference, base)?;
    screen::text(&format!("A registry that speaks Ollama's protocol listens on {}.", registry.url()))?;
    screen::command("blobd serve &")?;
    let daemon = DaemonProcess::start(sandbox)?;
    let started = Instant::now();
    sandbox.run(&["pull", base.reference])?;
    let pulled = Pulled { bytes: registry.bytes_served(), time: started.elapsed() };
    expect("bytes served by the registry", &pulled.bytes, &size)?;
    let stored = stored_file(sandbox, base)?;
    expect(&format!("digest of {}", base.reference), &stored, &base.digest)?;
    base.delete()?;
    Ok((pulled, daemon))
}

fn stored_file(sandbox: &Sandbox, model: &ModelFile) -> Result<Digest, DemoError> {
    let details = sandbox.client()?.model(&model.reference.parse()?)?;
    let weights = details.layers.iter().find(|layer| layer.media_type.component() == "model");
    Ok(weights.map_or_else(|| Digest::of(b""), |layer| layer.digest))
}

fn import_others(sandbox: &Sandbox, models: &DemoModels) -> Result<DiskUsage, DemoError> {
    screen::heading("3  Import the other models")?;
    for model in [&models.tuned, &models.stacked, &models.separate] {
        let before = sandbox.client()?.disk_usage()?.physical_bytes;
        sandbox.run(&["import", &model.file_name(), "--name", model.reference])?;
        let after = sandbox.client()?.disk_usage()?.physical_bytes;
        let grown = after.saturating_sub(before);
        if model.is_relative && grown > model.size / 10 {
            return Err(DemoError::Mismatch {
                what: format!("disk space taken by {}", model.reference),
                found: human_bytes(grown),
                expected: format!("less than a tenth of {}", human_bytes(model.size)),
            });
        }
        let stored = stored_file(sandbox, model)?;
        expect(&format!("digest of {}", model.reference), &stored, &model.digest)?;
        model.delete()?;
    }
    screen::text("The original files are deleted now: the store contains all their data.")?;
    sandbox.run(&["ls"])?;
    sandbox.run(&["df"])?;
    Ok(sandbox.client()?.disk_usage()?)
}

fn open(sandbox: &Sandbox, model: &ModelFile) -> Result<(Vec<ReaderProcess>, Vec<Reading>), DemoError> {
    screen::heading(&format!("4  Open {} in two processes", model.reference))?;
    screen::text(
        "Each process connects to the socket, receives the descriptors of the model's blobs, maps all \
         tensors, hashes them and compares the digests with those that the daemon reports.",
    )?;
    let (mut readers, mut reports) = (Vec::new(), Vec::new());
    // One after the other, so that they do not slow each other down while they measure.
    for number in 1..=2 {
        let mut reader = ReaderProcess::start(sandbox, number, model.reference)?;
        let opened = reader.opened()?;
        screen::output(&report::opened(number, reader.pid(), &opened))?;
        expect("tensors opened", &opened.tensor_count, &(model.tensor_count as u64))?;
        readers.push(reader);
        reports.push(opened);
    }
    sandbox.run(&["ps"])?;
    let mut readings = Vec::new();
    for (reader, opened) in readers.iter_mut().zip(reports) {
        readings.push(Reading { opened, memory: reader.request(Request::Memory)? });
    }
    screen::output(&report::memory_table(&readings))?;
    check_sharing(&readings)?;
    Ok((readers, readings))
}

/// A shared page counts once in the sum of all PSS. A tenth is allowed for pages that are only partly used.
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
    sandbox: &Sandbox,
    daemon: DaemonProcess,
    readers: &mut [ReaderProcess],
) -> Result<DaemonProcess, DemoError> {
    screen::heading("5  Kill the daemon")?;
    let before = list_models(sandbox)?;
    screen::command(&format!("kill -9 {}", daemon.pid()))?;
    daemon.kill()?;
    for reader in readers {
        let Rehashed { bytes } = reader.request(Request::Rehash)?;
        let (number, bytes) = (reader.number(), human_bytes(bytes));
        screen::output(&format!("reader {number} hashed its maps again: {bytes}, unchanged"))?;
    }
    screen::command("blobd serve &")?;
    let daemon = DaemonProcess::start(sandbox)?;
    sandbox.run(&["ls"])?;
    expect("models after the restart", &names(&list_models(sandbox)?), &names(&before))?;
    Ok(daemon)
}

fn list_models(sandbox: &Sandbox) -> Result<Vec<ModelSummary>, DemoError> {
    Ok(sandbox.client()?.models()?.models)
}

fn names(models: &[ModelSummary]) -> String {
    let name = |model: &ModelSummary| format!("{} {}", model.name, model.digest);
    models.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn export(sandbox: &Sandbox, model: &ModelFile) -> Result<(), DemoError> {
    const FILE: &str = "exported.gguf";
    if model.reference == models::BASE {
        screen::heading("6  Export")?;
    }
    sandbox.run(&["export", model.reference, "-o", FILE])?;
    let found = digest_of_file(&sandbox.path(FILE))?;
    let rows = [("original", model.digest.to_hex()), ("exported", found.to_hex())];
    screen::facts(&rows)?;
    expect(&format!("digest of the exported {}", model.reference), &found, &model.digest)?;
    std::fs::remove_file(sandbox.path(FILE)).map_err(DemoError::io(FILE))
}

fn remove(sandbox: &Sandbox, model: &ModelFile) -> Result<(), DemoError> {
    screen::heading("7  Remove")?;
    let before = sandbox.client()?.disk_usage()?.physical_bytes;
    sandbox.run(&["rm", model.reference])?;
    let after = sandbox.client()?.disk_usage()?.physical_bytes;
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

#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch { what: String, found: String, expected: String },
    /// The command has printed the reason on standard error.
    #[error("{command}: {status}")]
    Command { command: String, status: ExitStatus },
    #[error("daemon: {problem}; the last line of its log is {last_log_line:?}")]
    Daemon { problem: String, last_log_line: String },
    /// The reader has printed the reason on standard error.
    #[error("reader {number}: {problem}")]
    Reader { number: usize, problem: String },
    #[error("{subject}: {source}")]
    Io { subject: String, source: io::Error },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    #[error(transparent)]
    Output(#[from] ErrorBody),
    #[error("demo: interrupted; its processes and files are removed")]
    Interrupted,
}

impl DemoError {
    pub(crate) fn body(&self) -> ErrorBody {
        match self {
            Self::Output(body) => body.clone(),
            Self::Mismatch { .. } => ErrorBody::new(ErrorCode::Corrupt, self),
            Self::Client(error) => ErrorBody::new(error.code(), error),
            _ if self.is_lack_of_space() => {
                let body = ErrorBody::new(ErrorCode::NoSpace, self);
                body.with_hint("the demo needs about 200 MiB; set TMPDIR to use another directory")
            }
            _ => ErrorBody::new(ErrorCode::Internal, self),
        }
    }

    fn is_lack_of_space(&self) -> bool {
        match self {
            Self::Io { source, .. } | Self::Model(ModelError::Io { source, .. }) => {
                source.kind() == io::ErrorKind::StorageFull
            }
            Self::Command { status, .. } => status.code() == Some(ErrorCode::NoSpace.exit_code().into()),
            _ => false,
        }
    }

    fn io(subject: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let subject = subject.into();
        move |source| Self::Io { subject, source }
    }

    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        Self::io(path.display().to_string())
    }
}

fn expect<T: PartialEq + std::fmt::Display>(what: &str, found: &T, expected: &T) -> Result<(), DemoError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.to_string(), expected.to_string());
    Err(DemoError::Mismatch { what: what.to_owned(), found, expected })
}
