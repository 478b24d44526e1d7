//! The reader: a process of its own that opens a model, checks every tensor and keeps its maps.
//!
//! It stands for an inference engine. What it finds it writes to standard output, one JSON object
//! per line; what it shall do next it is told on standard input. When that ends, so does the
//! reader.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::error::{DemoError, expect};
use super::memory::MemoryUse;

/// What a reader is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Question {
    /// How much memory do you use? Answered with [`MemoryUse`].
    Memory,
    /// Is what you have mapped unchanged? Answered with [`Rehashed`].
    Rehash,
}

/// What a reader reports unasked, when all tensors are mapped and checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// How long it took from connecting to the last tensor mapped, once per try, in microseconds.
    pub(crate) open_micros: Vec<u64>,
    /// How many tensors there are.
    pub(crate) tensor_count: u64,
    /// How many bytes they have.
    pub(crate) tensor_bytes: u64,
}

/// Answer to [`Question::Rehash`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rehashed {
    /// How many bytes were hashed.
    pub(crate) bytes: u64,
}

/// Opens a model, reports, and answers questions until standard input ends.
///
/// # Errors
/// [`DemoError`] when the daemon refuses or a tensor has not the digest that the daemon names.
pub(crate) fn run(socket: &Path, reference: &Reference) -> Result<(), DemoError> {
    let (model, tensors, open_micros) = open_repeatedly(socket, reference)?;
    let details = Client::connect(socket)?.with_timeout(TIMEOUT).model(reference)?;
    verify(&details, &tensors)?;
    let tensor_bytes = tensors.iter().map(|tensor| tensor.len() as u64).sum();
    answer(&Opened { open_micros, tensor_count: tensors.len() as u64, tensor_bytes })?;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(DemoError::io("standard input"))?;
        match serde_json::from_str(&line).map_err(io::Error::from).map_err(DemoError::io(line))? {
            Question::Memory => {
                let memory = MemoryUse::of_this_process();
                answer(&memory.map_err(DemoError::io("/proc/self/smaps"))?)?;
            }
            Question::Rehash => answer(&Rehashed { bytes: verify(&details, &tensors)? })?,
        }
    }
    // Held to the end: it is the lease.
    drop(model);
    Ok(())
}

/// Opens the model several times and keeps the last.
fn open_repeatedly(
    socket: &Path,
    reference: &Reference,
) -> Result<(OpenModel, Vec<TensorMap>, Vec<u64>), ClientError> {
    let mut open_micros = Vec::new();
    loop {
        let started = Instant::now();
        let model = Client::connect(socket)?.with_timeout(TIMEOUT).open(reference)?;
        let tensors = model.map_all()?;
        open_micros.push(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX));
        if open_micros.len() >= OPEN_COUNT {
            return Ok((model, tensors, open_micros));
        }
    }
}

/// Hashes what is mapped and compares it with the daemon's table. Tensors that are packed in one
/// blob are hashed together, in the blob's order. Says how many bytes were hashed.
fn verify(details: &ModelDetails, tensors: &[TensorMap]) -> Result<u64, DemoError> {
    let mut blobs: BTreeMap<Digest, BTreeMap<u64, &TensorMap>> = BTreeMap::new();
    for (entry, tensor) in details.tensors.iter().zip(tensors) {
        expect("tensor mapped", &tensor.name(), &entry.name.as_str())?;
        blobs.entry(entry.digest).or_default().insert(entry.offset, tensor);
    }
    expect("tensors mapped", &tensors.len(), &details.tensors.len())?;
    let mut bytes = 0;
    for (digest, tensors) in blobs {
        let mut hasher = Hasher::new();
        tensors.values().for_each(|tensor| hasher.update(tensor));
        bytes += tensors.values().map(|tensor| tensor.len() as u64).sum::<u64>();
        let names: Vec<&str> = tensors.values().map(|tensor| tensor.name()).collect();
        expect(&format!("digest of {}", names.join(" + ")), &hasher.finish(), &digest)?;
    }
    Ok(bytes)
}

fn answer(found: &impl Serialize) -> Result<(), DemoError> {
    let mut line = serde_json::to_vec(found).map_err(io::Error::from).map_err(DemoError::io("answer"))?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).map_err(DemoError::io("standard output"))
}

/// How often the model is opened, to have a median.
const OPEN_COUNT: usize = 9;
/// No answer of a local daemon takes longer.
const TIMEOUT: Duration = Duration::from_secs(30);
