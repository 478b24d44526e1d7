//! GGUF headers.
//!
//! Invariant: any bytes, in any portions, are refused or make a header that reads back from its
//! own bytes. Portions never change the result.
#![no_main]

use std::mem::discriminant;

use blobd_store_format::gguf::{GgufError, Header, HeaderParser, Progress};
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
