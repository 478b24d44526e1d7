//! Two digests in one pass, compared with one digest.

use blobd_sha256::{Sha256, has_lanes, update_both};

use crate::Setup;
use crate::measure::{Outcome, Series, timed};

const BYTES: usize = 256 << 20;
/// The size of the chunks that are hashed when a file is stored.
const CHUNK_BYTES: usize = 4 << 20;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let bytes: Vec<u8> = (0..BYTES).map(|place| (place * 31 % 251).to_le_bytes()[0]).collect();
    let (mut one, mut same, mut apart) = (Series::default(), Series::default(), Series::default());
    for _ in 0..setup.rounds {
        one.push(timed(|| Ok(alone(&bytes)))?.0);
        same.push(timed(|| Ok(both(&bytes, 64)))?.0);
        apart.push(timed(|| Ok(both(&bytes, 32)))?.0);
    }
    println!("\nSHA-256 of {} MiB in memory, on one core; lanes: {}", BYTES >> 20, has_lanes());
    println!("  one digest                 {:8.3} s", one.seconds());
    println!("  both, same phase: time / one    {:8.2}", one.ratio(&same));
    println!("  both, 32 bytes apart: time / one{:8.2}    (limit 1.4 with lanes)", one.ratio(&apart));
    Ok(())
}

fn alone(bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    bytes.chunks(CHUNK_BYTES).for_each(|chunk| hash.update(chunk));
    std::hint::black_box(hash.finish())
}

/// A file and a part of it that begins at `phase`.
fn both(bytes: &[u8], phase: usize) -> [[u8; 32]; 2] {
    let (mut file, mut part) = (Sha256::new(), Sha256::new());
    let (head, rest) = bytes.split_at(phase);
    file.update(head);
    rest.chunks(CHUNK_BYTES).for_each(|chunk| update_both(&mut file, chunk, &mut part, chunk));
    std::hint::black_box([file.finish(), part.finish()])
}
