//! What is known of unfinished downloads, from their journals and records.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use super::*;
use crate::Store;
use crate::testing::{new_store, recipe_of};

const SIZE: u64 = 1000;

fn about(source: &str, uid: u32) -> DownloadAbout {
    DownloadAbout::for_pull("m".to_owned(), source.to_owned(), uid)
}

fn pull(source: &str, uid: u32) -> BytesFrom {
    BytesFrom::Pull { source: source.to_owned(), uid }
}

fn session(boot: u8) -> Record {
    Record::Session(journal::Session { boot: [boot; 16], plan: [0; 16] })
}

fn arrived(offset: u64, length: u32) -> Record {
    Record::Arrived { offset, length, crc: 0 }
}

/// Creates the directory of a download with this journal.
fn begin(store: &Arc<Store>, file: Digest, records: &[Record]) {
    fs::create_dir_all(store.path(layout::partial(file))).unwrap();
    let records = records.iter().flat_map(|record| record.encode());
    let journal: Vec<u8> = journal::head(file, SIZE).into_iter().chain(records).collect();
    fs::write(store.path(layout::partial(file).join(JOURNAL)), journal).unwrap();
}

fn summary(store: &Store, file: Digest) -> (Option<u64>, u64) {
    let all = store.content.downloads().unwrap();
    let found = all.into_iter().find(|download| download.partial.file == file).unwrap();
    (found.size, found.received_bytes)
}

#[test]
fn download_is_abandoned_when_nothing_has_arrived_for_more_than_a_week() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let now = SystemTime::UNIX_EPOCH + 100 * DAY;
    for (last_used, is_abandoned) in [
        (None, false),
        (Some(now + DAY), false),
        (Some(now - 7 * DAY), false),
        (Some(now - 7 * DAY - Duration::from_secs(1)), true),
    ] {
        let download = PartialDownload { file: Digest::of(b""), bytes: 1, last_used };
        assert_eq!(download.is_abandoned(now), is_abandoned, "{last_used:?}");
    }
}

#[test]
fn continued_download_has_the_bytes_of_both_pulls_if_all_of_them_are_known() {
    let (first, second) = (about("a", 1), about("b", 2));
    let unknown = |about: &DownloadAbout| DownloadAbout { bytes_from: None, ..about.clone() };
    let both = DownloadAbout { bytes_from: Some([pull("a", 1), pull("b", 2)].into()), ..second.clone() };
    for (earlier, later, expected) in [
        (Some(first.clone()), second.clone(), both),
        (Some(second.clone()), second.clone(), second.clone()),
        (Some(unknown(&first)), second.clone(), unknown(&second)),
        (Some(first.clone()), unknown(&second), unknown(&second)),
        (None, second.clone(), unknown(&second)),
    ] {
        assert_eq!(later.continuing(earlier.clone()), expected, "{earlier:?}");
    }
}

#[test]
fn record_that_would_be_too_long_to_read_names_no_origins() {
    let path = Path::new("about.json");
    let length = |source: usize| about(&"s".repeat(source), 7).encode(path).unwrap().len() as u64;
    let with_name = |name: usize| DownloadAbout { name: "m".repeat(name), ..about("a source", 7) };
    let rest = with_name(0).encode(path).unwrap().len() as u64;
    let longest = usize::try_from(MAX_BYTES - rest).unwrap();
    let read = |about: &DownloadAbout| {
        serde_json::from_slice::<DownloadAbout>(&about.encode(path).unwrap()).unwrap()
    };
    assert_eq!(read(&with_name(longest)), with_name(longest));
    let too_long = with_name(longest + 1);
    assert_eq!(read(&too_long), DownloadAbout { bytes_from: None, ..too_long.clone() });
    assert!(length(1) < MAX_BYTES);
}

#[test]
fn latest_record_of_a_download_is_kept_and_the_same_one_is_not_written_again() {
    let (_folder, store) = new_store();
    let file = Digest::of(b"file");
    begin(&store, file, &[]);
    let path = store.path(layout::partial(file).join(ABOUT));
    let record = |about: &DownloadAbout| {
        store.content.record_download(file, about).unwrap();
        assert_eq!(store.content.download_about(file).as_ref(), Some(about));
        let status = fs::metadata(&path).unwrap();
        assert_eq!(status.mode() & 0o777, 0o600);
        fs::File::open(&path).unwrap()
    };
    assert_eq!(store.content.download_about(file), None);
    let first = record(&about("a", 1));
    record(&about("a", 1));
    assert_eq!(first.metadata().unwrap().nlink(), 1, "it was replaced");
    record(&about("b", 2));
    assert_eq!(first.metadata().unwrap().nlink(), 0, "it was overwritten");
    // Where it cannot be written, none is left.
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    store.content.record_download(file, &about("c", 3)).unwrap();
    assert_eq!(store.content.download_about(file), None);
    store.content.disk.refuse_changes("a test");
    begin(&store, file, &[]);
    fs::write(&path, serde_json::to_vec(&about("a", 1)).unwrap()).unwrap();
    assert!(store.content.record_download(file, &about("b", 2)).is_err(), "the wrong record stays");
    store.content.record_download(file, &about("a", 1)).unwrap();
}

#[test]
fn names_of_downloads_are_sorted_and_each_once() {
    let (_folder, store) = new_store();
    for (file, name) in [(b"1", "b"), (b"2", "a"), (b"3", "b")] {
        begin(&store, Digest::of(file), &[]);
        let about = DownloadAbout { name: name.to_owned(), ..about("s", 1) };
        store.content.record_download(Digest::of(file), &about).unwrap();
    }
    begin(&store, Digest::of(b"without a record"), &[]);
    assert_eq!(names(&store.content.root), ["a", "b"]);
}

