//! Files assembled in any order have the digests of their bytes.

use crate::CHUNK_BYTES;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Passes on the bytes of a file. `fails_at`: the range that cannot be received.
struct Slice<'f> {
    file: &'f [u8],
    requested: VecDeque<Range<u64>>,
    fails_at: Option<usize>,
}

impl<'f> Slice<'f> {
    fn new(file: &'f [u8]) -> Self {
        Self { file, requested: VecDeque::new(), fails_at: None }
    }
}

impl<'f> RangeSource for Slice<'f> {
    type Chunk = &'f [u8];
    type Error = StoreError;

    fn request(&mut self, range: Range<u64>) -> Result<(), StoreError> {
        self.requested.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> Result<&'f [u8], StoreError> {
        let Range { start, end } = self.requested.pop_front().unwrap();
        match &mut self.fails_at {
            Some(0) => return Err(failure()),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(&self.file[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()])
    }
}

fn failure() -> StoreError {
    StoreError::NoSuchModel { name: "failure".to_owned(), similar: Vec::new() }
}

#[test]
fn members_of_an_expert_group_may_be_in_any_order() {
    let blob: Vec<u8> = (0..4).flat_map(|expert| [expert; 128]).collect();
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
        let (_folder, store) = new_store();
        let mut ingest = begin(&store);
        let (file, plan) = expert_group(order);
        let assembler = Assembler::new(ingest.staging(), plan);
        let mut add = |blob| ingest.add_blob(blob).map(drop);
        let hashed = assembler.store_in_order(&mut Slice::new(&file), &mut add).unwrap();
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
    assert_eq!(assembler.recipe(hashed, &[]).unwrap().unwrap().file(), Digest::of(&file));
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
    let mut add = |blob| ingest.add_blob(blob).map(drop);
    let hashed = assembler.store_in_order(&mut Slice::new(&[]), &mut add).unwrap();
    ingest.commit_blobs().unwrap();
    assert_eq!(hashed.blobs, [Digest::of(b"")]);
    assert_eq!(store.content().blob_size(Digest::of(b"")).unwrap(), Some(0));
}

#[test]
fn failure_of_the_reader_or_of_the_sink_ends_the_pipeline() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let file = vec![0; 3 * CHUNK_BYTES];
    let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(file.len() as u64));
    let mut source = Slice { fails_at: Some(2), ..Slice::new(&file) };
    let error = assembler.store_in_order(&mut source, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchModel { .. }), "{error}");
    let (file, plan) = expert_group([0, 1, 2, 3]);
    let assembler = Assembler::new(ingest.staging(), plan);
    assembler.write(0, &file).unwrap();
    let mut arrived = |offset| Some(assembler.end_of_run(offset));
    let error = assembler.hash_as_it_arrives(&mut arrived, &mut |_| Err(failure())).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchModel { .. }), "{error}");
}

/// A source's chunk, counted while it exists.
struct Counted<'c>(Vec<u8>, &'c AtomicUsize);

impl AsRef<[u8]> for Counted<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits with a request as long as the chunks requested and in use are as many as promised.
struct Bounded<'c> {
    requested: VecDeque<Range<u64>>,
    chunks: &'c AtomicUsize,
}

impl<'c> RangeSource for Bounded<'c> {
    type Chunk = Counted<'c>;
    type Error = StoreError;

    fn request(&mut self, range: Range<u64>) -> Result<(), StoreError> {
        while self.chunks.load(Ordering::SeqCst) == CHUNKS_IN_USE {
            std::thread::yield_now();
        }
        self.chunks.fetch_add(1, Ordering::SeqCst);
        self.requested.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> Result<Counted<'c>, StoreError> {
        let Range { start, end } = self.requested.pop_front().unwrap();
        Ok(Counted(vec![7; usize::try_from(end - start).unwrap()], self.chunks))
    }
}

#[test]
fn promised_number_of_chunks_suffices_for_any_file() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let file = vec![7; 9 * CHUNK_BYTES + 1];
    let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(file.len() as u64));
    let chunks = AtomicUsize::new(0);
    let mut source = Bounded { requested: VecDeque::new(), chunks: &chunks };
    let mut add = |blob| ingest.add_blob(blob).map(drop);
    let hashed = assembler.store_in_order(&mut source, &mut add).unwrap();
    assert_eq!((hashed.digest, chunks.load(Ordering::SeqCst)), (Digest::of(&file), 0));
}
