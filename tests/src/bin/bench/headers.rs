//! Parsing the headers of large models, compared with one digest of the same bytes.

use blobd_store_format::gguf::{GgufWriter, Header, HeaderParser, Progress};
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use sha2::{Digest as _, Sha256};

use crate::Setup;
use crate::measure::{Outcome, Series, timed};

/// Headers arrive in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;
/// The vocabulary of gemma-3 and gemma-4, the largest of published models.
const TOKENS: u32 = 262_144;
const MERGES: u32 = 514_906;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    println!("\nparsing a header, of which pieces of {} KiB arrive", PIECE_BYTES >> 10);
    let tensors = ModelFile::deepseek_v3().header()?;
    // Measured first: afterwards the allocator has freed memory to use again.
    let memory = peak_memory(&tensors)?;
    measure(setup, "1,086 tensors", &tensors, "5 ms")?;
    println!("    peak memory           {memory:8.2} MiB    (limit 16)");
    measure(setup, "262,144 tokens and 514,906 merges", &vocabulary()?, "100 ms")
}

fn measure(setup: &Setup, what: &str, bytes: &[u8], limits: &str) -> Outcome<()> {
    let (mut parsed, mut hashed) = (Series::default(), Series::default());
    for _ in 0..setup.rounds.max(5) {
        parsed.push(timed(|| parse(bytes))?.0);
        hashed.push(timed(|| Ok(std::hint::black_box(Sha256::digest(bytes))))?.0);
    }
    println!("  {what}, {} KiB    (limit {limits})", bytes.len() >> 10);
    println!("    parse                 {:8.3} ms", parsed.seconds() * 1e3);
    println!("    time / one digest     {:8.2}", hashed.ratio(&parsed));
    Ok(())
}

fn parse(bytes: &[u8]) -> Outcome<Header> {
    let mut parser = HeaderParser::new();
    for piece in bytes.chunks(PIECE_BYTES) {
        if parser.push(piece)? == Progress::Done {
            break;
        }
    }
    Ok(parser.finish()?)
}

/// How much the process's resident memory grows at most while it parses, in MiB.
#[expect(clippy::cast_precision_loss, reason = "a few MiB, for display")]
fn peak_memory(bytes: &[u8]) -> Outcome<f64> {
    const RESET_PEAK: &str = "5";
    let own = std::process::id();
    std::fs::write("/proc/self/clear_refs", RESET_PEAK)?;
    let before = status_bytes(own, "VmRSS");
    std::hint::black_box(parse(bytes)?);
    Ok(status_bytes(own, "VmHWM").saturating_sub(before) as f64 / f64::from(1 << 20))
}

fn vocabulary() -> Outcome<Vec<u8>> {
    let mut writer = GgufWriter::new();
    let texts =
        |count: u32, kind: &str| (0..count).map(|number| format!("{kind}{number:x}")).collect::<Vec<_>>();
    writer.metadata("general.architecture", "gemma3")?;
    writer.metadata("tokenizer.ggml.tokens", texts(TOKENS, "▁t"))?;
    writer.metadata("tokenizer.ggml.scores", vec![0.5_f32; TOKENS as usize])?;
    writer.metadata("tokenizer.ggml.token_type", vec![1_i32; TOKENS as usize])?;
    writer.metadata("tokenizer.ggml.merges", texts(MERGES, "m "))?;
    Ok(writer.header()?)
}
