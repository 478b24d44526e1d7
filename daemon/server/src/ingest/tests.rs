//! Files are ingested and rebuilt, or refused without leaving anything.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use blobd_fixtures::model::ModelFile;
use blobd_store::testing::{begin, new_store};
use blobd_store::{CHUNK_BYTES, FileReader, SpacePolicy, Store, StoreOptions};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::gguf::{GgmlType, GgufWriter};
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use tempfile::TempDir;

use super::*;

mod reflink;
mod safetensors;

/// A GGUF file of I8 tensors of these sizes, filled with noise.
fn gguf(tensors: &[(&str, u64)]) -> Vec<u8> {
    let mut file = ModelFile::empty();
    tensors.iter().for_each(|(name, size)| file.add_noise(1, name, GgmlType::I8, &[*size]));
    file.bytes()
}

/// A file in memory, which may differ from the file that was announced.
#[derive(Default)]
struct InMemory<'f> {
    file: &'f [u8],
    requested: VecDeque<Range<u64>>,
    /// Reading from this offset on fails.
    broken_from: Option<usize>,
}

impl<'f> InMemory<'f> {
    fn new(file: &'f [u8]) -> Self {
        Self { file, ..Self::default() }
    }
}

impl FileSource for InMemory<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.requested.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        let Range { start, end } = self.requested.pop_front().unwrap();
        let [start, end] = [start, end].map(|offset| usize::try_from(offset).unwrap());
        if self.broken_from.is_some_and(|offset| offset < end) {
            return Err(io::Error::other("the cable is cut"));
        }
        let file = self.file;
        Ok(Bytes::copy_from_slice(&file[start.min(file.len())..end.min(file.len())]))
    }
}

/// Ingests and commits a file, so that its blobs can be read.
fn ingest_and_commit(
    store: &Arc<Store>,
    source: &mut dyn FileSource,
    size: usize,
) -> Result<IngestedFile, IngestError> {
    commit_as(store, ("m", "x"), source, size)
}

fn commit_as(
    store: &Arc<Store>,
    (name, media_type): (&str, &str),
    source: &mut dyn FileSource,
    size: usize,
) -> Result<IngestedFile, IngestError> {
    let mut ingest = begin(store);
    let ingested = ingest_file(&mut ingest, source, size as u64, &mut |_, _| ())?;
    let config = Descriptor { media_type: MediaType::new("x"), digest: ingest.add_bytes(b"{}")?, size: 2 };
    let (media_type, digest) = (MediaType::new(media_type), ingested.digest);
    let manifest = Manifest::compose(config, vec![Descriptor { media_type, digest, size: ingested.size }]);
    ingest.commit(&name.parse().unwrap(), &manifest.unwrap(), None)?;
    Ok(ingested)
}

fn rebuild(store: &Store, file: Digest) -> Vec<u8> {
    let recipe = store.content().recipe(file).unwrap().unwrap();
    FileReader::for_recipe(store.content(), &recipe).read_range(0..recipe.size()).unwrap()
}

fn staging(folder: &TempDir) -> PathBuf {
    folder.path().join("store").join(layout::STAGING)
}

fn check_nothing_staged(folder: &TempDir, store: &Store) {
    assert_eq!(fs::read_dir(staging(folder)).unwrap().count(), 0);
    assert!(store.content().blobs().unwrap().is_empty() && store.content().recipes().unwrap().is_empty());
}

#[test]
fn tensors_around_the_size_of_a_chunk_are_rebuilt() {
    const CHUNK: u64 = CHUNK_BYTES as u64;
    for tensors in [
        &[("a", CHUNK)][..],
        &[("a", CHUNK - 1), ("b", 1)],
        &[("a", CHUNK + 1), ("b", CHUNK)],
        &[("a", 10), ("b", 2 * CHUNK + 5), ("c", 10)],
        &[("blk.0.ffn_up.1.weight", CHUNK), ("x", 3), ("blk.0.ffn_up.0.weight", CHUNK)],
    ] {
        let (_folder, store) = new_store();
        let file = gguf(tensors);
        let ingested = ingest_and_commit(&store, &mut InMemory::new(&file), file.len()).unwrap();
        assert_eq!((ingested.digest, ingested.size), (Digest::of(&file), file.len() as u64));
        assert!(rebuild(&store, ingested.digest) == file, "{tensors:?}");
    }
}

