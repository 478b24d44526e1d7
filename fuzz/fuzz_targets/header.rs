//! GGUF headers.
//!
//! Invariant: any bytes, in any portions, are refused or make a header that reads back from its
//! own bytes. Portions never change the verdict. A plan made from an accepted header, for any
//! file size, covers the file exactly once, in order, without gap or overlap, fills every blob
//! exactly, and puts every tensor inside its blob.
#![no_main]

use std::mem::discriminant;

use blobd_store_format::gguf::{GgufError, Header, HeaderParser, Progress};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::split::{SplitPlan, Target};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((portion, bytes)) = input.split_first() else { return };
    let whole = Header::parse(bytes);
    match (&whole, parse_in_portions(bytes, usize::from(*portion) + 1)) {
        (Ok(whole), Ok(portions)) => assert!(*whole == portions, "portions make another header"),
        // A refused name is shown as far as it had come, so the errors' texts may differ.
        (Err(whole), Err(portions)) => assert_eq!(discriminant(whole), discriminant(&portions)),
        (whole, portions) => panic!("{whole:?} as a whole, {portions:?} in portions"),
    }
    let Ok(header) = whole else { return };
    assert!(bytes.starts_with(header.bytes()));
    assert!(Header::parse(header.bytes()).is_ok_and(|again| again == header));
    read_everything(&header);
    let (length, data) = (bytes.len() as u64, header.data_offset());
    for file_size in
        [0, length, data, data + 1, data + 4096, data + length, 1 << 40, i64::MAX as u64, u64::MAX]
    {
        if let Ok(plan) = SplitPlan::new(&header, file_size) {
            assert_covers(&plan, &header, file_size);
        }
    }
});

fn parse_in_portions(bytes: &[u8], size: usize) -> Result<Header, GgufError> {
    let mut parser = HeaderParser::new();
    for portion in bytes.chunks(size) {
        match parser.push(portion) {
            Ok(Progress::NeedMore) => {}
            Ok(Progress::Done) => return parser.finish(),
            Err(error) => {
                assert_eq!(parser.push(b"more"), Err(error.clone()), "a refusal is final");
                return Err(error);
            }
        }
    }
    parser.finish()
}

/// Everything that shows a header to people.
fn read_everything(header: &Header) {
    for (key, value) in header.metadata() {
        let _ = (key.len(), value.to_string(), value.as_u64(), value.as_str());
        if let Some(array) = value.as_array() {
            assert_eq!(array.iter().count(), array.len(), "an accepted array has all its elements");
        }
    }
    let _ = (header.architecture(), format!("{header:?}"));
    assert_eq!(header.tensors().len(), header.tensors().count());
}

fn assert_covers(plan: &SplitPlan, header: &Header, file_size: u64) {
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
            assert_eq!(*offset, end, "a byte of a blob comes twice or never");
            end + length
        });
        assert_eq!(end, blob.size);
    }
    assert_eq!(plan.tensors().len(), header.tensors().len());
    for tensor in plan.tensors() {
        let size = tensor.blob.map_or(0, |blob| plan.blobs()[blob].size);
        assert!(tensor.offset_in_blob.checked_add(tensor.size).is_some_and(|end| end <= size));
        if let Some(experts) = tensor.experts {
            assert_eq!(experts.count.checked_mul(experts.stride), Some(tensor.size));
        }
    }
}
