//! Files taken in, put together again, and refused without a trace.

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

/// A GGUF file of I8 tensors of these sizes, all of noise.
fn gguf(tensors: &[(&str, u64)]) -> Vec<u8> {
    let mut file = ModelFile::empty();
    tensors.iter().for_each(|(name, size)| file.add_noise(1, name, GgmlType::I8, &[*size]));
    file.bytes()
}

/// Takes a file in and commits it, so that its blobs can be looked at.
fn take(store: &Arc<Store>, source: &mut (dyn Read + Send), size: u64) -> Result<TakenFile, IntakeError> {
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::manifest::Manifest;
    let mut ingest = begin(store);
    let taken = ingest_file(&mut ingest, source, size, &mut |_| ())?;
    let config = Descriptor { media_type: MediaType::new("x"), digest: ingest.add_bytes(b"{}")?, size: 2 };
    let model = Descriptor { digest: taken.digest, size: taken.size, ..config.clone() };
    let manifest = Manifest::compose(config, vec![model]).unwrap();
    ingest.commit(&"m".parse().unwrap(), &manifest, None)?;
    Ok(taken)
}

/// The file as its recipe rebuilds it from what lies in the store.
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

/// Hands out a few bytes at a time, is interrupted now and then, and counts.
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
fn tensors_around_the_size_of_a_chunk_come_back() {
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
        let taken = take(&store, &mut file.as_slice(), file.len() as u64).unwrap();
        assert_eq!((taken.digest, taken.size), (Digest::of(&file), file.len() as u64));
        assert!(rebuild(&store, taken.digest) == file, "{tensors:?}");
    }
}

#[test]
fn source_may_give_as_little_as_it_likes() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 300), ("b", 7), ("c", 70_000)]);
    let mut source = Trickle { bytes: &file, step: 13, calls: 0 };
    let taken = take(&store, &mut source, file.len() as u64).unwrap();
    assert!(rebuild(&store, taken.digest) == file);
}

#[test]
fn bytes_beyond_the_announced_size_are_not_read() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 100)]);
    let mut source = Cursor::new([file.as_slice(), b"more"].concat());
    let taken = take(&store, &mut source, file.len() as u64).unwrap();
    assert_eq!((taken.digest, source.position()), (Digest::of(&file), file.len() as u64));
}

#[test]
fn progress_grows_up_to_the_size() {
    let (_folder, store) = new_store();
    let file = gguf(&[("a", 9 << 20), ("b", 100)]);
    let mut heard = Vec::new();
    let mut ingest = begin(&store);
    ingest_file(&mut ingest, &mut file.as_slice(), file.len() as u64, &mut |done| heard.push(done)).unwrap();
    assert!(heard.len() >= 3 && heard.is_sorted(), "{heard:?}");
    assert_eq!(heard.last(), Some(&(file.len() as u64)));
}

#[test]
fn file_that_ends_early_is_refused_wherever_it_ends() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20), ("b", 100)]);
    for length in [0, 3, 24, 60, 200, 1 << 20, file.len() - 1] {
        let error = take(&store, &mut &file[..length], file.len() as u64).unwrap_err();
        let IntakeError::Truncated { found, expected } = error else { panic!("{length}: {error}") };
        assert_eq!((found, expected), (length as u64, file.len() as u64));
        check_nothing_staged(&folder, &store);
    }
}

#[test]
fn failure_of_the_source_is_passed_on() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _buffer: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the cable is cut"))
        }
    }
    let (folder, store) = new_store();
    let file = gguf(&[("a", 5 << 20)]);
    for length in [0, 30, 1 << 20, file.len() - 1] {
        let error = take(&store, &mut file[..length].chain(Broken), file.len() as u64).unwrap_err();
        assert!(
            matches!(&error, IntakeError::Source(error) if error.to_string().contains("cable")),
            "{error}"
        );
        check_nothing_staged(&folder, &store);
    }
}

/// The thread that writes fails while the one that reads goes on: the cause is told, not the
/// consequence, and nobody waits for ever.
#[test]
fn failure_of_the_store_is_told_and_not_its_consequence() {
    let (folder, store) = new_store();
    let file = gguf(&[("a", 1 << 20), ("b", 30 << 20)]);
    let mut ingest = begin(&store);
    let staging = staging(&folder);
    let mut remove_staging = |_| drop(fs::remove_dir_all(&staging));
    let size = file.len() as u64;
    remove_staging(0);
    let error = ingest_file(&mut ingest, &mut file.as_slice(), size, &mut remove_staging).unwrap_err();
    assert!(matches!(error, IntakeError::Store(StoreError::Io { .. })), "{error}");
}

#[test]
fn refused_file_is_told_as_such() {
    let (folder, store) = new_store();
    for (mut file, reason) in [
        (b"no model at all, but long enough".to_vec(), "starts with \"no m\""),
        (gguf(&[("a", 64)]), "end beyond the data section"),
    ] {
        file.pop();
        let error = take(&store, &mut file.as_slice(), file.len() as u64).unwrap_err();
        assert!(matches!(error, IntakeError::Format(_)), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        check_nothing_staged(&folder, &store);
    }
}

#[test]
fn facts_tell_what_the_header_says() {
    let (_folder, store) = new_store();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama").unwrap();
    writer.metadata("general.file_type", 15_u32).unwrap();
    writer.metadata("split.count", 2_u16).unwrap();
    writer.tensor("t", GgmlType::F32, &[4, 2]).unwrap();
    let mut file = writer.header().unwrap();
    file.extend([0; 32]);
    let mut ingest = begin(&store);
    let taken = ingest_file(&mut ingest, &mut file.as_slice(), file.len() as u64, &mut |_| ()).unwrap();
    let facts = taken.facts;
    assert_eq!(
        (facts.architecture.as_deref(), facts.quantization.as_deref()),
        (Some("llama"), Some("Q4_K_M"))
    );
    assert_eq!((facts.parameters, facts.tensor_count, facts.shard.map(|shard| shard.count)), (8, 1, Some(2)));
}
