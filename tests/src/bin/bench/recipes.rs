//! Reading, writing and checking recipes of files with many tensors, compared with `serde_json` reading the same text
//! into a tree of values.

use std::hint::black_box;

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Piece, Recipe, RecipeOutline, TensorEntry};
use blobd_store_format::tensor::TensorFormat;
use serde_json::Value;

use crate::Setup;
use crate::measure::{Outcome, Series, timed};

/// A large model without stacked experts, and the most tensors that a file may have.
const TENSOR_COUNTS: [u64; 2] = [20_000, 131_072];

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    println!("\nrecipes, each time / serde_json's for a tree of values");
    TENSOR_COUNTS.into_iter().try_for_each(|count| measure(setup, count))
}

fn measure(setup: &Setup, tensor_count: u64) -> Outcome<()> {
    let (pieces, tensors) = parts(tensor_count);
    let file = Digest::of(b"file");
    let recipe = Recipe::new(file, TensorFormat::Gguf, pieces.clone(), tensors.clone())?;
    let json = recipe.to_json();
    let [mut tree, mut parsed, mut outlined, mut written, mut checked]: [Series; 5] = Default::default();
    for _ in 0..setup.rounds.max(5) {
        tree.push(timed(|| Ok(black_box(serde_json::from_slice::<Value>(&json)?)))?.0);
        parsed.push(timed(|| Ok(black_box(Recipe::parse(&json)?)))?.0);
        outlined.push(timed(|| Ok(black_box(RecipeOutline::parse(&json)?)))?.0);
        written.push(timed(|| Ok(black_box(recipe.to_json())))?.0);
        let (pieces, tensors) = (pieces.clone(), tensors.clone());
        checked.push(timed(|| Ok(Recipe::new(file, TensorFormat::Gguf, pieces, tensors)?))?.0);
    }
    println!("  {tensor_count} tensors, {} KiB", json.len() >> 10);
    println!("    serde_json's tree     {:8.1} ms", tree.seconds() * 1e3);
    let rows = [
        ("parse", &parsed, "    (limit 1.5, and 1 s for 20,000 tensors)"),
        ("parse the outline", &outlined, ""),
        ("write", &written, ""),
        ("check alone", &checked, ""),
    ];
    for (what, series, limit) in rows {
        println!("    {what:<18}    {:8.1} ms {:8.2}{limit}", series.seconds() * 1e3, tree.ratio(series));
    }
    Ok(())
}

/// A header, and one blob for each tensor.
fn parts(tensor_count: u64) -> (Vec<Piece>, Vec<TensorEntry<'static>>) {
    const TENSOR_BYTES: u64 = 144 * 16;
    let tensor = |number: u64| TensorEntry {
        name: format!("blk.{}.ffn_up.{}.weight", number / 256, number % 256).into(),
        type_name: "Q4_K".into(),
        shape: vec![256, 16].into(),
        digest: Digest::of(&number.to_le_bytes()),
        offset: 0,
        size: TENSOR_BYTES,
        experts: None,
    };
    let tensors: Vec<_> = (0..tensor_count).map(tensor).collect();
    let header = Piece::Blob { blob: Digest::of(b"header"), offset: 0, length: 4096 };
    let blobs =
        tensors.iter().map(|tensor| Piece::Blob { blob: tensor.digest, offset: 0, length: tensor.size });
    (std::iter::once(header).chain(blobs).collect(), tensors)
}
