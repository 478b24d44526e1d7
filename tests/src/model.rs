//! Model files, valid ones: of real shapes but small, and in every layout that occurs.

use std::fs;
use std::path::{Path, PathBuf};

use blobd_store_format::gguf::{ByteOrder, GgmlType, GgufWriter, Header, Value};

/// A GGUF file to be made. The same seed and tensor name always give the same bytes.
#[derive(Clone, Debug)]
pub struct ModelFile {
    /// 2 or 3.
    pub version: u32,
    /// The order of numbers in the header.
    pub order: ByteOrder,
    /// `general.alignment`, if it is to be set.
    pub alignment: Option<u32>,
    /// Further metadata.
    pub metadata: Vec<(String, Value)>,
    /// In table order.
    pub tensors: Vec<ModelTensor>,
    /// Whether the data lies in the reverse order of the table.
    pub reversed: bool,
    /// Multiples of the alignment that stay free in front of each tensor.
    pub gap: u64,
    /// What padding and gaps are filled with.
    pub padding: u8,
    /// How the file ends.
    pub end: End,
}

/// A tensor and its bytes.
#[derive(Clone, Debug)]
pub struct ModelTensor {
    /// Its name.
    pub name: String,
    /// Its number format.
    pub ggml_type: GgmlType,
    /// Its dimensions, the fastest first.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// How a file ends.
#[derive(Clone, Debug)]
pub enum End {
    /// With the padding behind its last tensor, as llama.cpp writes it.
    Padded,
    /// With its last tensor, as other programs write it.
    Bare,
    /// With padding and then these bytes.
    Trailing(Vec<u8>),
}

impl ModelFile {
    /// A file without tensors.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            version: 3,
            order: ByteOrder::Little,
            alignment: None,
            metadata: vec![("general.architecture".to_owned(), Value::from("llama"))],
            tensors: Vec::new(),
            reversed: false,
            gap: 0,
            padding: 0,
            end: End::Padded,
        }
    }

    /// A small llama: about 60 KiB in 20 tensors of two layers.
    #[must_use]
    pub fn dense(seed: u64) -> Self {
        Self::dense_of(seed, 2, 32)
    }

    /// A llama of so many layers and elements in a row.
    #[must_use]
    pub fn dense_of(seed: u64, layers: u64, width: u64) -> Self {
        let mut file = Self::empty();
        file.add_noise(seed, "token_embd.weight", GgmlType::Q8_0, &[width, 64]);
        for layer in 0..layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            for norm in ["attn_norm", "ffn_norm"] {
                file.add_noise(seed, &name(norm), GgmlType::F32, &[width]);
            }
            for part in ["attn_q", "attn_k", "attn_v", "attn_output"] {
                file.add_noise(seed, &name(part), GgmlType::Q8_0, &[width, width]);
            }
            for part in ["ffn_gate", "ffn_up", "ffn_down"] {
                file.add_noise(seed, &name(part), GgmlType::F16, &[width, width * 4]);
            }
        }
        file.add_noise(seed, "output_norm.weight", GgmlType::F32, &[width]);
        file.add_noise(seed, "output.weight", GgmlType::Q8_0, &[width, 64]);
        file
    }

    /// A mixture of `count` experts in one layer, each projection stacked into one tensor.
    #[must_use]
    pub fn stacked_experts(seed: u64, count: u64) -> Self {
        Self::experts(seed, count, |file, projection, experts| {
            let name = format!("blk.0.ffn_{projection}_exps.weight");
            let bytes = experts.concat();
            file.tensors.push(ModelTensor {
                name,
                ggml_type: GgmlType::F16,
                shape: vec![32, 16, count],
                bytes,
            });
        })
    }

    /// The same weights with one tensor per expert, sorted by name as old converters did: expert
    /// 10 stands before expert 2.
    #[must_use]
    pub fn separate_experts(seed: u64, count: u64) -> Self {
        Self::experts(seed, count, |file, projection, experts| {
            let tensor = |(expert, bytes): (usize, &Vec<u8>)| ModelTensor {
                name: format!("blk.0.ffn_{projection}.{expert}.weight"),
                ggml_type: GgmlType::F16,
                shape: vec![32, 16],
                bytes: bytes.clone(),
            };
            let mut tensors: Vec<_> = experts.iter().enumerate().map(tensor).collect();
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            file.tensors.extend(tensors);
        })
    }

    /// The table of DeepSeek-V3: its 1,086 names in file order, with eight experts and tiny shapes.
    #[must_use]
    pub fn deepseek_v3() -> Self {
        const ATTENTION: [&str; 10] = [
            "attn_norm",
            "attn_q_a",
            "attn_q_a_norm",
            "attn_q_b",
            "attn_kv_a_mqa",
            "attn_kv_a_norm",
            "attn_k_b",
            "attn_v_b",
            "attn_output",
            "ffn_norm",
        ];
        const SHARED: [&str; 4] = ["ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
        let mut file = Self::empty();
        let mut add = |name: &str, shape: &[u64]| file.add_noise(3, name, GgmlType::F16, shape);
        add("token_embd.weight", &[32, 64]);
        for block in 0..61 {
            let mut weight = |part: &str, shape: &[u64]| add(&format!("blk.{block}.{part}.weight"), shape);
            ATTENTION.iter().for_each(|part| weight(part, &[32, 4]));
            if block < 3 {
                ["ffn_gate", "ffn_up", "ffn_down"].iter().for_each(|part| weight(part, &[32, 8]));
            } else {
                SHARED.iter().for_each(|part| weight(part, &[32, 8]));
                let stacks = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
                stacks.iter().for_each(|part| weight(part, &[32, 4, 8]));
                add(&format!("blk.{block}.exp_probs_b.bias"), &[32]);
            }
        }
        add("output_norm.weight", &[32]);
        add("output.weight", &[32, 64]);
        file
    }

    /// The same model in `count` shards, as `llama-gguf-split` makes them: all metadata in the first,
    /// the tensors in order.
    #[must_use]
    pub fn shards(&self, count: u32) -> Vec<Self> {
        let per_shard = self.tensors.len().div_ceil(count as usize).max(1);
        let mut tensors = self.tensors.chunks(per_shard).map(<[_]>::to_vec);
        let total = u32::try_from(self.tensors.len()).unwrap_or(u32::MAX);
        let shard = |number: u32| {
            let metadata = if number == 0 { self.metadata.clone() } else { Vec::new() };
            let split = [("split.no", number), ("split.count", count), ("split.tensors.count", total)];
            let split = split.map(|(key, value)| (key.to_owned(), Value::from(value)));
            let metadata = metadata.into_iter().chain(split).collect();
            Self { metadata, tensors: tensors.next().unwrap_or_default(), ..self.clone() }
        };
        (0..count).map(shard).collect()
    }

    fn experts(seed: u64, count: u64, add: impl Fn(&mut Self, &str, &[Vec<u8>])) -> Self {
        let mut file = Self::empty();
        file.add_noise(seed, "token_embd.weight", GgmlType::Q8_0, &[32, 64]);
        file.add_noise(seed, "blk.0.ffn_gate_inp.weight", GgmlType::F32, &[32, count]);
        for projection in ["down", "gate", "up"] {
            let bytes = |expert| noise(seed, &format!("{projection} {expert}"), 32 * 16 * 2);
            add(&mut file, projection, &(0..count).map(bytes).collect::<Vec<_>>());
        }
        file
    }

    /// Adds a tensor of noise.
    ///
    /// # Panics
    /// When the shape does not fit the type.
    pub fn add_noise(&mut self, seed: u64, name: &str, ggml_type: GgmlType, shape: &[u64]) {
        let (elements, bytes) = ggml_type.block().expect("a type of known size");
        let size = shape.iter().product::<u64>() / elements * bytes;
        let bytes = noise(seed, name, usize::try_from(size).expect("a small tensor"));
        self.tensors.push(ModelTensor { name: name.to_owned(), ggml_type, shape: shape.to_vec(), bytes });
    }

    /// Gives one tensor other bytes, as a fine-tune does.
    ///
    /// # Panics
    /// When there is no such tensor.
    #[must_use]
    pub fn with_changed(mut self, name: &str) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor's name");
        tensor.bytes = noise(u64::MAX, name, tensor.bytes.len());
        self
    }

    /// Adds metadata.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// The file.
    ///
    /// # Panics
    /// When it cannot be made: the test is wrong.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let alignment = self.alignment.map_or(32, u64::from);
        let places = self.places(alignment);
        let mut writer = GgufWriter::new().with_version(self.version).with_byte_order(self.order);
        for (key, value) in &self.metadata {
            writer.metadata(key, value.clone()).unwrap();
        }
        if let Some(alignment) = self.alignment {
            writer.metadata("general.alignment", alignment).unwrap();
        }
        for (tensor, (_, offset)) in self.tensors.iter().zip(&places) {
            writer.tensor_at(&tensor.name, tensor.ggml_type, &tensor.shape, *offset).unwrap();
        }
        let mut file = writer.header().unwrap();
        let unpadded = Header::parse(&file).unwrap().bytes().len();
        file[unpadded..].fill(self.padding);
        let data_offset = file.len();
        let mut in_file_order = places;
        in_file_order.sort_by_key(|(tensor, offset)| (*offset, *tensor));
        for (tensor, offset) in in_file_order {
            file.resize(data_offset + usize::try_from(offset).unwrap(), self.padding);
            file.extend(&self.tensors[tensor].bytes);
        }
        self.end(&mut file, alignment);
        file
    }

    /// Writes the file into a directory.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn write_to(&self, directory: &Path, name: &str) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, self.bytes()).unwrap();
        path
    }

    /// Each tensor's place in the table and where its bytes start in the data section.
    fn places(&self, alignment: u64) -> Vec<(usize, u64)> {
        let mut places = vec![(0, 0); self.tensors.len()];
        let mut end = 0_u64;
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        if self.reversed {
            order.reverse();
        }
        for tensor in order {
            let offset = end.next_multiple_of(alignment) + self.gap * alignment;
            places[tensor] = (tensor, offset);
            end = offset + self.tensors[tensor].bytes.len() as u64;
        }
        places
    }

    fn end(&self, file: &mut Vec<u8>, alignment: u64) {
        if !matches!(self.end, End::Bare) {
            // The data section starts at a multiple of the alignment.
            file.resize(file.len().next_multiple_of(usize::try_from(alignment).unwrap()), self.padding);
        }
        if let End::Trailing(bytes) = &self.end {
            file.extend(bytes);
        }
    }
}

/// Bytes without a pattern, the same for the same seed and name.
#[must_use]
pub fn noise(seed: u64, name: &str, length: usize) -> Vec<u8> {
    let mut state = name.bytes().fold(seed ^ 0x9e37_79b9_7f4a_7c15, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
    }) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
