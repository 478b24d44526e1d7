//! Imports of blobs that are large enough for direct I/O, if temporary files are on a disk.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use blobd_store::{Assembler, CHUNK_BYTES, Ingest, RangeSource, Store, StoreError, StoreOptions};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::split::SplitPlan;
use blobd_tests::faulty_disk::{Call, Fault, FaultyDisk};
use blobd_tests::store_dir::staged;
use blobd_tests::temp_dirs::disk_directory;
use rustix::io::Errno;

/// Two pieces, the last of which ends in an incomplete page.
const LENGTH: usize = 2 * CHUNK_BYTES - 5000;

/// Content that starts at a page, as in the memory that an import's process shares with the daemon.
struct Pages {
    memory: Vec<u8>,
    start: usize,
}

impl Pages {
    fn new() -> Self {
        let memory: Vec<u8> = (0..LENGTH + 4096).map(|place| (place % 251).to_le_bytes()[0]).collect();
        let start = memory.as_ptr().align_offset(4096);
        Self { memory, start }
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..self.start + LENGTH]
    }
}

/// Reads ranges of [`Pages`].
struct Source<'p>(&'p Pages, VecDeque<Range<u64>>);

impl<'p> RangeSource for Source<'p> {
    type Chunk = &'p [u8];
    type Error = StoreError;

    fn request(&mut self, range: Range<u64>) -> Result<(), StoreError> {
        self.1.push_back(range);
        Ok(())
    }

    fn receive(&mut self) -> Result<&'p [u8], StoreError> {
        let Range { start, end } = self.1.pop_front().unwrap();
        Ok(&self.0.content()[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()])
    }
}

fn store(folder: &Path) -> (Arc<Store>, Arc<FaultyDisk>) {
    let disk = Arc::new(FaultyDisk::default());
    let options = StoreOptions { disk: disk.clone(), ..StoreOptions::default() };
    (Arc::new(Store::open_with(folder.join("store"), options).unwrap()), disk)
}

fn import(store: &Arc<Store>, pages: &Pages) -> Result<(), StoreError> {
    let mut ingest = Ingest::begin(store, store.liveness().leases().grant("a test"))?;
    let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(LENGTH as u64));
    let mut source = Source(pages, VecDeque::new());
    assembler.store_in_order(&mut source, &mut |blob| ingest.add_blob(blob).map(drop))?;
    ingest.commit_blobs()
}

fn is_stored(folder: &Path, pages: &Pages) -> bool {
    let path = folder.join("store").join(layout::blob(Digest::of(pages.content())));
    std::fs::read(path).is_ok_and(|found| found == pages.content())
}

#[test]
fn large_blobs_have_their_content() {
    let (folder, pages) = (disk_directory(), Pages::new());
    let (store, _disk) = store(folder.path());
    import(&store, &pages).unwrap();
    assert!(is_stored(folder.path(), &pages));
}

#[test]
fn writes_that_fail_leave_nothing_and_refused_ones_are_repeated_through_the_page_cache() {
    let pages = Pages::new();
    for errno in [Errno::IO, Errno::NOSPC, Errno::INVAL] {
        let mut succeeded = 0;
        for after in 0.. {
            let folder = disk_directory();
            let (store, disk) = store(folder.path());
            disk.arm(Fault { after, only: Some(Call::WriteAt), errno, stays: false });
            let result = import(&store, &pages);
            if disk.disarm().is_empty() {
                result.unwrap();
                break;
            }
            succeeded += usize::from(result.is_ok());
            assert_eq!(is_stored(folder.path(), &pages), result.is_ok(), "{errno} {after}");
            assert_eq!(staged(&folder.path().join("store")), [""; 0], "{errno} {after}");
            import(&store, &pages).unwrap();
            assert!(is_stored(folder.path(), &pages), "{errno} {after}");
        }
        println!("{errno}: {succeeded} imports succeeded");
        assert!(succeeded == 0 || errno == Errno::INVAL, "{errno}: {succeeded}");
    }
}
