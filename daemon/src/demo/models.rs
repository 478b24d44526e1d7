//! Model files that look like real ones and cost nothing to get.
//!
//! A [`SyntheticModel`] has the tensor names, shapes, number formats and metadata of a published
//! model and pseudo-random weights. Its width, depth and vocabulary can be scaled, from tens of
//! megabytes for the demo to the full size for a benchmark. It is written as a stream: the memory
//! needed does not depend on its size. The same description always gives the same bytes.
//!
//! It promises that a tensor's bytes depend on seed, name and number format alone. So relatives
//! share what a real model's relatives share: a fine-tune all tensors but those retrained, and the
//! two spellings of a mixture of experts every expert. No engine makes sense of the weights.

mod metadata;
#[cfg(test)]
mod tests;
mod weights;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blobd_store_format::gguf::{GgmlType, GgufError, GgufWriter};

use self::weights::Stream;

/// A model that can be written as a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticModel {
    name: String,
    dimensions: Dimensions,
    experts: Option<Experts>,
    seed: u64,
    /// Names of the tensors that have other weights than the seed's.
    retrained: Vec<String>,
    chat_template: String,
}

/// How wide and deep a model is. Lengths of rows must be multiples of 256, as in real models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimensions {
    /// How many transformer blocks it has.
    pub block_count: u32,
    /// How long a token's vector is.
    pub embedding_length: u32,
    /// How long that vector is inside a feed-forward network.
    pub feed_forward_length: u32,
    /// How many attention heads there are.
    pub head_count: u32,
    /// How many of them have keys and values of their own.
    pub head_count_kv: u32,
    /// How many tokens it knows.
    pub vocabulary_length: u32,
}

impl Dimensions {
    /// Llama 3 8B's own: 4.58 GiB. With fewer blocks the file shrinks and its tensors do not:
    /// `Dimensions { block_count: 4, ..Dimensions::LLAMA3_8B }` gives 1.17 GiB.
    pub const LLAMA3_8B: Self = Self {
        block_count: 32,
        embedding_length: 4096,
        feed_forward_length: 14336,
        head_count: 32,
        head_count_kv: 8,
        vocabulary_length: 128_256,
    };

    /// Mixtral 8x7B's own: 26.5 GiB.
    pub const MIXTRAL_8X7B: Self = Self { vocabulary_length: 32_000, ..Self::LLAMA3_8B };

    /// A narrow Llama 3 8B of as many tensors: 37 MiB.
    pub const SMALL_LLAMA: Self = Self {
        embedding_length: 512,
        feed_forward_length: 768,
        head_count: 4,
        head_count_kv: 1,
        vocabulary_length: 4096,
        ..Self::LLAMA3_8B
    };

    /// A narrow Mixtral 8x7B of as many tensors: 34 MiB.
    pub const SMALL_MIXTRAL: Self =
        Self { embedding_length: 256, feed_forward_length: 256, ..Self::SMALL_LLAMA };
}

/// How the experts of a mixture are spelt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// One tensor per layer and projection holds them all, as since April 2024.
    Stacked,
    /// One tensor each, as before.
    Separate,
}

impl SyntheticModel {
    /// A dense model like Llama 3 8B, quantised to `Q4_K_M`: 291 tensors at 32 blocks.
    #[must_use]
    pub fn llama(name: impl Into<String>, dimensions: Dimensions) -> Self {
        let chat_template = metadata::LLAMA3_CHAT_TEMPLATE.to_owned();
        Self { name: name.into(), dimensions, experts: None, seed: 0, retrained: Vec::new(), chat_template }
    }

    /// A mixture of eight experts like Mixtral 8x7B, quantised to `Q4_K_M`: at 32 blocks it has
    /// 323 tensors with stacked experts and 995 with separate ones.
    #[must_use]
    pub fn mixtral(name: impl Into<String>, dimensions: Dimensions, experts: Experts) -> Self {
        let chat_template = metadata::MIXTRAL_CHAT_TEMPLATE.to_owned();
        Self { experts: Some(experts), chat_template, ..Self::llama(name, dimensions) }
    }

