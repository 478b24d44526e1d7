//! A line in the table of formats is all that a second format needs: its files are split, shared, described, opened,
//! verified, exported and collected. The format is safetensors, which the table has in these tests alone.

use std::collections::BTreeSet;

use blobd_client::protocol::model_tensor::TensorFormat;
use blobd_client::protocol::request::OpenParams;
use blobd_store::gc::collect;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_store_format::testing::with_safetensors;
use serde_json::{Value as Json, json};

use super::*;
use crate::ops::{CallerPolicy, OpenCache, open, recipe_fault, show};

/// Name, type, shape and the number that the data begins with.
type Row<'a> = (&'a str, Dtype, &'a [u64], u8);

/// Names that no GGUF file may have, elements of 4 and 6 bits, and offsets that are multiples of nothing.
const ODD: [Row<'_>; 6] = [
    ("", Dtype::F4, &[3, 2], 1),
    ("a\0\u{1b}[2J", Dtype::F6_E2M3, &[4], 2),
    ("../../größe", Dtype::BF16, &[5, 7], 3),
    ("none", Dtype::F32, &[0, 9], 4),
    ("shared", Dtype::F32, &[2, 16], 5),
    ("last", Dtype::Bool, &[3], 6),
];
const OTHER: [Row<'_>; 2] = [("its own", Dtype::U8, &[5], 7), ("shared, renamed", Dtype::F32, &[32], 5)];

fn data(size: u64, first: u8) -> Vec<u8> {
    (0..size).map(|place| first.wrapping_mul(41).wrapping_add(u8::try_from(place % 251).unwrap())).collect()
}

fn size((_, dtype, shape, _): &Row<'_>) -> u64 {
    shape.iter().product::<u64>() * dtype.bits() / 8
}

fn safetensors(rows: &[Row<'_>]) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    for (name, dtype, shape, _) in rows {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let mut file = writer.metadata("format", "pt").header().unwrap();
    rows.iter().for_each(|row| file.extend(data(size(row), row.3)));
    file
}

/// A GGUF file with a tensor that has the bytes of `shared`.
fn gguf_sibling() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.tensor("blk.0.attn_norm.weight", GgmlType::F32, &[32]).unwrap();
    [writer.header().unwrap(), data(128, 5)].concat()
}

/// Imports a file as a model of this name; returns the file's digest.
fn add(store: &Arc<Store>, name: &str, file: &[u8]) -> Digest {
    let mut ingest = begin(store);
    let mut source = InMemory::new(file);
    let ingested = ingest_file(&mut ingest, &mut source, file.len() as u64, &mut |_, _| ()).unwrap();
    assert_eq!(ingested.digest, Digest::of(file));
    let config =
        Descriptor { media_type: MediaType::new("x"), digest: ingest.add_bytes(b"{}").unwrap(), size: 2 };
    let media_type = MediaType::new("application/vnd.cncf.model.weight.v1.raw");
    let weights = Descriptor { media_type, digest: ingested.digest, size: ingested.size };
    let manifest = Manifest::compose(config, vec![weights]).unwrap();
    ingest.commit(&name.parse().unwrap(), &manifest, None).unwrap();
    ingested.digest
}

fn fault(store: &Store, file: Digest) -> Option<String> {
    recipe_fault(store, &store.content().recipe(file).unwrap().unwrap())
}

/// The frames of the response to an open.
fn opened(store: &Store, name: &str) -> Vec<Json> {
    let (params, policy) = (OpenParams::new(name.parse().unwrap()), CallerPolicy::default());
    let located = open(store, &OpenCache::default(), &params, &policy, 0, "a test".to_owned()).unwrap();
    let frames_bytes = located.response.frames.concat();
    let mut bytes = &frames_bytes[..];
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (frame, rest) = rest.split_at(usize::try_from(u32::from_le_bytes(*length)).unwrap());
        frames.push(serde_json::from_slice(frame).unwrap());
        bytes = rest;
    }
    frames
}

