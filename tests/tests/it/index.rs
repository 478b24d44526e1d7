//! The index: with any damage to it, the daemon serves, and its numbers are those of the disk.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::thread;

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{names, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start_on_disk();
    import(&daemon, 1, "m");
    import(&daemon, 2, "n");
    daemon
}

fn import(daemon: &TestDaemon, seed: u64, name: &str) {
    let path = ModelFile::dense(seed).write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

fn index(daemon: &TestDaemon) -> PathBuf {
    daemon.root().join("index")
}

fn differences(daemon: &TestDaemon) -> u64 {
    daemon.command().line("reindex --json").succeeds().json()["differences"].as_u64().unwrap()
}

/// Asserts that `df` of the daemon equals `df` of a command that reads every file.
fn check_usage(daemon: &mut TestDaemon) {
    let served = daemon.client().disk_usage().unwrap();
    daemon.kill();
    let counted = daemon.embedded().line("df --json").succeeds().json();
    for (field, value) in [
        ("physical_bytes", served.physical_bytes),
        ("reclaimable_bytes", served.reclaimable_bytes),
        ("blob_count", served.blob_count),
        ("logical_bytes", served.logical_bytes),
        ("saved_bytes", served.saved_bytes),
    ] {
        assert_eq!(counted[field].as_u64(), Some(value), "{field}");
    }
    daemon.restart();
}

#[test]
fn clean_stop_leaves_an_index_that_the_next_start_loads() {
    let mut daemon = daemon();
    assert!(daemon.client().open(&"m".parse().unwrap()).is_ok());
    assert!(daemon.stop().success());
    assert!(index(&daemon).join("CLEAN").is_file());
    daemon.restart();
    eventually("the index is loaded", || daemon.log().contains("index: loaded without a rebuild"));
    assert!(!index(&daemon).join("CLEAN").exists());
    assert_eq!(differences(&daemon), 0);
    let usage = daemon.client().disk_usage().unwrap();
    assert!(usage.models.iter().any(|model| model.name == "m:latest" && model.last_opened.is_some()));
    assert!(usage.models.iter().any(|model| model.name == "n:latest" && model.last_opened.is_none()));
    check_usage(&mut daemon);
}

#[test]
fn index_is_complete_and_private_with_any_umask() {
    for umask in ["000", "022", "077"] {
        let script = format!("umask {umask}; exec \"$@\"");
        let mut daemon = TestDaemon::start_under(&["sh", "-c", &script, "sh"], tmpfs_directory());
        import(&daemon, 1, "m");
        for directory in [index(&daemon), index(&daemon).join("sled")] {
            let mode = fs::metadata(&directory).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o700, "{umask}: {}", directory.display());
        }
        assert!(daemon.stop().success(), "{umask}: {}", daemon.log());
        daemon.restart();
        eventually("the index is loaded", || daemon.log().contains("index: loaded without a rebuild"));
        assert_eq!(differences(&daemon), 0, "{umask}");
    }
}

#[test]
fn killed_daemon_rebuilds_its_index_while_it_serves() {
    let mut daemon = daemon();
    daemon.kill();
    daemon.restart();
    assert!(daemon.client().open(&"m".parse().unwrap()).is_ok());
    eventually("the index is rebuilt", || daemon.log().contains("index: complete"));
    assert!(daemon.log().contains("index: rebuilt from disk"), "{}", daemon.log());
    assert_eq!(differences(&daemon), 0);
    check_usage(&mut daemon);
}

#[test]
fn command_that_changes_the_store_without_a_daemon_makes_the_next_one_rebuild() {
    let mut daemon = daemon();
    assert!(daemon.stop().success());
    daemon.embedded().line("ls").succeeds();
    assert!(index(&daemon).join("CLEAN").is_file());
    daemon.embedded().line("rm n").succeeds();
    assert!(!index(&daemon).join("CLEAN").exists());
    daemon.restart();
    assert_eq!(differences(&daemon), 0);
    check_usage(&mut daemon);
}

#[test]
fn reindex_without_a_daemon_leaves_an_index_for_the_next_one() {
    let mut daemon = daemon();
    daemon.kill();
    daemon.embedded().line("reindex").succeeds();
    assert!(index(&daemon).join("CLEAN").is_file());
    daemon.restart();
    eventually("the index is loaded", || daemon.log().contains("index: loaded without a rebuild"));
}