    /// The same model with entirely other weights.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The same model after a fine-tune that changed the tensors with these names.
    #[must_use]
    pub fn with_retrained<N: Into<String>>(self, tensors: impl IntoIterator<Item = N>) -> Self {
        Self { retrained: tensors.into_iter().map(Into::into).collect(), ..self }
    }

    /// The same model with another chat template.
    #[must_use]
    pub fn with_chat_template(self, chat_template: impl Into<String>) -> Self {
        Self { chat_template: chat_template.into(), ..self }
    }

    /// How many tensors it has.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors().len()
    }

    /// How long its file is in bytes.
    ///
    /// # Errors
    /// As for [`Self::header`].
    pub fn size_bytes(&self) -> Result<u64, GgufError> {
        let writer = self.writer()?;
        Ok((writer.header()?.len() as u64).saturating_add(writer.data_size()?))
    }

    /// The file's header, with the padding up to the tensors.
    ///
    /// # Errors
    /// [`GgufError::Unwritable`] when the dimensions make no whole blocks.
    pub fn header(&self) -> Result<Vec<u8>, GgufError> {
        self.writer()?.header()
    }

    /// Writes the file and says how long it is. What was there before is replaced.
    ///
    /// # Errors
    /// [`SyntheticError`] when the dimensions make no model, or the file cannot be written.
    pub fn write_to(&self, path: &Path) -> Result<u64, SyntheticError> {
        let writer = self.writer()?;
        let (header, offsets, data_size) = (writer.header()?, writer.tensor_offsets()?, writer.data_size()?);
        let written = File::create(path).and_then(|mut out| {
            out.write_all(&header)?;
            self.write_data(&offsets, data_size, &mut out)
        });
        written.map_err(|source| SyntheticError::Io { path: path.to_path_buf(), source })?;
        Ok(data_size.saturating_add(header.len() as u64))
    }

    fn write_data(&self, offsets: &[u64], data_size: u64, out: &mut impl Write) -> io::Result<()> {
        let mut position = 0;
        for (tensor, offset) in self.tensors().iter().zip(offsets) {
            pad(out, offset.saturating_sub(position))?;
            let size = tensor.size_bytes();
            self.weights_of(tensor).copy_to(size, out)?;
            position = offset.saturating_add(size);
        }
        pad(out, data_size.saturating_sub(position))
    }

    fn writer(&self) -> Result<GgufWriter, GgufError> {
        let mut writer = GgufWriter::new();
        self.write_metadata(&mut writer)?;
        for tensor in self.tensors() {
            writer.tensor(&tensor.name, tensor.ggml_type, &tensor.shape)?;
        }
        Ok(writer)
    }

    fn weights_of(&self, tensor: &Tensor) -> Stream {
        let is_retrained = self.retrained.contains(&tensor.name);
        let seed = self.seed.wrapping_add(u64::from(is_retrained) << 63);
        let start = tensor.place.as_ref().map_or(0, |place| tensor.size_bytes().saturating_mul(place.expert));
        let stack = tensor.place.as_ref().map_or(&tensor.name, |place| &place.stack);
        Stream::new(seed, stack, tensor.ggml_type, start)
    }

    /// All tensors in the order in which llama.cpp's converter writes them.
    fn tensors(&self) -> Vec<Tensor> {
        let Dimensions { embedding_length, vocabulary_length, block_count, .. } = self.dimensions;
        let embedding = [embedding_length, vocabulary_length];
        let mut tensors = vec![Tensor::new("token_embd.weight", GgmlType::Q4_K, &embedding)];
        for block in 0..block_count {
            match self.experts {
                None => self.push_dense_network(block, &mut tensors),
                Some(experts) => self.push_experts(block, experts, &mut tensors),
            }
            self.push_attention(block, &mut tensors);
        }
        tensors.push(Tensor::new("output_norm.weight", GgmlType::F32, &[embedding_length]));
        tensors.push(Tensor::new("output.weight", GgmlType::Q6_K, &embedding));
        tensors
    }

    fn push_dense_network(&self, block: u32, tensors: &mut Vec<Tensor>) {
        let Dimensions { embedding_length: n, feed_forward_length: ff, .. } = self.dimensions;
        for (name, ggml_type, shape) in [
            ("ffn_down", self.sensitive(block), [ff, n]),
            ("ffn_gate", GgmlType::Q4_K, [n, ff]),
            ("ffn_up", GgmlType::Q4_K, [n, ff]),
        ] {
            tensors.push(Tensor::new(format!("blk.{block}.{name}.weight"), ggml_type, &shape));
        }
    }

    fn push_experts(&self, block: u32, experts: Experts, tensors: &mut Vec<Tensor>) {
        let Dimensions { embedding_length: n, feed_forward_length: ff, .. } = self.dimensions;
        tensors.push(Tensor::new(
            format!("blk.{block}.ffn_gate_inp.weight"),
            GgmlType::F32,
            &[n, EXPERT_COUNT],
        ));
        for (projection, ggml_type, rows, columns) in [
            ("down", self.sensitive(block), ff, n),
            ("gate", GgmlType::Q4_K, n, ff),
            ("up", GgmlType::Q4_K, n, ff),
        ] {
            let stack = format!("blk.{block}.ffn_{projection}_exps.weight");
            match experts {
                Experts::Stacked => {
                    tensors.push(Tensor::new(stack, ggml_type, &[rows, columns, EXPERT_COUNT]));
                }
                Experts::Separate => tensors.extend((0..EXPERT_COUNT).map(|expert| {
                    let name = format!("blk.{block}.ffn_{projection}.{expert}.weight");
                    let place = Some(Place { stack: stack.clone(), expert: expert.into() });
                    Tensor { place, ..Tensor::new(name, ggml_type, &[rows, columns]) }
                })),
            }
        }
    }

    fn push_attention(&self, block: u32, tensors: &mut Vec<Tensor>) {
        let Dimensions { embedding_length: n, head_count, head_count_kv, .. } = self.dimensions;
        let kv = n / head_count.max(1) * head_count_kv;
        // llama.cpp gives the few attention weights of a mixture more bits than its many experts.
        let (key, value, output) = match self.experts {
            None => (GgmlType::Q4_K, self.sensitive(block), GgmlType::Q4_K),
            Some(_) => (GgmlType::Q8_0, GgmlType::Q8_0, GgmlType::Q5_K),
        };
        let name = |part| format!("blk.{block}.{part}.weight");
        tensors.extend([
            Tensor::new(name("ffn_norm"), GgmlType::F32, &[n]),
            Tensor::new(name("attn_norm"), GgmlType::F32, &[n]),
            Tensor::new(name("attn_k"), key, &[n, kv]),
            Tensor::new(name("attn_output"), output, &[n, n]),
            Tensor::new(name("attn_q"), GgmlType::Q4_K, &[n, n]),
            Tensor::new(name("attn_v"), value, &[n, kv]),
        ]);
    }

    /// What `Q4_K_M` uses for the weights that matter most: more bits in the first and the last
    /// eighth of the blocks and in every third between (`use_more_bits` in llama.cpp).
    fn sensitive(&self, block: u32) -> GgmlType {
        let eighth = self.dimensions.block_count / 8;
        let is_outer = block < eighth || block >= self.dimensions.block_count * 7 / 8;
        if is_outer || (block - eighth) % 3 == 2 { GgmlType::Q6_K } else { GgmlType::Q4_K }
    }
}

/// Why a synthetic model cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyntheticError {
    /// Its dimensions make no model.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file cannot be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// How many experts a mixture has.
const EXPERT_COUNT: u32 = 8;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tensor {
    name: String,
    ggml_type: GgmlType,
    shape: Vec<u64>,
    /// For one expert of several, the stack that it is part of.
    place: Option<Place>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    stack: String,
    expert: u64,
}

impl Tensor {
    fn new(name: impl Into<String>, ggml_type: GgmlType, shape: &[u32]) -> Self {
        let shape = shape.iter().copied().map(u64::from).collect();
        Self { name: name.into(), ggml_type, shape, place: None }
    }

    /// Exact once [`GgufWriter::tensor`] has taken the tensor.
    fn size_bytes(&self) -> u64 {
        let (elements, bytes) = self.ggml_type.block().unwrap_or((1, 0));
        self.shape.iter().fold(bytes, |size, dimension| size.saturating_mul(*dimension)) / elements
    }
}

fn pad(out: &mut impl Write, length: u64) -> io::Result<()> {
    io::copy(&mut io::Read::take(io::repeat(0), length), out).map(drop)
}
