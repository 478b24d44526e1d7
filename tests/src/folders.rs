//! Models that are folders, as programs of the Hugging Face hub have them: safetensors files, JSON files and others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use serde_json::json;

use crate::model::noise;

/// The files of a model by their paths in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFolder(pub BTreeMap<String, Vec<u8>>);

impl ModelFolder {
    /// A model of two shards with an index, a configuration, and a tokenizer. Every tensor depends on `seed` and its name,
    /// except `shared.weight`, which is the same in all models.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn transformers(seed: u64) -> Self {
        let shards = [
            ("model-00001-of-00002.safetensors", ["model.embed_tokens.weight", "shared.weight"]),
            ("model-00002-of-00002.safetensors", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]),
        ];
        let mut folder = Self::default();
        let mut map = serde_json::Map::new();
        for (file, tensors) in shards {
            let seeded = |name: &'static str| (if name == "shared.weight" { 0 } else { seed }, name);
            folder.add(file, safetensors(&tensors.map(seeded)));
            map.extend(tensors.map(|tensor| (tensor.to_owned(), file.into())));
        }
        let index = json!({ "metadata": { "total_size": 4 * TENSOR_BYTES }, "weight_map": map });
        folder.add("model.safetensors.index.json", index.to_string());
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 128,
            "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
        });
        folder.add("config.json", config.to_string());
        folder.add("tokenizer.json", json!({ "model": { "type": "BPE", "seed": seed } }).to_string());
        folder.add("README.md", "# A model of tests\n");
        folder
    }

    /// Adds a file.
    pub fn add(&mut self, path: &str, content: impl Into<Vec<u8>>) {
        self.0.insert(path.to_owned(), content.into());
    }

    /// Writes the files below a directory, which is created if necessary, and returns it.
    ///
    /// # Panics
    /// When they cannot be written.
    pub fn write_to(&self, directory: impl Into<PathBuf>) -> PathBuf {
        let directory = directory.into();
        for (path, content) in &self.0 {
            let path = directory.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        directory
    }

    /// Reads all files below a directory.
    ///
    /// # Panics
    /// When they cannot be read.
    #[must_use]
    pub fn read(directory: &Path) -> Self {
        let (mut folder, mut directories) = (Self::default(), vec![directory.to_owned()]);
        while let Some(listed) = directories.pop() {
            for entry in fs::read_dir(&listed).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    let name = path.strip_prefix(directory).unwrap().to_str().unwrap();
                    folder.add(name, fs::read(&path).unwrap());
                }
            }
        }
        folder
    }

    /// The size of all files in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.values().map(|content| content.len() as u64).sum()
    }
}

/// The size of each tensor of [`safetensors`].
const TENSOR_BYTES: u64 = 2 * 128 * 64;

/// A safetensors file with a BF16 tensor of this seed for each name.
///
/// # Panics
/// When a name is there twice.
#[must_use]
pub fn safetensors(tensors: &[(u64, &str)]) -> Vec<u8> {
    let (mut writer, mut data) = (HeaderWriter::new(), Vec::new());
    for (seed, name) in tensors {
        writer.tensor(name, Dtype::BF16, &[128, 64]).unwrap();
        data.extend(noise(*seed, name, usize::try_from(TENSOR_BYTES).unwrap()));
    }
    let mut file = writer.metadata("format", "pt").header().unwrap();
    file.extend(data);
    file
}
