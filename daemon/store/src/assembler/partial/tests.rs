//! Unfinished downloads survive crashes.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use blobd_store_format::split::SplitPlan;
use tempfile::TempDir;

use super::*;
use crate::lock;
use crate::testing::{begin, new_store};

const SIZE: u64 = 1000;

struct Download {
    _folder: TempDir,
    store: Arc<Store>,
    content: Vec<u8>,
}

impl Download {
    fn new() -> Self {
        let (folder, store) = new_store();
        Self { _folder: folder, store, content: (0..SIZE).map(|byte| (byte % 251) as u8).collect() }
    }

    fn digest(&self) -> Digest {
        Digest::of(&self.content)
    }

    fn session(&self) -> Assembler {
        let ingest = begin(&self.store);
        let partial = PartialFile::open(&self.store, self.digest(), SIZE).unwrap();
        partial.follow(SplitPlan::whole(SIZE), ingest.staging()).unwrap()
    }

    fn write(&self, partial: &Assembler, range: std::ops::Range<usize>) {
        partial.write(range.start as u64, &self.content[range]).unwrap();
    }

    /// A session that receives these ranges and is killed: nothing is closed in order.
    fn receive(&self, ranges: impl IntoIterator<Item = std::ops::Range<usize>>) {
        let partial = self.session();
        ranges.into_iter().for_each(|range| self.write(&partial, range));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.store.path(layout::partial(self.digest())).join(name)
    }

    /// Makes the journal look like one from before a reboot.
    fn reboot(&self) {
        let mut journal = fs::read(self.path(JOURNAL)).unwrap();
        let records = journal::parse(&journal, self.digest(), SIZE);
        journal.truncate(journal::HEAD_BYTES);
        for record in records {
            let record = match record {
                Record::Session(session) => Record::Session(Session { boot: [7; 16], ..session }),
                other => other,
            };
            journal.extend(record.encode());
        }
        fs::write(self.path(JOURNAL), journal).unwrap();
    }
}

fn only(range: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(range).collect()
}

#[test]
fn bytes_of_a_killed_session_are_kept() {
    let download = Download::new();
    download.receive([600..800, 0..300]);
    let again = download.session();
    assert_eq!(again.missing(), [300..600, 800..1000]);
    assert_eq!(again.arrived_bytes(), 500);
    assert_eq!(content_of(&again, 300), download.content[..300]);
    let opened = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    assert_eq!(opened.head(SIZE), download.content[..300]);
    assert_eq!(opened.head(10), download.content[..10]);
}

#[test]
fn after_a_power_cut_only_bytes_on_disk_count() {
    let download = Download::new();
    download.receive([0..300, 300..600]);
    download.reboot();
    assert_eq!(download.session().missing(), only(600..1000));
    download.reboot();
    let file = OpenOptions::new().write(true).open(download.path("0")).unwrap();
    file.write_all_at(&[0xff; 4], 450).unwrap();
    assert_eq!(download.session().missing(), only(300..1000));
}

#[test]
fn bytes_lost_by_an_unplugged_disk_are_missing() {
    let download = Download::new();
    download.receive([0..500, 700..900]);
    // The journal was written out, the file was not, and the machine was not started again.
    OpenOptions::new().write(true).open(download.path("0")).unwrap().set_len(400).unwrap();
    let again = download.session();
    assert_eq!(again.missing(), only(400..1000));
    assert_eq!(content_of(&again, 400), download.content[..400]);
    download.write(&again, 400..1000);
    assert_eq!(content(&again), download.content);
}

#[test]
fn torn_journal_loses_only_its_end() {
    let download = Download::new();
    download.receive([0..300, 300..600]);
    let journal = OpenOptions::new().write(true).open(download.path(JOURNAL)).unwrap();
    journal.set_len(journal.metadata().unwrap().len() - 1).unwrap();
    let again = download.session();
    assert_eq!(again.missing(), only(300..1000));
    download.write(&again, 900..1000);
    drop(again);
    assert_eq!(download.session().missing(), only(300..900));
}

#[test]
fn journal_of_another_file_size_or_garbage_is_replaced() {
    let download = Download::new();
    download.receive(std::iter::once(0..300));
    fs::write(download.path(JOURNAL), "no journal").unwrap();
    let again = download.session();
    assert_eq!(again.missing(), only(0..1000));
    assert!(!download.path("0").exists());
}

