//! A store of any size, written without a daemon.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Piece, Recipe, TensorEntry};
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor::TensorFormat;

use crate::measure::Outcome;

/// A generated store.
pub(crate) struct Generated {
    /// One of the models.
    pub(crate) some_model: Reference,
    /// The number of blobs of each model.
    pub(crate) blobs_per_model: u32,
}

/// The number of blobs of a model: about as many as a Llama 3 8B has tensors.
const BLOBS_PER_MODEL: u32 = 300;
/// The length of a blob in bytes: four numbers.
const BLOB_BYTES: u64 = 16;

impl Generated {
    /// Writes `blobs` blobs and `models` models that share them.
    pub(crate) fn write(root: &Path, blobs: u32, models: u32) -> Outcome<Self> {
        drop(blobd_store::Store::open(root)?);
        let digests =
            (0..blobs).map(|number| write_blob(root, &content(number))).collect::<Outcome<Vec<_>>>()?;
        let config = write_blob(root, b"{}")?;
        let blobs_per_model = BLOBS_PER_MODEL.min(blobs);
        let mut some_model = "model-0".parse()?;
        for model in 0..models {
            let first = model * (blobs / models.max(1));
            let numbers: Vec<u32> = (first..first + blobs_per_model).map(|number| number % blobs).collect();
            let file = write_recipe(root, &numbers, &digests)?;
            some_model = format!("model-{model}").parse()?;
            write_manifest(root, &some_model, config, file, u64::from(blobs_per_model) * BLOB_BYTES)?;
        }
        rustix::fs::syncfs(File::open(root)?)?;
        Ok(Self { some_model, blobs_per_model })
    }
}

fn content(number: u32) -> [u8; 16] {
    let mut content = [0; 16];
    content[..4].copy_from_slice(&number.to_le_bytes());
    content
}

fn write_blob(root: &Path, bytes: &[u8]) -> Outcome<Digest> {
    let digest = Digest::of(bytes);
    write(&root.join(layout::blob(digest)), bytes)?;
    Ok(digest)
}

fn write_recipe(root: &Path, numbers: &[u32], digests: &[Digest]) -> Outcome<Digest> {
    let mut hasher = Hasher::new();
    let (mut pieces, mut tensors) = (Vec::new(), Vec::new());
    for (place, number) in numbers.iter().enumerate() {
        hasher.update(&content(*number));
        let blob = *digests.get(usize::try_from(*number)?).ok_or("no such blob")?;
        pieces.push(Piece::Blob { blob, offset: 0, length: BLOB_BYTES });
        tensors.push(TensorEntry {
            name: format!("blk.{}.ffn_{}.weight", place / 9, place % 9).into(),
            type_name: "F32".into(),
            shape: vec![4].into(),
            digest: blob,
            offset: 0,
            size: BLOB_BYTES,
            experts: None,
        });
    }
    let recipe = Recipe::new(hasher.finish(), TensorFormat::Gguf, pieces, tensors)?;
    write(&root.join(layout::recipe(recipe.file())), &recipe.to_json())?;
    Ok(recipe.file())
}

fn write_manifest(root: &Path, model: &Reference, config: Digest, file: Digest, size: u64) -> Outcome<()> {
    let descriptor =
        |media_type: &str, digest, size| Descriptor { media_type: MediaType::new(media_type), digest, size };
    let config = descriptor("application/vnd.docker.container.image.v1+json", config, 2);
    let layer = descriptor("application/vnd.ollama.image.model", file, size);
    let manifest = Manifest::compose(config, vec![layer])?;
    let origin = format!("{{\"origin\":\"import {}.gguf\"}}", model.model());
    write(&root.join(layout::origin(manifest.digest())), origin.as_bytes())?;
    let path = root.join(layout::manifest(model));
    fs::create_dir_all(path.parent().ok_or("no parent")?)?;
    write(&path, manifest.raw())
}

fn write(path: &Path, bytes: &[u8]) -> Outcome<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o444).open(path)?;
    Ok(file.write_all(bytes)?)
}
