use std::fs;
use std::path::{Path, PathBuf};

use blobd_client::protocol::audit::LogParams;

use blobd_store::StoreOwner;

use super::*;

const SMALL: Rotation = Rotation { max_bytes: 4096, keep: 3 };

fn start(path: &Path, rotation: Rotation) -> AuditLog {
    let log = AuditLog::default();
    log.start(LogSettings {
        directory: LogDirectory::at(path, StoreOwner::for_process()),
        rotation,
        is_forwarded: false,
    })
    .unwrap();
    log
}

const fn latest(limit: u64) -> Latest {
    Latest { limit, count_earlier: 0, up_to: u64::MAX }
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

/// Lets `write` add a record, and waits until it is written.
fn write_and_wait(log: &AuditLog, write: impl FnOnce()) {
    let mut written = log.written().unwrap();
    write();
    let wait = async { tokio::time::timeout(std::time::Duration::from_secs(60), written.changed()).await };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(wait).unwrap().unwrap();
}

/// Waits until the writer has taken all but `most` records of the queue.
fn catch_up(log: &AuditLog, class: Class, most: usize) {
    let waiting = || log.running.get().unwrap().shared.classes.get(class).waiting.load(Ordering::Relaxed);
    while waiting() > most {
        std::thread::yield_now();
    }
}

/// Writes records with these numbers, each in a batch of its own, and stops.
fn write(path: &Path, rotation: Rotation, numbers: impl IntoIterator<Item = u64>) {
    let log = start(path, rotation);
    numbers.into_iter().for_each(|number| write_and_wait(&log, || log.record(record(number))));
    log.stop();
}

fn reader(path: &Path, params: &LogParams, limit: u64) -> LogReader {
    let filter = Filter::new(params, None).unwrap();
    LogReader::find(
        Arc::new(LogDirectory::at(path, StoreOwner::for_process())),
        filter,
        latest(limit),
        &|| true,
    )
    .unwrap()
    .unwrap()
}

fn found(reader: &mut LogReader) -> Vec<u64> {
    numbers(|| reader.next_found())
}

fn followed(reader: &mut LogReader) -> Vec<u64> {
    numbers(|| reader.next_written(u64::MAX))
}

fn numbers(next: impl FnMut() -> io::Result<Batch>) -> Vec<u64> {
    records(next).iter().filter_map(|record| record.bytes).collect()
}

fn records(mut next: impl FnMut() -> io::Result<Batch>) -> Vec<AuditRecord> {
    let mut all = Vec::new();
    loop {
        let Batch { records, may_have_more } = next().unwrap();
        all.extend(records);
        if !may_have_more {
            return all;
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
    let sizes: Vec<u64> = files(&path).iter().map(|file| fs::metadata(file).unwrap().len()).collect();
    assert!(sizes.iter().all(|bytes| *bytes <= SMALL.file_bytes()), "{sizes:?}");
    assert!(sizes.len() > 2 && sizes.iter().sum::<u64>() <= SMALL.max_bytes * SMALL.keep as u64, "{sizes:?}");
    // There are also records about the removed files.
    let changes = LogParams { verbs: vec!["rm".to_owned()], ..LogParams::default() };
    assert_eq!(found(&mut reader(&path, &changes, 20)), Vec::from_iter(80..100));
    let all = found(&mut reader(&path, &changes, 1000));
    assert!(all.len() < 100 && all.last() == Some(&99) && all.is_sorted(), "{all:?}");
    let none = LogParams { verbs: vec!["pull".to_owned()], ..LogParams::default() };
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
    assert_eq!(log.status().all_dropped(), 1);
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
    assert_eq!(log.status().all_dropped(), 1);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&files(&path)[0])), (0o700, 0o600));
}

/// A log whose writer is blocked, as by a slow disk.
fn blocked(path: &Path) -> (AuditLog, std::sync::mpsc::Receiver<Waiting>) {
    let (queue, waiting) = std::sync::mpsc::sync_channel(MAX_WAITING);
    let running = Running {
        directory: Arc::new(LogDirectory::at(path, StoreOwner::for_process())),
        shared: Arc::new(Shared::default()),
        queue: Mutex::new(Some(queue)),
        thread: Mutex::default(),
    };
    let log = AuditLog::default();
    log.running.set(running).unwrap();
    (log, waiting)
}

#[test]
fn each_class_has_room_in_the_queue_that_others_cannot_take() {
    let (_folder, path) = folder();
    let (log, waiting) = blocked(&path);
    let dropped = |class| *log.status().dropped.get(class);
    for class in [Class::Attempt, Class::Open] {
        for uid in 0..max_waiting(class) + 10 {
            log.record_as(class, AuditRecord { uid: uid.try_into().unwrap(), ..record(1) });
        }
        assert_eq!(dropped(class), 10);
    }
    for _ in 0..MAX_WAITING / 2 {
        log.record(record(2));
    }
    assert_eq!(dropped(Class::Change), 0, "changes have room");
    log.record(record(3));
    assert_eq!(dropped(Class::Change), 1);
    // The writer takes all of them, and reports for each class what is missing.
    let running = log.running.get().unwrap();
    let writer = Writer::new(Arc::clone(&running.directory), LARGE, None, Arc::clone(&running.shared));
    drop(lock(&running.queue).take());
    writer.run(&waiting);
    assert!(running.shared.classes.iter().all(|(_, state)| state.waiting.load(Ordering::Relaxed) == 0));
    let missing = notices(&path, "dropped");
    let missing = missing.iter().map(|record| (&record.details["class"], &record.details["records"]));
    let expected = [("changes", 1), ("opens", 10), ("attempts", 10)];
    assert!(
        missing
            .eq(expected.map(|(class, records)| (json!(class), json!(records))).iter().map(|(a, b)| (a, b)))
    );
}

