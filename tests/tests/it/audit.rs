//! The audit log: which requests it records, who can read the records, and which failures they survive.

mod filters;
mod full_disk;
mod hidden;
mod lifecycle;
mod readers;
mod refusals;
mod requests;
mod survival;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::DEADLINE;
use serde_json::Value as Json;

fn import(blobd: &Blobd, folder: &Path, seed: u64, name: &str) {
    let path = ModelFile::dense(seed).write_to(folder, &format!("{name}.gguf"));
    blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

/// The records that `blobd log` prints with these options. Those of starts, stops and reloads only if the options name
/// verbs.
fn records(blobd: &Blobd, options: &str) -> Vec<Json> {
    let text = blobd.line(&format!("log --json --limit 0 {options}")).succeeds().text();
    let all = text.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    let is_wanted = |record: &Json| options.contains("--verb") || !is_of_daemon(record);
    all.filter(is_wanted).collect()
}

fn is_of_daemon(record: &Json) -> bool {
    ["start", "stop", "reload"].iter().any(|verb| record["verb"] == *verb)
}

/// The verbs and results of these records.
fn results(records: &[Json]) -> Vec<String> {
    let text = |record: &Json, key: &str| record[key].as_str().unwrap().to_owned();
    records.iter().map(|record| format!("{} {}", text(record, "verb"), text(record, "result"))).collect()
}

/// Waits until the log has these verbs and results, because records are written shortly after a request has ended.
fn eventual_records(blobd: &Blobd, options: &str, expected: &[&str]) -> Vec<Json> {
    let start = Instant::now();
    loop {
        let found = records(blobd, options);
        if results(&found) == expected {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "records: expected {expected:?}, found {found:#?}");
        sleep(Duration::from_millis(5));
    }
}

/// The text of all files of a log.
fn content(directory: &Path) -> String {
    files(directory).iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// The files of a log, the oldest of each class first.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn config(daemon_folder: &Path, text: &str) -> PathBuf {
    let path = daemon_folder.join("config.toml");
    fs::write(&path, text).unwrap();
    path
}

fn audit(daemon: &TestDaemon) -> PathBuf {
    daemon.root().join("audit")
}
