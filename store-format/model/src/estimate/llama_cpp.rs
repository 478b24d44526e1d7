//! The KV cache as llama.cpp allocates it.
//!
//! Keys and values may have different types, and blocks different numbers of heads. Blocks with a sliding window keep
//! only the window, and recurrent blocks keep a state of fixed size. Every sequence has its own cache, as with
//! `--parallel`, and flash attention is on, so values are stored untransposed.
//!
//! Source: llama.cpp 0c1e57098 of October 2026: `llama-kv-cache.cpp`, `llama-kv-cache-iswa.cpp`,
//! `llama-memory-recurrent.cpp`, `llama-hparams.cpp`, `llama-context.cpp`, `llama_model::create_memory`.

use super::blocks::{self, Recurrent};
use super::compute::Sizes;
use super::hyperparameters::Keys;
use super::number::Number;
use super::{CacheType, EstimateError, Settings};

/// The name of this basis.
pub(super) const NAME: &str = "llama.cpp-2026-10";
/// Contexts and windows are padded to this many tokens.
const PADDING: u128 = 256;
/// The number of gemma3n's blocks with their own cache; the others use that of an earlier block.
const GEMMA3N_CACHED_BLOCKS: u64 = 20;
/// Architectures that compute the embedding of a whole text at once and keep nothing.
const ENCODERS: [&str; 9] = [
    "bert",
    "modern-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "eurobert",
    "gemma-embedding",
];
/// An architecture that computes embeddings of whole texts but still has a cache.
const CACHED_ENCODER: &str = "llama-embed";
/// Architectures that compute all tokens of a text at once, several times, and keep nothing.
const DIFFUSION: [&str; 4] = ["dream", "llada", "llada-moe", "rnd1"];
/// Architectures that may use multi-head latent attention, which keeps one compressed key per token and no value.
const LATENT_ATTENTION: [&str; 3] = ["deepseek2", "deepseek2-ocr", "mistral4"];

/// What each block keeps, independent of the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CacheLayout {
    pub(super) architecture: String,
    blocks: Vec<BlockLayout>,
    /// The length of the sliding window in tokens.
    window: u64,
    /// Keys that the rules need but the file lacks.
    pub(super) missing: Vec<String>,
}

/// What a block keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BlockLayout {
    /// The elements of a token's keys, and of its values.
    k: u64,
    v: u64,
    /// Whether it keeps only the tokens in the window.
    is_windowed: bool,
    /// Bytes of the recurrent state of a sequence.
    state_bytes: u64,
}

impl CacheLayout {
    /// Reads what each of the blocks keeps.
    pub(super) fn read(mut keys: Keys<'_>, blocks: usize) -> Result<Self, EstimateError> {
        let architecture = keys.metadata().architecture().to_owned();
        let mut layout = Self { architecture, blocks: Vec::new(), window: 0, missing: Vec::new() };
        let heads = Heads::read(&mut keys, blocks);
        if !layout.has_cache() {
            layout.blocks = vec![BlockLayout::default(); blocks];
            layout.missing = keys.into_missing();
            return Ok(layout);
        }
        let recurrent = blocks::read_recurrent(&mut keys, &heads.kv)?;
        let predicted = keys.optional("nextn_predict_layers").and_then(|count| usize::try_from(count).ok());
        let trunk = blocks.saturating_sub(predicted.unwrap_or(0));
        let window = blocks::read_window(&mut keys, blocks, trunk, &recurrent);
        let cached = cached_blocks(&keys, blocks, trunk);
        for (block, state) in recurrent.into_iter().enumerate() {
            let is_windowed = window.blocks.get(block).copied().unwrap_or(false);
            let has_cache = block < cached && state != Recurrent::Instead && state != Recurrent::Nothing;
            let (k, v) = if has_cache { heads.elements(block, is_windowed)? } else { (0, 0) };
            let state_bytes = if block < trunk { state.bytes(&mut keys)? } else { 0 };
            layout.blocks.push(BlockLayout { k, v, is_windowed, state_bytes });
        }
        layout.window = window.tokens;
        layout.missing = keys.into_missing();
        Ok(layout)
    }

    fn has_cache(&self) -> bool {
        !self.is_encoder() && !DIFFUSION.contains(&self.architecture.as_str())
    }

    fn is_encoder(&self) -> bool {
        ENCODERS.contains(&self.architecture.as_str())
    }

    /// The lengths of the tensors in the graph.
    pub(super) fn sizes(&self, settings: &Settings) -> Sizes {
        let cells = Self::padded_context(settings);
        // A batch contains equally many tokens of every sequence.
        let tokens = (cells * settings.parallel).min(settings.batch.into());
        let tokens = tokens.next_multiple_of(u128::from(settings.parallel.max(1)));
        let is_embedding = self.is_encoder() || self.architecture == CACHED_ENCODER;
        let cells = if self.has_cache() && !is_embedding { cells } else { tokens };
        Sizes {
            tokens: tokens.saturated(),
            cells: cells.saturated(),
            window_cells: self.window_cells(settings, cells).saturated(),
            windowed: self.blocks.iter().map(|block| block.is_windowed).collect(),
            is_embedding,
        }
    }

