use proptest::prelude::*;

use super::*;
use blobd_store_format::gguf::generate::{Sample, file};
use blobd_store_format::gguf::{GgufWriter, MAGIC, ValueType};

fn source(file: &[u8]) -> RewriteSource {
    RewriteSource::new(Header::parse(file).unwrap(), file.len() as u64).unwrap()
}

fn sources(files: &[Vec<u8>]) -> Vec<RewriteSource> {
    files.iter().map(|file| source(file)).collect()
}

/// Executes a plan.
fn rewrite(files: &[Vec<u8>], options: &RewriteOptions) -> Result<Vec<Vec<u8>>, RewriteError> {
    let plan = RewritePlan::new(&sources(files), options)?;
    Ok(plan.files().iter().map(|planned| execute(planned, files)).collect())
}

fn execute(planned: &RewrittenFile, files: &[Vec<u8>]) -> Vec<u8> {
    let mut out = planned.header().to_vec();
    for piece in planned.pieces() {
        assert!(piece.length() > 0, "an empty piece");
        let end = out.len() as u64 + piece.length();
        match *piece {
            RewritePiece::Zeros { length } => out.resize(out.len() + usize::try_from(length).unwrap(), 0),
            RewritePiece::Tensor { source, offset, size, swapped } => {
                let start = usize::try_from(offset).unwrap();
                let mut bytes = files[source][start..start + usize::try_from(size).unwrap()].to_vec();
                if let Some(ggml_type) = swapped {
                    swap_bytes(ggml_type, &mut bytes).unwrap();
                }
                out.extend(bytes);
            }
        }
        assert_eq!(out.len() as u64, end);
    }
    assert_eq!(out.len() as u64, planned.size());
    out
}

fn rewrite_one(file: &[u8], options: &RewriteOptions) -> Result<Vec<u8>, RewriteError> {
    let mut files = rewrite(&[file.to_vec()], options)?;
    assert_eq!(files.len(), 1);
    Ok(files.remove(0))
}

/// Name, type, shape and bytes of each tensor, in table order.
type Tensors = Vec<(String, GgmlType, Vec<u64>, Vec<u8>)>;

fn tensors(file: &[u8]) -> Tensors {
    let source = source(file);
    let tensors = tensors_of(std::slice::from_ref(&source), &[0]).into_iter().map(|tensor| {
        let start = usize::try_from(tensor.offset).unwrap();
        let bytes = file[start..start + usize::try_from(tensor.size).unwrap()].to_vec();
        let shape = tensor.info.shape().dimensions().to_vec();
        (tensor.info.name().to_owned(), tensor.info.ggml_type(), shape, bytes)
    });
    tensors.collect()
}

/// Compares tensors. One of an unknown type ends where the next one starts, so padding may follow its bytes.
fn assert_same_tensors(found: &Tensors, expected: &Tensors) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((&found.0, found.1, &found.2), (&expected.0, expected.1, &expected.2));
        match expected.1.block() {
            Some(_) => assert!(found.3 == expected.3, "{}", found.0),
            None => assert!(found.3.starts_with(&expected.3), "{}", found.0),
        }
    }
}

/// Keys with the bytes of their values, except `general.alignment`.
fn metadata(file: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let header = Header::parse(file).unwrap();
    let owned = header.raw_metadata().map(|(key, value)| (key.to_vec(), value.to_vec()));
    owned.filter(|(key, _)| key != ALIGNMENT_KEY.as_bytes()).collect()
}

/// Whether the offsets are what llama.cpp requires: each is the sum of the padded sizes before it, and the last
/// tensor is padded too.
fn is_packed(file: &[u8]) -> bool {
    let header = Header::parse(file).unwrap();
    let mut expected = 0;
    for (info, range) in header.tensors().zip(header.file_layout(file.len() as u64).unwrap().tensors().iter())
    {
        if info.offset() != expected {
            return false;
        }
        expected += range.size.next_multiple_of(header.alignment().into());
    }
    file.len() as u64 == header.data_offset() + expected
}

