//! `blobd warm`

use std::io;
use std::time::Instant;

use blobd_cli_common::connect::{client_error, connect, model_error, note_name, print_report};
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::{human_bytes, print_message};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::residency::blobs;
use blobd_cli_common::{Global, internal};
use blobd_client::model::{BlobSlice, OpenModel};
use blobd_client::process::{Signals, first_of, listen_for_end};
use blobd_client::protocol::request::OpenParams;
use blobd_client::residency::{MemoryLock, Prefetch, Residency};
use blobd_store_format::size::parse_size;
use clap::Args;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};

use crate::{ErrorBody, ErrorCode};

/// Read a model into memory before it is used
#[derive(Debug, Args)]
#[command(
    after_help = "Reads the model's blobs from the disk in file order, in large pieces, so that an engine's random
reads find them in memory. With --lock, that much of it is kept there until the command is ended.

Examples:
  blobd warm llama3:8b
  blobd warm llava:7b --component projector
  blobd warm z-image --component text_encoder/
  blobd warm mixtral:8x7b --lock 20GiB          until Ctrl-C"
)]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// Read only this part: model, projector, adapter, or a prefix of layer names that ends in a slash
    #[arg(long, value_name = "NAME")]
    component: Option<String>,
    /// Lock this many bytes, from the model's start, in memory until the command ends
    #[arg(long, value_name = "BUDGET", value_parser = parse_size)]
    lock: Option<u64>,
}

/// A piece is read and locked at a time, while the kernel reads the next one ahead.
const PIECE_BYTES: u64 = 32 << 20;

#[derive(Debug, Default, Serialize)]
struct Warmed {
    name: String,
    bytes: u64,
    /// Bytes that were not in memory before; `null` if the kernel does not report it.
    cold_bytes: Option<u64>,
    /// Bytes in memory now: less than `bytes` if there is not enough memory.
    resident_bytes: Option<u64>,
    seconds: f64,
    /// Counts `cold_bytes` if known, else `bytes`.
    bytes_per_second: u64,
    locked_bytes: u64,
    /// Why less was locked than requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    lock_error: Option<String>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let component = params.component.clone();
    let reference = only(global, &connected.client, &params.model)?;
    let request = OpenParams { component, ..OpenParams::new(reference.clone()) };
    let model = connected.client.open_with(&request).map_err(client_error)?;
    note_name(global, &reference, model.name());
    let pieces = pieces(&blobs(&model).map_err(model_error)?);
    let mut locker = Locker { left: params.lock.unwrap_or_default(), ..Locker::default() };
    let warmed = warm(&model, &pieces, &mut locker, global.hides_progress())?;
    // Handled only from here on: until then a signal ends the command.
    let stop = params.lock.filter(|budget| *budget > 0).map(|_| stop_signals()).transpose();
    let stop = stop.map_err(internal)?;
    print_report(global, &warmed, sentence)?;
    stop.map_or(Ok(()), |(runtime, signals)| hold(global, &warmed, &locker, &runtime, signals))
}

fn pieces(blobs: &[BlobSlice]) -> Vec<BlobSlice> {
    let cut = |blob: &BlobSlice| {
        let length = blob.len() as u64;
        let starts = (0..length.div_ceil(PIECE_BYTES)).map(|piece| piece * PIECE_BYTES);
        starts.filter_map(|start| blob.part(start, PIECE_BYTES.min(length - start))).collect::<Vec<_>>()
    };
    blobs.iter().flat_map(cut).collect()
}

fn warm(
    model: &OpenModel,
    pieces: &[BlobSlice],
    locker: &mut Locker,
    quiet: bool,
) -> Result<Warmed, ErrorBody> {
    let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
    let before = residency(pieces);
    let bar = Bar::new(model.name(), bytes, quiet);
    let (start, mut done) = (Instant::now(), 0);
    for (number, piece) in pieces.iter().enumerate() {
        if let Some(next) = pieces.get(number + 1) {
            // Only advice: a piece that is not read ahead is read in its turn.
            let _ = next.prefetch(Prefetch::ReadAhead);
        }
        piece.prefetch(Prefetch::Populate).map_err(|error| unreadable(model, &error))?;
        locker.lock(piece);
        done += piece.len() as u64;
        bar.set(done, bytes);
    }
    bar.clear();
    let seconds = start.elapsed().as_secs_f64();
    let cold_bytes = before.map(|before| before.bytes.saturating_sub(before.resident_bytes));
    Ok(Warmed {
        name: model.name().to_owned(),
        bytes,
        cold_bytes,
        resident_bytes: residency(pieces).map(|after| after.resident_bytes),
        seconds,
        bytes_per_second: rate(cold_bytes.unwrap_or(bytes), seconds),
        locked_bytes: locker.locked_bytes,
        lock_error: locker.error.as_ref().map(ToString::to_string),
    })
}

