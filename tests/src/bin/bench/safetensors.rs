//! safetensors files of many small tensors and of few large ones, and several files at once.
//!
//! The many tensors have the names and the proportions of Qwen3-30B-A3B: its experts are separate tensors.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_store_format::reference::Reference;

use crate::Setup;
use crate::measure::{Costs, Daemon, Outcome, Series, gib, mib, run as run_command, timed};

/// The name and the shape of a tensor of BF16.
type Tensor = (String, [u64; 2]);

/// Qwen3-30B-A3B's sizes are divided by this.
const SCALE: u64 = 8;
/// The tensors of a dense model of the same size.
const DENSE_COUNT: u64 = 300;
const FILES_AT_ONCE: u64 = 8;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let tensors = mixture();
    let mixture = directory.path().join("mixture.safetensors");
    let size = write(&mixture, &tensors, 1)?;
    println!("\nsafetensors: a file of {} tensors, {:.2} GiB, source in memory", tensors.len(), gib(size));
    rate(setup, &mixture, size)?;
    open(setup, &mixture)?;
    drop(directory);
    at_once(setup, ("memory", &setup.tmpfs))?;
    at_once(setup, ("disk", &setup.disk))
}

/// The import of many tensors against that of few, both in memory.
fn rate(setup: &Setup, mixture: &Path, size: u64) -> Outcome<()> {
    let dense = mixture.with_file_name("dense.safetensors");
    write(&dense, &few(size), 2)?;
    let (mut many, mut few) = (Series::default(), Series::default());
    for _ in 0..setup.rounds {
        let directory = tempfile::tempdir_in(&setup.tmpfs)?;
        few.push(timed(|| import(setup, &[&dense], &directory.path().join("dense")))?.0);
        many.push(timed(|| import(setup, &[mixture], &directory.path().join("mixture")))?.0);
    }
    println!("  import, {DENSE_COUNT} tensors        {:8.2} s", few.seconds());
    println!("  import, many tensors       {:8.2} s", many.seconds());
    println!("  speed against few tensors  {:8.2}    (floor 0.5)", many.ratio(&few));
    Ok(std::fs::remove_file(dense)?)
}

/// From `connect` until the last tensor is mapped.
fn open(setup: &Setup, mixture: &Path) -> Outcome<()> {
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(mixture)?;
    let mut opens = Series::default();
    for _ in 0..setup.rounds.max(5) {
        let opened = || {
            let model = daemon.client()?.open(&"bench".parse::<Reference>()?)?;
            let maps = model.map_all()?;
            Ok((model, maps))
        };
        opens.push(timed(opened)?.0);
    }
    println!("  open, daemon warm          {:8.2} ms    (limit 60)", opens.seconds() * 1e3);
    println!("  peak RSS of the daemon     {:8.1} MiB (limit 64)", mib(daemon.peak_rss_bytes()?));
    Ok(())
}

/// Several files in one command against one command for each. A single import uses more than one core: one thread computes
/// the digests of the file and of its parts, another one writes, a process reads. So the speed cannot grow by more than
/// what a single import leaves idle, which is printed beside it.
fn at_once(setup: &Setup, (kind, place): (&str, &Path)) -> Outcome<()> {
    const FILE_BYTES: u64 = 96 << 20;
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let paths = (0..FILES_AT_ONCE).map(|number| -> Outcome<PathBuf> {
        let path = directory.path().join(format!("model-{number}.safetensors"));
        write(&path, &few(FILE_BYTES), 3 + number)?;
        Ok(path)
    });
    let paths = paths.collect::<Outcome<Vec<_>>>()?;
    let (mut together, mut alone) = (Costs::default(), Costs::default());
    for _ in 0..setup.rounds {
        let stores = tempfile::tempdir_in(place)?;
        rustix::fs::sync();
        let each = |path: &PathBuf| import(setup, &[path], &stores.path().join("alone"));
        alone.measure(|| paths.iter().try_for_each(each))?;
        rustix::fs::sync();
        let all: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        together.measure(|| import(setup, &all, &stores.path().join("together")))?;
    }
    let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
    let size = FILES_AT_ONCE * FILE_BYTES;
    println!("  {FILES_AT_ONCE} files, stores in {kind}");
    alone.print("  one by one", size);
    together.print("  one command", size);
    let busy = alone.processor.seconds() / alone.wall.seconds();
    println!("  cores that one import uses {busy:8.2} of {cores}");
    println!("  most speed with {cores} cores    {:8.2}", f64::from(cores) / busy);
    println!(
        "  speed against one by one   {:8.2}    (floor 1.6 on two cores)",
        together.wall.ratio(&alone.wall)
    );
    Ok(())
}

fn import(setup: &Setup, files: &[&Path], store: &Path) -> Outcome<()> {
    run_command(Command::new(&setup.blobd).arg("--root").arg(store).arg("import").args(files))
}

/// The tensors of Qwen3-30B-A3B, in the order of their names.
fn mixture() -> Vec<Tensor> {
    const LAYERS: u64 = 48;
    const EXPERTS: u64 = 128;
    let (hidden, inner, query) = (2048 / SCALE, 768 / SCALE, 4096 / SCALE);
    let mut tensors = Vec::new();
    for layer in 0..LAYERS {
        let mut add =
            |name: String, shape| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        for expert in 0..EXPERTS {
            add(format!("mlp.experts.{expert}.down_proj"), [hidden, inner]);
            add(format!("mlp.experts.{expert}.gate_proj"), [inner, hidden]);
            add(format!("mlp.experts.{expert}.up_proj"), [inner, hidden]);
        }
        for (name, shape) in [
            ("input_layernorm", [hidden, 1]),
            ("mlp.gate", [EXPERTS, hidden]),
            ("post_attention_layernorm", [hidden, 1]),
            ("self_attn.k_norm", [128, 1]),
            ("self_attn.k_proj", [512 / SCALE, hidden]),
            ("self_attn.o_proj", [hidden, query]),
            ("self_attn.q_norm", [128, 1]),
            ("self_attn.q_proj", [query, hidden]),
            ("self_attn.v_proj", [512 / SCALE, hidden]),
        ] {
            add(name.to_owned(), shape);
        }
    }
    let vocabulary = 151_936 / SCALE;
    for (name, shape) in [
        ("lm_head.weight", [vocabulary, hidden]),
        ("model.embed_tokens.weight", [vocabulary, hidden]),
        ("model.norm.weight", [hidden, 1]),
    ] {
        tensors.push((name.to_owned(), shape));
    }
    tensors
}

/// Tensors of about `bytes` in all.
fn few(bytes: u64) -> Vec<Tensor> {
    let rows = bytes / DENSE_COUNT / 2 / 64;
    (0..DENSE_COUNT).map(|number| (format!("model.layers.{number}.weight"), [rows, 64])).collect()
}

/// Writes a file of these tensors, no two parts of which are the same. Returns its size.
fn write(path: &Path, tensors: &[Tensor], seed: u64) -> Outcome<u64> {
    let mut end = 0;
    let entries = tensors.iter().map(|(name, shape)| {
        let start = end;
        end += shape[0] * shape[1] * 2;
        let entry = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        (name.clone(), entry)
    });
    let header = serde_json::to_vec(&entries.collect::<serde_json::Map<_, _>>())?;
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for number in 0..end / 8 {
        // An odd factor maps different numbers to different ones.
        file.write_all(&((seed << 48 | number).wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes())?;
    }
    // All shapes have an even number of elements, but perhaps not a multiple of four.
    file.write_all(&vec![0; usize::try_from(end % 8)?])?;
    file.flush()?;
    Ok(8 + header.len() as u64 + end)
}