#[test]
fn daemon_serves_with_any_damage_to_its_index() {
    let mut daemon = daemon();
    let blobs = snapshot(&daemon.root().join("blobs"));
    for damage in 0..4 {
        assert!(daemon.stop().success());
        let index = index(&daemon);
        match damage {
            0 => fs::set_permissions(&index, fs::Permissions::from_mode(0o000)).unwrap(),
            1 => fs::set_permissions(&index, fs::Permissions::from_mode(0o500)).unwrap(),
            2 => {
                for name in names(&index.join("sled")) {
                    let path = index.join("sled").join(name);
                    if path.is_file() {
                        let length = usize::try_from(path.metadata().unwrap().len()).unwrap();
                        fs::write(&path, vec![0xa5; length]).unwrap();
                    }
                }
            }
            _ => {
                fs::remove_dir_all(&index).unwrap();
                fs::write(&index, "a file").unwrap();
            }
        }
        daemon.restart();
        assert!(daemon.client().open(&"m".parse().unwrap()).is_ok());
        assert_eq!(daemon.client().disk_usage().unwrap().models.len(), 2);
        assert_eq!(differences(&daemon), 0, "damage {damage}: {}", daemon.log());
        assert_eq!(snapshot(&daemon.root().join("blobs")), blobs);
    }
    let aside = names(daemon.root()).into_iter().filter(|name| name.starts_with("index.bad-")).count();
    assert!(aside <= 1, "{:?}", names(daemon.root()));
}

#[test]
fn index_contains_imports_and_removals_during_its_rebuild() {
    let mut daemon = daemon();
    daemon.kill();
    daemon.restart();
    thread::scope(|scope| {
        let daemon = &daemon;
        for importer in 0..3u64 {
            scope.spawn(move || {
                for round in 0..3 {
                    let name = format!("x{importer}-{round}");
                    import(daemon, 10 + importer * 10 + round, &name);
                    if round == 1 {
                        daemon.command().line(&format!("rm {name}")).succeeds();
                    }
                }
            });
        }
        scope.spawn(|| (0..5).for_each(|_| assert!(daemon.client().reindex().is_ok())));
    });
    assert_eq!(differences(&daemon), 0);
    check_usage(&mut daemon);
}

#[test]
fn reclaimable_is_what_gc_would_free() {
    let mut daemon = daemon();
    // Recorded as models that no longer have a name.
    std::fs::remove_dir_all(daemon.root().join("manifests/registry.ollama.ai/library/n")).unwrap();
    let planned = daemon.command().line("gc --dry-run --json").json()["freed_bytes"].as_u64().unwrap();
    assert!(planned > 0);
    assert_eq!(daemon.client().disk_usage().unwrap().reclaimable_bytes, planned);
    let before = daemon.client().disk_usage().unwrap().physical_bytes;
    daemon.command().line("gc").succeeds();
    let after = daemon.client().disk_usage().unwrap();
    assert_eq!((before - after.physical_bytes, after.reclaimable_bytes), (planned, 0));
    check_usage(&mut daemon);
}

#[test]
fn manual_changes_of_tags_are_listed_at_once() {
    let daemon = daemon();
    let listed = || -> Vec<String> {
        daemon.client().models().unwrap().models.into_iter().map(|model| model.name).collect()
    };
    let tags = daemon.root().join("manifests/registry.ollama.ai/library");
    for round in 0..20 {
        let copy = tags.join(format!("copy{round}"));
        fs::create_dir(&copy).unwrap();
        fs::copy(tags.join("m/latest"), copy.join("latest")).unwrap();
        assert!(listed().contains(&format!("copy{round}:latest")));
        fs::write(copy.join("latest"), "damaged").unwrap();
        let list = daemon.client().models().unwrap().models;
        let model = list.iter().find(|model| model.name == format!("copy{round}:latest")).unwrap();
        assert!(model.damage.is_some());
        fs::remove_file(copy.join("latest")).unwrap();
        assert_eq!(listed(), ["m:latest", "n:latest"]);
    }
}

#[test]
fn reindex_over_get_is_refused() {
    let daemon = daemon();
    let response = blobd_tests::http::get(&daemon.socket(), "/v1/reindex");
    assert_eq!(response.json()["error"]["code"], serde_json::to_value(ErrorCode::InvalidRequest).unwrap());
}