/// `None` if the kernel does not report it to this user.
fn residency(pieces: &[BlobSlice]) -> Option<Residency> {
    pieces.iter().try_fold(Residency::default(), |sum, piece| Some(sum.plus(piece.residency().ok()?)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive speed")]
#[expect(clippy::cast_precision_loss, reason = "of 16 digits")]
fn rate(bytes: u64, seconds: f64) -> u64 {
    (bytes as f64 / seconds.max(1e-6)) as u64
}

fn unreadable(model: &OpenModel, error: &io::Error) -> ErrorBody {
    let message = format!("model {}: cannot read: {error}", model.name());
    match error.kind() {
        io::ErrorKind::OutOfMemory => ErrorBody::new(ErrorCode::Internal, message),
        _ => ErrorBody::new(ErrorCode::Corrupt, message).with_hint("run `blobd verify`"),
    }
}

fn sentence(warmed: &Warmed) -> String {
    let Warmed { bytes, seconds, bytes_per_second, .. } = warmed;
    let speed = format!("{seconds:.1} s, {}/s", human_bytes(*bytes_per_second));
    let name = blobd_store_format::text::printable(&warmed.name);
    let read = match warmed.cold_bytes {
        None => format!("{name}: {} read in {speed}", human_bytes(*bytes)),
        Some(0) => format!("{name}: {} were in memory already", human_bytes(*bytes)),
        Some(cold) => {
            format!(
                "{name}: {}, of which {} were not in memory and were read in {speed}",
                human_bytes(*bytes),
                human_bytes(cold)
            )
        }
    };
    let left = warmed.resident_bytes.filter(|resident| resident < bytes);
    let gone = left.map(|resident| {
        let missing = human_bytes(bytes - resident);
        format!("not enough memory: the kernel has already dropped {missing} of it\n")
    });
    format!("{read}\n{}", gone.unwrap_or_default())
}

#[derive(Debug, Default)]
struct Locker {
    left: u64,
    locked_bytes: u64,
    locks: Vec<MemoryLock>,
    error: Option<io::Error>,
}

impl Locker {
    fn lock(&mut self, piece: &BlobSlice) {
        let wanted = (piece.len() as u64).min(self.left);
        if wanted == 0 || self.error.is_some() {
            return;
        }
        match piece.part(0, wanted).unwrap_or_default().lock() {
            Ok(lock) => {
                self.locks.push(lock);
                self.locked_bytes += wanted;
                self.left -= wanted;
            }
            Err(error) => self.error = Some(error),
        }
    }
}

/// Keeps the memory locked until a stop signal. In JSON, the document has said how much is locked.
fn hold(
    global: &Global,
    warmed: &Warmed,
    locker: &Locker,
    runtime: &Runtime,
    mut signals: Signals,
) -> Result<(), ErrorBody> {
    let refused = locker.error.as_ref().map(|error| lock_refusal(locker.locked_bytes, error));
    match refused {
        Some(refusal) if locker.locked_bytes == 0 => return Err(refusal),
        Some(refusal) if !global.json => print_message(&format!("blobd: {refusal}\n")),
        _ => {}
    }
    if !global.hides_reports() {
        print_message(&format!(
            "{} of {} locked; Ctrl-C unlocks and exits\n",
            human_bytes(warmed.locked_bytes),
            human_bytes(warmed.bytes)
        ));
    }
    runtime.block_on(first_of(&mut signals));
    Ok(())
}

fn lock_refusal(locked_bytes: u64, error: &io::Error) -> ErrorBody {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or_else(|| "not limited".to_owned(), human_bytes);
    let locked = human_bytes(locked_bytes);
    let message =
        format!("memory lock: refused by the kernel after {locked}: {error}; RLIMIT_MEMLOCK is {limit}");
    let hint = "raise `ulimit -l`, or LimitMEMLOCK= of the service, or lock less";
    ErrorBody::new(ErrorCode::Denied, message).with_hint(hint)
}

fn stop_signals() -> io::Result<(Runtime, Signals)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let signals = {
        let _context = runtime.enter();
        listen_for_end()?
    };
    Ok((runtime, signals))
}
