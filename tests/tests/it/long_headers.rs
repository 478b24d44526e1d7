//! The memory that the longest headers take: the process's peak during an import and what reads the header after it.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use blobd_store_format::safetensors::Header;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::memory::status_bytes;
use tempfile::TempDir;

/// The contract's bound for an import, here above an idle daemon.
const MEMORY_BYTES: u64 = 64 << 20;

/// Writes a safetensors file of one tensor, whose header has these parts repeated up to its length.
fn write_file(path: &Path, (start, repeated, end): (&str, &str, &str), header_bytes: usize) {
    let mut file = File::create(path).unwrap();
    file.write_all(&(header_bytes as u64).to_le_bytes()).unwrap();
    file.write_all(start.as_bytes()).unwrap();
    let repeats = (header_bytes - start.len() - end.len()) / repeated.len();
    file.write_all(repeated.repeat(repeats).as_bytes()).unwrap();
    let rest = header_bytes - start.len() - end.len() - repeats * repeated.len();
    file.write_all(" ".repeat(rest).as_bytes()).unwrap();
    file.write_all(end.as_bytes()).unwrap();
    file.write_all(b"1").unwrap();
}

#[test]
fn header_that_is_long_without_tensors_is_not_held_in_memory() {
    const TENSOR: &str = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]"#;
    let (folder, daemon) = (TempDir::new().unwrap(), TestDaemon::start());
    let peak = || {
        let status = |field| status_bytes(daemon.pid(), field);
        // Without the pages of the program's file: a build for tests has many more of them.
        status("VmHWM").saturating_sub(status("RssFile"))
    };
    let blobd = daemon.command();
    let unknown = format!("{TENSOR},\"x\":[");
    let longest = usize::try_from(Header::MAX_BYTES).unwrap();
    for (name, parts, length) in [
        ("small", (TENSOR, " ", "}}"), 100),
        ("spaces", (TENSOR, " ", "}}"), longest),
        ("lines", (TENSOR, " \r\n\t", "}}"), longest),
        // Shorter, because a build for tests takes seconds for each ten megabytes.
        ("unknown", (unknown.as_str(), "12, ", "1]}}"), longest / 4),
    ] {
        let path = folder.path().join(format!("{name}.safetensors"));
        write_file(&path, parts, length);
        let before = peak();
        blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        let grown = peak().saturating_sub(before);
        assert!(grown < MEMORY_BYTES / 2, "{name}: {} MiB", grown >> 20);
        let copy = folder.path().join("copy");
        blobd.run(["export", name, "-o", copy.to_str().unwrap()]).succeeds();
        assert!(fs::read(&path).unwrap() == fs::read(&copy).unwrap(), "{name}");
        fs::remove_file(&copy).unwrap();
    }
}