const LARGE: Rotation = Rotation { max_bytes: 1 << 20, keep: 10 };

/// The records about the log itself with this result.
fn notices(path: &Path, result: &str) -> Vec<AuditRecord> {
    let (verbs, results) = (vec!["audit".to_owned()], vec![result.to_owned()]);
    let params = LogParams { verbs, results, ..LogParams::default() };
    let mut reader = reader(path, &params, 1000);
    reader.next_found().unwrap().records
}

fn attempt(number: u64) -> AuditRecord {
    AuditRecord { verb: "open".to_owned(), result: "denied".to_owned(), ..record(number) }
}

fn open(model: &str) -> AuditRecord {
    AuditRecord { verb: "open".to_owned(), model: Some(model.to_owned()), ..record(0) }
}

#[test]
fn refusals_do_not_use_up_the_limit_of_opens_and_rare_records_do_not_hide_among_many() {
    let (_folder, path) = folder();
    let log = start(&path, LARGE);
    for _ in 0..1500 {
        log.record_as(Class::Attempt, attempt(0));
        // The queue is for a slow disk, and is not tested here.
        catch_up(&log, Class::Attempt, 100);
    }
    log.record_as(Class::Open, open("secret"));
    for _ in 0..1500 {
        log.record_as(Class::Open, open("public"));
        catch_up(&log, Class::Open, 100);
    }
    log.record_as(Class::Open, open("rare"));
    log.stop();
    let of_model = |model: &str| {
        let params = LogParams { model: Some(model.to_owned()), ..LogParams::default() };
        found(&mut reader(&path, &params, 10_000)).len()
    };
    assert_eq!((of_model("secret"), of_model("rare")), (1, 1));
    let omitted = notices(&path, "omitted");
    let count = |class: &str| {
        let of_class = omitted.iter().filter(|record| record.details["class"] == class);
        of_class.map(|record| record.details["records"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(count("opens") + of_model("public") as u64, 1500);
    let params = LogParams { results: vec!["denied".to_owned()], ..LogParams::default() };
    assert_eq!(count("attempts") + found(&mut reader(&path, &params, 10_000)).len() as u64, 1500);
    assert!(
        omitted.iter().any(|record| record.details["models"]["public"].as_u64() > Some(0)),
        "{omitted:?}"
    );
    assert_eq!(*log.status().omitted.get(Class::Open), count("opens"));
}

#[test]
fn opens_and_attempts_do_not_displace_changes_and_the_log_keeps_its_size() {
    let (_folder, path) = folder();
    let log = start(&path, SMALL);
    for number in 0..15 {
        log.record(record(number));
    }
    for number in 0..1000 {
        for (class, record) in [(Class::Attempt, attempt(number)), (Class::Open, open("m"))] {
            log.record_as(class, record);
            catch_up(&log, class, 0);
        }
    }
    log.stop();
    let params = LogParams { verbs: vec!["rm".to_owned()], ..LogParams::default() };
    assert_eq!(found(&mut reader(&path, &params, 1000)), Vec::from_iter(0..15));
    let bytes: u64 = files(&path).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    assert!(bytes <= SMALL.max_bytes * SMALL.keep as u64, "{bytes}");
}

/// Writes a file of lines with these numbers and times.
fn write_file(path: &Path, name: &str, lines: &[(Option<u64>, &str, u64)]) {
    let line = |(seq, time, number): &(Option<u64>, &str, u64)| {
        let time = format!("2026-11-24T{time}:00.000Z");
        AuditRecord { seq: *seq, time, ..record(*number) }.line()
    };
    fs::write(path.join(name), lines.iter().flat_map(line).collect::<Vec<u8>>()).unwrap();
}

#[test]
fn records_of_all_classes_are_merged_in_the_order_in_which_they_were_written() {
    let (_folder, path) = folder();
    fs::create_dir(&path).unwrap();
    // The first two are of an earlier version. The clock has gone back between 2 and 3.
    let changes = [(None, "10:00", 0), (None, "10:01", 1), (Some(1), "10:02", 2), (Some(4), "09:01", 5)];
    write_file(&path, "audit-00000007.jsonl", &changes);
    write_file(&path, "opens-00000001.jsonl", &[(Some(2), "10:03", 3), (Some(6), "09:03", 7)]);
    write_file(&path, "attempts-00000001.jsonl", &[(Some(3), "09:00", 4)]);
    write_file(&path, "attempts-00000002.jsonl", &[(Some(5), "09:02", 6)]);
    let all = LogParams::default();
    assert_eq!(found(&mut reader(&path, &all, 100)), Vec::from_iter(0..8));
    for limit in 0..8 {
        assert_eq!(found(&mut reader(&path, &all, limit)), Vec::from_iter(8 - limit..8));
    }
    // The next record follows all of them.
    write(&path, LARGE, [8]);
    let mut reader = reader(&path, &all, 2);
    assert_eq!(found(&mut reader), [7, 8]);
    let log = start(&path, LARGE);
    log.record_as(Class::Attempt, attempt(9));
    log.record(record(10));
    log.record_as(Class::Open, AuditRecord { bytes: Some(11), ..open("m") });
    log.stop();
    assert_eq!(followed(&mut reader), [9, 10, 11]);
}

#[test]
fn reader_leaves_records_to_the_next_step_that_were_written_to_some_files_only() {
    let (_folder, path) = folder();
    fs::create_dir(&path).unwrap();
    write_file(&path, "audit-00000001.jsonl", &[(Some(1), "10:00", 1), (Some(4), "10:03", 4)]);
    write_file(&path, "opens-00000001.jsonl", &[(Some(2), "10:01", 2), (Some(3), "10:02", 3)]);
    let directory = Arc::new(LogDirectory::at(&path, StoreOwner::for_process()));
    let latest = Latest { up_to: 2, ..latest(100) };
    let mut reader = LogReader::find(directory, Filter::default(), latest, &|| true).unwrap().unwrap();
    assert_eq!(found(&mut reader), [1, 2]);
    assert_eq!(numbers(|| reader.next_written(3)), [3]);
    assert_eq!(numbers(|| reader.next_written(4)), [4]);
}

#[test]
fn log_of_an_earlier_version_is_read_and_loses_files_only_for_space() {
    let (_folder, path) = folder();
    fs::create_dir(&path).unwrap();
    let rotation = Rotation { max_bytes: 4096, keep: 10 };
    for number in 1..=10 {
        write_file(&path, &format!("audit-{number:08}.jsonl"), &[(None, "10:00", number); 16]);
    }
    write(&path, rotation, [11]);
    let numbers = found(&mut reader(&path, &LogParams::default(), 1000));
    assert_eq!((numbers.first(), numbers.last(), numbers.len()), (Some(&1), Some(&11), 161));
}

#[test]
fn earlier_records_are_counted_up_to_a_limit() {
    let (_folder, path) = folder();
    write(&path, LARGE, 0..30);
    let earlier = |limit, count_earlier| {
        let latest = Latest { count_earlier, ..latest(limit) };
        let directory = Arc::new(LogDirectory::at(&path, StoreOwner::for_process()));
        LogReader::find(directory, Filter::default(), latest, &|| true).unwrap().unwrap().earlier_records
    };
    assert_eq!([earlier(10, 100), earlier(10, 5), earlier(30, 100), earlier(100, 100)], [20, 5, 0, 0]);
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
        let directory = Arc::new(LogDirectory::at(&path, StoreOwner::for_process()));
        LogReader::find(directory, Filter::default(), latest(limit), &is_wanted).unwrap()
    };
    assert_eq!(found(&mut find(3, u64::MAX).unwrap()), [4997, 4998, 4999]);
    assert!(lines_read.get() <= 4, "{}", lines_read.get());
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

/// Adds the record of a change and waits until it is written.
fn change_and_wait(log: &AuditLog, uid: u32) {
    let record = AuditRecord { uid, message: Some("m".repeat(1000)), ..record(1) };
    write_and_wait(log, || log.record_as(Class::Change, record));
}

#[test]
fn user_with_very_many_changes_displaces_none_of_others_and_what_is_removed_is_counted() {
    const ROTATION: Rotation = Rotation { max_bytes: 256 << 10, keep: 16 };
    const VICTIM: u32 = 40_001;
    const BUSY: u32 = 40_002;
    const CHANGES: u64 = 5000;
    let (_folder, path) = folder();
    let log = start(&path, ROTATION);
    change_and_wait(&log, VICTIM);
    (0..CHANGES).for_each(|_| change_and_wait(&log, BUSY));
    log.stop();
    let of = |params: LogParams| {
        let mut reader = reader(&path, &params, u64::MAX);
        records(|| reader.next_found())
    };
    let user = |uid: u32| LogParams { user: Some(uid.to_string()), ..LogParams::default() };
    assert_eq!(of(user(VICTIM)).len(), 1);
    let removed = of(LogParams { verbs: vec!["audit".to_owned()], ..LogParams::default() });
    assert!(removed.iter().all(|record| record.result == "removed"), "{removed:?}");
    assert!(removed.iter().all(|record| record.details["class"] == "attempts"), "{removed:?}");
    let counted: u64 = removed.iter().filter_map(|record| record.details["users"]["40002"].as_u64()).sum();
    assert!(counted > 0 && removed.iter().all(|record| record.details["first"].is_string()), "{removed:?}");
    assert_eq!(of(user(BUSY)).len() as u64 + counted, CHANGES);
}