#[test]
fn files_of_a_second_format_are_split_shared_and_rebuilt() {
    let (_folder, store) = new_store();
    let (odd, other) = (safetensors(&ODD), safetensors(&OTHER));
    let file = with_safetensors(|| add(&store, "odd", &odd));
    let recipe = store.content().recipe(file).unwrap().unwrap();
    assert_eq!(recipe.format(), Some(TensorFormat::Safetensors));
    assert_eq!(
        recipe.header().map(|(_, size)| size),
        Some(odd.len() as u64 - ODD.iter().map(size).sum::<u64>())
    );
    assert_eq!(recipe.tensors().len(), ODD.len());
    for row in &ODD {
        let (name, dtype, shape, first) = row;
        let entry = recipe.tensors().iter().find(|entry| entry.name == *name).unwrap();
        assert_eq!((&*entry.type_name, &entry.shape[..]), (dtype.name(), *shape), "{name:?}");
        assert_eq!(
            (entry.digest, entry.offset, entry.size),
            (Digest::of(&data(size(row), *first)), 0, size(row))
        );
    }
    // A blob for the configuration, one for the header, and one for each tensor with bytes.
    let before: BTreeSet<_> = store.content().blobs().unwrap().into_iter().collect();
    assert_eq!(before.len(), 2 + 5);
    with_safetensors(|| add(&store, "other", &other));
    add(&store, "sibling", &gguf_sibling());
    let after: BTreeSet<_> = store.content().blobs().unwrap().into_iter().collect();
    assert_eq!(
        after.difference(&before).count(),
        3,
        "two headers and one tensor: the format does not matter"
    );
    assert!(rebuild(&store, file) == odd && rebuild(&store, Digest::of(&other)) == other);
    // It is stored once, however often it is imported, with the format in the table or not.
    with_safetensors(|| add(&store, "again", &odd));
    assert_eq!(store.content().blobs().unwrap().len(), after.len());
}

#[test]
fn files_of_a_second_format_are_described_opened_verified_and_collected() {
    let (_folder, store) = new_store();
    let (odd, other) = (safetensors(&ODD), safetensors(&OTHER));
    let (file, kept) = with_safetensors(|| (add(&store, "odd", &odd), add(&store, "other", &other)));
    let name: Reference = "odd".parse().unwrap();
    let shown = with_safetensors(|| show(&store, &name)).unwrap();
    assert_eq!((shown.architecture, shown.quantization), (None, None));
    assert_eq!(shown.parameters, 6 + 4 + 35 + 32 + 3);
    assert_eq!(shown.metadata, [("format".to_owned(), json!("pt"))].into());
    assert_eq!(shown.tensors.len(), ODD.len());
    assert!(shown.tensors.iter().all(|tensor| tensor.format == TensorFormat::Safetensors));
    let frames = opened(&store, "odd");
    let layer = &frames[0]["open"]["layers"][1];
    assert_eq!(
        (&layer["format"], &frames[0]["open"]["tensor_count"]),
        (&json!("safetensors"), &json!(ODD.len()))
    );
    let shared =
        frames[1]["tensors"].as_array().unwrap().iter().find(|entry| entry["name"] == "shared").unwrap();
    assert_eq!(
        (&shared["type"], &shared["shape"], &shared["size"]),
        (&json!("F32"), &json!([2, 16]), &json!(128))
    );
    assert_eq!(with_safetensors(|| fault(&store, file)), None);
    // A store with such files is safe in the hands of a build that does not split them.
    assert_eq!(fault(&store, file), None);
    assert!(rebuild(&store, file) == odd);
    assert_eq!(collect(store.liveness()).unwrap(), 0);
    store.names().remove_tag(&name, blobd_store::Actor::daemon(blobd_store::Verb::Rm)).unwrap();
    assert!(collect(store.liveness()).unwrap() > 0);
    assert!(store.content().recipe(file).unwrap().is_none() && rebuild(&store, kept) == other);
    assert_eq!(
        store.content().blobs().unwrap().len(),
        4,
        "configuration, header, a tensor of its own, and the shared one"
    );
}

#[test]
fn without_its_line_in_the_table_a_file_of_the_format_is_refused() {
    let (folder, store) = new_store();
    let file = safetensors(&ODD);
    let mut ingest = begin(&store);
    let error =
        ingest_file(&mut ingest, &mut InMemory::new(&file), file.len() as u64, &mut |_, _| ()).unwrap_err();
    assert_eq!(error.to_string(), "wrong format: expected a GGUF file, found a safetensors file");
    drop(ingest);
    check_nothing_staged(&folder, &store);
}
