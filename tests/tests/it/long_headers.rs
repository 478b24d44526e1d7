//! The memory that the longest headers take: the process's peak during an import and what reads the header after it.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

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

/// The peak of a process without the pages of its program's file: a build for tests has many more of them.
fn peak_bytes(pid: u32) -> u64 {
    let status = |field| status_bytes(pid, field);
    status("VmHWM").saturating_sub(status("RssFile"))
}

#[test]
fn header_that_is_long_without_tensors_is_not_held_in_memory() {
    const TENSOR: &str = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]"#;
    let (folder, daemon) = (TempDir::new().unwrap(), TestDaemon::start());
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
        let before = peak_bytes(daemon.pid());
        blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        let grown = peak_bytes(daemon.pid()).saturating_sub(before);
        assert!(grown < MEMORY_BYTES / 2, "{name}: {} MiB", grown >> 20);
        let copy = folder.path().join("copy");
        blobd.run(["export", name, "-o", copy.to_str().unwrap()]).succeeds();
        assert!(fs::read(&path).unwrap() == fs::read(&copy).unwrap(), "{name}");
        fs::remove_file(&copy).unwrap();
    }
}

/// The most tensors of a file.
const TENSORS: usize = Header::MAX_TENSORS;
const SHAPE: [u64; 2] = [8, 16];
const TENSOR_BYTES: usize = 4 * 8 * 16;

fn names() -> impl Iterator<Item = String> {
    (0..TENSORS).map(|number| {
        format!("model.layers.{}.blocks.{}.attention.q_proj.weight", number / 128, number % 128)
    })
}

fn safetensors_header(names: impl Iterator<Item = String>) -> Vec<u8> {
    let (mut json, [rows, columns]) = ("{".to_owned(), SHAPE);
    for (number, name) in names.enumerate() {
        let (start, end) = (number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES);
        let fields = format!(r#""dtype":"F32","shape":[{rows},{columns}],"data_offsets":[{start},{end}]"#);
        write!(json, r#"{}"{name}":{{{fields}}}"#, if number > 0 { "," } else { "" }).unwrap();
    }
    json.push('}');
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

fn gguf_header(names: impl Iterator<Item = String>) -> Vec<u8> {
    const VERSION: u32 = 3;
    let mut header = [b"GGUF", &VERSION.to_le_bytes()[..], &(TENSORS as u64).to_le_bytes(), &[0; 8]].concat();
    for (number, name) in names.enumerate() {
        header.extend((name.len() as u64).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(2_u32.to_le_bytes());
        header.extend(SHAPE.iter().flat_map(|length| length.to_le_bytes()));
        // The number of F32.
        header.extend(0_u32.to_le_bytes());
        header.extend(((number * TENSOR_BYTES) as u64).to_le_bytes());
    }
    header.resize(header.len().next_multiple_of(32), 0);
    header
}

/// With a build for tests on a busy machine, 69 MiB were seen once, where `docs/BENCHMARKS.md` has 58. Before the layout handed
/// its table on, it was 113.
const MOST_TENSORS_BYTES: u64 = 80 << 20;

/// Imports a sparse file into a new store. Compares samples of the memory that is not of files, whose pages the kernel may
/// take back at any time.
fn import_of_most_tensors_fits(name: &str, header: &[u8]) {
    let (folder, daemon) = (TempDir::new().unwrap(), TestDaemon::start());
    let path = folder.path().join(name);
    let mut file = File::create(&path).unwrap();
    file.write_all(header).unwrap();
    file.set_len((header.len() + TENSORS * TENSOR_BYTES) as u64).unwrap();
    let memory = || status_bytes(daemon.pid(), "RssAnon") + status_bytes(daemon.pid(), "RssShmem");
    let (before, command) = (memory(), daemon.command());
    let most = thread::scope(|scope| {
        let import =
            scope.spawn(|| command.run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds());
        let mut most = before;
        while !import.is_finished() {
            most = most.max(memory());
            thread::sleep(Duration::from_millis(2));
        }
        import.join().unwrap();
        most
    });
    let grown = most.saturating_sub(before);
    assert!(grown < MOST_TENSORS_BYTES, "{name}: {} MiB", grown >> 20);
}

#[test]
fn safetensors_file_of_the_most_tensors_is_imported_in_the_memory_of_an_import() {
    import_of_most_tensors_fits("most.safetensors", &safetensors_header(names()));
}

#[test]
fn gguf_file_of_the_most_tensors_is_imported_in_the_memory_of_an_import() {
    import_of_most_tensors_fits("most.gguf", &gguf_header(names()));
}