#[test]
fn another_plan_starts_over() {
    let download = Download::new();
    download.receive(std::iter::once(0..300));
    let ingest = begin(&download.store);
    let other = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    assert_eq!(other.follow(other_plan(), ingest.staging()).unwrap().arrived_bytes(), 0);
}

fn other_plan() -> SplitPlan {
    let mut writer = blobd_store_format::gguf::GgufWriter::default();
    writer.tensor("t", blobd_store_format::gguf::GgmlType::F32, &[4]).unwrap();
    let header = blobd_store_format::gguf::Header::parse(&writer.header().unwrap()).unwrap();
    SplitPlan::new(header.file_layout(SIZE).unwrap())
}

#[test]
fn published_blob_is_read_from_the_store() {
    let download = Download::new();
    let partial = download.session();
    download.write(&partial, 0..1000);
    partial.note_digests(&[download.digest()]).unwrap();
    drop(partial);
    fs::rename(download.path("0"), download.store.path(layout::blob(download.digest()))).unwrap();
    let again = download.session();
    assert_eq!(again.missing(), []);
    assert_eq!(content_of(&again, 1000), download.content);
    // If it was collected meanwhile, it has to be downloaded again.
    drop(again);
    fs::remove_file(download.store.path(layout::blob(download.digest()))).unwrap();
    assert_eq!(download.session().missing(), only(0..1000));
}

/// The state that btrfs may leave when the power fails after a rename.
#[test]
fn published_blob_that_kept_its_partial_name_is_not_written_to() {
    use std::os::unix::fs::PermissionsExt as _;
    for is_noted in [true, false] {
        let download = Download::new();
        let partial = download.session();
        download.write(&partial, 0..1000);
        if is_noted {
            partial.note_digests(&[download.digest()]).unwrap();
        }
        drop(partial);
        let blob = download.store.path(layout::blob(download.digest()));
        fs::hard_link(download.path("0"), &blob).unwrap();
        fs::set_permissions(&blob, fs::Permissions::from_mode(0o444)).unwrap();
        let again = download.session();
        let missing = if is_noted { Vec::new() } else { only(0..1000) };
        assert_eq!(again.missing(), missing);
        assert!(!download.path("0").exists());
        again.write(0, &[0; 1000]).unwrap();
        assert_eq!(fs::read(&blob).unwrap(), download.content);
        assert_eq!(fs::metadata(&blob).unwrap().permissions().mode() & 0o7777, 0o444);
    }
}

#[test]
fn downloads_count_as_used_and_are_removed_whole() {
    let download = Download::new();
    let before = download.store.ledger.used_bytes();
    let partial = download.session();
    download.write(&partial, 0..300);
    assert!(download.store.ledger.used_bytes() >= before + 4096);
    drop(partial);
    let listed = download.store.content.partials().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].file, download.digest());
    assert!(download.store.ledger.remove_partial(download.digest()).unwrap() >= 4096);
    assert_eq!(download.store.content.partials().unwrap(), []);
    assert_eq!(download.store.ledger.used_bytes(), before);
}

/// They may have been hashed already, and a later change would not be noticed.
#[test]
fn bytes_that_have_arrived_are_not_overwritten() {
    let download = Download::new();
    let partial = download.session();
    download.write(&partial, 200..400);
    let wrong = vec![255; 600];
    partial.write(0, &wrong).unwrap();
    let mut back = vec![0; 600];
    partial.read(0, &mut back).unwrap();
    assert_eq!(back[200..400], download.content[200..400]);
    assert_eq!((&back[..200], &back[400..]), (&wrong[..200], &wrong[..200]));
    partial.replace(100, &download.content[100..300]).unwrap();
    partial.read(0, &mut back).unwrap();
    assert_eq!(back[100..400], download.content[100..400]);
}

/// A plan made from lost bytes would discard all the rest.
#[test]
fn head_from_before_a_reboot_is_not_used() {
    let download = Download::new();
    download.receive(std::iter::once(0..300));
    download.reboot();
    let opened = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    assert_eq!((opened.head(SIZE), opened.claimed_bytes()), (Vec::new(), 300));
}