fn has_unknown_type(sample: &Sample) -> bool {
    sample.tensors.iter().any(|tensor| tensor.ggml_type.block().is_none())
}

proptest! {
    #[test]
    fn rewriting_without_a_change_keeps_metadata_and_tensors(sample in file()) {
        let written = rewrite_one(&sample.file, &RewriteOptions::default()).unwrap();
        prop_assert_eq!(metadata(&written), metadata(&sample.file));
        assert_same_tensors(&tensors(&written), &tensors(&sample.file));
        let (before, after) = (Header::parse(&sample.file).unwrap(), Header::parse(&written).unwrap());
        prop_assert_eq!(after.alignment(), before.alignment());
        prop_assert_eq!(after.byte_order(), before.byte_order());
        prop_assert!(is_packed(&written));
        prop_assert!(rewrite_one(&written, &RewriteOptions::default()).unwrap() == written);
    }

    #[test]
    fn alignment_changes_only_places(sample in file(), log in 0..=16_u32) {
        let options = RewriteOptions { alignment: Some(1 << log), ..RewriteOptions::default() };
        let written = rewrite_one(&sample.file, &options).unwrap();
        prop_assert_eq!(metadata(&written), metadata(&sample.file));
        assert_same_tensors(&tensors(&written), &tensors(&sample.file));
        let header = Header::parse(&written).unwrap();
        prop_assert_eq!(header.alignment(), 1 << log);
        let has_key = header.value(ALIGNMENT_KEY).is_some();
        prop_assert_eq!(has_key, log != 5 || sample.alignment == 32 && sample.metadata.iter().any(|(key, _)| key == ALIGNMENT_KEY));
        prop_assert!(is_packed(&written));
    }

    #[test]
    fn byte_order_changed_twice_gives_the_same_bytes(sample in file()) {
        let other = if sample.order == ByteOrder::Big { ByteOrder::Little } else { ByteOrder::Big };
        let to = |order| RewriteOptions { byte_order: Some(order), ..RewriteOptions::default() };
        let once = rewrite_one(&sample.file, &to(other));
        if has_unknown_type(&sample) {
            let is_refused = matches!(once, Err(RewriteError::CannotSwap { .. }));
            prop_assert!(is_refused);
            return Ok(());
        }
        let once = once.unwrap();
        let header = Header::parse(&once).unwrap();
        prop_assert_eq!(header.byte_order(), other);
        let packed = rewrite_one(&sample.file, &RewriteOptions::default()).unwrap();
        let mut twice = rewrite_one(&once, &to(sample.order)).unwrap();
        // A big-endian file has version 3.
        twice[4..8].copy_from_slice(&packed[4..8]);
        prop_assert!(twice == packed);
    }

    #[test]
    fn shards_hold_the_model_and_merge_to_it(sample in file(), max_kilobytes in 1..20_u64) {
        let max_bytes = max_kilobytes * 1024;
        let options = RewriteOptions { sharding: Sharding::Split { max_bytes }, ..RewriteOptions::default() };
        let shards = rewrite(std::slice::from_ref(&sample.file), &options).unwrap();
        for (number, shard) in shards.iter().enumerate() {
            let header = Header::parse(shard).unwrap();
            let fits = shard.len() as u64 - header.data_offset() <= max_bytes;
            prop_assert!(fits || header.tensors().len() == 1);
            prop_assert_eq!(split_value(&header, SPLIT_NO), Some(number as u64));
            prop_assert_eq!(split_value(&header, SPLIT_COUNT), Some(shards.len() as u64));
            prop_assert_eq!(split_value(&header, SPLIT_TENSORS), Some(sample.tensors.len() as u64));
            prop_assert!(number == 0 || metadata(shard).len() == 3);
            prop_assert!(number == 0 || header.tensors().len() > 0);
            prop_assert!(is_packed(shard));
        }
        let merged = RewriteOptions { sharding: Sharding::Merge, ..RewriteOptions::default() };
        let mut reversed = shards;
        reversed.reverse();
        let whole = rewrite(&reversed, &merged).unwrap();
        prop_assert!(whole == [rewrite_one(&sample.file, &RewriteOptions::default()).unwrap()]);
    }
}

