//! Headers of safetensors files.
//!
//! Invariant: any bytes, as a file of any size, are refused or make a header whose tensors cover
//! the data exactly once, in order, without gap or overlap, each as long as its shape and type
//! say, each found by its name; and an accepted header is accepted again after it is rewritten. As a layer
//! of a model, each of its tensors is described or is a part of another one.
#![no_main]

use blobd_model::tensor_layers::{Quantization, TensorLayers};
use blobd_store_format::safetensors::{Header, HeaderWriter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A fuzzer would rarely find a length that fits, so it is computed.
    let framed = [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    let end = framed.len() as u64;
    for (start, file_size) in [
        (bytes, bytes.len() as u64),
        (&framed, end),
        (&framed, end + 4),
        (&framed, end + 64),
        (&framed, u64::MAX),
    ] {
        if let Ok(header) = Header::parse(start, file_size) {
            check(&header, file_size);
            check_layer(&header);
        }
    }
});

fn check(header: &Header, file_size: u64) {
    let (mut position, mut writer) = (header.data_offset(), HeaderWriter::new());
    for tensor in header.tensors() {
        assert_eq!(tensor.offset_in_file(), position, "a gap or an overlap");
        position += tensor.size_bytes();
        let elements = tensor.shape().iter().map(|dimension| u128::from(*dimension));
        let bits = elements.fold(u128::from(tensor.dtype().bits()), u128::saturating_mul);
        assert!(tensor.shape().contains(&0) || bits == u128::from(tensor.size_bytes()) * 8);
        assert_eq!(header.tensor(tensor.name()), Some(tensor));
        writer.tensor(tensor.name(), tensor.dtype(), tensor.shape()).expect("it was accepted before");
    }
    assert_eq!(position, file_size, "the tensors cover all data");
    for (key, value) in header.metadata() {
        writer.metadata(key, value);
    }
    let written = writer.header().expect("it is about as long as before");
    // The writer's padding may make the sum exceed 2^64.
    if let Some(file_size) = (file_size - header.data_offset()).checked_add(written.len() as u64) {
        let again = Header::parse(&written, file_size).expect("it was accepted before");
        assert!(again.tensors().len() == header.tensors().len() && again.metadata() == header.metadata());
    }
}

fn check_layer(header: &Header) {
    let mut layers = TensorLayers::new("");
    // Names may be ambiguous: `a/b` and `b` of component `a`.
    if layers.add("a/b", 0, header).is_ok() {
        for tensor in layers.describe(&Quantization::default()) {
            assert!(!layers.is_part(tensor.name) && layers.tensor(tensor.name) == Some(tensor.stored));
        }
    }
}
