//! Malicious files: the real command refuses each of them quickly, in little memory, and leaves nothing in
//! the store.

use std::fs;
use std::path::Path;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::memory::status_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::raw_gguf::{RawGguf, id, string};
use blobd_tests::store_dir::check_empty;

/// What is wrong, the file, and what the message must say.
type Case = (&'static str, Vec<u8>, &'static str);

/// Asserts that each file is refused with the right message, and leaves nothing in the store.
fn check_refused(cases: &[Case]) {
    let daemon = TestDaemon::start();
    let before = peak(&daemon);
    for (what, bytes, words) in cases {
        let run = import(&daemon, what, bytes);
        assert_eq!(run.code, 1, "{what}: {}", run.stderr);
        let error = run.error();
        assert!(error.message.contains(words), "{what}: {error}");
        assert!(error.message.contains("case.gguf") && error.message.len() < 600, "{what}: {error}");
        assert!(!error.message.contains(char::is_control), "{what}: {error}");
        check_empty(daemon.root());
    }
    check_alive(&daemon, before);
}

fn import(daemon: &TestDaemon, what: &str, bytes: &[u8]) -> Run {
    let path = daemon.scratch().join("case.gguf");
    fs::write(&path, bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--json".as_ref()])
}

/// The daemon's peak memory so far, its own code included, which depends on the build.
fn peak(daemon: &TestDaemon) -> u64 {
    status_bytes(daemon.pid(), "VmHWM")
}

/// Asserts that the daemon has needed little memory since its peak was `before`, and that it still imports a valid file.
fn check_alive(daemon: &TestDaemon, before: u64) {
    let growth = peak(daemon) - before;
    assert!(growth < 64 << 20, "{growth} bytes");
    println!("{} KiB more", growth >> 10);
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "good.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
}

fn raw() -> RawGguf {
    RawGguf::new()
}

fn one(ggml_type: u32, dimensions: &[u64]) -> RawGguf {
    raw().tensor("t", ggml_type, dimensions, 0)
}

#[test]
fn files_that_are_not_gguf_are_refused() {
    let with = |magic: &[u8; 4]| RawGguf { magic: *magic, ..raw() }.bytes();
    let version = |version| RawGguf { version, ..raw() }.bytes();
    check_refused(&[
        ("nothing", vec![], "an empty file"),
        ("the magic alone (CVE-2024-39720)", b"GGUF".to_vec(), "ends at byte 4"),
        ("magic and version", raw().bytes()[..8].to_vec(), "ends at byte 8"),
        ("half a count", raw().bytes()[..20].to_vec(), "ends at byte 20"),
        ("bad magic", with(b"FUGG"), "swapped"),
        ("the format before GGUF", with(b"tjgg"), "an old ggml file"),
        ("a zip archive", with(b"PK\x03\x04"), "zip"),
        ("a web page", b"<!doctype html><html></html>".to_vec(), "found a web page"),
        (
            "text with terminal escapes",
            b"\x1b[2J\x1b[31m".to_vec(),
            "found a file that starts with \"\\x1b[2J\"",
        ),
        ("version 0", version(0), "expected 2 or 3, found 0"),
        ("version 1", version(1), "expected 2 or 3, found 1"),
        ("a version of the future", version(4), "expected 2 or 3, found 4"),
        ("a version with its bytes swapped", version(0x0400_0000), "expected 2 or 3, found 4"),
        ("a version of no byte order", version(0xffff_ffff), "expected 2 or 3, found 4294967295"),
    ]);
}

#[test]
fn wrong_counts_are_refused() {
    let tensors = |tensor_count| RawGguf { tensor_count, ..raw() }.bytes();
    let keys = |key_count| RawGguf { key_count, ..raw() }.bytes();
    check_refused(&[
        ("2^64 - 1 tensors (CVE-2024-21836)", tensors(u64::MAX), "too many tensors"),
        ("2^63 tensors", tensors(1 << 63), "too many tensors"),
        ("one tensor more than allowed", tensors(131_073), "at most 131072"),
        ("a tensor that is not there", tensors(1), "tensor info 1 of 1"),
        ("many tensors that are not there", tensors(131_072), "tensor info 1 of 131072"),
        ("2^64 - 1 keys (CVE-2024-25664)", keys(u64::MAX), "too many metadata keys"),
        ("a key that is not there", keys(1), "metadata entry 1 of 1"),
        ("many keys that are not there", keys(131_072), "metadata entry 1 of 131072"),
        ("one key too many", RawGguf { key_count: 2, ..raw().key("a", id::U8, [1]) }.bytes(), "entry 2 of 2"),
    ]);
}

#[test]
fn invalid_metadata_is_refused() {
    let key_length = |length: u64| RawGguf { key_count: 1, ..raw().key_bytes(length.to_le_bytes()) }.bytes();
    let value = |value_type, value: &[u8]| raw().key("some.key", value_type, value).bytes();
    let string_of = |length: u64| value(id::STRING, &length.to_le_bytes());
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let nested = [&id::ARRAY.to_le_bytes()[..], &1_u64.to_le_bytes()].concat().repeat(1000);
    check_refused(&[
        ("a key of 2^64 - 1 bytes (CVE-2024-21802)", key_length(u64::MAX), "at byte 32"),
        ("a key of 2^63 bytes", key_length(1 << 63), "at byte 32"),
        ("a key of 1 GiB", key_length(1 << 30), "at byte 32"),
        ("a key longer than the file", key_length(1000), "metadata entry 1"),
        ("a key without a name", raw().key("", id::U8, [1]).bytes(), "is empty"),
        (
            "one key twice",
            raw().key("a", id::U8, [1]).key("b", id::U8, [1]).key("a", id::U8, [2]).bytes(),
            "appears twice",
        ),
        ("a type that does not exist", value(13, &[0; 8]), "found 13"),
        ("a negative type", value(u32::MAX, &[0; 8]), "found 4294967295"),
        ("a string of 2^64 - 1 bytes (CVE-2024-23496)", string_of(u64::MAX), "18446744073709551615"),
        ("a string of 1 GiB (CVE-2025-0315)", string_of(1 << 30), "1073741824"),
        ("a string longer than the file", string_of(100), "metadata entry 1"),
        ("an array of 2^64 - 1 numbers", value(id::ARRAY, &array(id::U64, u64::MAX)), "18446744073709551615"),
        ("an array whose size overflows", value(id::ARRAY, &array(id::U64, (1 << 61) + 1)), "items"),
        ("an array of 2^40 bytes", value(id::ARRAY, &array(id::U8, 1 << 40)), "1099511627776"),
        ("an array of 2^62 strings (CVE-2024-25668)", value(id::ARRAY, &array(id::STRING, 1 << 62)), "items"),
        ("an array longer than the file", value(id::ARRAY, &array(id::U32, 1000)), "metadata entry 1"),
        ("an array of arrays", value(id::ARRAY, &array(id::ARRAY, 1)), "array of arrays"),
        ("arrays a thousand deep (gguf_py_f001)", value(id::ARRAY, &nested), "array of arrays"),
        ("an array of a type that does not exist", value(id::ARRAY, &array(99, 1)), "found 99"),
    ]);
}

#[test]
fn invalid_alignments_are_refused() {
    let of_type = |value_type, value: &[u8]| raw().key("general.alignment", value_type, value).bytes();
    let off = raw().alignment(64).tensor("a", id::I8, &[8], 32).with_data(&[0; 128]);
    check_refused(&[
        ("alignment 0 (CVE-2025-0317)", raw().alignment(0).bytes(), "found 0"),
        ("alignment 13", raw().alignment(13).bytes(), "power of two"),
        ("alignment 2^31 (lcpp#24997)", raw().alignment(1 << 31).bytes(), "up to"),
        ("alignment 2^21", raw().alignment(1 << 21).bytes(), "up to 1048576"),
        ("alignment as i32 (lcpp#26318)", of_type(id::I32, &32_i32.to_le_bytes()), "expected u32"),
        ("alignment as u64", of_type(id::U64, &32_u64.to_le_bytes()), "expected u32"),
        ("alignment as a string", of_type(id::STRING, &string("32")), "expected u32"),
        ("a tensor off the alignment", off, "not a multiple of 64"),
    ]);
}

#[test]
fn invalid_tensors_are_refused() {
    let named = |name: &[u8]| raw().tensor(name, id::F32, &[1], 0).with_data(&[0; 32]);
    let f32s = |dimensions: &[u64]| one(id::F32, dimensions).with_data(&[0; 64]);
    let bytes = |dimensions: &[u64]| one(id::I8, dimensions).with_data(&[0; 64]);
    let huge = 0x7fff_ffff_ffff_ffc0;
    let two_huge =
        raw().tensor("a", id::I8, &[huge], 0).tensor("b", id::I8, &[huge], huge).with_data(&[0; 64]);
    check_refused(&[
        ("a name of 128 bytes", named(&[b'n'; 128]), "name too long"),
        (
            "a name of 2^64 - 1 bytes",
            RawGguf { tensor_count: 1, ..raw().key_bytes(u64::MAX.to_le_bytes()) }.bytes(),
            "18446744073709551615",
        ),
        ("a name that is not UTF-8", named(b"\xff\xfe"), "name"),
        ("a name with a NUL", named(b"a\0b"), "name"),
        ("a name that clears the screen", named(b"\x1b[2J"), "name"),
        (
            "one name twice",
            raw().tensor("t", id::F32, &[1], 0).tensor("t", id::F32, &[1], 32).with_data(&[0; 64]),
            "appears twice",
        ),
        ("more dimensions than any format has", f32s(&[1; 1025]), "found 1025"),
        ("a negative dimension", f32s(&[u64::MAX]), "-1"),
        ("a negative dimension beside a zero", f32s(&[0, u64::MAX]), "-1"),
        ("dimensions that wrap to zero", bytes(&[1 << 32, 1 << 32]), "4294967296"),
        ("dimensions that wrap to four", bytes(&[1 << 62, 1 << 2, 1, 1]), "4611686018427387904"),
        ("elements beyond an int64", f32s(&[4 * 0x7fff_ffff, 4 * 0x7fff_ffff]), "8589934588"),
        ("bytes beyond 2^64 (CVE-2026-33298)", one(id::I64, &[1 << 61]).with_data(&[0; 64]), "tensor \"t\""),
        ("bytes that wrap to zero (lcpp#24759)", f32s(&[u64::MAX / 4]), "tensor \"t\""),
        ("a padded size that wraps", f32s(&[4, (1 << 30) - 1, (1 << 30) + 1]), "tensor \"t\""),
        ("two halves of memory (CVE-2025-53630)", two_huge, "beyond the data section"),
        ("an exabyte", bytes(&[1 << 60]), "beyond the data section"),
        ("a removed type", one(5, &[32]).with_data(&[0; 64]), "tensor \"t\""),
        ("half a block", one(2, &[33]).with_data(&[0; 64]), "33"),
        ("a scalar of blocks", one(12, &[]).with_data(&[0; 256]), "256"),
    ]);
}

#[test]
fn tensors_outside_their_file_are_refused() {
    let at = |offset| raw().tensor("t", id::F32, &[16], offset).with_data(&[0; 128]);
    let pair = |second| {
        raw().tensor("a", id::F32, &[16], 0).tensor("b", id::F32, &[16], second).with_data(&[0; 128])
    };
    let unknown = raw().tensor("a", 4711, &[16], 128).with_data(&[0; 128]);
    let mut cut = ModelFile::dense(1).bytes();
    cut.truncate(cut.len() - 32);
    let header = ModelFile::dense(1).bytes()[..700].to_vec();
    check_refused(&[
        ("an end beyond the file (CVE-2026-7482)", at(96), "beyond the data section of 128 bytes"),
        ("a start beyond the file", at(1 << 40), "beyond the data section"),
        ("a negative offset", at(u64::MAX - 31), "beyond the data section"),
        ("an offset that is no multiple", at(1), "not a multiple of 32"),
        ("one place for two", pair(0), "overlap"),
        ("two that overlap", pair(32), "overlap"),
        ("an unknown type at the end of the file", unknown, "no bytes for it"),
        ("a file that is cut off", cut, "beyond the data section"),
        ("a file that is cut off in its header", header, "ends at byte 700"),
    ]);
}

#[test]
fn endless_headers_are_refused_in_little_memory() {
    let daemon = TestDaemon::start();
    let before = peak(&daemon);
    let strings = |count: u64, length: usize| {
        let value = [&id::STRING.to_le_bytes()[..], &count.to_le_bytes()].concat();
        let each = string(vec![b'x'; length]);
        let fitting = usize::try_from(count).unwrap().min((40 << 20) / each.len());
        raw().key("k", id::ARRAY, value).key_bytes(each.repeat(fitting)).bytes()
    };
    for (what, bytes) in [
        ("a string of 40 MiB", raw().key("k", id::STRING, string(vec![b'x'; 40 << 20])).bytes()),
        ("three million empty strings", strings(5_000_000, 0)),
        ("strings of 1 MiB", strings(40, 1 << 20)),
        (
            "40 MiB of numbers",
            raw()
                .key(
                    "k",
                    id::ARRAY,
                    [&id::U8.to_le_bytes()[..], &(40_u64 << 20).to_le_bytes(), &vec![0; 40 << 20]].concat(),
                )
                .bytes(),
        ),
        (
            "keys of 32 MiB together",
            (0..40)
                .fold(raw(), |raw, n| raw.key(format!("{n}"), id::STRING, string(vec![b'x'; 1 << 20])))
                .bytes(),
        ),
    ] {
        let run = import(&daemon, what, &bytes);
        assert_eq!(run.code, 1, "{what}: {}", run.stderr);
        check_empty(daemon.root());
    }
    check_alive(&daemon, before);
}

/// llama.cpp needs a minute for such a file, because it compares each name with all others.
#[test]
fn import_of_a_hundred_thousand_names_is_not_quadratic() {
    let daemon = TestDaemon::start();
    let before = peak(&daemon);
    let tensors = |count: u64| (0..count).fold(raw(), |raw, n| raw.tensor(format!("{n}"), id::F32, &[0], 0));
    let keys = |count: u64| (0..count).fold(raw(), |raw, n| raw.key(format!("{n}"), id::U8, [0]));
    let twice = tensors(100_000).tensor("99999", id::F32, &[0], 0);
    assert!(
        import(&daemon, "a name twice", &twice.with_data(&[])).exits_with(1).stderr.contains("appears twice")
    );
    let twice = keys(100_000).key("99999", id::U8, [0]);
    assert!(
        import(&daemon, "a key twice", &twice.with_data(&[])).exits_with(1).stderr.contains("appears twice")
    );
    check_empty(daemon.root());
    check_alive(&daemon, before);
    import(&daemon, "names without bytes", &tensors(100_000).with_data(&[])).succeeds();
    assert_eq!(daemon.client().open(&"case".parse().unwrap()).unwrap().tensors().len(), 100_000);
    daemon.command().line("rm case").succeeds();
    import(&daemon, "keys", &keys(100_000).with_data(&[])).succeeds();
    assert_eq!(daemon.client().open(&"case".parse().unwrap()).unwrap().tensors().len(), 0);
}

/// A `block_count` of another type, or an architecture that is no string or missing, is not refused, because
/// the store does not use them (CVE-2025-0312, CVE-2024-8063).
#[test]
fn metadata_of_unexpected_types_is_accepted() {
    let daemon = TestDaemon::start();
    let file = raw()
        .key("general.architecture", id::U32, 7_u32.to_le_bytes())
        .key("general.file_type", id::STRING, string("Q4_K_M"))
        .key("llama.block_count", id::STRING, string(""))
        .key("split.count", id::STRING, string("3"))
        .tensor("t", id::F32, &[8], 0)
        .with_data(&[0; 32]);
    import(&daemon, "odd types", &file).succeeds();
    let shown = daemon.command().line("show case --json").succeeds().json();
    assert_eq!(shown["architecture"], serde_json::Value::Null);
    assert_eq!(shown["metadata"]["llama.block_count"], "");
}

#[test]
fn names_and_values_cannot_control_the_terminal() {
    let daemon = TestDaemon::start();
    let mut model =
        ModelFile::dense(1).with("general.name", "\u{1b}[2Jowned\u{7}").with("\u{1b}]0;title\u{7}", 1_u8);
    model.add_noise(1, "../../../etc/passwd", GgmlType::F32, &[8]);
    let path = model.write_to(daemon.scratch(), "\u{1b}[31mred.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), "m".as_ref()]).succeeds();
    for line in ["ls", "show m --metadata --tensors", "df -v", "ps", "rm m"] {
        let run = daemon.command().line(line).succeeds();
        let harmless = |text: &str| text.chars().all(|c| !c.is_control() || c == '\n');
        assert!(harmless(&run.text()) && harmless(&run.stderr), "{line}: {:?}", run.text());
    }
    assert!(!Path::new(daemon.root()).join("blobs/passwd").exists());
}
