//! In every mode and for every source: no file is published before its content is durable, and an error of each write
//! would have been reported.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd as _;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::split::SplitPlan;

use super::*;
use crate::disk::{Disk, KernelDisk, Root};
use crate::testing::{begin, new_store_with};
use crate::{Assembler, Ingest, PartialFile, Store, StoreOptions};

const MODES: [Durability; 3] = [Durability::Auto, Durability::Fsync, Durability::Syncfs];

/// The kernel's disk, with a list of writes that are not synced.
#[derive(Debug, Default)]
struct Watched(Mutex<Records>);

#[derive(Debug, Default)]
struct Records {
    /// For each file, the descriptors through which it was written and not yet synced. The set is empty if a process
    /// wrote it that was killed.
    unsynced: BTreeMap<PathBuf, BTreeSet<i32>>,
    published: usize,
    file_syncs: usize,
    file_system_syncs: usize,
    violations: Vec<String>,
}

impl Watched {
    /// The descriptors of a killed process cannot be synced any more.
    fn process_dies(&self) {
        lock(&self.0).unsynced.values_mut().for_each(BTreeSet::clear);
    }

    fn changed(&self, path: &Path, file: &File) {
        if path.ends_with("journal") {
            return;
        }
        lock(&self.0).unsynced.entry(path.to_path_buf()).or_default().insert(file.as_raw_fd());
    }

    /// Asserts that there were no violations.
    fn published(&self) -> usize {
        let records = lock(&self.0);
        assert_eq!(records.violations, [""; 0]);
        records.published
    }
}

impl Disk for Watched {
    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        lock(&self.0).unsynced.remove(path);
        KernelDisk.create_file(root, path, mode)
    }
    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.changed(path, file);
        KernelDisk.write_at(path, file, bytes, offset)
    }
    fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()> {
        // Any descriptor may be synced after it.
        lock(&self.0).unsynced.entry(path.to_path_buf()).or_default();
        KernelDisk.set_mode(path, file, mode)
    }
    fn sync_file(&self, path: &Path, file: &File) -> io::Result<()> {
        let mut records = lock(&self.0);
        records.file_syncs += 1;
        if let Some(writers) = records.unsynced.get_mut(path) {
            writers.remove(&file.as_raw_fd());
            if writers.is_empty() {
                records.unsynced.remove(path);
            }
        }
        KernelDisk.sync_file(path, file)
    }
    fn sync_file_system(&self, directory: &File) -> io::Result<()> {
        let mut records = lock(&self.0);
        records.file_system_syncs += 1;
        records.unsynced.clear();
        KernelDisk.sync_file_system(directory)
    }
    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        let mut records = lock(&self.0);
        // Not `store.json` of the new store.
        records.published += usize::from(to.starts_with("blobs"));
        if let Some(writers) = records.unsynced.remove(from) {
            records.violations.push(format!("{} is not synced through {writers:?}", from.display()));
        }
        KernelDisk.publish(root, from, to)
    }
    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        lock(&self.0).unsynced.remove(path);
        KernelDisk.remove_file(root, path)
    }
}

struct Rig {
    _folder: tempfile::TempDir,
    disk: Arc<Watched>,
    store: Arc<Store>,
}

impl Rig {
    fn new(durability: Durability) -> Self {
        let disk = Arc::new(Watched::default());
        let options = StoreOptions { disk: disk.clone(), durability, ..StoreOptions::default() };
        let (folder, store) = new_store_with(options);
        Self { _folder: folder, disk, store }
    }

    fn begin(&self) -> Ingest {
        begin(&self.store)
    }

    fn count(&self, of: impl Fn(&Records) -> usize) -> usize {
        of(&lock(&self.disk.0))
    }

    /// Stages blobs by writing all first halves, then all second halves.
    fn add_interleaved(&self, ingest: &mut Ingest, count: u32) {
        let half = |blob: u32| [blob.to_le_bytes(); 8].concat();
        let stage = |_| ingest.staging().stage(64);
        let mut writers: Vec<_> = (0..count).map(stage).collect();
        for _ in 0..2 {
            for (blob, writer) in (0..).zip(&mut writers) {
                writer.append(&half(blob)).unwrap();
            }
        }
        for writer in writers {
            ingest.add_blob(writer.finish().unwrap()).unwrap();
        }
    }

    fn session(&self, ingest: &Ingest, content: &[u8]) -> Assembler {
        let (file, size) = (Digest::of(content), content.len() as u64);
        let partial = PartialFile::open(&self.store, file, size).unwrap();
        partial.follow(SplitPlan::whole(size), ingest.staging()).unwrap()
    }
}

fn finish(file: &Assembler, mut ingest: Ingest) {
    let mut sink = |blob| ingest.add_blob(blob).map(drop);
    file.hash_as_it_arrives(&mut |offset| Some(file.end_of_run(offset)), &mut sink).unwrap().unwrap();
    ingest.commit_blobs().unwrap();
}

