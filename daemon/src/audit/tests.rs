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
    LogReader::find(Arc::new(LogDirectory::at(path)), filter, limit).unwrap()
}

fn found(reader: &mut LogReader) -> Vec<u64> {
    let mut numbers = Vec::new();
    loop {
        let records = reader.next_found().unwrap();
        if records.is_empty() {
            return numbers;
        }
        numbers.extend(records.iter().filter_map(|record| record.bytes));
    }
}

fn followed(reader: &mut LogReader) -> Vec<u64> {
    let mut numbers = Vec::new();
    loop {
        let (records, may_have_more) = reader.next_written().unwrap();
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
    let is_written =
        || path.exists() && files(&path).first().is_some_and(|file| fs::metadata(file).unwrap().len() > 0);
    eventually("the record is written", is_written);
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
    let records = reader.next_found().unwrap();
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
