//! Tests of splitting and rebuilding, and of files that cannot be split.

use std::collections::BTreeMap;
use std::convert::Infallible;

use proptest::prelude::*;

use super::*;
use crate::digest::Digest;
use crate::file_layout::LayoutError;
use crate::gguf::generate::{Sample, file};
use crate::gguf::{GgmlType, GgufError, GgufWriter, Header};
use crate::recipe::{Piece, Recipe, RecipeError};
use crate::tensor::Experts;
use crate::tensor::TensorInfo;

/// Tensors to be written: name, type, dimensions, offset.
type Row<'a> = (&'a str, GgmlType, &'a [u64], u64);

const I8: GgmlType = GgmlType::I8;
const UNKNOWN: GgmlType = GgmlType::from_id(77);

fn header(rows: &[Row<'_>]) -> Header {
    aligned_header(32, rows)
}

fn aligned_header(alignment: u32, rows: &[Row<'_>]) -> Header {
    let mut writer = GgufWriter::new();
    writer.metadata("general.alignment", alignment).unwrap();
    for (name, ggml_type, dimensions, offset) in rows {
        writer.tensor_at(name, *ggml_type, dimensions, *offset).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

/// Plans a file whose data section has `data_size` bytes.
fn plan(header: &Header, data_size: u64) -> Result<SplitPlan, GgufError> {
    plan_file(header, header.data_offset() + data_size)
}

fn plan_file(header: &Header, file_size: u64) -> Result<SplitPlan, GgufError> {
    header.file_layout(file_size).map(SplitPlan::new)
}

/// Whether a tensor is refused because the file does not contain all of it.
fn is_outside(plan: &Result<SplitPlan, GgufError>) -> bool {
    matches!(plan, Err(GgufError::Layout(LayoutError::Outside { .. })))
}

/// A file with this header and data that differ from byte to byte.
fn file_with(header: &Header, data_size: u64) -> Vec<u8> {
    let mut file = header.bytes().to_vec();
    file.resize(usize::try_from(header.data_offset()).unwrap(), 0);
    file.extend((0..data_size).map(|place| u8::try_from(place % 251 + 1).unwrap()));
    file
}

/// A split file.
struct Stored {
    recipe: Recipe,
    blobs: BTreeMap<Digest, Vec<u8>>,
}

impl Stored {
    /// Splits a file in chunks of these sizes, repeated.
    fn new(plan: &SplitPlan, file: &[u8], sizes: &[usize]) -> Self {
        let size_of = |blob: &PlannedBlob| usize::try_from(blob.size).unwrap();
        let mut blobs: Vec<Vec<u8>> = plan.blobs().iter().map(|blob| vec![0; size_of(blob)]).collect();
        let mut written = vec![0; blobs.len()];
        let mut literals = vec![Vec::new(); plan.literal_count()];
        let (mut splitter, mut rest, mut completed) = (Splitter::new(plan), file, 0);
        for size in sizes.iter().cycle() {
            let (chunk, more) = rest.split_at((*size).min(rest.len()));
            for part in splitter.push(chunk).unwrap() {
                assert!(!part.bytes.is_empty());
                completed += usize::from(part.completes);
                match part.target {
                    Target::Blob { blob, offset_in_blob } => {
                        let start = usize::try_from(offset_in_blob).unwrap();
                        blobs[blob][start..start + part.bytes.len()].copy_from_slice(part.bytes);
                        written[blob] += part.bytes.len();
                    }
                    Target::Literal { literal } => literals[literal].extend(part.bytes),
                }
            }
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        splitter.finish().unwrap();
        assert_eq!(completed, plan.segments().len());
        assert!(blobs.iter().map(Vec::len).eq(written), "a byte of a blob was written twice or never");
        let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
        let recipe = plan.clone().recipe(Digest::of(file), &digests, literals).unwrap();
        Self { recipe, blobs: digests.into_iter().zip(blobs).collect() }
    }

    fn rebuild(&self) -> Vec<u8> {
        let mut file = vec![0xee; usize::try_from(self.recipe.size()).unwrap()];
        let read = self.recipe.pieces().read_at(0, &mut file, |blob, offset, buffer| {
            buffer.copy_from_slice(self.bytes(blob, offset, buffer.len() as u64));
            Ok::<_, Infallible>(())
        });
        assert_eq!(read, Ok(file.len()));
        file
    }

    fn bytes(&self, blob: Digest, offset: u64, size: u64) -> &[u8] {
        let start = usize::try_from(offset).unwrap();
        match self.blobs.get(&blob) {
            Some(bytes) => &bytes[start..start + usize::try_from(size).unwrap()],
            None => &[],
        }
    }
}

fn assert_covers(plan: &SplitPlan, file_size: u64) {
    let mut position = 0;
    let mut blob_sizes = vec![0; plan.blobs().len()];
    for segment in plan.segments() {
        assert_eq!(segment.offset_in_file, position, "a gap or an overlap");
        assert!(segment.length > 0, "an empty segment");
        position += segment.length;
        if let Target::Blob { blob, .. } = segment.target {
            blob_sizes[blob] += segment.length;
        }
    }
    assert_eq!((position, plan.file_size()), (file_size, file_size));
    assert!(plan.blobs().iter().map(|blob| blob.size).eq(blob_sizes));
    assert_eq!(plan.blobs()[0].content, BlobContent::Header);
}

/// The bytes of a tensor of known size, directly from its file.
fn tensor_bytes<'a>(file: &'a [u8], header: &Header, info: &TensorInfo<'_>) -> &'a [u8] {
    let start = usize::try_from(header.data_offset() + info.offset()).unwrap();
    let size = info.size_bytes().and_then(|size| usize::try_from(size).ok()).unwrap();
    if size == 0 { &[] } else { &file[start..start + size] }
}

fn assert_tensors_found(sample: &Sample, header: &Header, stored: &Stored) {
    assert_eq!(stored.recipe.tensors().len(), header.tensors().len());
    for (info, entry) in header.tensors().zip(stored.recipe.tensors().iter()) {
        assert_eq!((info.name(), info.ggml_type().name().as_ref()), (&*entry.name, &*entry.type_name));
        assert_eq!(info.shape().dimensions(), &*entry.shape);
        if info.size_bytes().is_some() {
            let bytes = stored.bytes(entry.digest, entry.offset, entry.size);
            assert_eq!(bytes, tensor_bytes(&sample.file, header, &info), "{}", entry.name);
        }
    }
}

proptest! {
    #[test]
    fn any_file_is_rebuilt_bit_for_bit(
        sample in file(),
        sizes in prop::collection::vec(1..5000_usize, 1..6),
    ) {
        let header = Header::parse(&sample.file).unwrap();
        let plan = plan_file(&header, sample.file.len() as u64).unwrap();
        assert_covers(&plan, sample.file.len() as u64);
        let stored = Stored::new(&plan, &sample.file, &sizes);
        prop_assert!(stored.rebuild() == sample.file);
        assert_tensors_found(&sample, &header, &stored);
        prop_assert_eq!(Recipe::parse(stored.recipe.to_json()).unwrap(), stored.recipe);
    }

    #[test]
    fn chunks_cover_the_file_and_cut_large_segments_at_multiples(
        sample in file(),
        max in prop_oneof![1..100_u64, 100..5000_u64, Just(1 << 20)],
    ) {
        let header = Header::parse(&sample.file).unwrap();
        let plan = plan_file(&header, sample.file.len() as u64).unwrap();
        let large: Vec<&Segment> = plan.segments().iter().filter(|segment| {
            segment.length >= max && matches!(segment.target, Target::Blob { .. })
        }).collect();
        let mut position = 0;
        while position < plan.file_size() {
            let end = plan.chunk_end(position, max);
            prop_assert!(position < end && end <= plan.file_size() && end - position <= max);
            for segment in &large {
                let starts_inside = position < segment.offset_in_file && segment.offset_in_file < end;
                prop_assert!(!starts_inside, "chunk {}..{} runs into {:?}", position, end, segment);
                if (segment.offset_in_file..segment.end()).contains(&position) {
                    let done = position - segment.offset_in_file;
                    prop_assert_eq!(done % max, 0);
                    prop_assert_eq!(end, (position + max).min(segment.end()));
                }
            }
            position = end;
        }
    }

    #[test]
    fn places_of_a_blob_are_its_segments_in_order(sample in file()) {
        let header = Header::parse(&sample.file).unwrap();
        let plan = plan_file(&header, sample.file.len() as u64).unwrap();
        let places = BlobPlaces::new(&plan);
        for blob in 0..plan.blobs().len() {
            let is_own =
                |segment: &&Segment| matches!(segment.target, Target::Blob { blob: of, .. } if of == blob);
            let expected: Vec<_> = plan.segments().iter().filter(is_own).collect();
            prop_assert_eq!(places.segments(&plan, blob).collect::<Vec<_>>(), expected);
        }
        prop_assert_eq!(places.segments(&plan, plan.blobs().len()).count(), 0);
        prop_assert_eq!(places.segments(&plan, usize::MAX).count(), 0);
    }

    #[test]
    fn parts_of_a_range_are_parts_of_the_file(sample in file(), start in any::<prop::sample::Index>()) {
        let header = Header::parse(&sample.file).unwrap();
        let plan = plan_file(&header, sample.file.len() as u64).unwrap();
        let start = start.index(sample.file.len());
        let mut splitter = Splitter::new(&plan);
        splitter.push(&sample.file[..start]).unwrap();
        let rest = &sample.file[start..];
        prop_assert_eq!(splitter.push(rest).unwrap(), plan.parts(start as u64, rest).unwrap());
    }
}

#[test]
fn ordinary_file_becomes_header_tensors_and_zero_padding() {
    let header = header(&[("a", I8, &[40], 0), ("b", I8, &[64], 64)]);
    let plan = plan(&header, 128).unwrap();
    let contents: Vec<BlobContent> = plan.blobs().iter().map(|blob| blob.content).collect();
    assert_eq!(contents, [BlobContent::Header, BlobContent::Tensor, BlobContent::Tensor]);
    assert_eq!(plan.blobs()[1].size, 40);
    let mut file = file_with(&header, 128);
    let padding = usize::try_from(header.data_offset()).unwrap() + 40;
    file[padding..padding + 24].fill(0);
    let stored = Stored::new(&plan, &file, &[100]);
    assert_eq!(stored.recipe.pieces()[2], Piece::Zeros { zeros: 24 });
    assert_eq!(stored.recipe.header(), Some((Digest::of(&file[..padding - 40]), header.data_offset())));
}

#[test]
fn missing_final_padding_is_accepted() {
    let header = header(&[("a", I8, &[40], 0)]);
    assert_covers(&plan(&header, 40).unwrap(), header.data_offset() + 40);
}

#[test]
fn trailing_bytes_and_gaps_become_literals_up_to_the_limit_and_blobs_beyond() {
    let header = header(&[("a", I8, &[32], 32)]);
    let with_tail = |tail| plan(&header, 64 + tail).unwrap();
    let within = with_tail(Recipe::MAX_LITERAL_BYTES);
    assert_eq!((within.literal_count(), within.literal_bytes()), (2, 32 + Recipe::MAX_LITERAL_BYTES));
    let beyond = with_tail(Recipe::MAX_LITERAL_BYTES + 1);
    assert_eq!((beyond.literal_count(), beyond.literal_bytes()), (1, 32));
    let filler = PlannedBlob { size: Recipe::MAX_LITERAL_BYTES + 1, content: BlobContent::Filler };
    assert_eq!(beyond.blobs().last(), Some(&filler));
}

#[test]
fn literals_together_stay_below_their_limit() {
    let names: Vec<String> = (0..300).map(|index| index.to_string()).collect();
    let gap = Recipe::MAX_LITERAL_BYTES;
    let rows: Vec<Row<'_>> = names
        .iter()
        .zip(1..)
        .map(|(name, place)| (&**name, I8, &[32][..], place * (gap + 32) - 32))
        .collect();
    let plan = plan(&header(&rows), 300 * (gap + 32)).unwrap();
    assert_eq!(plan.literal_count() as u64, Recipe::MAX_LITERALS_BYTES / gap);
    assert_eq!(plan.blobs().iter().filter(|blob| blob.content == BlobContent::Filler).count(), 300 - 256);
}

#[test]
fn literals_of_earlier_parts_of_a_file_count_towards_the_limit() {
    let gap = Recipe::MAX_LITERAL_BYTES;
    let layout = header(&[("a", I8, &[32], gap)]);
    let layout = layout.file_layout(layout.data_offset() + gap + 32).unwrap();
    for (before, literals) in [
        (0, 1),
        (Recipe::MAX_LITERALS_BYTES - gap, 1),
        (Recipe::MAX_LITERALS_BYTES - gap + 1, 0),
        (u64::MAX, 0),
    ] {
        assert_eq!(SplitPlan::for_part(layout.clone(), before).literal_count(), literals, "{before}");
    }
}

#[test]
fn file_that_is_not_split_is_one_segment_unless_it_is_empty() {
    for (size, segments) in [(0, 0), (1, 1), (u64::MAX, 1)] {
        let plan = SplitPlan::whole(size);
        assert_eq!((plan.file_size(), plan.segments().len(), plan.blobs().len()), (size, segments, 1));
        assert!(plan.is_whole() && plan.segments().iter().all(|segment| segment.length == size));
    }
}

#[test]
fn file_of_a_header_alone_is_one_blob() {
    let header = header(&[]);
    let size = header.bytes().len() as u64;
    for file_size in [size, size + 1, header.data_offset()] {
        let plan = plan_file(&header, file_size).unwrap();
        assert_eq!(plan.blobs(), [PlannedBlob { size: file_size, content: BlobContent::Header }]);
    }
    let error = plan_file(&header, size - 1).unwrap_err();
    assert_eq!(error, GgufError::FileSize { header_size: size, file_size: size - 1 });
}

#[test]
fn tensors_in_reversed_order_are_accepted() {
    let header = header(&[("a", I8, &[32], 64), ("b", I8, &[64], 0)]);
    let plan = plan(&header, 96).unwrap();
    let blobs: Vec<Option<usize>> = plan.tensors().map(|tensor| tensor.blob).collect();
    assert_eq!(blobs, [Some(2), Some(1)]);
}

#[test]
fn tensors_without_elements_have_no_blob_and_may_share_an_offset() {
    let header =
        header(&[("a", I8, &[0], 0), ("b", I8, &[7, 0], 0), ("c", I8, &[32], 0), ("d", I8, &[0], 32)]);
    let plan = plan(&header, 32).unwrap();
    let blobs: Vec<Option<usize>> = plan.tensors().map(|tensor| tensor.blob).collect();
    assert_eq!(blobs, [None, None, Some(1), None]);
    let stored = Stored::new(&plan, &file_with(&header, 32), &[7]);
    assert_eq!(stored.recipe.tensors().get(0).unwrap().digest, Digest::of(b""));
}

#[test]
fn tensors_without_elements_need_no_data_section() {
    let header = header(&[("a", I8, &[0], 0)]);
    let file_size = header.bytes().len() as u64;
    assert_covers(&plan_file(&header, file_size).unwrap(), file_size);
}

#[test]
fn tensor_beyond_the_file_end_is_refused() {
    let header = header(&[("a", I8, &[32], 0), ("b", I8, &[32], 32)]);
    assert!(plan(&header, 64).is_ok());
    let error = plan(&header, 63).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"gguf: tensor "b": offset 32 and size 32 end beyond the data section of 63 bytes; the file is incomplete: expected at least 64 bytes in this section, found 63"#
    );
    assert!(is_outside(&plan(&header, 0)));
    let cut = plan_file(&header, header.bytes().len() as u64);
    assert!(matches!(cut, Err(GgufError::Layout(LayoutError::Outside { data_size: 0, .. }))));
}

#[test]
fn offset_and_size_that_wrap_are_refused() {
    let refused = |header: &Header| is_outside(&plan(header, 128));
    // The writer refuses such offsets, so the last eight bytes of a header are replaced.
    let moved = |dimensions: &[u64], offset: u64| {
        let mut bytes = header(&[("a", I8, dimensions, 0)]).bytes().to_vec();
        bytes.truncate(bytes.len() - 8);
        bytes.extend(offset.to_le_bytes());
        Header::parse(&bytes).unwrap()
    };
    assert!(refused(&moved(&[64], u64::MAX - 31)));
    assert!(refused(&moved(&[64], u64::MAX - 63)));
    assert!(refused(&moved(&[0], u64::MAX - 31)));
    assert!(refused(&moved(&[i64::MAX as u64], 1 << 63)));
    // Two tensors whose end wraps to a small number.
    let size = 0x7fff_ffff_ffff_ffc0;
    assert!(refused(&header(&[("a", I8, &[size], 0), ("b", I8, &[size], size)])));
}

#[test]
fn size_that_wraps_when_padded_is_refused() {
    let dimensions = [4, (1 << 30) - 1, (1 << 30) + 1];
    let mut writer = GgufWriter::new();
    writer.tensor_at("a", GgmlType::F32, &dimensions, 0).unwrap();
    assert!(writer.data_size().is_err());
    writer = GgufWriter::new();
    writer.metadata("general.alignment", 1_u32).unwrap();
    writer.tensor_at("a", GgmlType::F32, &dimensions, 0).unwrap();
    let header = Header::parse(&writer.header().unwrap()).unwrap();
    let size = 0_u64.wrapping_sub(16);
    let error = plan(&header, 128).unwrap_err();
    assert!(matches!(error, GgufError::Layout(LayoutError::Outside { size: found, .. }) if found == size));
}

#[test]
fn misaligned_offset_is_refused_with_the_likely_cause() {
    let narrow = header(&[("a", I8, &[32], 33)]);
    let error = plan(&narrow, 96).unwrap_err();
    assert_eq!(error.to_string(), r#"gguf: tensor "a": offset 33 is not a multiple of 32"#);
    let wide = aligned_header(4096, &[("a", I8, &[32], 0), ("b", I8, &[32], 32)]);
    let error = plan(&wide, 96).unwrap_err().to_string();
    assert!(error.contains("llama-quantize"), "{error}");
    let packed = aligned_header(1, &[("a", I8, &[3], 0), ("b", I8, &[5], 3)]);
    assert!(plan(&packed, 8).is_ok());
}

#[test]
fn overlapping_tensors_are_refused() {
    let partly = header(&[("b", I8, &[32], 32), ("a", I8, &[33], 0)]);
    let overlap = |first: &str, second: &str, offset| {
        let (first, second) = (first.to_owned(), second.to_owned());
        GgufError::Layout(LayoutError::Overlap { first, second, offset })
    };
    assert_eq!(plan(&partly, 64).unwrap_err(), overlap("a", "b", 32));
    let same = header(&[("a", I8, &[32], 0), ("b", I8, &[32], 0)]);
    assert_eq!(plan(&same, 64).unwrap_err(), overlap("a", "b", 0));
    let inside = header(&[("a", I8, &[256], 0), ("b", I8, &[32], 64)]);
    assert_eq!(plan(&inside, 256).unwrap_err(), overlap("a", "b", 64));
}

#[test]
fn unknown_type_extends_to_the_next_tensor_or_the_end() {
    let header =
        header(&[("last", UNKNOWN, &[5], 96), ("middle", UNKNOWN, &[5], 0), ("known", I8, &[32], 64)]);
    let plan = plan(&header, 100).unwrap();
    let sizes: Vec<u64> = plan.tensors().map(|tensor| tensor.size).collect();
    assert_eq!(sizes, [4, 64, 32]);
    assert_eq!(plan.literal_count(), 0);
}

#[test]
fn unknown_type_without_any_bytes_is_refused() {
    let at_the_end = header(&[("a", UNKNOWN, &[5], 32)]);
    assert!(matches!(plan(&at_the_end, 32), Err(GgufError::NoBytes { offset: 32, .. })));
    assert!(is_outside(&plan(&at_the_end, 31)));
    let two = header(&[("a", UNKNOWN, &[5], 0), ("b", UNKNOWN, &[5], 0)]);
    assert!(matches!(plan(&two, 32), Err(GgufError::Layout(LayoutError::Overlap { .. }))));
}

#[test]
fn legacy_type_of_ollama_has_the_size_of_mxfp4() {
    let header = header(&[("a", GgmlType::from_id(4), &[64], 0)]);
    assert_eq!(plan(&header, 64).unwrap().tensors().next().unwrap().size, 34);
}

/// Eleven experts of 64 bytes in the order that sorting by name gives, and what follows.
fn lexical_experts(alignment: u32) -> Header {
    let names: Vec<String> =
        [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9].iter().map(|e| format!("blk.0.ffn_up.{e}.weight")).collect();
    let step = 64_u64.next_multiple_of(alignment.into());
    let rows: Vec<Row<'_>> = names
        .iter()
        .zip(0..)
        .map(|(name, place)| (&**name, GgmlType::F32, &[8, 2][..], place * step))
        .collect();
    aligned_header(alignment, &rows)
}

#[test]
fn separate_experts_become_the_blob_of_the_stacked_tensor() {
    let header = lexical_experts(32);
    let plan = plan(&header, 704).unwrap();
    assert_eq!(plan.blobs()[1], PlannedBlob { size: 704, content: BlobContent::ExpertGroup });
    // 0 and 1, then 10, then 2 to 9.
    let targets: Vec<Target> = plan.segments().iter().skip(1).map(|segment| segment.target).collect();
    assert_eq!(targets, [0, 640, 128].map(|offset_in_blob| Target::Blob { blob: 1, offset_in_blob }));
    let file = file_with(&header, 704);
    let stored = Stored::new(&plan, &file, &[50]);
    let mut stacked = Vec::new();
    for expert in 0..11 {
        let name = format!("blk.0.ffn_up.{expert}.weight");
        let info = header.tensors().find(|info| info.name() == name).unwrap();
        stacked.extend(tensor_bytes(&file, &header, &info));
        let entry = stored.recipe.tensors().iter().find(|entry| entry.name == name).unwrap();
        assert_eq!((entry.digest, entry.experts), (stored.recipe.tensors().get(0).unwrap().digest, None));
        assert_eq!((entry.offset, entry.size), (expert * 64, 64));
    }
    assert_eq!(stored.recipe.tensors().get(0).unwrap().digest, Digest::of(&stacked));
}

#[test]
fn padding_between_experts_stays_outside_their_blob() {
    let header = lexical_experts(128);
    let plan = plan(&header, 10 * 128 + 64).unwrap();
    assert_eq!((plan.blobs()[1].size, plan.literal_count()), (704, 10));
}

#[test]
fn incomplete_experts_stay_separate_blobs() {
    let header = header(&[
        ("blk.0.ffn_up.0.weight", GgmlType::F32, &[16], 0),
        ("blk.0.ffn_up.2.weight", GgmlType::F32, &[16], 64),
    ]);
    let plan = plan(&header, 128).unwrap();
    assert!(plan.blobs().iter().skip(1).all(|blob| blob.content == BlobContent::Tensor));
}

#[test]
fn stacked_tensor_says_where_its_experts_are() {
    let header = header(&[
        ("blk.0.ffn_up_exps.weight", GgmlType::F32, &[4, 4, 3], 0),
        ("blk.0.ffn_down_exps.weight", UNKNOWN, &[4, 4, 3], 192),
    ]);
    let plan = plan(&header, 384).unwrap();
    let experts: Vec<Option<Experts>> = plan.tensors().map(|tensor| tensor.experts).collect();
    assert_eq!(experts, [Some(Experts { count: 3, stride: 64 }), None]);
}

#[test]
fn chunk_end_at_the_edges() {
    let header = header(&[("a", I8, &[1000], 0)]);
    let plan = plan(&header, 1000).unwrap();
    let (start, end) = (header.data_offset(), plan.file_size());
    assert_eq!(plan.chunk_end(0, 500), start);
    assert_eq!(plan.chunk_end(start, 400), start + 400);
    assert_eq!(plan.chunk_end(start + 1, 400), start + 400);
    assert_eq!(plan.chunk_end(start + 800, 400), end);
    assert_eq!(plan.chunk_end(0, u64::MAX), end);
    assert_eq!(plan.chunk_end(5, 0), 6);
    assert_eq!(plan.chunk_end(end, 400), end);
    assert_eq!(plan.chunk_end(u64::MAX, 400), u64::MAX);
}

#[test]
fn too_many_and_too_few_bytes_are_refused() {
    let header = header(&[("a", I8, &[32], 0)]);
    let plan = plan(&header, 32).unwrap();
    let file_size = plan.file_size();
    let mut file = file_with(&header, 33);
    assert_eq!(Splitter::new(&plan).push(&file), Err(SplitError::TooLong { file_size }));
    assert_eq!(plan.parts(u64::MAX, b"x"), Err(SplitError::TooLong { file_size }));
    assert_eq!(plan.parts(file_size, b""), Ok(vec![]));
    file.truncate(31);
    let mut splitter = Splitter::new(&plan);
    splitter.push(&file).unwrap();
    assert_eq!(splitter.finish(), Err(SplitError::TooShort { found: 31, file_size }));
}

#[test]
fn recipe_needs_every_digest_and_every_literal_byte() {
    let header = header(&[("a", I8, &[40], 0)]);
    let plan = plan(&header, 64).unwrap();
    let digests = [Digest::of(b"header"), Digest::of(b"a")];
    let recipe = |blobs: &[Digest], literals| plan.clone().recipe(Digest::of(b"file"), blobs, literals);
    assert!(recipe(&digests, vec![vec![1; 24]]).is_ok());
    for error in [
        recipe(&digests[..1], vec![vec![1; 24]]),
        recipe(&digests, vec![]),
        recipe(&digests, vec![vec![1; 23]]),
    ] {
        assert!(matches!(error, Err(RecipeError::Parts { .. })));
    }
}
