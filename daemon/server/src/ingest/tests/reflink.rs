//! Files that are stored whole share the blocks of their source, or are read.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;

use super::*;

/// A file whose blocks can be shared. What is read of it afterwards is other bytes.
struct Shareable<'f> {
    read: InMemory<'f>,
    /// What the other file gets; `None` if no blocks can be shared.
    shared: Option<&'f [u8]>,
    /// What the file has afterwards.
    after: &'f [u8],
    attempts: usize,
    /// The process that shares the blocks fails.
    fails: bool,
    /// Nobody waits any more after so many checks.
    wanted_for: Cell<usize>,
}

impl<'f> Shareable<'f> {
    fn new(file: &'f [u8], shared: Option<&'f [u8]>) -> Self {
        let wanted_for = Cell::new(usize::MAX);
        Self { read: InMemory::new(file), shared, after: file, attempts: 0, fails: false, wanted_for }
    }
}

impl FileSource for Shareable<'_> {
    fn request(&mut self, range: Range<u64>) -> io::Result<()> {
        self.read.request(range)
    }

    fn receive(&mut self) -> io::Result<Bytes> {
        self.read.receive()
    }

    fn reflink_to(&mut self, target: BorrowedFd<'_>) -> io::Result<bool> {
        self.attempts += 1;
        self.read.file = self.after;
        let Some(shared) = self.shared else { return Ok(false) };
        if self.fails {
            return Err(io::Error::other("the cable is cut"));
        }
        File::from(target.try_clone_to_owned()?).write_all_at(shared, 0)?;
        Ok(true)
    }

    fn check_wanted(&self) -> io::Result<()> {
        let left = self.wanted_for.get().checked_sub(1);
        self.wanted_for.set(left.ok_or_else(|| io::Error::other("the client has gone"))?);
        Ok(())
    }
}

/// A file of no known format, larger than those that are read into memory.
fn whole_file() -> Vec<u8> {
    (0..3 << 20).map(|place: u32| place.to_le_bytes()[usize::from(place.is_multiple_of(7))]).collect()
}

fn ingest_any(
    store: &Arc<Store>,
    source: &mut dyn FileSource,
    size: usize,
) -> Result<IngestedFile, IngestError> {
    let (mut ingest, mut reported) = (begin(store), Vec::new());
    let mut progress = |done, total| reported.push((done, total));
    let begun = begin_file(source, (size as u64, Accepted::Any), &mut progress)?;
    let ingested = begun.ingest(&mut ingest, &mut SharedBlobs::default())?;
    assert!(reported.is_sorted(), "{reported:?}");
    assert_eq!(reported.last(), Some(&(size as u64, size as u64)));
    ingest.commit_blobs()?;
    Ok(ingested)
}

#[test]
fn source_that_changes_after_its_blocks_were_shared_does_not_change_the_blob() {
    let (_folder, store) = new_store();
    let (file, after) = (whole_file(), vec![1; 3 << 20]);
    let mut source = Shareable { after: &after, ..Shareable::new(&file, Some(&file)) };
    let ingested = ingest_any(&store, &mut source, file.len()).unwrap();
    assert_eq!((ingested.digest, source.attempts), (Digest::of(&file), 1));
    assert_eq!(store.content().blobs().unwrap(), [Digest::of(&file)]);
}

#[test]
fn file_whose_blocks_cannot_be_shared_is_read() {
    let file = whole_file();
    for shared in [None, Some(&file[1..])] {
        let (_folder, store) = new_store();
        let mut source = Shareable::new(&file, shared);
        assert_eq!(ingest_any(&store, &mut source, file.len()).unwrap().digest, Digest::of(&file));
        assert_eq!(source.attempts, 1);
    }
}

/// As if no blocks were shared.
#[test]
fn file_that_becomes_shorter_is_refused() {
    let (folder, store) = new_store();
    let file = whole_file();
    let after = &file[..2 << 20];
    let mut source = Shareable { after, ..Shareable::new(&file, Some(after)) };
    let error = ingest_any(&store, &mut source, file.len()).unwrap_err();
    assert!(matches!(error, IngestError::Truncated { found: 0x20_0000, .. }), "{error}");
    check_nothing_staged(&folder, &store);
}

#[test]
fn import_that_nobody_waits_for_ends_while_its_file_is_hashed() {
    let (folder, store) = new_store();
    let file = whole_file();
    let mut source = Shareable { wanted_for: Cell::new(2), ..Shareable::new(&file, Some(&file)) };
    let error = ingest_any(&store, &mut source, file.len()).unwrap_err();
    assert!(matches!(&error, IngestError::Source(error) if error.to_string().contains("gone")), "{error}");
    check_nothing_staged(&folder, &store);
}

#[test]
fn failure_while_blocks_are_shared_is_one_of_the_source() {
    let (folder, store) = new_store();
    let file = whole_file();
    let mut source = Shareable { fails: true, ..Shareable::new(&file, Some(&file)) };
    let error = ingest_any(&store, &mut source, file.len()).unwrap_err();
    assert!(matches!(&error, IngestError::Source(error) if error.to_string().contains("cable")), "{error}");
    check_nothing_staged(&folder, &store);
}

#[test]
fn small_files_and_files_that_are_split_are_not_tried() {
    let (_folder, store) = new_store();
    let (small, model) = (vec![1; 256 << 10], gguf(&[("a", 1 << 20)]));
    for file in [&small, &model] {
        let mut source = Shareable::new(file, Some(file));
        let (mut ingest, mut progress) = (begin(&store), |_, _| ());
        let begun = begin_file(&mut source, (file.len() as u64, Accepted::Any), &mut progress).unwrap();
        let ingested = begun.ingest(&mut ingest, &mut SharedBlobs::default()).unwrap();
        assert_eq!((ingested.digest, source.attempts), (Digest::of(file), 0));
    }
}
