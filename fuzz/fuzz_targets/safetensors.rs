//! Headers of safetensors files.
//!
//! Invariant: any bytes, as a file of any size, are refused or make a header whose tensors cover
//! the data exactly once, in order, without gap or overlap, each as long as its shape and type
//! say, each found by its name; and an accepted header is accepted again after it is rewritten. As a layer
//! of a model, each of its tensors is described or is a part of another one. A file with any accepted header, names that
//! are not printable included, is split and rebuilt bit for bit, and its recipe has the bytes of each tensor.
#![no_main]

use std::collections::BTreeMap;
use std::convert::Infallible;

use blobd_model::tensor_layers::{Quantization, TensorLayers};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::read_header;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::safetensors::{Header, HeaderWriter, Tensor};
use blobd_store_format::split::{SplitPlan, Splitter, Target};
use libfuzzer_sys::fuzz_target;

/// Larger files test nothing more.
const MAX_DATA_BYTES: u64 = 1 << 16;

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
    if let Ok(header) = Header::parse_start(&framed) {
        check_split(&header, framed);
    }
});

fn check_split(header: &Header, mut file: Vec<u8>) {
    let sizes = header.tensors().iter().map(Tensor::size_bytes);
    let data = sizes.fold(0, u64::saturating_add);
    // A header that a file would not be recognised by has less than two bytes.
    let (Ok(read), true) = (read_header(&file), data <= MAX_DATA_BYTES) else { return };
    file.extend((0..data).map(|place| (place % 251) as u8));
    let layout = read.file_layout(file.len() as u64).expect("the header covers the data");
    let plan = SplitPlan::new(layout);
    assert_eq!(plan.literal_count(), 0, "all data belong to tensors");
    let mut blobs: Vec<Vec<u8>> = plan.blobs().iter().map(|blob| vec![0; blob.size as usize]).collect();
    for part in Splitter::new(&plan).push(&file).expect("the plan is for this file") {
        let Target::Blob { blob, offset_in_blob } = part.target else { panic!("a literal") };
        blobs[blob][offset_in_blob as usize..][..part.bytes.len()].copy_from_slice(part.bytes);
    }
    let digests: Vec<Digest> = blobs.iter().map(|blob| Digest::of(blob)).collect();
    let recipe = plan.recipe(Digest::of(&file), &digests, Vec::new()).expect("all parts are there");
    assert!(Recipe::parse(recipe.to_json()).is_ok_and(|parsed| parsed == recipe));
    let blobs: BTreeMap<Digest, Vec<u8>> = digests.into_iter().zip(blobs).collect();
    let mut rebuilt = vec![0xee; file.len()];
    let read = recipe.pieces().read_at(0, &mut rebuilt, |blob, offset, buffer| {
        buffer.copy_from_slice(&blobs[&blob][offset as usize..][..buffer.len()]);
        Ok::<_, Infallible>(())
    });
    assert!(read == Ok(file.len()) && rebuilt == file, "the rebuilt file differs");
    for entry in recipe.tensors().iter().filter(|entry| entry.size > 0) {
        let tensor = header.tensor(&entry.name).expect("the recipe has the tensors of the header");
        let (start, size) = (tensor.offset_in_file() as usize, tensor.size_bytes() as usize);
        assert!(
            blobs[&entry.digest][entry.offset as usize..][..size] == file[start..][..size],
            "{}",
            entry.name
        );
    }
}

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