/// Tensors of 64, 64 and 32 bytes.
fn small() -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", Value::from("llama")).unwrap();
    for (name, elements) in [("a", 16), ("b", 16), ("c", 8)] {
        writer.tensor(name, GgmlType::F32, &[elements]).unwrap();
    }
    writer
}

fn file_of(writer: &GgufWriter) -> Vec<u8> {
    let mut file = writer.header().unwrap();
    let data = usize::try_from(writer.data_size().unwrap()).unwrap();
    file.extend((0..data).map(|place| u8::try_from(place % 251).unwrap()));
    file
}

fn split(max_bytes: u64) -> RewriteOptions {
    RewriteOptions { sharding: Sharding::Split { max_bytes }, ..RewriteOptions::default() }
}

#[test]
fn shard_is_ended_before_the_tensor_that_does_not_fit() {
    let file = file_of(&small());
    let counts = |max_bytes| -> Vec<usize> {
        let shards = rewrite(std::slice::from_ref(&file), &split(max_bytes)).unwrap();
        shards.iter().map(|shard| Header::parse(shard).unwrap().tensors().len()).collect()
    };
    assert_eq!(counts(160), [3]);
    assert_eq!(counts(159), [2, 1]);
    assert_eq!(counts(128), [2, 1]);
    assert_eq!(counts(127), [1, 2]);
    assert_eq!(counts(64), [1, 1, 1]);
    assert_eq!(counts(63), [1, 1, 1], "a larger tensor has a shard of its own");
    assert_eq!(counts(1), [1, 1, 1]);
}

#[test]
fn first_shard_has_all_keys_and_the_others_only_those_of_shards() {
    let shards = rewrite(&[file_of(&small())], &split(64)).unwrap();
    let keys = |shard: &[u8]| -> Vec<(String, ValueType)> {
        let header = Header::parse(shard).unwrap();
        let typed = header.raw_metadata().map(|(key, value)| {
            let id = u32::from_le_bytes(*value.first_chunk().unwrap());
            (String::from_utf8(key.to_vec()).unwrap(), ValueType::from_id(id).unwrap())
        });
        typed.collect()
    };
    let own = [(SPLIT_NO, ValueType::U16), (SPLIT_COUNT, ValueType::U16), (SPLIT_TENSORS, ValueType::I32)]
        .map(|(key, value_type)| (key.to_owned(), value_type));
    let architecture = ("general.architecture".to_owned(), ValueType::String);
    assert_eq!(keys(&shards[0]), [&[architecture][..], &own].concat());
    assert_eq!(keys(&shards[1]), own);
    assert_eq!(keys(&shards[2]), own);
}

#[test]
fn every_shard_records_an_alignment_that_is_not_the_default() {
    let options = RewriteOptions { alignment: Some(128), ..split(128) };
    for shard in rewrite(&[file_of(&small())], &options).unwrap() {
        let header = Header::parse(&shard).unwrap();
        assert_eq!(header.alignment(), 128);
        assert!(is_packed(&shard));
    }
    // If the shards stay separate, each of them is changed.
    let shards = rewrite(&[file_of(&small())], &split(64)).unwrap();
    let options = RewriteOptions { alignment: Some(256), ..RewriteOptions::default() };
    for shard in rewrite(&shards, &options).unwrap() {
        assert_eq!(Header::parse(&shard).unwrap().alignment(), 256);
        assert!(Header::parse(&shard).unwrap().value(SPLIT_COUNT).is_some());
    }
}

