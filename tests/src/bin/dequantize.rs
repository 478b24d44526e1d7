//! Converts a file of blocks to `f32`, for `tests/quants.py`: `dequantize TYPE BLOCKS NUMBERS`.
//!
//! Prints the time of the conversion in seconds: the shortest of some runs.

use std::error::Error;
use std::time::{Duration, Instant};
use std::{env, fs};

use blobd_model::quant::{dequantize, element_count};
use blobd_store_format::gguf::GgmlType;

const RUNS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [name, blocks, numbers] = &arguments[..] else {
        return Err("usage: dequantize TYPE BLOCKS NUMBERS".into());
    };
    let ggml_type = GgmlType::from_name(name).ok_or_else(|| format!("type {name}: unknown"))?;
    let bytes = fs::read(blocks)?;
    let mut out = vec![0.0; element_count(ggml_type, &bytes)?];
    let mut shortest = Duration::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        dequantize(ggml_type, &bytes, &mut out)?;
        shortest = shortest.min(start.elapsed());
    }
    fs::write(numbers, out.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())?;
    println!("{:.9}", shortest.as_secs_f64());
    Ok(())
}
