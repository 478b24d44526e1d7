//! The reader: a process that opens a model, checks every tensor and keeps its maps.
//!
//! It represents an inference engine. It reads requests from standard input and writes its results to
//! standard output, one JSON object per line. It ends when standard input is closed.

use std::collections::BTreeMap;
use std::env;
use std::io::{self, BufRead as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::{DemoError, expect};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// The reader's memory: responds with [`MemoryUse`].
    Memory,
    /// Hash all maps again: responds with [`Rehashed`].
    Rehash,
}

/// Sent without a request, when all tensors are mapped and checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Time in microseconds from connecting until all tensors are mapped, for each repetition.
    pub(crate) open_micros: Vec<u64>,
    pub(crate) tensor_count: u64,
    pub(crate) tensor_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rehashed {
    pub(crate) bytes: u64,
}

/// How much memory a process uses, and how much of it is mapped weights, in bytes.
///
/// Resident memory (RSS) counts every page that a process has mapped and touched. Proportional memory (PSS) divides a page
/// among the processes that share it, so only PSS can be added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryUse {
    pub(crate) rss_bytes: u64,
    pub(crate) pss_bytes: u64,
    pub(crate) weights_rss_bytes: u64,
    pub(crate) weights_pss_bytes: u64,
    /// Private memory: heap and stacks.
    pub(crate) anonymous_bytes: u64,
}

/// The first argument of a reader; the second one is the model.
pub(crate) const COMMAND: &str = "demo-reader";

pub(crate) fn main() -> ExitCode {
    let socket = env::var_os("BLOBD_SOCKET").unwrap_or_default();
    let reference = env::args().nth(2).unwrap_or_default().parse().map_err(DemoError::from);
    let Err(error) = reference.and_then(|reference| run(Path::new(&socket), &reference)) else {
        return ExitCode::SUCCESS;
    };
    let _nobody_reads_it = writeln!(io::stderr(), "blobd: {error}");
    ExitCode::from(error.body().code.exit_code())
}

fn run(socket: &Path, reference: &Reference) -> Result<(), DemoError> {
    let (model, tensors, open_micros) = open_repeatedly(socket, reference)?;
    let details = Client::connect(socket)?.with_timeout(TIMEOUT).model(reference)?;
    verify(&details, &tensors)?;
    let tensor_bytes = tensors.iter().map(|tensor| tensor.len() as u64).sum();
    respond(&Opened { open_micros, tensor_count: tensors.len() as u64, tensor_bytes })?;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(DemoError::io("standard input"))?;
        match serde_json::from_str(&line).map_err(io::Error::from).map_err(DemoError::io(line))? {
            Request::Memory => {
                let memory = MemoryUse::of_this_process();
                respond(&memory.map_err(DemoError::io("/proc/self/smaps"))?)?;
            }
            Request::Rehash => respond(&Rehashed { bytes: verify(&details, &tensors)? })?,
        }
    }
    // Kept until here, because it holds the lease.
    drop(model);
    Ok(())
}

impl MemoryUse {
    fn of_this_process() -> io::Result<Self> {
        std::fs::read_to_string("/proc/self/smaps").map(|smaps| Self::parse(&smaps))
    }

    fn parse(smaps: &str) -> Self {
        let mut sum = Self::default();
        let mut is_weights = false;
        for line in smaps.lines() {
            match figure(line) {
                None => is_weights = line.contains("/blobs/sha256-"),
                Some(("Rss", bytes)) => {
                    sum.rss_bytes += bytes;
                    sum.weights_rss_bytes += if is_weights { bytes } else { 0 };
                }
                Some(("Pss", bytes)) => {
                    sum.pss_bytes += bytes;
                    sum.weights_pss_bytes += if is_weights { bytes } else { 0 };
                }
                Some(("Anonymous", bytes)) => sum.anonymous_bytes += bytes,
                Some(_) => {}
            }
        }
        sum
    }
}

/// Parses `Rss:     120 kB` into a name and bytes; `None` for the line that begins a mapping. Lines without
/// kilobytes count as zero.
fn figure(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    if name.contains(['-', ' ']) {
        return None;
    }
    let kilobytes = value.trim().strip_suffix(" kB").and_then(|number| number.parse::<u64>().ok());
    Some((name, kilobytes.unwrap_or_default().saturating_mul(1024)))
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

/// Hashes all maps and compares them with the daemon's digests. Tensors that share a blob are hashed together,
/// in the blob's order. Returns how many bytes were hashed.
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

fn respond(found: &impl Serialize) -> Result<(), DemoError> {
    let mut line = serde_json::to_vec(found).map_err(io::Error::from).map_err(DemoError::io("response"))?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).map_err(DemoError::io("standard output"))
}

/// How often the model is opened, for a median.
const OPEN_COUNT: usize = 9;
/// Much longer than any response of a local daemon takes.
const TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_counted_separately_from_other_mappings() {
        let smaps = "\
7f00-7f01 r--s 00000000 fe:00 12 /tmp/store/blobs/sha256-ab (deleted)
Size:                 64 kB
Rss:                  60 kB
Pss:                  30 kB
Pss_Dirty:             4 kB
Anonymous:             0 kB
VmFlags: rd sh mr
7f02-7f03 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
Pss:                   8 kB
Anonymous:             8 kB
";
        let expected = MemoryUse {
            rss_bytes: 68 << 10,
            pss_bytes: 38 << 10,
            weights_rss_bytes: 60 << 10,
            weights_pss_bytes: 30 << 10,
            anonymous_bytes: 8 << 10,
        };
        assert_eq!(MemoryUse::parse(smaps), expected);
    }

    #[test]
    fn kernel_reports_the_memory_of_this_process() {
        let memory = MemoryUse::of_this_process().unwrap();
        assert!(memory.pss_bytes > 0 && memory.rss_bytes >= memory.pss_bytes, "{memory:?}");
        assert!(memory.anonymous_bytes > 0);
    }
}