    fn window_cells(&self, settings: &Settings, cells: Number) -> Number {
        let batch = (Number::from(settings.context) * settings.parallel).min(settings.batch.into());
        cells.min(self.window + batch).next_multiple_of(PADDING)
    }

    /// The bytes that each block keeps.
    pub(super) fn kv_cache(&self, settings: &Settings) -> Result<Vec<Number>, EstimateError> {
        let cells = Self::padded_context(settings);
        let window_cells = self.window_cells(settings, cells);
        let sequences = settings.parallel;
        let of_block = |block: &BlockLayout| {
            let row = row_bytes(block.k, settings.cache_type_k)? + row_bytes(block.v, settings.cache_type_v)?;
            let cells = if block.is_windowed { window_cells } else { cells };
            Ok(row * cells * sequences + Number::from(block.state_bytes) * sequences.max(1))
        };
        self.blocks.iter().map(of_block).collect()
    }

    /// The number of cache cells for one sequence: the total is padded and divided by the sequences, and each share is
    /// padded again.
    pub(super) fn padded_context(settings: &Settings) -> Number {
        let total = (Number::from(settings.context) * settings.parallel).next_multiple_of(PADDING);
        (total / settings.parallel.max(1)).next_multiple_of(PADDING)
    }
}

/// The number of heads in each block, and their sizes in elements.
struct Heads {
    kv: Vec<u64>,
    size_k: u64,
    size_v: u64,
    windowed_size_k: u64,
    windowed_size_v: u64,
    has_values: bool,
}

impl Heads {
    fn read(keys: &mut Keys<'_>, blocks: usize) -> Self {
        let architecture = keys.metadata().architecture();
        let heads = keys.per_block("attention.head_count", blocks);
        let heads = heads.filter(|heads| heads.iter().any(|count| *count > 0));
        if heads.is_none() && !blocks::is_recurrent_only(architecture) {
            keys.add_missing("attention.head_count");
        }
        let heads = heads.unwrap_or_else(|| vec![0; blocks]);
        let embedding = keys.positive("embedding_length");
        let first = heads.first().copied().unwrap_or(0);
        let default = embedding.checked_div(first).unwrap_or(0);
        // If block 0 has no heads, llama.cpp reads the sizes for plamo2 only.
        let reads_sizes = first > 0 || architecture == "plamo2";
        let size = |key: &str| keys.optional(key).filter(|_| reads_sizes).unwrap_or(default);
        let (size_k, size_v) = (size("attention.key_length"), size("attention.value_length"));
        let is_set = |key: &str| keys.optional(key).is_some_and(|length| length > 0);
        let is_latent = LATENT_ATTENTION.contains(&architecture)
            && is_set("attention.key_length_mla")
            && is_set("attention.value_length_mla");
        Self {
            kv: keys.per_block("attention.head_count_kv", blocks).unwrap_or(heads),
            size_k,
            size_v,
            windowed_size_k: keys.optional("attention.key_length_swa").unwrap_or(size_k),
            windowed_size_v: keys.optional("attention.value_length_swa").unwrap_or(size_v),
            has_values: !is_latent,
        }
    }

    /// The elements of the keys and of the values of a token.
    fn elements(&self, block: usize, is_windowed: bool) -> Result<(u64, u64), EstimateError> {
        let heads = Number::from(self.kv.get(block).copied().unwrap_or(0));
        let (k, v) = match is_windowed {
            true => (self.windowed_size_k, self.windowed_size_v),
            false => (self.size_k, self.size_v),
        };
        let v = if self.has_values { v } else { 0 };
        Ok(((heads * k).bytes("keys of a token")?, (heads * v).bytes("values of a token")?))
    }
}

/// How many blocks, counted from the first, have their own cache. Blocks for multi-token prediction have one only in a
/// separate context.
fn cached_blocks(keys: &Keys<'_>, blocks: usize, trunk: usize) -> usize {
    let own = match keys.metadata().architecture() {
        "gemma3n" => usize::try_from(GEMMA3N_CACHED_BLOCKS).unwrap_or(usize::MAX),
        "gemma4" => {
            let shared = keys.optional("attention.shared_kv_layers").unwrap_or(0);
            blocks.saturating_sub(usize::try_from(shared).unwrap_or(usize::MAX))
        }
        _ => blocks,
    };
    // A file with such blocks only is a draft model, so the cache is theirs.
    if trunk == 0 { own } else { own.min(trunk) }
}

fn row_bytes(elements: u64, cache_type: CacheType) -> Result<Number, EstimateError> {
    let (block, bytes) = cache_type.ggml_type().block().unwrap_or((1, 4));
    if !elements.is_multiple_of(block) {
        return Err(EstimateError::CacheRow { cache_type, elements, block });
    }
    Ok(Number::from(elements / block) * bytes)
}
