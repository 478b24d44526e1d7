//! Conditions that alerts rely on: counters exist before their first event, and the state of the store is right when it
//! is damaged.

use std::fs;

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{blob_path, flip_byte};
use blobd_tests::wait::eventually;

use super::samples::Samples;

#[test]
fn counters_of_a_new_daemon_are_present_and_0() {
    let daemon = TestDaemon::start();
    let samples = Samples::read(&daemon.socket());
    let is_0 = |sample: String| assert!(samples.has(&sample) && samples.value(&sample) == 0.0, "{sample}");
    for code in ErrorCode::ALL.map(ErrorCode::name) {
        is_0(format!("blobd_request_errors_total{{code=\"{code}\"}}"));
        is_0(format!("blobd_pull_errors_total{{code=\"{code}\"}}"));
    }
    for result in ["ok", "failed", "cancelled"] {
        is_0(format!("blobd_pulls_ended_total{{result=\"{result}\"}}"));
        for verb in ["pull", "gc", "unpin", "unknown"] {
            is_0(format!("blobd_requests_total{{result=\"{result}\",verb=\"{verb}\"}}"));
        }
    }
    for verb in ["pull", "import"] {
        is_0(format!("blobd_reused_bytes_total{{verb=\"{verb}\"}}"));
    }
}

/// The sizes cannot be counted because of a file in the trash that blobd does not know.
#[test]
fn space_and_damage_are_known_while_the_sizes_cannot_be_counted() {
    let daemon = TestDaemon::start();
    let import = |seed: u64| {
        let path = ModelFile::dense(seed).write_to(daemon.scratch(), &format!("m{seed}.gguf"));
        daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    };
    import(1);
    let trash = daemon.root().join("trash");
    fs::create_dir_all(&trash).unwrap();
    fs::write(trash.join("notes.txt"), "of an administrator").unwrap();
    assert_ne!(daemon.command().line("df").code, 0);
    let read = || Samples::read(&daemon.socket());
    eventually("the used bytes are known", || read().value("blobd_used_bytes") > 0.0);
    let before = read();
    assert!(!before.has("blobd_sizes_timestamp_seconds") && before.has("blobd_damaged_blobs"));
    import(2);
    let shown = daemon.command().line("show m1 --json").succeeds().json();
    flip_byte(&blob_path(daemon.root(), shown["tensors"][0]["digest"].as_str().unwrap()), 3);
    daemon.command().line("verify m1").exits_with(5);
    let after = read();
    assert_eq!(after.value("blobd_damaged_blobs"), 1.0);
    for sample in ["blobd_used_bytes", "blobd_free_bytes"] {
        assert!(after.value(sample) != before.value(sample), "{sample}");
    }
    assert!(after.has("blobd_min_free_bytes") && after.has("blobd_quota_bytes"));
}