#[test]
fn bytes_beyond_the_announced_size_are_not_read() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 100)]);
    let longer = [file.as_slice(), b"more"].concat();
    let mut source = InMemory { broken_from: Some(file.len()), ..InMemory::new(&longer) };
    let ingested = ingest_and_commit(&store, &mut source, file.len()).unwrap();
    assert_eq!(ingested.digest, Digest::of(&file));
}

/// A file whose second request for its header gets other bytes.
struct Rewritten<'f>(InMemory<'f>, &'f [u8]);

impl FileSource for Rewritten<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.0.request(range)
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        let bytes = self.0.receive();
        self.0.file = self.1;
        bytes
    }
}

#[test]
fn file_whose_header_changes_during_the_import_is_refused() {
    let (folder, store) = new_store();
    let before = gguf(&[("a", 100)]);
    let mut after = before.clone();
    after[30] ^= 1;
    let mut source = Rewritten(InMemory::new(&before), &after);
    let error = ingest_and_commit(&store, &mut source, before.len()).unwrap_err();
    assert!(matches!(error, IngestError::Changed), "{error}");
    check_nothing_staged(&folder, &store);
}

#[test]
fn progress_grows_up_to_the_size() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 9 << 20), ("b", 100)]);
    let mut reported = Vec::new();
    let mut ingest = begin(&store);
    let mut report = |done, _total| reported.push(done);
    ingest_file(&mut ingest, &mut InMemory::new(&file), file.len() as u64, &mut report).unwrap();
    assert!(reported.len() >= 3 && reported.is_sorted(), "{reported:?}");
    assert_eq!(reported.last(), Some(&(file.len() as u64)));
}

#[test]
fn file_that_ends_early_is_refused_wherever_it_ends() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20), ("b", 100)]);
    for length in [0, 3, 24, 60, 200, 1 << 20, file.len() - 1] {
        let error = ingest_and_commit(&store, &mut InMemory::new(&file[..length]), file.len()).unwrap_err();
        let IngestError::Truncated { found, expected } = error else { panic!("{length}: {error}") };
        assert_eq!((found, expected), (length as u64, file.len() as u64));
        check_nothing_staged(&folder, &store);
    }
}

#[test]
fn failure_of_the_source_is_returned() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20)]);
    for length in [0, 30, 1 << 20, file.len() - 1] {
        let mut source = InMemory { broken_from: Some(length), ..InMemory::new(&file) };
        let error = ingest_and_commit(&store, &mut source, file.len()).unwrap_err();
        assert!(
            matches!(&error, IngestError::Source(error) if error.to_string().contains("cable")),
            "{error}"
        );
        check_nothing_staged(&folder, &store);
    }
}

/// The writing thread fails while the reading thread continues: the error is the cause, and no thread hangs.
#[test]
fn failure_of_the_store_is_returned_and_not_its_consequence() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 1 << 20), ("b", 30 << 20)]);
    let mut ingest = begin(&store);
    let staging = staging(&folder);
    let mut remove_staging = |_, _| drop(fs::remove_dir_all(&staging));
    let size = file.len() as u64;
    remove_staging(0, 0);
    let error = ingest_file(&mut ingest, &mut InMemory::new(&file), size, &mut remove_staging).unwrap_err();
    assert!(matches!(error, IngestError::Store(StoreError::Io { .. })), "{error}");
}

