//! GGUF headers.
//!
//! Invariant: any bytes, in any portions, are refused or make a header that reads back from its
//! own bytes. Portions never change the result. Every header can be edited, and what is rewritten from it
//! has the same tensors.
#![no_main]

use std::mem::discriminant;

use blobd_model::edit::{Change, EditedHeader, KeyEdit};
use blobd_model::rewrite::{RewriteOptions, RewritePlan, RewriteSource};
use blobd_store_format::gguf::{ByteOrder, GgufError, Header, HeaderParser, Progress};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((portion, bytes)) = input.split_first() else { return };
    let whole = Header::parse(bytes);
    match (&whole, parse_in_portions(bytes, usize::from(*portion) + 1)) {
        (Ok(whole), Ok(portions)) => assert!(*whole == portions, "portions make another header"),
        // The error quotes the part of a refused name that had been received, so the texts may differ.
        (Err(whole), Err(portions)) => assert_eq!(discriminant(whole), discriminant(&portions)),
        (whole, portions) => panic!("{whole:?} as a whole, {portions:?} in portions"),
    }
    let Ok(header) = whole else { return };
    assert!(bytes.starts_with(header.bytes()));
    assert!(Header::parse(header.bytes()).is_ok_and(|again| again == header));
    read_everything(&header);
    edit(&header);
    rewrite(&header);
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

/// Calls every method that displays a header.
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

/// Sets a key that is too long to be in the input.
fn edit(header: &Header) {
    let key = "k".repeat(1 << 16);
    let change = Change::Set { value_type: None, text: "1".to_owned() };
    // Refused only if the header becomes too long, or has the most keys already.
    let Ok(edited) = EditedHeader::new(header, &[KeyEdit { key: key.clone(), change }]) else { return };
    assert!(edited.header.tensors().eq(header.tensors()));
    assert_eq!(edited.header.value(&key).and_then(|value| value.as_u64()), Some(1));
    assert_eq!(edited.header.metadata().count(), header.metadata().count() + 1);
}

/// Plans a file with another alignment and byte order, as if the data were there.
fn rewrite(header: &Header) {
    const DATA_BYTES: u64 = 1 << 40;
    let size = header.data_offset() + DATA_BYTES;
    let Ok(source) = RewriteSource::new(header.clone(), size) else { return };
    for byte_order in [ByteOrder::Little, ByteOrder::Big] {
        let options =
            RewriteOptions { alignment: Some(64), byte_order: Some(byte_order), ..RewriteOptions::default() };
        let Ok(plan) = RewritePlan::new(std::slice::from_ref(&source), &options) else { continue };
        let [file] = plan.files() else { panic!("{} files", plan.files().len()) };
        let new = Header::parse(file.header()).expect("a planned header is valid");
        assert_eq!((new.byte_order(), new.alignment()), (byte_order, 64));
        assert!(new.tensors().map(|tensor| tensor.name()).eq(header.tensors().map(|tensor| tensor.name())));
        new.file_layout(file.size()).expect("the tensors are in the file");
    }
}