/// A GGUF file with these tensors and no `split.*` keys.
fn unnumbered(names: &[&str]) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", Value::from("llama")).unwrap();
    for name in names {
        writer.tensor(name, GgmlType::F32, &[16]).unwrap();
    }
    file_of(&writer)
}

#[test]
fn shards_without_split_keys_are_merged_in_their_order() {
    let shards = [unnumbered(&["b", "a"]), unnumbered(&["c"])];
    let merge = RewriteOptions { sharding: Sharding::Merge, ..RewriteOptions::default() };
    let [merged] = rewrite(&shards, &merge).unwrap().try_into().unwrap();
    let expected = [tensors(&shards[0]), tensors(&shards[1])].concat();
    assert_same_tensors(&tensors(&merged), &expected);
    assert_eq!(metadata(&merged), metadata(&shards[0]));
    assert_eq!(rewrite(&shards, &split(64)).unwrap().len(), 3);
    let aligned = RewriteOptions { alignment: Some(64), ..RewriteOptions::default() };
    assert_eq!(rewrite(&shards, &aligned).unwrap().len(), 2);
    let foreign = [unnumbered(&["a"]), unnumbered(&["a"])];
    assert!(matches!(rewrite(&foreign, &merge), Err(RewriteError::Shards { .. })));
}

#[test]
fn incomplete_or_repeated_shards_are_refused() {
    let shards = rewrite(&[file_of(&small())], &split(64)).unwrap();
    let merge = RewriteOptions { sharding: Sharding::Merge, ..RewriteOptions::default() };
    let refused = |files: &[Vec<u8>]| rewrite(files, &merge).unwrap_err();
    assert_eq!(refused(&[]), RewriteError::NoSource);
    assert!(refused(&shards[..2]).to_string().contains("expected shard 0 of 2, found shard 0 of 3"));
    assert!(refused(&shards[..1]).to_string().contains("expected shard 0 of 1, found shard 0 of 3"));
    let twice = [shards[0].clone(), shards[1].clone(), shards[1].clone()];
    assert!(refused(&twice).to_string().contains("expected shard 2 of "));
    let foreign = [shards[0].clone(), shards[1].clone(), file_of(&small())];
    assert!(matches!(refused(&foreign), RewriteError::Shards { count: 1, .. }));
    assert_eq!(refused(&[file_of(&small())]), RewriteError::NotSharded);
}

#[test]
fn impossible_alignments_are_refused() {
    for alignment in [0, 13, 1 << 21] {
        let options = RewriteOptions { alignment: Some(alignment), ..RewriteOptions::default() };
        let error = rewrite(&[file_of(&small())], &options).unwrap_err();
        assert_eq!(error, GgufError::Alignment { found: alignment }.into());
    }
}

#[test]
fn unusual_bytes_survive_a_change_of_the_byte_order() {
    // A boolean with the value 237, a key that is not UTF-8, and a signalling NaN.
    let mut file = MAGIC.to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend([0u64, 3].map(u64::to_le_bytes).concat());
    for (key, id, value) in [
        (&b"\xff\0"[..], ValueType::Bool, vec![237]),
        (b"f", ValueType::F32, 0x7fa0_0001_u32.to_le_bytes().to_vec()),
        (b"s", ValueType::String, [&2u64.to_le_bytes()[..], b"\xc3\x28"].concat()),
    ] {
        file.extend((key.len() as u64).to_le_bytes());
        file.extend(key);
        file.extend(id.id().to_le_bytes());
        file.extend(value);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    let to = |order| RewriteOptions { byte_order: Some(order), ..RewriteOptions::default() };
    let big = rewrite_one(&file, &to(ByteOrder::Big)).unwrap();
    assert!(big.windows(4).any(|bytes| bytes == 0x7fa0_0001_u32.to_be_bytes()));
    assert_eq!(rewrite_one(&big, &to(ByteOrder::Little)).unwrap(), file);
}
