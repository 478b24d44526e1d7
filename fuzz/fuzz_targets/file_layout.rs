//! The start of a model file of any format, and the layout and the plan made from it.
//!
//! Invariant: any bytes, in any portions, are refused or make a header; portions never change the
//! result. A layout made from an accepted header, for any file size, covers the file exactly once,
//! in order, without gap or overlap, and has every tensor inside. So does the plan made from the
//! layout, which fills every blob exactly and puts every tensor inside its blob.
#![no_main]

use blobd_model::facts::ModelFacts;
use blobd_store_format::file_format::{
    FormatError, HeaderReader, ModelHeader, Progress, read_header, stream_header,
};
use blobd_store_format::file_layout::{FileLayout, RangeContent};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::split::{SplitPlan, Target};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((portion, bytes)) = input.split_first() else { return };
    let whole = read_header(bytes);
    let header = match (whole, read_in_portions(bytes, usize::from(*portion) + 1)) {
        (Ok(whole), Ok(portions)) => {
            assert!(whole.bytes() == portions.bytes());
            assert!(whole.bytes().is_some_and(|header| bytes.starts_with(header)));
            let streamed = stream_header(&mut &bytes[..]).expect("memory").expect("the same header");
            assert_eq!((streamed.digest(), streamed.size()), (whole.digest(), whole.size()));
            assert_eq!(streamed.tensor_count(), whole.tensor_count());
            whole
        }
        (Err(whole), Err(portions)) => {
            assert_eq!(whole.is_unknown_format(), portions.is_unknown_format());
            return;
        }
        (whole, portions) => panic!("{whole:?} as a whole, {portions:?} in portions"),
    };
    let facts = ModelFacts::from_header(&*header);
    let _ = (facts.parameter_size(), header.metadata().count());
    let (length, headed) = (bytes.len() as u64, header.size());
    for file_size in
        [0, length, headed, headed + 1, headed + 4096, headed + length, 1 << 40, i64::MAX as u64, u64::MAX]
    {
        let Ok(layout) = header.file_layout(file_size) else { continue };
        assert_eq!(facts.tensor_count, layout.tensors().len() as u64);
        assert_layout_covers(&layout, file_size);
        let tensor_count = layout.tensors().len();
        assert_plan_covers(&SplitPlan::new(layout), file_size, tensor_count);
    }
});

fn read_in_portions(bytes: &[u8], size: usize) -> Result<Box<dyn ModelHeader>, FormatError> {
    let mut reader = HeaderReader::new();
    for portion in bytes.chunks(size) {
        match reader.push(portion) {
            Ok(Progress::NeedMore) => {}
            Ok(Progress::Done) => return reader.finish(),
            Err(error) => {
                assert_eq!(reader.push(b"more"), Err(error.clone()), "a refusal is final");
                return Err(error);
            }
        }
    }
    reader.finish()
}

fn assert_layout_covers(layout: &FileLayout, file_size: u64) {
    let mut position = 0;
    let mut found = vec![0; layout.tensors().len()];
    for (place, range) in layout.ranges().iter().enumerate() {
        assert_eq!(range.offset, position, "a gap or an overlap");
        assert!(range.size > 0, "an empty range");
        assert_eq!(range.content == RangeContent::Header, place == 0);
        position += range.size;
        if let RangeContent::Tensor(tensor) = range.content {
            found[tensor] += range.size;
        }
    }
    assert_eq!((position, layout.file_size()), (file_size, file_size));
    assert!(layout.tensors().iter().map(|tensor| tensor.size).eq(found));
}

/// Asserts that the plan covers every byte of the file and every tensor exactly once.
fn assert_plan_covers(plan: &SplitPlan, file_size: u64, tensor_count: usize) {
    let mut position = 0;
    let mut filled: Vec<Vec<(u64, u64)>> = vec![Vec::new(); plan.blobs().len()];
    let mut literals = 0;
    for segment in plan.segments() {
        assert_eq!(segment.offset_in_file, position, "a gap or an overlap");
        assert!(segment.length > 0, "an empty segment");
        position += segment.length;
        match segment.target {
            Target::Blob { blob, offset_in_blob } => filled[blob].push((offset_in_blob, segment.length)),
            Target::Literal { literal } => {
                assert_eq!(literal, literals, "literals are numbered in file order");
                assert!(segment.length <= Recipe::MAX_LITERAL_BYTES);
                literals += 1;
            }
        }
    }
    assert_eq!((position, literals), (file_size, plan.literal_count()));
    for (blob, ranges) in plan.blobs().iter().zip(&mut filled) {
        ranges.sort_unstable();
        let end = ranges.iter().fold(0, |end, (offset, length)| {
            assert_eq!(*offset, end, "a byte of a blob is written twice or never");
            end + length
        });
        assert_eq!(end, blob.size);
    }
    assert_eq!(plan.tensors().len(), tensor_count);
    for tensor in plan.tensors() {
        let size = tensor.blob.map_or(0, |blob| plan.blobs()[blob].size);
        assert!(tensor.offset_in_blob.checked_add(tensor.size).is_some_and(|end| end <= size));
        if let Some(experts) = tensor.experts {
            assert_eq!(experts.count.checked_mul(experts.stride), Some(tensor.size));
        }
    }
}
