//! Headers of many MiB: the memory that they take is counted, and every pull ends.

use std::thread;
use std::time::Duration;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::memory::status_bytes;
use blobd_tests::raw_gguf::{RawGguf, id, string};
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::routes::model_with_large_header;

use super::MODEL;

/// The bound that docs/SECURITY.md promises.
const MEMORY_BYTES: u64 = 256 << 20;
const HEADER_MIB: usize = 31;
/// The longest header of a GGUF file.
const LONGEST_BYTES: usize = 32 << 20;

/// A registry that has so many models with large headers, and their names.
fn registry_of(models: u8, model: &[u8]) -> (FakeRegistry, Vec<String>) {
    let registry = FakeRegistry::start().unwrap();
    let add = |number: u8| {
        let mut model = model.to_vec();
        *model.last_mut().unwrap() = number;
        let name = format!("library/large{number}:latest");
        registry.add_model(&name, b"{}", &[(MODEL, &model)]).unwrap();
        registry.name(&name)
    };
    let names = (0..models).map(add).collect();
    (registry, names)
}

#[test]
fn concurrent_pulls_of_models_with_large_headers_stay_within_the_memory_limit() {
    let (registry, names) = registry_of(4, &model_with_large_header(HEADER_MIB));
    // So that all headers arrive at the same time.
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(4 << 20, Duration::from_millis(20)));
    let daemon = TestDaemon::start();
    thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| daemon.command().run(["pull", name]).succeeds());
        }
    });
    let peak = status_bytes(daemon.pid(), "VmHWM");
    assert!(peak < MEMORY_BYTES, "{} MiB", peak >> 20);
    let listed = daemon.command().line("ls --json").succeeds().json();
    assert_eq!(listed["models"].as_array().unwrap().len(), names.len());
}

#[test]
fn longest_header_that_the_format_allows_is_described_planned_and_pulled() {
    let text = |bytes| RawGguf::new().key("general.description", id::STRING, string("x".repeat(bytes)));
    let file = |bytes| text(bytes).tensor("output.weight", id::I8, &[32], 0).with_data(&[7; 32]);
    let without_text = file(0).len() - 32;
    // The padding before the data counts too.
    let (registry, names) = registry_of(1, &file(LONGEST_BYTES - without_text - 32));
    let daemon = TestDaemon::start();
    let name = names[0].as_str();
    for words in [["show", name, "--json"].as_slice(), &["pull", name, "--dry-run"], &["pull", name]] {
        daemon.command().run(words).succeeds();
    }
    drop(registry);
}
