//! Files assembled in any order have the digests of their bytes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};

use super::*;
use crate::CHUNK_BYTES;
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
pub(super) struct Slice<'f> {
    file: &'f [u8],
    requested: VecDeque<Range<u64>>,
    fails_at: Option<usize>,
}

impl<'f> Slice<'f> {
    pub(super) fn new(file: &'f [u8]) -> Self {
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
        assert_eq!((hashed.digest, hashed.blobs()[1]), (Digest::of(&file), Digest::of(&blob)), "{order:?}");
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
    assert_eq!(hashed.blobs(), [Digest::of(b"")]);
    assert_eq!(store.content.blob_size(Digest::of(b"")).unwrap(), Some(0));
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

/// Delays a request while as many chunks as promised are requested or in use.
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

/// The files of the only transaction in `staging/`, by name.
pub(super) fn staged(store: &Store) -> Vec<(String, Vec<u8>)> {
    let transaction = std::fs::read_dir(store.path(layout::STAGING)).unwrap().next().unwrap().unwrap();
    let files = std::fs::read_dir(transaction.path()).unwrap().map(Result::unwrap);
    let mut files: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn planned_blob_that_is_stored_is_compared_and_not_written() {
    let (_folder, store) = new_store();
    let experts: Vec<u8> = (0..4).flat_map(|expert| [expert; 128]).collect();
    let digest = crate::testing::add_blobs(&store, [&experts])[0];
    let ingest = begin(&store);
    let (file, plan) = expert_group([1, 0, 3, 2]);
    let assembler = Assembler::new(ingest.staging(), plan);
    assert!(assembler.is_untouched(0) && assembler.is_untouched(1));
    assembler.take_stored(1, digest);
    assert_eq!(assembler.stored(), [(1, digest)].into());
    assert!(assembler.is_untouched(0) && !assembler.is_untouched(1));
    assembler.write(0, &file).unwrap();
    assert!(!assembler.is_untouched(0));
    let header = file[..file.len() - 512].to_vec();
    assert_eq!(staged(&store), [("0".to_owned(), header)]);
    let mut back = vec![0; file.len()];
    assembler.read(0, &mut back).unwrap();
    assert_eq!(back, file);
    let mut wrong = file.clone();
    *wrong.last_mut().unwrap() ^= 1;
    let refused = assembler.replace(0, &wrong);
    assert!(
        matches!(refused, Err(StoreError::BlobDiffers { digest: found }) if found == digest),
        "{refused:?}"
    );
    assembler.forget_stored(1);
    assert!(assembler.stored().is_empty() && assembler.is_untouched(1));
    assembler.replace(0, &wrong).unwrap();
    assembler.read(0, &mut back).unwrap();
    assert_eq!(back, wrong);
}

#[test]
fn discarded_file_leaves_nothing_and_gives_its_space_back() {
    let (_folder, store) = new_store();
    let (ingest, before) = (begin(&store), store.ledger.used_bytes());
    let (file, plan) = expert_group([0, 1, 2, 3]);
    let assembler = Assembler::new(ingest.staging(), plan.clone());
    assembler.write(0, &file).unwrap();
    assert_eq!(staged(&store).len(), 2);
    assert!(store.ledger.used_bytes() > before);
    assembler.discard().unwrap();
    assert_eq!((staged(&store), store.ledger.used_bytes()), (Vec::new(), before));
    // The file can be received again.
    let mut ingest = ingest;
    let assembler = Assembler::new(ingest.staging(), plan);
    let mut add = |blob| ingest.add_blob(blob).map(drop);
    let hashed = assembler.store_in_order(&mut Slice::new(&file), &mut add).unwrap();
    assert_eq!(hashed.digest, Digest::of(&file));
}

#[test]
fn bytes_that_have_not_arrived_cannot_be_read() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let (file, plan) = expert_group([0, 1, 2, 3]);
    let assembler = Assembler::new(ingest.staging(), plan);
    assembler.write(0, &file[..10]).unwrap();
    let missing = assembler.read(file.len() as u64 - 1, &mut [0]);
    let size = file.len() as u64;
    assert!(
        matches!(missing, Err(StoreError::FileSize { found: 10, expected }) if expected == size),
        "{missing:?}"
    );
    let outside = assembler.read(size, &mut [0]);
    assert!(
        matches!(outside, Err(StoreError::FileSize { found, expected }) if (found, expected) == (size + 1, size))
    );
    assert_eq!((assembler.end_of_run(0), assembler.end_of_run(10)), (10, 10));
    assert_eq!(assembler.missing(), std::iter::once(10..size).collect::<Vec<_>>());
}

#[test]
fn hash_of_an_incomplete_file_is_refused() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let (file, plan) = expert_group([0, 1, 2, 3]);
    let assembler = Assembler::new(ingest.staging(), plan);
    let mut hasher = hash::FileHasher::new(&assembler, false);
    assembler.write(0, &file[..700]).unwrap();
    hasher.push(&file[..700], &mut |_| Ok(())).unwrap();
    let refused = hasher.finish(&mut |_| Ok(()));
    let expected = file.len() as u64;
    assert!(
        matches!(refused, Err(StoreError::FileSize { found: 700, expected: e }) if e == expected),
        "{refused:?}"
    );
}

#[test]
fn space_of_a_staged_file_is_taken_ahead_unless_that_is_slow() {
    let (_folder, store) = new_store();
    let (ingest, before) = (begin(&store), store.ledger.used_bytes());
    let mut writer = ingest.staging().stage(100_000);
    writer.append(b"x").unwrap();
    let length = if store.content.file_system().allocates_slowly() { 1 } else { 100_000 };
    assert_eq!(store.ledger.used_bytes() - before, store.ledger.size_on_disk(length));
    writer.append(&vec![7; 99_999]).unwrap();
    assert_eq!(store.ledger.used_bytes() - before, store.ledger.size_on_disk(100_000));
}

/// Counts the files that are created and removed.
#[derive(Debug, Default)]
struct CountingDisk {
    created: AtomicUsize,
    removed: AtomicUsize,
}

impl crate::Disk for CountingDisk {
    fn create_file(&self, root: &crate::disk::Root, path: &Path, mode: u32) -> std::io::Result<File> {
        self.created.fetch_add(1, Ordering::SeqCst);
        crate::disk::KernelDisk.create_file(root, path, mode)
    }

