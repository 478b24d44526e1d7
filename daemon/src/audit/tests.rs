use std::fs;
use std::path::{Path, PathBuf};

use blobd_client::protocol::audit::LogParams;

use super::*;

const SMALL: Rotation = Rotation { max_bytes: 4096, keep: 3 };

fn start(path: &Path, rotation: Rotation) -> AuditLog {
    let log = AuditLog::default();
    log.start(LogDirectory::at(path), rotation).unwrap();
    log
}

fn record(number: u64) -> AuditRecord {
    AuditRecord {
        verb: "rm".to_owned(),
        bytes: Some(number),
        result: "ok".to_owned(),
        model: Some("m".repeat(100)),
        ..AuditRecord::default()
    }
}

/// Writes records with these numbers, each in a batch of its own, and stops.
fn write(path: &Path, rotation: Rotation, numbers: impl IntoIterator<Item = u64>) {
    let log = start(path, rotation);
    for number in numbers {
        let mut written = log.written().unwrap();
        log.record(record(number));
        let wait =
            async { tokio::time::timeout(std::time::Duration::from_secs(60), written.changed()).await };
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(wait)
            .unwrap()
            .unwrap();
    }
    log.stop();
}

fn reader(path: &Path, params: &LogParams, limit: usize) -> LogReader {
    let filter = Filter::new(params, None).unwrap();
    LogReader::find(Arc::new(LogDirectory::at(path)), filter, limit, &|| true).unwrap().unwrap()
}

fn found(reader: &mut LogReader) -> Vec<u64> {
    numbers(|| reader.next_found())
}

fn followed(reader: &mut LogReader) -> Vec<u64> {
    numbers(|| reader.next_written())
}

fn numbers(mut next: impl FnMut() -> io::Result<Batch>) -> Vec<u64> {
    let mut numbers = Vec::new();
    loop {
        let Batch { records, may_have_more } = next().unwrap();
        numbers.extend(records.iter().filter_map(|record| record.bytes));
        if !may_have_more {
            return numbers;
        }
    }
}

fn files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn wait_until_written(path: &Path) {
    let has_bytes = || files(path).first().is_some_and(|file| fs::metadata(file).unwrap().len() > 0);
    eventually("the record is written", || path.exists() && has_bytes());
}

fn eventually(what: &str, is_true: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_true() {
        assert!(start.elapsed() < std::time::Duration::from_secs(60), "{what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    (folder, path)
}

#[test]
fn latest_records_are_found_over_all_files_and_old_files_are_removed() {
    let (_folder, path) = folder();
    write(&path, SMALL, 0..100);
    assert_eq!(files(&path).len(), 3);
    assert!(files(&path).iter().all(|file| fs::metadata(file).unwrap().len() <= SMALL.max_bytes));
    assert_eq!(found(&mut reader(&path, &LogParams::default(), 30)), Vec::from_iter(70..100));
    let all = found(&mut reader(&path, &LogParams::default(), 1000));
    assert!(all.len() < 100 && all.last() == Some(&99) && all.is_sorted(), "{all:?}");
    let none = LogParams { verb: Some("pull".to_owned()), ..LogParams::default() };
    assert!(found(&mut reader(&path, &none, 1000)).is_empty());
}

#[test]
fn reader_follows_over_rotations() {
    let (_folder, path) = folder();
    write(&path, Rotation { keep: 100, ..SMALL }, 0..10);
    let mut reader = reader(&path, &LogParams::default(), 2);
    assert_eq!(found(&mut reader), [8, 9]);
    assert!(followed(&mut reader).is_empty());
    write(&path, Rotation { keep: 100, ..SMALL }, 10..100);
    assert!(files(&path).len() > 2);
    assert_eq!(followed(&mut reader), Vec::from_iter(10..100));
    assert!(followed(&mut reader).is_empty());
}

#[test]
fn incomplete_line_of_a_crash_is_ended_and_skipped() {
    let (_folder, path) = folder();
    write(&path, SMALL, 0..2);
    let file = files(&path).remove(0);
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 20]).unwrap();
    write(&path, SMALL, 2..4);
    let mut reader = reader(&path, &LogParams::default(), 10);
    assert_eq!(found(&mut reader), [0, 2, 3]);
    assert_eq!(reader.unreadable_lines, 1);
}

#[test]
fn line_that_is_too_long_and_bytes_that_are_no_text_are_skipped() {
    let (_folder, path) = folder();
    write(&path, SMALL, 0..1);
    let file = files(&path).remove(0);
    let mut bytes = fs::read(&file).unwrap();
    bytes.extend(vec![b'x'; 100_000]);
    bytes.extend(b"\n\xff\xfe\n{}\n");
    fs::write(&file, bytes).unwrap();
    write(&path, Rotation { max_bytes: 1 << 20, keep: 3 }, 1..2);
    let mut reader = reader(&path, &LogParams::default(), 10);
    assert_eq!(found(&mut reader), [0, 1]);
    assert_eq!(reader.unreadable_lines, 3);
}

#[test]
fn log_that_was_removed_while_it_was_written_begins_a_new_file() {
    let (_folder, path) = folder();
    let log = start(&path, SMALL);
    log.record(record(1));
    wait_until_written(&path);
    fs::remove_file(files(&path).remove(0)).unwrap();
    log.record(record(2));
    log.stop();
    assert_eq!(found(&mut reader(&path, &LogParams::default(), 10)), [2]);
}