#[test]
fn invalid_file_is_refused_with_the_reason() {
    let (folder, store) = new_store();
    for (mut file, reason) in [
        (b"no model at all, but long enough".to_vec(), "expected a GGUF or safetensors file, found a text"),
        (gguf(&[("a", 64)]), "end beyond the data section"),
    ] {
        file.pop();
        let error = ingest_and_commit(&store, &mut InMemory::new(&file), file.len()).unwrap_err();
        assert!(matches!(error, IngestError::Format(_)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        check_nothing_staged(&folder, &store);
    }
}

#[test]
fn facts_come_from_the_header() {
    let (_folder, store) = new_store();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama").unwrap();
    writer.metadata("general.file_type", 15_u32).unwrap();
    writer.metadata("split.count", 2_u16).unwrap();
    writer.tensor("t", GgmlType::F32, &[4, 2]).unwrap();
    let mut file = writer.header().unwrap();
    file.extend([0; 32]);
    let mut ingest = begin(&store);
    let size = file.len() as u64;
    let ingested = ingest_file(&mut ingest, &mut InMemory::new(&file), size, &mut |_, _| ()).unwrap();
    let facts = ingested.facts;
    assert_eq!(
        (facts.architecture.as_deref(), facts.quantization.as_deref()),
        (Some("llama"), Some("Q4_K_M"))
    );
    assert_eq!((facts.parameters, facts.tensor_count, facts.shard.map(|shard| shard.count)), (8, 1, Some(2)));
}

/// A store that has `file`, and may take `spare` bytes more.
fn full_store(file: &[u8], spare: u64) -> (TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    ingest_and_commit(&store, &mut InMemory::new(file), file.len()).unwrap();
    let quota_bytes = Some(store.ledger().used_bytes() + spare);
    drop(store);
    let space = SpacePolicy { quota_bytes, min_free_bytes: Some(0), ..SpacePolicy::default() };
    let options = StoreOptions { space, ..StoreOptions::default() };
    let store = Arc::new(Store::open_with(folder.path().join("store"), options).unwrap());
    (folder, store)
}

#[test]
fn parts_that_are_stored_need_no_space() {
    let file = gguf(&[
        ("a", 9 << 20),
        ("b", 100),
        ("blk.0.ffn_up.1.weight", 5 << 20),
        ("x", 3),
        ("blk.0.ffn_up.0.weight", 5 << 20),
    ]);
    let (_folder, store) = full_store(&file, 8 << 10);
    let ingested = ingest_and_commit(&store, &mut InMemory::new(&file), file.len()).unwrap();
    assert_eq!(ingested.digest, Digest::of(&file));
    assert!(rebuild(&store, ingested.digest) == file);
}

#[test]
fn progress_counts_what_is_read_twice() {
    let file = gguf(&[("a", 9 << 20), ("b", 100)]);
    let (_folder, store) = full_store(&file, 8 << 10);
    let (mut reported, size) = (Vec::new(), file.len() as u64);
    let mut ingest = begin(&store);
    let mut report = |done, total| reported.push((done, total));
    ingest_file(&mut ingest, &mut InMemory::new(&file), size, &mut report).unwrap();
    assert!(reported.is_sorted(), "{reported:?}");
    // Padding belongs to no part, so it is read once.
    let (done, total) = *reported.last().unwrap();
    assert!(done == total && total > size + (9 << 20), "{done} of {total}");
}

/// A file whose content changes at its `n`th request.
struct Replaced<'f>(InMemory<'f>, usize, &'f [u8]);

impl FileSource for Replaced<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.1 = self.1.saturating_sub(1);
        if self.1 == 0 {
            self.0.file = self.2;
        }
        self.0.request(range)
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        self.0.receive()
    }
}

#[test]
fn file_that_changes_after_it_was_found_to_be_stored_is_refused() {
    let file = gguf(&[("a", 1 << 20), ("b", 100)]);
    let mut after = file.clone();
    let last = after.len() - (1 << 19);
    after[last] ^= 1;
    let (folder, store) = full_store(&file, 8 << 10);
    let mut is_refused = false;
    for requests in 2..9 {
        let mut source = Replaced(InMemory::new(&file), requests, &after);
        match ingest_and_commit(&store, &mut source, file.len()) {
            // The file was replaced before it was compared, or after it was read.
            Ok(ingested) => assert!(rebuild(&store, ingested.digest) == file),
            Err(IngestError::Changed) => is_refused = true,
            Err(error) => assert!(matches!(error, IngestError::Store(StoreError::Quota { .. })), "{error}"),
        }
        assert_eq!(fs::read_dir(staging(&folder)).unwrap().count(), 0);
    }
    assert!(is_refused);
}
