//! `blobd warm`

use std::io;
use std::time::Instant;

use blobd_client::error::ModelError;
use blobd_client::model::{BlobSlice, OpenModel};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::OpenParams;
use blobd_client::residency::{MemoryLock, Prefetch, Residency};
use blobd_store_format::reference::Reference;
use clap::Args;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Global;
use super::connect::{client_error, connect};
use super::progress::Bar;
use super::residency::blobs;
use crate::output::{print, print_json};
use crate::size::human_bytes;
use crate::size::parse_size;

/// Read a model into memory ahead of its use
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
    reference: Reference,
    /// Read only this part: model, projector, adapter, or a prefix of layer names that ends in a slash
    #[arg(long, value_name = "NAME")]
    component: Option<String>,
    /// Lock this many bytes, from the model's start, in memory until the command ends
    #[arg(long, value_name = "BUDGET", value_parser = parse_size)]
    lock: Option<u64>,
}

/// How much is read and locked at a time: the disk reads the next piece meanwhile.
const PIECE_BYTES: u64 = 32 << 20;

#[derive(Debug, Default, Serialize)]
struct Warmed {
    name: String,
    bytes: u64,
    /// What was not in memory before; `null` where the kernel does not tell.
    cold_bytes: Option<u64>,
    /// What is in memory now: less than `bytes` when there is not enough of it.
    resident_bytes: Option<u64>,
    seconds: f64,
    /// Of what was cold, or of everything.
    bytes_per_second: u64,
    locked_bytes: u64,
    /// Why no more was locked.
    #[serde(skip_serializing_if = "Option::is_none")]
    lock_error: Option<String>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let component = params.component.clone();
    let request = OpenParams { component, ..OpenParams::new(params.reference.clone()) };
    let model = connected.client.open_with(&request).map_err(client_error)?;
    let failed = |error: ModelError| ErrorBody::new(error.code(), error);
    let pieces = pieces(&blobs(&model).map_err(failed)?);
    let mut locker = Locker { left: params.lock.unwrap_or_default(), ..Locker::default() };
    let warmed = warm(&model, &pieces, &mut locker, global.json)?;
    // From here on a signal is waited for; until then it ends the command.
    let stop = params.lock.filter(|budget| *budget > 0).map(|_| Stop::new()).transpose();
    let stop = stop.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    if global.json {
        print_json(&warmed)?;
    } else {
        print(&sentence(&warmed))?;
    }
    stop.map_or(Ok(()), |stop| hold(&warmed, &locker, stop))
}

fn pieces(blobs: &[BlobSlice]) -> Vec<BlobSlice> {
    let cut = |blob: &BlobSlice| {
        let length = blob.len() as u64;
        let starts = (0..length.div_ceil(PIECE_BYTES)).map(|piece| piece * PIECE_BYTES);
        starts.filter_map(|start| blob.part(start, PIECE_BYTES.min(length - start))).collect::<Vec<_>>()
    };
    blobs.iter().flat_map(cut).collect()
}

/// Reads piece after piece, and has the kernel begin with the next one.
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
            // Advice: what is not read ahead is read in its turn.
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

/// `None` where the kernel does not tell.
fn residency(pieces: &[BlobSlice]) -> Option<Residency> {
    pieces.iter().try_fold(Residency::default(), |sum, piece| Some(sum.plus(piece.residency().ok()?)))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive speed")]
#[expect(clippy::cast_precision_loss, reason = "of 16 digits")]
fn rate(bytes: u64, seconds: f64) -> u64 {
    (bytes as f64 / seconds.max(1e-6)) as u64
}

fn unreadable(model: &OpenModel, error: &io::Error) -> ErrorBody {
    let message = format!("model {}: cannot be read: {error}", model.name());
    match error.kind() {
        io::ErrorKind::OutOfMemory => ErrorBody::new(ErrorCode::Internal, message),
        _ => ErrorBody::new(ErrorCode::Corrupt, message).with_hint("run `blobd verify`"),
    }
}

fn sentence(warmed: &Warmed) -> String {
    let Warmed { bytes, seconds, bytes_per_second, .. } = warmed;
    let speed = format!("{seconds:.1} s, {}/s", human_bytes(*bytes_per_second));
    let name = crate::output::printable(&warmed.name);
    let read = match warmed.cold_bytes {
        None => format!("{name}: {} read in {speed}", human_bytes(*bytes)),
        Some(0) => format!("{name}: {} were in memory already", human_bytes(*bytes)),
        Some(cold) => {
            format!("{name}: {}, of which {} were cold: {speed}", human_bytes(*bytes), human_bytes(cold))
        }
    };
    let left = warmed.resident_bytes.filter(|resident| resident < bytes);
    let gone = left.map(|resident| {
        let missing = human_bytes(bytes - resident);
        format!("memory is short: {missing} of it are not there any more\n")
    });
    format!("{read}\n{}", gone.unwrap_or_default())
}

/// Locks pieces until the budget is used up, or the kernel refuses.
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

/// Keeps what is locked until the process is told to end.
fn hold(warmed: &Warmed, locker: &Locker, stop: Stop) -> Result<(), ErrorBody> {
    let refused = locker.error.as_ref().map(|error| lock_refusal(locker.locked_bytes, error));
    match refused {
        Some(refusal) if locker.locked_bytes == 0 => return Err(refusal),
        Some(refusal) => eprintln!("blobd: {refusal}"),
        None => {}
    }
    eprintln!("{} of {} locked; Ctrl-C lets go", human_bytes(warmed.locked_bytes), human_bytes(warmed.bytes));
    stop.wait();
    Ok(())
}

fn lock_refusal(locked_bytes: u64, error: &io::Error) -> ErrorBody {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or_else(|| "not limited".to_owned(), human_bytes);
    let locked = human_bytes(locked_bytes);
    let message = format!("{locked} locked, then the kernel refused: {error}; RLIMIT_MEMLOCK is {limit}");
    let hint = "raise `ulimit -l` or LimitMEMLOCK= of the service, or lock less";
    ErrorBody::new(ErrorCode::Denied, message).with_hint(hint)
}

/// The signals that end the command.
struct Stop {
    runtime: Runtime,
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let context = runtime.enter();
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        drop(context);
        Ok(Self { runtime, terminate, interrupt })
    }

    fn wait(mut self) {
        self.runtime.block_on(async {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
            }
        });
    }
}
