//! Files assembled in any order have the digests of their bytes.

use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};

use super::*;
use crate::testing::{begin, new_store};

/// A GGUF file whose four experts are in this order, and its plan.
fn expert_group(order: [usize; 4]) -> (Vec<u8>, SplitPlan) {
    let mut writer = GgufWriter::new();
    for expert in order {
        writer.tensor(&format!("blk.0.ffn_up.{expert}.weight"), GgmlType::I8, &[128]).unwrap();
    }
    let mut file = writer.header().unwrap();
    let header = Header::parse(&file).unwrap();
    let plan = SplitPlan::new(header.file_layout(file.len() as u64 + 4 * 128).unwrap());
    order.iter().for_each(|expert| file.extend([u8::try_from(*expert).unwrap(); 128]));
    (file, plan)
}

#[test]
fn members_of_an_expert_group_may_be_in_any_order() {
    let blob: Vec<u8> = (0..4).flat_map(|expert| [expert; 128]).collect();
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
        let (_folder, store) = new_store();
        let mut ingest = begin(&store);
        let (file, plan) = expert_group(order);
        let assembler = Assembler::new(ingest.staging(), plan);
        let mut read = |offset: u64, buffer: &mut [u8]| {
            let start = usize::try_from(offset).unwrap();
            buffer.copy_from_slice(&file[start..start + buffer.len()]);
            Ok::<_, StoreError>(())
        };
        let hashed =
            assembler.store_in_order(&mut read, &mut |blob| ingest.add_blob(blob).map(drop)).unwrap();
        assert_eq!((hashed.digest, hashed.blobs[1]), (Digest::of(&file), Digest::of(&blob)), "{order:?}");
    }
}

#[test]
fn ranges_in_any_order_give_the_file_and_its_blobs() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let (file, plan) = expert_group([1, 0, 3, 2]);
    let assembler = Assembler::new(ingest.staging(), plan);
    let mut starts: Vec<usize> = (0..file.len()).step_by(50).collect();
    starts.reverse();
    for start in starts {
        let end = file.len().min(start + 50);
        assembler.write(start as u64, &file[start..end]).unwrap();
    }
    assert_eq!((assembler.missing(), assembler.arrived_bytes()), (Vec::new(), file.len() as u64));
    let mut back = vec![0; file.len()];
    assembler.read(0, &mut back).unwrap();
    assert_eq!(back, file);
    let mut sizes = Vec::new();
    let mut sink = |blob: StagedBlob| {
        sizes.push(blob.size);
        ingest.add_blob(blob).map(drop)
    };
    let mut arrived = |offset| Some(assembler.end_of_run(offset));
    let hashed = assembler.hash_as_it_arrives(&mut arrived, &mut sink).unwrap().unwrap();
    assert_eq!(hashed.digest, Digest::of(&file));
    assert_eq!(sizes, [file.len() as u64 - 512, 512]);
    assert_eq!(assembler.recipe(hashed).unwrap().unwrap().file(), Digest::of(&file));
}

#[test]
fn missing_or_excess_bytes_are_refused() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let mut writer = ingest.staging().stage(6);
    writer.append(b"four").unwrap();
    let error = writer.append(b"four").unwrap_err();
    assert!(matches!(error, StoreError::FileSize { found: 8, expected: 6 }), "{error}");
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, StoreError::FileSize { found: 4, expected: 6 }), "{error}");
}

#[test]
fn empty_blob_is_stored() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(0));
    let mut read = |_offset: u64, _buffer: &mut [u8]| Ok::<_, StoreError>(());
    let hashed = assembler.store_in_order(&mut read, &mut |blob| ingest.add_blob(blob).map(drop)).unwrap();
    ingest.commit_blobs().unwrap();
    assert_eq!(hashed.blobs, [Digest::of(b"")]);
    assert_eq!(store.blob_size(Digest::of(b"")).unwrap(), Some(0));
}

#[test]
fn failure_of_the_reader_or_of_the_sink_ends_the_pipeline() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let failure = || StoreError::NoSuchModel { name: "failure".to_owned() };
    let size = 3 * CHUNK_BYTES as u64;
    let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(size));
    let mut reads = 0;
    let mut read = |_offset: u64, _buffer: &mut [u8]| {
        reads += 1;
        if reads < 3 { Ok(()) } else { Err(failure()) }
    };
    let error = assembler.store_in_order(&mut read, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchModel { .. }), "{error}");
    let (file, plan) = expert_group([0, 1, 2, 3]);
    let assembler = Assembler::new(ingest.staging(), plan);
    assembler.write(0, &file).unwrap();
    let mut arrived = |offset| Some(assembler.end_of_run(offset));
    let error = assembler.hash_as_it_arrives(&mut arrived, &mut |_| Err(failure())).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchModel { .. }), "{error}");
}