    fn remove_file(&self, root: &crate::disk::Root, path: &Path) -> std::io::Result<()> {
        self.removed.fetch_add(1, Ordering::SeqCst);
        crate::disk::KernelDisk.remove_file(root, path)
    }
}

/// A file of scalars with these values, and its plan.
fn scalars(values: &[u8]) -> (Vec<u8>, SplitPlan) {
    let mut writer = GgufWriter::new();
    for number in 0..values.len() {
        writer.tensor(&format!("blk.{number}.input_scale"), GgmlType::I8, &[32]).unwrap();
    }
    let mut file = writer.header().unwrap();
    let header = Header::parse(&file).unwrap();
    let plan = SplitPlan::new(header.file_layout((file.len() + 32 * values.len()) as u64).unwrap());
    values.iter().for_each(|value| file.extend([*value; 32]));
    (file, plan)
}

#[test]
fn equal_small_blobs_take_one_file_and_stored_ones_none() {
    let disk = Arc::new(CountingDisk::default());
    let options = crate::StoreOptions { disk: disk.clone(), ..Default::default() };
    let (_folder, store) = crate::testing::new_store_with(options);
    crate::testing::add_blobs(&store, [[9; 32]]);
    let before = store.ledger.used_bytes();
    let [created, removed] = [&disk.created, &disk.removed].map(|count| count.load(Ordering::SeqCst));
    let mut ingest = begin(&store);
    // The header and the blobs 1 and 2 are new.
    let (file, plan) = scalars(&[1, 1, 2, 9, 1, 9, 2, 1, 1, 1]);
    let sizes: Vec<u64> = plan.blobs().iter().map(|blob| blob.size).collect();
    ingest.admit(sizes.iter().copied()).unwrap();
    let assembler = Assembler::new(ingest.staging(), plan);
    let hashed = assembler.store_in_order(&mut Slice::new(&file), &mut ingest).unwrap();
    assert_eq!(hashed.digest, Digest::of(&file));
    assert_eq!(hashed.blobs()[1..4], [1, 1, 2].map(|value| Digest::of(&[value; 32])));
    assert_eq!(staged(&store).len(), 3);
    assert_eq!(disk.created.load(Ordering::SeqCst) - created, 3);
    assert_eq!(disk.removed.load(Ordering::SeqCst) - removed, 0);
    drop(assembler);
    ingest.commit_blobs().unwrap();
    let new = [file.len() as u64 - 10 * 32, 32, 32].map(|size| store.ledger.size_on_disk(size));
    assert_eq!(store.ledger.used_bytes() - before, new.iter().sum::<u64>());
}
