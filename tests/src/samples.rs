//! The names and files that tests of crashes and faults put into a store, by their numbers.

use std::sync::OnceLock;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::reference::Reference;

use crate::model::{ModelFile, noise};

/// The names that models have: two share a directory, one has directories of its own.
pub const NAMES: [&str; 3] = ["a", "a:2", "me/c:1"];

/// A model file.
#[derive(Debug)]
pub struct SomeFile {
    /// Its digest.
    pub digest: Digest,
    /// It.
    pub bytes: Vec<u8>,
}

/// Without any tensors.
pub const EMPTY: usize = 4;
/// With a tensor that is large enough for a pull to take it from a relative.
pub const LARGE: usize = 5;
/// The same but for a small tensor.
pub const LARGE_RELATIVE: usize = 6;
/// With more blobs than are published at once.
pub const MANY: usize = 7;
/// No GGUF file but one that is pulled beside the empty one, and stored as it is. It cannot be imported.
pub const WHOLE: usize = 8;

/// Small files, of which the first four share tensors: with a few blobs, which are synced one by one,
/// with a dozen, for which the file system is, and with so many that they are published in groups.
pub fn files() -> &'static [SomeFile] {
    static FILES: OnceLock<Vec<SomeFile>> = OnceLock::new();
    FILES.get_or_init(|| {
        let base = ModelFile::dense_of(1, 1, 32);
        let files = [
            base.clone(),
            base.clone().with_changed("output.weight"),
            base.with("general.name", "another header"),
            ModelFile::stacked_experts(1, 3),
            ModelFile::empty(),
            with_a_large_tensor(),
            with_a_large_tensor().with_changed("blk.0.attn_norm.weight"),
            of_many_tensors(),
        ];
        let whole = noise(1, "whole", WHOLE_BYTES);
        let file = |bytes: Vec<u8>| SomeFile { digest: Digest::of(&bytes), bytes };
        files.iter().map(ModelFile::bytes).chain([whole]).map(file).collect()
    })
}

/// More than is fetched into memory at once.
const WHOLE_BYTES: usize = 300 << 10;

/// The weights of a file's model, which most files are themselves.
#[must_use]
pub fn weights(file: usize) -> &'static [u8] {
    &files()[if file == WHOLE { EMPTY } else { file }].bytes
}

fn with_a_large_tensor() -> ModelFile {
    let mut file = ModelFile::empty();
    file.add_noise(1, "token_embd.weight", GgmlType::F32, &[288 << 10]);
    file.add_noise(1, "blk.0.attn_norm.weight", GgmlType::F32, &[32]);
    file
}

fn of_many_tensors() -> ModelFile {
    let mut file = ModelFile::empty();
    for index in 0..270 {
        file.add_noise(1, &format!("blk.{index}.attn_norm.weight"), GgmlType::F32, &[8]);
    }
    file
}

/// The name of this number.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn reference(name: usize) -> Reference {
    NAMES[name].parse().expect("a well-formed name")
}