#[test]
fn records_that_cannot_be_written_are_counted_and_reported_later() {
    let (folder, path) = folder();
    // No directory can be created there.
    fs::write(&path, "").unwrap();
    let log = start(&path, SMALL);
    log.record(record(1));
    eventually("it fails", || log.status().failure.is_some());
    assert_eq!(log.status().dropped, 1);
    fs::remove_file(&path).unwrap();
    log.record(record(2));
    log.stop();
    assert_eq!(log.status().failure, None);
    let mut reader = reader(&path, &LogParams::default(), 10);
    let records = reader.next_found().unwrap().records;
    assert_eq!((records[0].verb.as_str(), records[0].result.as_str()), ("audit", "dropped"));
    assert_eq!((records[0].details["records"].as_u64(), records[1].bytes), (Some(1), Some(2)));
    drop(folder);
}

#[test]
fn files_are_private_and_the_log_ends_with_its_daemon() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_folder, path) = folder();
    let log = start(&path, SMALL);
    log.record(record(1));
    log.stop();
    log.record(record(2));
    assert_eq!(log.status().dropped, 1);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&files(&path)[0])), (0o700, 0o600));
}

/// A log whose writer is blocked, as by a slow disk.
fn blocked(path: &Path) -> (AuditLog, std::sync::mpsc::Receiver<Waiting>) {
    let (queue, waiting) = std::sync::mpsc::sync_channel(MAX_WAITING);
    let shared = Shared {
        dropped: AtomicU64::new(0),
        limited_waiting: AtomicUsize::new(0),
        written: watch::Sender::new(()),
        failure: Mutex::default(),
    };
    let running = Running {
        directory: Arc::new(LogDirectory::at(path)),
        shared: Arc::new(shared),
        queue: Mutex::new(Some(queue)),
        thread: Mutex::default(),
        limit: RateLimit::default(),
        names: Names::default(),
    };
    let log = AuditLog::default();
    log.running.set(running).unwrap();
    (log, waiting)
}

#[test]
fn records_that_change_nothing_leave_half_of_the_queue_to_changes() {
    let (_folder, path) = folder();
    let (log, waiting) = blocked(&path);
    let (limited, dropped) = (MAX_LIMITED_WAITING, || log.status().dropped);
    for uid in 0..limited + 10 {
        log.record_limited(AuditRecord { uid: uid.try_into().unwrap(), ..record(1) });
    }
    assert_eq!(dropped(), 10);
    for _ in 0..MAX_WAITING - limited {
        log.record(record(2));
    }
    assert_eq!(dropped(), 10, "changes have room");
    log.record(record(3));
    assert_eq!(dropped(), 11);
    // The writer takes some of them.
    let running = log.running.get().unwrap();
    let writer = Writer::new(Arc::clone(&running.directory), SMALL, Arc::clone(&running.shared));
    drop(lock(&running.queue).take());
    writer.run(&waiting);
    assert_eq!(running.shared.limited_waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn one_user_cannot_replace_the_log_by_requests_that_change_nothing() {
    let (_folder, path) = folder();
    let log = start(&path, Rotation { max_bytes: 1 << 20, keep: 2 });
    log.record(record(42));
    for _ in 0..50_000 {
        log.record_limited(AuditRecord { message: Some("long ".repeat(200)), ..record(0) });
    }
    log.record(record(43));
    log.stop();
    let changes = found(&mut reader(&path, &LogParams::default(), 100_000));
    assert_eq!((changes.first(), changes.last()), (Some(&42), Some(&43)));
}

#[test]
fn latest_records_are_read_from_the_end_and_only_while_somebody_waits() {
    let (_folder, path) = folder();
    fs::create_dir(&path).unwrap();
    let lines: Vec<u8> = (0..5000).flat_map(|number| record(number).line()).collect();
    fs::write(path.join("audit-00000001.jsonl"), lines).unwrap();
    let lines_read = std::cell::Cell::new(0);
    let find = |limit, most| {
        lines_read.set(0);
        let is_wanted = || {
            lines_read.set(lines_read.get() + 1);
            lines_read.get() <= most
        };
        LogReader::find(Arc::new(LogDirectory::at(&path)), Filter::default(), limit, &is_wanted).unwrap()
    };
    assert_eq!(found(&mut find(3, u64::MAX).unwrap()), [4997, 4998, 4999]);
    assert_eq!(lines_read.get(), 3);
    assert!(find(5000, 100).is_none());
    assert_eq!(lines_read.get(), 101);
}

#[test]
fn records_written_during_a_search_are_followed_and_not_found() {
    let (_folder, path) = folder();
    let rotation = Rotation { keep: 100, ..SMALL };
    write(&path, rotation, 0..10);
    let mut reader = reader(&path, &LogParams::default(), 100);
    // So many that the last file is no longer the one where the search has begun.
    write(&path, rotation, 10..100);
    assert_eq!(found(&mut reader), Vec::from_iter(0..10));
    assert_eq!(followed(&mut reader), Vec::from_iter(10..100));
}

#[test]
fn reader_that_is_restricted_reads_the_records_of_one_user() {
    let (_folder, path) = folder();
    write(&path, SMALL, 0..3);
    let mut reader = reader(&path, &LogParams::default(), 100);
    reader.restrict_to(7);
    assert!(found(&mut reader).is_empty());
}

#[test]
fn directory_that_was_removed_while_it_was_written_is_created_again() {
    let (_folder, path) = folder();
    let log = start(&path, SMALL);
    log.record(record(1));
    wait_until_written(&path);
    fs::remove_dir_all(&path).unwrap();
    log.record(record(2));
    log.stop();
    assert_eq!(
        log.status(),
        AuditStatus { directory: Some(path.display().to_string()), ..AuditStatus::default() }
    );
    assert_eq!(found(&mut reader(&path, &LogParams::default(), 10)), [2]);
}
