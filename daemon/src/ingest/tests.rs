//! Files are ingested and rebuilt, or refused without leaving anything.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use blobd_fixtures::model::ModelFile;
use blobd_store::testing::{begin, new_store};
use blobd_store::{CHUNK_BYTES, FileReader, Store};
use blobd_store_format::gguf::{GgmlType, GgufWriter};
use blobd_store_format::layout;
use tempfile::TempDir;

use super::*;

/// A GGUF file of I8 tensors of these sizes, filled with noise.
fn gguf(tensors: &[(&str, u64)]) -> Vec<u8> {
    let mut file = ModelFile::empty();
    tensors.iter().for_each(|(name, size)| file.add_noise(1, name, GgmlType::I8, &[*size]));
    file.bytes()
}

/// Ingests and commits a file, so that its blobs can be read.
fn ingest_and_commit(
    store: &Arc<Store>,
    source: &mut (dyn Read + Send),
    size: u64,
) -> Result<IngestedFile, IngestError> {
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::manifest::Manifest;
    let mut ingest = begin(store);
    let ingested = ingest_file(&mut ingest, source, size, &mut |_| ())?;
    let config = Descriptor { media_type: MediaType::new("x"), digest: ingest.add_bytes(b"{}")?, size: 2 };
    let model = Descriptor { digest: ingested.digest, size: ingested.size, ..config.clone() };
    let manifest = Manifest::compose(config, vec![model]).unwrap();
    ingest.commit(&"m".parse().unwrap(), &manifest, None)?;
    Ok(ingested)
}

/// Rebuilds a file from the store.
fn rebuild(store: &Store, file: Digest) -> Vec<u8> {
    let recipe = store.recipe(file).unwrap().unwrap();
    FileReader::of_recipe(store, &recipe).read_range(0..recipe.size()).unwrap()
}

fn staging(folder: &TempDir) -> PathBuf {
    folder.path().join("store").join(layout::STAGING)
}

fn check_nothing_staged(folder: &TempDir, store: &Store) {
    assert_eq!(fs::read_dir(staging(folder)).unwrap().count(), 0);
    assert!(store.blobs().unwrap().is_empty() && store.recipes().unwrap().is_empty());
}

/// Returns a few bytes per call, and is interrupted at every seventh.
struct Trickle<'b> {
    bytes: &'b [u8],
    step: usize,
    calls: usize,
}

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.calls += 1;
        if self.calls.is_multiple_of(7) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let length = self.step.min(buffer.len()).min(self.bytes.len());
        let (now, later) = self.bytes.split_at(length);
        buffer[..length].copy_from_slice(now);
        self.bytes = later;
        Ok(length)
    }
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
        let ingested = ingest_and_commit(&store, &mut file.as_slice(), file.len() as u64).unwrap();
        assert_eq!((ingested.digest, ingested.size), (Digest::of(&file), file.len() as u64));
        assert!(rebuild(&store, ingested.digest) == file, "{tensors:?}");
    }
}

#[test]
fn short_and_interrupted_reads_are_continued() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 300), ("b", 7), ("c", 70_000)]);
    let mut source = Trickle { bytes: &file, step: 13, calls: 0 };
    let ingested = ingest_and_commit(&store, &mut source, file.len() as u64).unwrap();
    assert!(rebuild(&store, ingested.digest) == file);
}

#[test]
fn bytes_beyond_the_announced_size_are_not_read() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 100)]);
    let mut source = Cursor::new([file.as_slice(), b"more"].concat());
    let ingested = ingest_and_commit(&store, &mut source, file.len() as u64).unwrap();
    assert_eq!((ingested.digest, source.position()), (Digest::of(&file), file.len() as u64));
}

#[test]
fn progress_grows_up_to_the_size() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 9 << 20), ("b", 100)]);
    let mut reported = Vec::new();
    let mut ingest = begin(&store);
    ingest_file(&mut ingest, &mut file.as_slice(), file.len() as u64, &mut |done| reported.push(done))
        .unwrap();
    assert!(reported.len() >= 3 && reported.is_sorted(), "{reported:?}");
    assert_eq!(reported.last(), Some(&(file.len() as u64)));
}

#[test]
fn file_that_ends_early_is_refused_wherever_it_ends() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20), ("b", 100)]);
    for length in [0, 3, 24, 60, 200, 1 << 20, file.len() - 1] {
        let error = ingest_and_commit(&store, &mut &file[..length], file.len() as u64).unwrap_err();
        let IngestError::Truncated { found, expected } = error else { panic!("{length}: {error}") };
        assert_eq!((found, expected), (length as u64, file.len() as u64));
        check_nothing_staged(&folder, &store);
    }
}

#[test]
fn failure_of_the_source_is_returned() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _buffer: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the cable is cut"))
        }
    }
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20)]);
    for length in [0, 30, 1 << 20, file.len() - 1] {
        let error =
            ingest_and_commit(&store, &mut file[..length].chain(Broken), file.len() as u64).unwrap_err();
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
    let mut remove_staging = |_| drop(fs::remove_dir_all(&staging));
    let size = file.len() as u64;
    remove_staging(0);
    let error = ingest_file(&mut ingest, &mut file.as_slice(), size, &mut remove_staging).unwrap_err();
    assert!(matches!(error, IngestError::Store(StoreError::Io { .. })), "{error}");
}

#[test]
fn invalid_file_is_refused_with_the_reason() {
    let (folder, store) = new_store();
    for (mut file, reason) in [
        (b"no model at all, but long enough".to_vec(), "starts with \"no m\""),
        (gguf(&[("a", 64)]), "end beyond the data section"),
    ] {
        file.pop();
        let error = ingest_and_commit(&store, &mut file.as_slice(), file.len() as u64).unwrap_err();
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
    let ingested = ingest_file(&mut ingest, &mut file.as_slice(), file.len() as u64, &mut |_| ()).unwrap();
    let facts = ingested.facts;
    assert_eq!(
        (facts.architecture.as_deref(), facts.quantization.as_deref()),
        (Some("llama"), Some("Q4_K_M"))
    );
    assert_eq!((facts.parameters, facts.tensor_count, facts.shard.map(|shard| shard.count)), (8, 1, Some(2)));
}
