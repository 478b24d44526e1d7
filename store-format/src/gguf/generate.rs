//! Generates valid GGUF files for property tests.
#![allow(clippy::unwrap_used, reason = "for tests alone")]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::{ALIGNMENT_KEY, ByteOrder, GgmlType, GgufWriter, Value};

/// A valid file and its expected content.
#[derive(Clone, Debug)]
pub struct Sample {
    pub order: ByteOrder,
    pub version: u32,
    pub alignment: u64,
    /// Keys and values in file order.
    pub metadata: Vec<(String, Value)>,
    /// In table order.
    pub tensors: Vec<SampleTensor>,
    pub file: Vec<u8>,
}

#[derive(Clone, Debug)]
pub struct SampleTensor {
    pub name: String,
    pub ggml_type: GgmlType,
    /// Its dimensions, the fastest first.
    pub dimensions: Vec<u64>,
    /// 0 without elements; for an unknown type, the minimum size in its file.
    size: u64,
    /// From the data section's start.
    pub offset: u64,
    /// The gap before it, in multiples of the alignment.
    gap: u64,
    /// Determines its order in the file.
    rank: u32,
}

/// Any valid file: either byte order and version, any alignment up to a page, tensors in any
/// order with gaps of any bytes, with zero elements or of unknown types, packed experts, any tail.
pub fn file() -> impl Strategy<Value = Sample> {
    let format = (any::<bool>(), 2..=3_u32, option::of(0..=12_u32));
    let tail = prop_oneof![Just(0), 0..100_u64, 65_530..65_560_u64];
    (format, vec(("[a-z.]{1,12}", value()), 0..6), tensors(), tail, any::<bool>()).prop_map(
        |((big, version, alignment), metadata, tensors, tail, noisy_gaps)| {
            let order = if big { ByteOrder::Big } else { ByteOrder::Little };
            let numbered = |(index, (key, value))| (format!("{index}.{key}"), value);
            let mut metadata: Vec<_> = metadata.into_iter().enumerate().map(numbered).collect();
            metadata.extend(alignment.map(|log| (ALIGNMENT_KEY.to_owned(), Value::U32(1 << log))));
            let alignment = alignment.map_or(32, |log| 1 << log);
            let file = Vec::new();
            let mut sample = Sample { order, version, alignment, metadata, tensors, file };
            let data_size = sample.place_tensors() + tail;
            sample.write(data_size, noisy_gaps);
            sample
        },
    )
}

impl Sample {
    /// Gives every tensor an offset; returns where the data ends.
    fn place_tensors(&mut self) -> u64 {
        let mut in_file_order: Vec<&mut SampleTensor> = self.tensors.iter_mut().collect();
        in_file_order.sort_by_key(|tensor| tensor.rank);
        let mut end = 0_u64;
        for tensor in in_file_order {
            tensor.offset = end.next_multiple_of(self.alignment) + tensor.gap * self.alignment;
            end = tensor.offset + tensor.size;
        }
        end
    }

    fn write(&mut self, data_size: u64, noisy_gaps: bool) {
        let mut writer = GgufWriter::new().with_byte_order(self.order).with_version(self.version);
        for (key, value) in &self.metadata {
            writer.metadata(key, value.clone()).unwrap();
        }
        for tensor in &self.tensors {
            writer.tensor_at(&tensor.name, tensor.ggml_type, &tensor.dimensions, tensor.offset).unwrap();
        }
        self.file = writer.header().unwrap();
        let data_start = self.file.len();
        // No two stretches of 251 bytes are alike for long, and none is zero.
        let noise =
            |place: usize| u8::try_from(place * 7 % 251 + 1).unwrap() ^ u8::try_from(place >> 8 & 3).unwrap();
        self.file
            .extend((0..usize::try_from(data_size).unwrap()).map(|p| if noisy_gaps { noise(p) } else { 0 }));
        for tensor in &self.tensors {
            let start = usize::try_from(tensor.offset).unwrap();
            for place in start..start + usize::try_from(tensor.size).unwrap() {
                self.file[data_start + place] = noise(place);
            }
        }
    }
}

/// Some tensors of any kind, perhaps with a set of separate experts among them.
fn tensors() -> impl Strategy<Value = Vec<SampleTensor>> {
    let others = vec((tensor(), any::<u32>(), gap()), 0..8);
    let experts = option::of((2..12_u64, 1..3_u64, vec((any::<u32>(), gap()), 12), any::<bool>()));
    (others, experts).prop_map(|(others, experts)| {
        let mut tensors: Vec<SampleTensor> = others
            .into_iter()
            .enumerate()
            .map(|(index, ((mut tensor, suffix), rank, gap))| {
                // The one empty name that a file may have, paths, and the longest names.
                tensor.name = if index == 0 { suffix } else { format!("{index}/../{suffix}") };
                SampleTensor { rank, gap, ..tensor }
            })
            .collect();
        if let Some((count, columns, places, in_order)) = experts {
            tensors.extend((0..count).zip(places).map(|(expert, (rank, gap))| SampleTensor {
                name: format!("blk.7.ffn_up.{expert}.weight"),
                ggml_type: GgmlType::F32,
                dimensions: vec![columns * 8, 2],
                size: columns * 64,
                offset: 0,
                gap: if in_order { 0 } else { gap },
                rank: if in_order { u32::MAX } else { rank },
            }));
        }
        tensors
    })
}

fn gap() -> impl Strategy<Value = u64> {
    prop_oneof![6 => Just(0_u64), 2 => 1..4_u64, 1 => Just(17_u64)]
}

/// A tensor without a place, and a text for its name.
fn tensor() -> impl Strategy<Value = (SampleTensor, String)> {
    let known = prop_oneof![
        Just(GgmlType::F32),
        Just(GgmlType::F16),
        Just(GgmlType::I8),
        Just(GgmlType::Q4_0),
        Just(GgmlType::Q4_K),
        Just(GgmlType::from_id(4)),
    ];
    let known = (known, vec(0..5_u64, 0..=3), 1..3_u64).prop_map(|(ggml_type, slow, blocks)| {
        let (block, block_bytes) = ggml_type.block().unwrap();
        let size = slow.iter().product::<u64>() * blocks * block_bytes;
        unplaced(ggml_type, [vec![blocks * block], slow].concat(), size)
    });
    let unknown = (43..300_u32, vec(1..5_u64, 0..=4), 1..600_u64)
        .prop_map(|(id, dimensions, size)| unplaced(GgmlType::from_id(id), dimensions, size));
    (prop_oneof![4 => known, 1 => unknown], "[a-zäß.]{0,40}")
}

fn unplaced(ggml_type: GgmlType, dimensions: Vec<u64>, size: u64) -> SampleTensor {
    SampleTensor { name: String::new(), ggml_type, dimensions, size, offset: 0, gap: 0, rank: 0 }
}

/// A metadata value of any type; strings of any bytes.
fn value() -> impl Strategy<Value = Value> {
    let bytes = || vec(any::<u8>(), 0..20);
    let scalars = prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
    ];
    let arrays = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Value::from),
        vec(any::<i16>(), 0..9).prop_map(Value::from),
        vec(any::<f32>(), 0..9).prop_map(Value::from),
        vec(any::<bool>(), 0..9).prop_map(Value::from),
        vec(any::<i64>(), 0..9).prop_map(Value::from),
        vec(bytes(), 0..9).prop_map(Value::strings),
    ];
    prop_oneof![scalars, arrays, bytes().prop_map(Value::String)]
}