#[test]
fn summary_has_the_size_and_the_bytes_of_the_journal() {
    let (_folder, store) = new_store();
    let [some, much, none, whole] = [b"a", b"b", b"c", b"d"].map(|name| Digest::of(name));
    begin(&store, some, &[session(1), arrived(100, 50), session(2), arrived(120, 80)]);
    begin(&store, much, &[session(1), arrived(900, 5000)]);
    begin(&store, none, &[]);
    fs::write(store.path(layout::partial(none).join(JOURNAL)), "no journal").unwrap();
    let recipe = recipe_of(&[b"whole ", b"file"]);
    begin(&store, recipe.file(), &[session(1), arrived(0, 10)]);
    fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
    fs::create_dir_all(store.path(layout::partial(whole))).unwrap();
    assert_eq!(summary(&store, some), (Some(SIZE), 100));
    assert_eq!(summary(&store, much), (Some(SIZE), SIZE), "no more than the file has");
    assert_eq!(summary(&store, none), (None, 0));
    assert_eq!(summary(&store, whole), (None, 0));
    assert_eq!(summary(&store, recipe.file()), (Some(SIZE), SIZE), "it is complete");
    store.content.record_download(some, &about("s", 7)).unwrap();
    let all = store.content.downloads().unwrap();
    let mut files = [some, much, none, whole, recipe.file()];
    files.sort();
    assert_eq!(all.iter().map(|download| download.partial.file).collect::<Vec<_>>(), files);
    for download in all {
        let is_described = download.partial.file == some;
        assert_eq!(download.about, is_described.then(|| about("s", 7)));
        assert_eq!(download.started.is_some(), is_described);
        let path = store.path(layout::partial(download.partial.file));
        let content = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks());
        let blocks = content.sum::<u64>() + path.metadata().unwrap().blocks();
        assert_eq!(download.partial.bytes, blocks * 512);
        let used = download.partial.last_used.unwrap();
        let journal = fs::metadata(path.join(JOURNAL)).or_else(|_| path.metadata()).unwrap();
        assert_eq!(used, journal.modified().unwrap());
    }
}

#[test]
fn only_bytes_of_this_boot_and_of_the_last_copy_are_claimed() {
    let records = [session(1), arrived(0, 10), session(2), arrived(100, 20), arrived(110, 20), session(1)];
    let total = |records: &[Record], boot: Option<u8>| claimed(records, boot.map(|boot| [boot; 16])).total();
    assert_eq!([None, Some(1), Some(2), Some(3)].map(|boot| total(&records, boot)), [40, 10, 30, 0]);
    let second = Record::SecondCopy { first: Digest::of(b"first") };
    let differs = Record::Differs { offset: 500, length: 5, bytes: 5 };
    let records = [session(1), arrived(0, 10), second, differs, arrived(50, 5)];
    assert_eq!([None, Some(1), Some(2)].map(|boot| total(&records, boot)), [5, 5, 0]);
    assert_eq!(claimed(&records, None).gaps(0..100), [0..50, 55..100]);
}

#[test]
fn download_needs_its_published_blobs_and_the_complete_file() {
    let (_folder, store) = new_store();
    let recipe = recipe_of(&[b"one", b"two"]);
    let (file, published) = (recipe.file(), Digest::of(b"published"));
    begin(&store, file, &[session(1), Record::Stored { blob: 0, digest: published }]);
    let needs = || store.content.download_needs(file).unwrap();
    let own = [Node::Blob(published), Node::Blob(file), Node::Recipe(file)];
    assert_eq!(needs(), own.into());
    let path = store.path(layout::recipe(file));
    fs::write(&path, recipe.to_json()).unwrap();
    let parts = [&b"one"[..], b"two"].map(|part| Node::Blob(Digest::of(part)));
    assert_eq!(needs(), own.into_iter().chain(parts).collect());
    fs::write(&path, "damaged").unwrap();
    assert_eq!(needs(), [Node::Blob(published)].into(), "it will be assembled again");
    let other = Digest::of(b"other");
    assert_eq!(store.content.download_needs(other).unwrap(), Node::both(other).into());
}

#[test]
fn size_of_a_download_is_that_of_its_directory_and_absent_without_one() {
    let (_folder, store) = new_store();
    let file = Digest::of(b"file");
    assert_eq!(store.content.bytes_of_partial(file).unwrap(), None);
    begin(&store, file, &[]);
    fs::write(store.path(layout::partial(file)).join("0"), vec![7; 9000]).unwrap();
    let bytes = store.content.partials().unwrap()[0].bytes;
    assert!(bytes >= 9000 + 4096, "{bytes}");
    assert_eq!(store.content.bytes_of_partial(file).unwrap(), Some(bytes));
}

#[test]
fn journal_that_is_too_long_is_not_read() {
    let (_folder, store) = new_store();
    let file = Digest::of(b"file");
    assert_eq!(journal_in(&store.content.root, &layout::partial(file)).unwrap(), None);
    begin(&store, file, &[session(1), arrived(0, 10)]);
    let read = || journal_in(&store.content.root, &layout::partial(file)).unwrap().unwrap();
    assert_eq!(read().len(), journal::HEAD_BYTES + 2 * journal::RECORD_BYTES);
    let journal = store.path(layout::partial(file)).join(JOURNAL);
    fs::OpenOptions::new().write(true).open(journal).unwrap().set_len(MAX_JOURNAL_BYTES + 1).unwrap();
    assert!(read().is_empty());
    assert_eq!(summary(&store, file), (None, 0));
}