#[test]
fn file_sealed_before_a_power_cut_can_be_repaired() {
    let download = Download::new();
    download.receive(std::iter::once(0..1000));
    fs::remove_file(download.path("0")).unwrap();
    fs::write(download.path("0"), [0; 1000]).unwrap();
    fs::set_permissions(download.path("0"), std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    download.reboot();
    let again = download.session();
    assert_eq!(again.missing(), only(0..1000));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(download.path("0")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    download.write(&again, 0..1000);
}

#[test]
fn unfinished_download_that_is_leased_is_not_removed() {
    let download = Download::new();
    download.write(&download.session(), 0..100);
    let leases = download.store.liveness.leases();
    let (own, other) = (leases.grant("a pull that failed"), leases.grant("another"));
    own.protect(download.digest());
    other.protect(download.digest());
    let forget = || download.store.liveness.forget_partials([download.digest()]);
    own.release();
    forget();
    assert_eq!(download.session().missing(), only(100..1000));
    other.release();
    forget();
    assert_eq!(download.session().missing(), only(0..1000));
}

#[test]
fn published_blobs_of_a_download_are_listed() {
    let download = Download::new();
    let blob = Digest::of(b"a tensor");
    let partial = download.session();
    partial.note_digests(&[blob]).unwrap();
    assert_eq!(download.store.content.blobs_of_partial(download.digest()).unwrap(), BTreeSet::from([blob]));
}

/// The position of a blob in the file is looked up. Searching all segments would take sixteen times as long for four
/// times as many tensors.
#[test]
fn resume_time_is_linear_in_the_number_of_tensors() {
    let (few, many) = (resume_time(8_000), resume_time(32_000));
    println!("8,000 tensors: {few:?}, 32,000: {many:?}");
    assert!(many < few * 10 + Duration::from_millis(500), "{few:?} and {many:?}");
}

/// The shortest of three attempts to resume a download with this many tensors.
fn resume_time(tensors: u64) -> Duration {
    use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
    let mut writer = GgufWriter::new();
    for number in 0..tensors {
        writer.tensor(&format!("t{number}"), GgmlType::F32, &[64]).unwrap();
    }
    let header = Header::parse(&writer.header().unwrap()).unwrap();
    let size = header.data_offset() + tensors * 256;
    let plan = SplitPlan::new(header.file_layout(size).unwrap());
    assert!(plan.blobs().len() as u64 > tensors);
    let (_folder, store) = new_store();
    let resume = || {
        let ingest = begin(&store);
        let partial = PartialFile::open(&store, Digest::of(b"large"), size).unwrap();
        let started = std::time::Instant::now();
        let partial = partial.follow(plan.clone(), ingest.staging()).unwrap();
        let took = started.elapsed();
        partial.write(0, &[1]).unwrap();
        took
    };
    resume();
    (0..3).map(|_| resume()).min().unwrap()
}

#[test]
fn slow_reservation_does_not_block_readers() {
    let download = Download::new();
    let partial = download.session();
    download.write(&partial, 0..100);
    // Held as while a blob's file is created.
    let _creating = lock(&partial.creating);
    assert_eq!(content_of(&partial, 100), download.content[..100]);
    assert_eq!((partial.arrived_bytes(), partial.end_of_run(0)), (100, 100));
    // A file that was started can be written to as well.
    download.write(&partial, 100..200);
    assert_eq!(partial.missing(), only(200..1000));
}

/// A complete copy that is wrong in two places.
fn wrong_copy(download: &Download) -> (Vec<u8>, Digest) {
    let mut wrong = download.content.clone();
    (wrong[10], wrong[700]) = (0xff, 0xff);
    let partial = download.session();
    partial.write(0, &wrong).unwrap();
    assert!(!partial.is_second_copy() && partial.differences().is_none());
    let digest = Digest::of(&wrong);
    (wrong, digest)
}

fn second_session(download: &Download, wrong: Digest) -> Assembler {
    let ingest = begin(&download.store);
    let partial = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    partial.receive_again(wrong).follow(SplitPlan::whole(SIZE), ingest.staging()).unwrap()
}

fn differing(partial: &Assembler) -> Vec<Range<u64>> {
    let (_first, differences) = partial.differences().unwrap();
    differences.ranges().iter().map(|difference| difference.range.clone()).collect()
}

fn content_of(partial: &Assembler, length: usize) -> Vec<u8> {
    let mut content = vec![0; length];
    partial.read(0, &mut content).unwrap();
    content
}

fn content(partial: &Assembler) -> Vec<u8> {
    content_of(partial, usize::try_from(SIZE).unwrap())
}

#[test]
fn second_copy_is_compared_with_the_first_and_replaces_it() {
    let download = Download::new();
    let (wrong, digest) = wrong_copy(&download);
    let partial = second_session(&download, digest);
    assert_eq!((partial.arrived_bytes(), partial.missing()), (0, only(0..SIZE)));
    assert_eq!(content(&partial), wrong, "the first copy is still there");
    download.write(&partial, 600..1000);
    assert_eq!((partial.arrived_bytes(), partial.end_of_run(600)), (400, 1000));
    assert_eq!(differing(&partial), only(700..701));
    download.write(&partial, 0..600);
    assert_eq!(content(&partial), download.content);
    let (first, differences) = partial.differences().unwrap();
    // Both are in one range: there are few equal bytes in between.
    assert_eq!((first, differences.bytes(), differing(&partial)), (digest, 2, only(10..701)));
}

#[test]
fn bytes_that_have_arrived_again_are_not_replaced() {
    let download = Download::new();
    let (wrong, digest) = wrong_copy(&download);
    let partial = second_session(&download, digest);
    download.write(&partial, 0..100);
    partial.write(0, &wrong[..200]).unwrap();
    assert_eq!(content(&partial)[..200], download.content[..200]);
    assert_eq!(differing(&partial), only(10..11));
}

#[test]
fn second_copy_continues_after_a_kill() {
    let download = Download::new();
    let (_wrong, digest) = wrong_copy(&download);
    let partial = second_session(&download, digest);
    download.write(&partial, 0..300);
    drop(partial);
    let opened = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    assert_eq!((opened.first_copy(), opened.claimed_bytes()), (Some(digest), 300));
    assert_eq!(opened.head(SIZE), download.content[..300]);
    // Whether the next session knows of the first copy or not.
    for partial in [download.session(), second_session(&download, Digest::of(b"another"))] {
        assert_eq!((partial.arrived_bytes(), partial.missing()), (300, only(300..SIZE)));
        assert_eq!((differing(&partial), partial.differences().unwrap().0), (only(10..11), digest));
    }
    let partial = download.session();
    download.write(&partial, 300..1000);
    assert_eq!((content(&partial), differing(&partial)), (download.content.clone(), only(10..701)));
}

/// Nothing may be reported as different that the disk has lost.
#[test]
fn part_of_the_first_copy_that_a_power_cut_damaged_is_not_compared() {
    let download = Download::new();
    download.receive([0..500, 500..1000]);
    let blob = OpenOptions::new().write(true).open(download.path("0")).unwrap();
    blob.write_all_at(&[0xff; 10], 600).unwrap();
    download.reboot();
    let partial = second_session(&download, Digest::of(b"wrong"));
    download.write(&partial, 0..1000);
    assert_eq!((content(&partial), differing(&partial)), (download.content.clone(), Vec::new()));
}

#[test]
fn first_copy_of_another_plan_is_dropped() {
    let download = Download::new();
    let (_wrong, digest) = wrong_copy(&download);
    let ingest = begin(&download.store);
    let partial = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    let partial = partial.receive_again(digest).follow(other_plan(), ingest.staging()).unwrap();
    assert!(!partial.is_second_copy());
    download.write(&partial, 0..32);
    assert_eq!((partial.arrived_bytes(), partial.differences()), (32, None));
}

/// Two tensors of 16 bytes with padding after each, which belongs to no blob, and the plan.
fn padded_file() -> (Vec<u8>, SplitPlan) {
    use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
    let mut writer = GgufWriter::new();
    for name in ["a", "b"] {
        writer.tensor(name, GgmlType::F32, &[4]).unwrap();
    }
    let mut file = writer.header().unwrap();
    let header = Header::parse(&file).unwrap();
    file.extend([[1; 16], [2; 16], [3; 16]].concat());
    let plan = SplitPlan::new(header.file_layout(file.len() as u64).unwrap());
    assert!(plan.literal_count() > 0);
    (file, plan)
}

#[test]
fn bytes_of_no_blob_are_kept_by_a_download() {
    let (_folder, store) = new_store();
    let (file, plan) = padded_file();
    let session = || {
        let (ingest, size) = (begin(&store), file.len() as u64);
        let partial = PartialFile::open(&store, Digest::of(&file), size).unwrap();
        partial.follow(plan.clone(), ingest.staging()).unwrap()
    };
    session().write(0, &file).unwrap();
    let again = session();
    assert_eq!((again.missing(), content_of(&again, file.len())), (Vec::new(), file.clone()));
    drop(again);
    // The literals were not written out when the power failed.
    let path = store.path(layout::partial(Digest::of(&file))).join(LITERALS);
    let literals = OpenOptions::new().write(true).open(path).unwrap();
    literals.set_len(file.len() as u64 - 20).unwrap();
    let start = file.len() as u64 - 32;
    assert_eq!(session().missing(), only(start + 12..start + 16));
    literals.set_len(0).unwrap();
    assert_eq!(session().missing(), only(start..start + 16));
}

#[test]
fn stored_blob_counts_as_arrived_until_it_is_forgotten() {
    let download = Download::new();
    let partial = download.session();
    download.write(&partial, 0..10);
    let digest = crate::testing::add_blobs(&download.store, [&download.content])[0];
    partial.take_stored(0, digest);
    assert_eq!((partial.missing(), partial.arrived_bytes()), (Vec::new(), SIZE));
    partial.forget_stored(0);
    assert_eq!((partial.missing(), partial.arrived_bytes()), (only(0..SIZE), 0));
    partial.forget_stored(0);
    download.write(&partial, 0..10);
    partial.forget_stored(0);
    assert_eq!(partial.missing(), only(10..SIZE), "only what was taken is forgotten");
}

#[test]
fn record_of_a_download_names_the_models_whose_blobs_it_uses() {
    let download = Download::new();
    let about = DownloadAbout::for_pull("m".to_owned(), "a source".to_owned(), 7);
    let session = |about: Option<&DownloadAbout>| {
        let ingest = begin(&download.store);
        let partial = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
        let partial = match about {
            Some(about) => partial.about(about.clone()),
            None => partial,
        };
        partial.follow(SplitPlan::whole(SIZE), ingest.staging()).unwrap()
    };
    let recorded = || download.store.content.download_about(download.digest());
    let model = Digest::of(b"model");
    let partial = session(None);
    partial.note_models([model].into()).unwrap();
    assert_eq!(recorded(), None, "nothing is known of it");
    drop(partial);
    fs::remove_dir_all(download.path("")).unwrap();
    let partial = session(Some(&about));
    partial.note_models(BTreeSet::new()).unwrap();
    assert_eq!(recorded().as_ref(), Some(&about));
    partial.note_models([model].into()).unwrap();
    let own = BytesFrom::Pull { source: about.source.clone(), uid: 7 };
    let both = DownloadAbout { bytes_from: Some([own, BytesFrom::Model(model)].into()), ..about.clone() };
    assert_eq!(recorded().as_ref(), Some(&both));
    download.write(&partial, 0..10);
    drop(partial);
    assert_eq!(session(Some(&about)).arrived_bytes(), 10);
    assert_eq!(recorded(), Some(both), "a later session adds to it");
    fs::write(download.path(JOURNAL), "damaged").unwrap();
    drop(session(Some(&about)));
    assert_eq!(recorded(), Some(about), "one that starts over has only its own bytes");
}

#[test]
fn journal_that_was_followed_by_other_records_is_cut_where_it_is_torn() {
    let download = Download::new();
    download.receive([0..100, 100..200, 200..300]);
    let records = || {
        let journal = fs::read(download.path(JOURNAL)).unwrap();
        assert_eq!((journal.len() - journal::HEAD_BYTES) % journal::RECORD_BYTES, 0);
        journal::parse(&journal, download.digest(), SIZE)
    };
    let before = records();
    let file = OpenOptions::new().write(true).open(download.path(JOURNAL)).unwrap();
    file.write_all_at(b"?", (journal::HEAD_BYTES + 2 * journal::RECORD_BYTES) as u64).unwrap();
    drop(download.session());
    let after = records();
    assert_eq!(after[..2], before[..2]);
    assert_eq!(after.len(), 3, "the records after the torn one are gone");
    assert!(matches!(after[2], Record::Session(_)));
}

#[test]
fn special_file_in_place_of_a_file_is_not_removed() {
    let download = Download::new();
    download.receive(std::iter::once(0..300));
    fs::remove_file(download.path("0")).unwrap();
    std::os::unix::fs::symlink("elsewhere", download.path("0")).unwrap();
    let ingest = begin(&download.store);
    let partial = PartialFile::open(&download.store, download.digest(), SIZE).unwrap();
    let refused = partial.follow(SplitPlan::whole(SIZE), ingest.staging());
    assert!(matches!(refused, Err(StoreError::UnexpectedFile { .. })), "{refused:?}");
    assert!(fs::symlink_metadata(download.path("0")).is_ok());
}

#[test]
fn whole_file_survives_a_reboot() {
    let download = Download::new();
    download.receive([0..300, 300..1000]);
    download.reboot();
    assert_eq!(download.session().missing(), []);
}