#[test]
fn staged_blobs_are_durable_before_they_are_published() {
    for durability in MODES {
        for count in [1, 3, 30, 150] {
            let rig = Rig::new(durability);
            let mut ingest = rig.begin();
            rig.add_interleaved(&mut ingest, count);
            ingest.commit_blobs().unwrap();
            assert_eq!(rig.disk.published(), count as usize, "{durability:?}");
        }
    }
}

#[test]
fn pulled_file_is_durable_before_it_is_published() {
    for durability in MODES {
        let rig = Rig::new(durability);
        let (ingest, content) = (rig.begin(), [7; 3000]);
        let partial = rig.session(&ingest, &content);
        partial.write(1000, &content[1000..]).unwrap();
        partial.write(0, &content[..1000]).unwrap();
        finish(&partial, ingest);
        assert_eq!(rig.disk.published(), 1, "{durability:?}");
    }
}

#[test]
fn file_of_a_killed_process_is_durable_before_it_is_published() {
    for durability in MODES {
        for rest in [0_usize, 1000] {
            let rig = Rig::new(durability);
            let content = [7; 3000];
            let partial = rig.session(&rig.begin(), &content);
            partial.write(rest as u64, &content[rest..]).unwrap();
            drop(partial);
            rig.disk.process_dies();
            let ingest = rig.begin();
            let partial = rig.session(&ingest, &content);
            partial.write(0, &content[..rest]).unwrap();
            finish(&partial, ingest);
            assert_eq!(rig.disk.published(), 1, "{durability:?}");
        }
    }
}

/// `syncfs` reports every write error since the transaction began; an `fsync` through a new descriptor may not.
#[test]
fn few_blobs_whose_descriptors_were_closed_are_synced_with_the_file_system() {
    let rig = Rig::new(Durability::Auto);
    let mut ingest = rig.begin();
    let begin = |_| {
        let mut writer = ingest.staging().stage(1);
        writer.append(b"x").unwrap();
        writer
    };
    let first = begin(0);
    let others: Vec<_> = (0..80).map(begin).collect();
    ingest.add_blob(first.finish().unwrap()).unwrap();
    drop(others);
    ingest.commit_blobs().unwrap();
    assert_eq!((rig.disk.published(), rig.count(|records| records.file_system_syncs)), (1, 1));
}

#[test]
fn blob_that_was_sealed_when_it_was_closed_is_not_synced_again() {
    let rig = Rig::new(Durability::Fsync);
    let mut ingest = rig.begin();
    let before = rig.count(|records| records.file_syncs);
    for blob in 0..200_u32 {
        ingest.add_bytes(&blob.to_le_bytes()).unwrap();
    }
    ingest.commit_blobs().unwrap();
    assert_eq!(rig.disk.published(), 200);
    assert_eq!(rig.count(|records| records.file_syncs) - before, 200);
}

#[test]
fn restarted_file_is_not_written_through_the_old_descriptor() {
    for durability in MODES {
        let rig = Rig::new(durability);
        let (ingest, content) = (rig.begin(), [7; 3000]);
        let partial = rig.session(&ingest, &content);
        partial.write(0, &[1; 3000]).unwrap();
        rig.store.ledger.remove_partial(Digest::of(&content)).unwrap();
        let partial = rig.session(&ingest, &content);
        partial.write(0, &content).unwrap();
        finish(&partial, ingest);
        let blob = rig.store.path(layout::blob(Digest::of(&content)));
        assert_eq!(std::fs::read(blob).unwrap(), content);
    }
}

#[test]
fn many_blobs_are_synced_with_the_file_system_and_few_one_by_one() {
    for (count, file_syncs, file_system_syncs) in [(7, 7, 0), (8, 0, 1)] {
        let rig = Rig::new(Durability::Auto);
        let mut ingest = rig.begin();
        let before = rig.count(|records| records.file_syncs);
        rig.add_interleaved(&mut ingest, count);
        ingest.commit_blobs().unwrap();
        let synced = rig.count(|records| records.file_syncs) - before;
        let syncs = (synced, rig.count(|records| records.file_system_syncs));
        assert_eq!(syncs, (file_syncs, file_system_syncs), "{count}");
        assert_eq!(rig.disk.published(), count as usize);
    }
}

#[test]
fn least_recently_used_file_is_closed_when_too_many_are_open() {
    let mut files = Files::default();
    for name in ["a", "b", "c"] {
        files.insert(Path::new(name), tempfile::tempfile().unwrap());
    }
    assert!(files.take_least_recently_used(4).is_none());
    files.used(Path::new("a")).unwrap();
    let mut closed = |limit| files.take_least_recently_used(limit).map(|(path, _)| path);
    assert_eq!(closed(3), Some("b".into()));
    assert_eq!(closed(3), None);
    assert_eq!([closed(1), closed(1), closed(1)], [Some("c".into()), Some("a".into()), None]);
    assert!(files.used(Path::new("a")).is_none());
}
