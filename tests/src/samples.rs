//! The names and files that tests of crashes and faults store, by number.

use std::sync::OnceLock;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::reference::Reference;

use crate::archives::{gzip, tar};
use crate::model::{ModelFile, noise};

/// The models' names: two share a directory, one has its own directories.
pub const NAMES: [&str; 3] = ["a:latest", "a:2", "me/c:1"];

/// A model file.
#[derive(Debug)]
pub struct SampleFile {
    /// Its digest.
    pub digest: Digest,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// A file, and the same with the key `general.name`.
pub const UNNAMED: usize = 0;
/// See [`UNNAMED`].
pub const NAMED: usize = 2;
/// A file without tensors.
pub const EMPTY: usize = 4;
/// A file with a tensor that is large enough for a pull to reuse it from a related model.
pub const LARGE: usize = 5;
/// The same with another small tensor.
pub const LARGE_RELATIVE: usize = 6;
/// A file with more blobs than are published at once.
pub const MANY: usize = 7;
/// A file that is not GGUF, so it is stored whole. It is pulled and imported together with the empty one. An import
/// shares its blocks with the source.
pub const WHOLE: usize = 8;
/// A compressed archive with [`UNNAMED`], which is only pulled.
pub const PACKED: usize = 9;

/// Small files, of which the first four share tensors. Some have few blobs, which are synced one by one; some
/// have a dozen, for which `syncfs` is used; one has so many that they are published in groups.
pub fn files() -> &'static [SampleFile] {
    static FILES: OnceLock<Vec<SampleFile>> = OnceLock::new();
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
        let file = |bytes: Vec<u8>| SampleFile { digest: Digest::of(&bytes), bytes };
        let packed = gzip(&tar(&[("LICENSE", b"free"), ("m/tiny.gguf", &files[UNNAMED].bytes())]));
        files.iter().map(ModelFile::bytes).chain([whole, packed]).map(file).collect()
    })
}

/// More than a pull fetches into memory at once.
const WHOLE_BYTES: usize = 300 << 10;

/// The weights of a file's model; for most files, the file itself.
#[must_use]
pub fn weights(file: usize) -> &'static [u8] {
    let file = match file {
        WHOLE => EMPTY,
        PACKED => UNNAMED,
        file => file,
    };
    &files()[file].bytes
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
