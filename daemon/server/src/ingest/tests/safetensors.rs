//! Files in safetensors format are split, shared, described, opened, verified, exported and collected.

use std::collections::BTreeSet;

use blobd_client::protocol::request::OpenParams;
use blobd_store::gc::collect;
use blobd_store_format::reference::Reference;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_store_format::tensor::TensorFormat;
use serde_json::{Value as Json, json};

use super::*;
use crate::ops::{CallerPolicy, OpenCache, open, recipe_fault, show};

/// Name, type, shape, and the number at the start of the data.
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

const WEIGHTS: &str = "application/vnd.cncf.model.weight.v1.raw";

/// Imports a file as a model of this name; returns the file's digest.
fn add(store: &Arc<Store>, name: &str, file: &[u8]) -> Digest {
    let ingested = commit_as(store, (name, WEIGHTS), &mut InMemory::new(file), file.len()).unwrap();
    assert_eq!(ingested.digest, Digest::of(file));
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
fn safetensors_files_are_split_shared_and_rebuilt() {
    let (_folder, store) = new_store();
    let (odd, other) = (safetensors(&ODD), safetensors(&OTHER));
    let file = add(&store, "odd", &odd);
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
    add(&store, "other", &other);
    add(&store, "sibling", &gguf_sibling());
    let after: BTreeSet<_> = store.content().blobs().unwrap().into_iter().collect();
    assert_eq!(
        after.difference(&before).count(),
        3,
        "two headers and one tensor: the format does not matter"
    );
    assert!(rebuild(&store, file) == odd && rebuild(&store, Digest::of(&other)) == other);
    // It is stored once, however often it is imported.
    add(&store, "again", &odd);
    assert_eq!(store.content().blobs().unwrap().len(), after.len());
}

#[test]
fn safetensors_files_are_described_opened_verified_and_collected() {
    let (_folder, store) = new_store();
    let (odd, other) = (safetensors(&ODD), safetensors(&OTHER));
    let (file, kept) = (add(&store, "odd", &odd), add(&store, "other", &other));
    let name: Reference = "odd".parse().unwrap();
    let shown = show(&store, &name).unwrap();
    assert_eq!((shown.architecture, shown.quantization.as_deref()), (None, Some("F32")));
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
fn file_that_was_stored_whole_stays_valid_when_it_is_added_again() {
    let (_folder, store) = new_store();
    let odd = safetensors(&ODD);
    let mut ingest = begin(&store);
    let digest = ingest.add_bytes(&odd).unwrap();
    let layer = Descriptor { media_type: MediaType::new(WEIGHTS), digest, size: odd.len() as u64 };
    let config =
        Descriptor { media_type: MediaType::new("x"), digest: ingest.add_bytes(b"{}").unwrap(), size: 2 };
    let manifest = Manifest::compose(config, vec![layer]).unwrap();
    let old: Reference = "old".parse().unwrap();
    ingest.commit(&old, &manifest, None).unwrap();
    assert!(show(&store, &old).unwrap().tensors.is_empty());
    add(&store, "new", &odd);
    assert!(rebuild(&store, digest) == odd);
    assert_eq!(show(&store, &old).unwrap().tensors.len(), ODD.len(), "of either form");
    collect(store.liveness()).unwrap();
    assert!(rebuild(&store, digest) == odd);
}

#[test]
fn file_whose_header_is_wrong_is_refused_and_nothing_of_it_is_kept() {
    let (folder, store) = new_store();
    let mut file = safetensors(&ODD);
    file.push(0);
    let mut ingest = begin(&store);
    let error =
        ingest_file(&mut ingest, &mut InMemory::new(&file), file.len() as u64, &mut |_, _| ()).unwrap_err();
    assert!(error.to_string().starts_with("safetensors: the tensors end at byte"), "{error}");
    drop(ingest);
    check_nothing_staged(&folder, &store);
}
