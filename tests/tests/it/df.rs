//! The rows of `df`: they add up to what `du` reports, and none is hidden.

use std::fs;
use std::os::unix::fs::symlink;

use blobd_client::protocol::space::{DiskUsage, UsageKind, UsageRow};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::{check_rows, du, names};
use blobd_tests::wait::eventually;

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), "model.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

fn rows(daemon: &TestDaemon) -> DiskUsage {
    let client = daemon.client();
    check_rows(daemon.root(), || client.disk_usage())
}

fn row(usage: &DiskUsage, kind: UsageKind) -> &UsageRow {
    usage.rows.iter().find(|row| row.kind == kind).unwrap_or_else(|| panic!("{kind:?}: {usage:#?}"))
}

/// `rm` says that a process keeps the model, so `df` must show where its bytes are and who uses them.
#[test]
fn removed_model_that_is_open_is_a_row_that_names_the_process() {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    let before = rows(&daemon);
    let model_bytes = row(&before, UsageKind::Model).bytes;
    assert_eq!(row(&before, UsageKind::Model).name.as_deref(), Some("m:latest"));
    assert_eq!(row(&before, UsageKind::InUse).bytes, 0);
    let mut reader = Reader::open(&daemon.socket(), "m");
    let removed = daemon.command().line("rm m --json").succeeds().json();
    let leased = rows(&daemon);
    let in_use = row(&leased, UsageKind::InUse);
    assert_eq!(Some(in_use.bytes), removed["kept"][0]["bytes"].as_u64());
    assert_eq!((in_use.bytes, row(&leased, UsageKind::Unneeded).bytes), (model_bytes, 0));
    assert_eq!(in_use.by, [format!("process {} (test-client)", reader.pid())]);
    let text = daemon.command().line("df").succeeds().text();
    assert!(text.contains("in use") && text.contains("(test-client)"), "{text}");
    // Without its lease, but mapped.
    assert!(!reader.touch().is_empty());
    reader.close();
    eventually("the lease ends", || daemon.client().sessions().unwrap().sessions.is_empty());
    let held = rows(&daemon);
    let in_use = row(&held, UsageKind::InUse);
    assert_eq!(in_use.bytes, held.held_bytes);
    assert!(in_use.bytes > 50_000 && in_use.by[0].contains("(test-client)"), "{in_use:?}");
    reader.kill();
    eventually("the bytes go", || names(&daemon.root().join("blobs")).is_empty());
    assert_eq!(row(&rows(&daemon), UsageKind::InUse).bytes, 0);
}

#[test]
fn foreign_files_are_a_row_wherever_they_are() {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    let root = daemon.root();
    let before = row(&rows(&daemon), UsageKind::Other).bytes;
    assert_eq!(before, 0);
    for directory in ["lost+found", "blobs/old/older", "partial/x", "origins"] {
        fs::create_dir_all(root.join(directory)).unwrap();
        fs::write(root.join(directory).join("file"), vec![1; 10_000]).unwrap();
    }
    fs::write(root.join("blobs/sha256-short"), vec![1; 5000]).unwrap();
    fs::write(root.join("notes.txt"), "notes").unwrap();
    symlink("/etc", root.join("recipes/link")).unwrap();
    let usage = rows(&daemon);
    let other = row(&usage, UsageKind::Other);
    assert!(other.bytes >= 45_000 && !other.by.is_empty(), "{other:?}");
    let text = daemon.command().line("df").succeeds().text();
    assert!(text.contains("other files"), "{text}");
}

/// A snapshot of hard links takes no space, and `du` counts each file once.
#[test]
fn file_with_several_names_counts_once() {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    let root = daemon.root();
    let before = rows(&daemon);
    fs::create_dir(root.join("snapshot")).unwrap();
    for name in names(&root.join("blobs")) {
        fs::hard_link(root.join("blobs").join(&name), root.join("snapshot").join(&name)).unwrap();
    }
    let usage = rows(&daemon);
    assert_eq!(row(&usage, UsageKind::Model).bytes, row(&before, UsageKind::Model).bytes);
    let other = row(&usage, UsageKind::Other).bytes;
    assert!(other < 50_000, "only the directory: {other}");
}

/// A change in place does not change the times of the directory.
#[test]
fn truncated_blob_counts_with_its_current_size() {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    let before = rows(&daemon);
    let blobs = daemon.root().join("blobs");
    let largest = names(&blobs).into_iter().max_by_key(|name| fs::metadata(blobs.join(name)).unwrap().len());
    let path = blobs.join(largest.unwrap());
    let mode = |mode| {
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(0o644);
    fs::File::options().write(true).open(&path).unwrap().set_len(1).unwrap();
    mode(0o444);
    let usage = rows(&daemon);
    assert!(usage.physical_bytes < before.physical_bytes, "{usage:?}");
    assert_eq!(usage.disk_bytes, du(daemon.root()));
}

#[test]
fn unneeded_blobs_are_shown_although_a_collection_would_refuse() {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    fs::write(daemon.root().join("manifests/notes.txt"), "notes").unwrap();
    daemon.command().line("rm m").succeeds();
    let usage = rows(&daemon);
    assert_eq!(usage.reclaimable_bytes, 0);
    assert!(row(&usage, UsageKind::Unneeded).bytes > 50_000, "{usage:#?}");
    let text = daemon.command().line("df").succeeds().text();
    assert!(text.contains("gc refuses"), "{text}");
}

#[test]
fn table_ends_with_a_total_that_is_the_sum_and_fits_80_columns() {
    let daemon = TestDaemon::start_on_disk();
    for (seed, name) in [(1, "a"), (2, "b"), (3, "c")] {
        import(&daemon, &ModelFile::dense(seed), name);
    }
    daemon.command().line("tag a another").succeeds();
    daemon.command().line("rm b --keep 7d").succeeds();
    for line in ["df", "df -v"] {
        let text = daemon.command().line(line).succeeds().text();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let total = text.lines().find(|line| line.starts_with("total")).unwrap();
        let shown: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(shown.len(), 3, "{text}");
        for part in ["c:latest", "shared", "trash", "records", "quota   none", "min_free"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let text = daemon.command().line("df -v").succeeds().text();
    assert!(text.contains("UNIQUE") && text.contains("LAST OPENED"), "{text}");
    let usage = rows(&daemon);
    let sizes: Vec<u64> = usage.rows.iter().map(|row| row.bytes).collect();
    assert_eq!(sizes.iter().sum::<u64>(), usage.disk_bytes);
}

/// The same rows without a daemon, where the index is in memory only.
#[test]
fn command_without_a_daemon_reports_the_same_rows() {
    let mut daemon = TestDaemon::start_on_disk();
    import(&daemon, &ModelFile::dense(1), "m");
    let served = rows(&daemon);
    daemon.kill();
    let embedded = check_rows(daemon.root(), || {
        let json = daemon.embedded().line("df --json").succeeds().json();
        serde_json::from_value::<DiskUsage>(json)
    });
    let of = |usage: &DiskUsage| row(usage, UsageKind::Model).clone();
    assert_eq!(of(&served), of(&embedded));
}
