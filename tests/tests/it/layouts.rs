//! A file of every layout: an accepted file must come back bit for bit.

use blobd_store_format::gguf::{ByteOrder, GgmlType, Value};
use blobd_tests::model::{End, ModelFile, ModelTensor, noise};

/// A name for each and the file.
pub(crate) fn layouts() -> Vec<(&'static str, ModelFile)> {
    let dense = || ModelFile::dense(1);
    vec![
        ("version-3", dense()),
        ("version-2", ModelFile { version: 2, ..dense() }),
        ("big-endian", ModelFile { order: ByteOrder::Big, ..dense() }),
        ("big-endian-version-2", ModelFile { version: 2, order: ByteOrder::Big, ..dense() }),
        ("alignment-8", ModelFile { alignment: Some(8), ..dense() }),
        ("alignment-1", ModelFile { alignment: Some(1), ..dense() }),
        ("alignment-4096", ModelFile { alignment: Some(4096), ..dense() }),
        ("reversed", ModelFile { reversed: true, ..dense() }),
        ("odd-padding", ModelFile { padding: 0xa5, alignment: Some(256), ..dense() }),
        ("gaps", ModelFile { gap: 3, padding: 1, ..dense() }),
        ("large-gaps", ModelFile { gap: 20, alignment: Some(4096), padding: 9, ..few_tensors() }),
        ("no-final-padding", ModelFile { end: End::Bare, ..odd_sizes() }),
        ("trailing-byte", ModelFile { end: End::Trailing(vec![1]), ..dense() }),
        ("trailing-zeros", ModelFile { end: End::Trailing(vec![0; 100_000]), ..dense() }),
        ("trailing-noise", ModelFile { end: End::Trailing(noise(1, "tail", 200_000)), ..dense() }),
        ("odd-sizes", odd_sizes()),
        ("no-tensors", ModelFile::empty()),
        (
            "no-tensors-but-data",
            ModelFile { end: End::Trailing(b"data of nobody".to_vec()), ..ModelFile::empty() },
        ),
        ("strange-metadata", strange_metadata()),
        ("zero-elements", zero_elements()),
        ("unknown-types", unknown_types()),
        ("stacked-experts", ModelFile::stacked_experts(1, 8)),
        ("separate-experts", ModelFile::separate_experts(1, 12)),
        ("separate-experts-reversed", ModelFile { reversed: true, ..ModelFile::separate_experts(1, 12) }),
        ("separate-experts-incomplete", incomplete_experts()),
        ("interleaved-experts", interleaved_experts()),
        ("many-dimensions", many_dimensions()),
    ]
}

fn few_tensors() -> ModelFile {
    let mut file = ModelFile::empty();
    for name in ["a", "b", "c"] {
        file.add_noise(1, name, GgmlType::F32, &[100]);
    }
    file
}

/// Odd sizes, the same bytes under two names, and a scalar.
fn odd_sizes() -> ModelFile {
    let mut file = ModelFile::empty();
    for (name, length) in [("one", 1), ("three", 3), ("page", 4096), ("page-and-one", 4097)] {
        file.add_noise(1, name, GgmlType::I8, &[length]);
    }
    file.add_noise(1, "scalar", GgmlType::F32, &[]);
    let mut twin = file.tensors[2].clone();
    twin.name = "page-again".to_owned();
    file.tensors.push(twin);
    file.add_noise(1, "last", GgmlType::I8, &[31]);
    file
}

/// Tensors of more dimensions than ggml has: published video models have some of five.
pub(crate) fn many_dimensions() -> ModelFile {
    let mut file = ModelFile::empty();
    let long = [&[2, 3][..], &[1; 62]].concat();
    for (name, ggml_type, shape) in [
        ("patch_embedding.weight", GgmlType::F16, &[2, 2, 1, 3, 5][..]),
        ("quantised.weight", GgmlType::Q8_0, &[32, 2, 1, 2, 3]),
        ("blk.0.ffn_up_exps.weight", GgmlType::F32, &[2, 2, 2, 1, 2]),
        ("scalar", GgmlType::F32, &[]),
        ("sixty-four", GgmlType::F32, &long),
        ("nothing", GgmlType::F32, &[3, 1, 0, 1, 1, 7]),
    ] {
        file.add_noise(1, name, ggml_type, shape);
    }
    file
}

fn strange_metadata() -> ModelFile {
    ModelFile::dense(1)
        .with("not.utf8", Value::String(vec![0xff, 0xfe, 0, b'x']))
        .with("not.utf8.array", Value::strings([vec![0xc3, 0x28], vec![], vec![0]]))
        .with("nul\0in.key", 1_u8)
        .with("terminal", "\u{1b}[2J\u{7}")
        .with("empty", "")
        .with("empty.array", Vec::<u32>::new())
        .with("nan", f32::NAN)
        .with("numbers", vec![i64::MIN, i64::MAX])
        .with("flag", true)
}

fn zero_elements() -> ModelFile {
    let mut file = ModelFile::empty();
    file.add_noise(1, "nothing.first", GgmlType::F32, &[0]);
    file.add_noise(1, "something", GgmlType::F32, &[5]);
    file.add_noise(1, "nothing.between", GgmlType::Q4_K, &[256, 0, 3]);
    file.add_noise(1, "something.else", GgmlType::F16, &[7]);
    file.add_noise(1, "nothing.last", GgmlType::F32, &[4, 0]);
    file
}

/// Types that this blobd does not know: their bytes extend to the next tensor.
fn unknown_types() -> ModelFile {
    let mut file = few_tensors();
    for (index, (name, length)) in [("new.first", 96), ("new.last", 77)].into_iter().enumerate() {
        let ggml_type = GgmlType::from_id(77);
        let bytes = noise(1, name, length);
        let tensor = ModelTensor::of_bytes(name, ggml_type, &[640], bytes);
        file.tensors.insert(index * 4, tensor);
    }
    file
}

fn incomplete_experts() -> ModelFile {
    let mut file = ModelFile::separate_experts(1, 6);
    file.tensors.retain(|tensor| tensor.name != "blk.0.ffn_up.3.weight");
    file
}

/// Sorted by expert, so that three groups are split at the same time.
fn interleaved_experts() -> ModelFile {
    let mut file = ModelFile::separate_experts(1, 12);
    let key = |name: &str| name.split('.').rev().nth(1).and_then(|expert| expert.parse::<u32>().ok());
    file.tensors.sort_by_key(|tensor| key(&tensor.name));
    file
}
