//! Stores with special files: symbolic links to other places or to nothing, FIFOs that block when they are
//! opened, missing directories. Nothing outside the store is read or changed, nothing inside is lost, and
//! nothing hangs. A read-only store can be read.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_client::protocol::error::ErrorCode;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{Blobd, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{names, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;
use rustix::fs::{CWD, FileType, FlockOperation, Mode, flock, mkfifoat, mknodat};
use tempfile::TempDir;

/// The name of a special file, and how to create it.
type Substitute = (&'static str, fn(&Path));

const TAG: &str = "manifests/registry.ollama.ai/library/m/latest";

/// A store with two models and one in the trash, and a directory outside it.
struct Fixture {
    folder: TempDir,
    blobd: Blobd,
}

impl Fixture {
    fn new() -> Self {
        let folder = tmpfs_directory();
        let blobd = Blobd::at_root(&folder.path().join("store"));
        let fixture = Self { folder, blobd };
        for (seed, name) in [(1, "m"), (2, "n"), (3, "t")] {
            let path = ModelFile::dense(seed).write_to(fixture.folder.path(), "model.gguf");
            fixture.blobd.run(["import", "--name", name, path.to_str().unwrap()]).succeeds();
        }
        fixture.blobd.line("rm --keep 7d t").succeeds();
        fs::create_dir(fixture.outside()).unwrap();
        fs::write(fixture.outside().join("precious"), "years of work").unwrap();
        fixture
    }

    fn store(&self, name: &str) -> PathBuf {
        self.folder.path().join("store").join(name)
    }

    fn outside(&self) -> PathBuf {
        self.folder.path().join("outside")
    }

    /// The only file in a directory of the store.
    fn only_in(&self, directory: &str) -> PathBuf {
        let [name] = names(&self.store(directory)).try_into().unwrap();
        self.store(directory).join(name)
    }

    fn recipe(&self) -> PathBuf {
        let name = names(&self.store("recipes")).remove(0);
        self.store("recipes").join(name)
    }

    /// Replaces a file or directory, runs `look`, and restores the original.
    fn with(&self, path: &Path, substitute: impl Fn(&Path), look: impl FnOnce(&Self)) {
        let hidden = self.folder.path().join("hidden");
        fs::create_dir_all(&hidden).unwrap();
        let hidden = hidden.join(path.file_name().unwrap());
        fs::rename(path, &hidden).unwrap();
        substitute(path);
        look(self);
        if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
            fs::remove_dir_all(path).unwrap();
        } else {
            let _ = fs::remove_file(path);
        }
        fs::rename(&hidden, path).unwrap();
    }
}

fn dangles(path: &Path) {
    symlink("/nowhere/at/all", path).unwrap();
}

fn fifo(path: &Path) {
    mkfifoat(CWD, path, Mode::from_raw_mode(0o600)).unwrap();
}

#[test]
fn staging_that_is_a_link_is_not_emptied() {
    let fixture = Fixture::new();
    let before = (snapshot(&fixture.store("blobs")), snapshot(&fixture.outside()));
    for target in [fixture.store("blobs"), fixture.outside()] {
        fixture.with(
            &fixture.store("staging"),
            |path| symlink(&target, path).unwrap(),
            |fixture| {
                fixture.blobd.line("ls").succeeds();
                let error = fixture.blobd.line("gc --json").exits_with(5).error();
                assert!(error.message.contains("found a symbolic link"), "{error}");
            },
        );
    }
    assert_eq!((snapshot(&fixture.store("blobs")), snapshot(&fixture.outside())), before);
}

#[test]
fn link_in_staging_is_removed_without_its_target() {
    let fixture = Fixture::new();
    let before = (snapshot(&fixture.store("blobs")), snapshot(&fixture.outside()));
    fs::create_dir(fixture.store("staging/1-0")).unwrap();
    for name in ["staging/link", "staging/1-0/link"] {
        symlink(fixture.outside(), fixture.store(name)).unwrap();
    }
    symlink(fixture.store("blobs"), fixture.store("staging/blobs")).unwrap();
    fifo(&fixture.store("staging/1-0/fifo"));
    fixture.blobd.line("ls").succeeds();
    assert_eq!(names(&fixture.store("staging")), [""; 0]);
    assert_eq!((snapshot(&fixture.store("blobs")), snapshot(&fixture.outside())), before);
}

#[test]
fn collection_refuses_if_a_record_cannot_be_read() {
    let fixture = Fixture::new();
    let before = snapshot(&fixture.store("blobs"));
    let records = [
        fixture.store(TAG),
        fixture.only_in("trash"),
        fixture.recipe(),
        fixture.store("manifests"),
        fixture.store("trash"),
    ];
    let more =
        ["recipes", "blobs", "manifests/registry.ollama.ai", "partial"].map(|name| fixture.store(name));
    fs::create_dir_all(fixture.store("partial")).unwrap();
    let substitutes: [Substitute; 3] =
        [("dangling link", dangles), ("FIFO", fifo), ("directory", |path| fs::create_dir(path).unwrap())];
    for path in records.iter().chain(&more) {
        for (what, substitute) in substitutes {
            let is_file =
                path.ends_with("latest") || path.extension().is_some_and(|extension| extension == "json");
            if what == "directory" && !is_file {
                continue;
            }
            fixture.with(path, substitute, |fixture| {
                let run = fixture.blobd.line("gc --json");
                assert_eq!(run.code, 5, "{} as {what}: {}", path.display(), run.text());
                let (error, name) = (run.error(), path.file_name().unwrap().to_str().unwrap());
                assert!(error.message.contains(name), "{} as {what}: {error}", path.display());
            });
        }
    }
    assert_eq!(snapshot(&fixture.store("blobs")), before);
    fixture.blobd.line("gc").succeeds();
    assert_eq!(snapshot(&fixture.store("blobs")), before);
}

#[test]
fn collection_refuses_if_a_directory_is_missing() {
    let fixture = Fixture::new();
    let directories = ["manifests", "trash", "recipes", "blobs"];
    let content = |fixture: &Fixture| directories.map(|name| snapshot(&fixture.store(name)));
    let before = content(&fixture);
    for name in directories {
        fixture.with(
            &fixture.store(name),
            |_| (),
            |fixture| {
                for line in ["gc --json", "gc --json --dry-run"] {
                    let error = fixture.blobd.line(line).exits_with(5).error();
                    assert!(error.message.contains(&format!("{name}: missing")), "{line}: {error}");
                }
                let doctor = fixture.blobd.line("doctor --json");
                assert!(doctor.text().contains(&format!("{name}: missing")), "{}", doctor.text());
                assert!(!fixture.store(name).exists(), "{name} is not created again");
            },
        );
    }
    assert_eq!(content(&fixture), before);
    fixture.blobd.line("gc").succeeds();
}

#[test]
fn tag_that_is_a_link_is_listed_as_damaged() {
    let fixture = Fixture::new();
    fixture.with(&fixture.store(TAG), dangles, |fixture| {
        let models = fixture.blobd.line("ls --json").succeeds().json();
        let damage = models["models"].as_array().unwrap().iter().find(|model| model["name"] == "m:latest");
        let damage = damage.and_then(|model| model["damage"].as_str()).unwrap_or_default();
        assert!(damage.contains("symbolic link"), "{models}");
        fixture.blobd.line("export n -o /dev/null").succeeds();
        fixture.blobd.line("verify").exits_with(5);
    });
}

/// For every kind of record, whether it is read, created or removed.
#[test]
fn special_file_in_place_of_a_record_is_reported_with_its_path() {
    let fixture = Fixture::new();
    fixture.blobd.line("pin m").succeeds();
    let blob = fixture.store("blobs").join(names(&fixture.store("blobs")).remove(0));
    let pin = fixture.store("pins").join(TAG.strip_prefix("manifests/").unwrap());
    let lines = [
        (fixture.store(TAG), ["show m", "tag m new --force", "history m"].as_slice()),
        (fixture.recipe(), &["show m", "show n"]),
        (pin, &["pin m"]),
        (fixture.only_in("trash"), &["undelete t"]),
        (blob, &["tag m new --force", "tag n other --force"]),
        (fixture.store("store.json"), &["ls"]),
    ];
    let substitutes: [Substitute; 4] = [
        ("a directory", |path| fs::create_dir(path).unwrap()),
        ("a FIFO", fifo),
        ("a socket", |path| mknodat(CWD, path, FileType::Socket, Mode::from_raw_mode(0o600), 0).unwrap()),
        ("a symbolic link", |path| symlink(path.file_name().unwrap(), path).unwrap()),
    ];
    for ((path, lines), (what, substitute)) in
        lines.iter().flat_map(|line| substitutes.iter().map(move |substitute| (line, substitute)))
    {
        fixture.with(path, substitute, |fixture| {
            let errors = lines.iter().map(|line| fixture.blobd.run(line.split(' ').chain(["--json"])));
            // A record of the one model or of the other.
            let failed: Vec<_> = errors.filter(|run| run.code != 0).collect();
            let _ = fixture.blobd.line("rm new other");
            assert!(!failed.is_empty(), "{}: {what}", path.display());
            for run in failed {
                let error = run.exits_with(5).error();
                let name = path.file_name().unwrap().to_str().unwrap();
                assert!(
                    error
                        .message
                        .contains(&format!("{name}: wrong type: expected a regular file, found {what}")),
                    "{error}"
                );
            }
        });
    }
}

#[test]
fn sparse_file_in_the_place_of_a_record_is_refused_without_being_read() {
    let fixture = Fixture::new();
    let sparse = |path: &Path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap();
    for (path, line, expected) in [
        (fixture.store(TAG), "show m", "expected at most 4194304 bytes"),
        (fixture.recipe(), "gc", "too long: expected at most 160 MiB, found 1.00 TiB"),
        (fixture.only_in("trash"), "undelete t", "damaged record"),
        (fixture.store("store.json"), "ls", "store.json"),
    ] {
        fixture.with(&path, sparse, |fixture| {
            let run = fixture.blobd.run(line.split(' ').chain(["--json"]));
            let error = run.error();
            assert!(error.message.contains(expected), "{}: {error}", path.display());
        });
    }
}

#[test]
fn files_of_the_store_that_are_links_are_not_written_through() {
    let fixture = Fixture::new();
    let outside = snapshot(&fixture.outside());
    fs::create_dir_all(fixture.store("index")).unwrap();
    let precious = fixture.outside().join("precious");
    let names = ["lock", "reserve", "scrub.json", "scrub.json.new", "index/CLEAN.new", "index/CLEAN"];
    let ways: [fn(&Path, &Path); 2] =
        [|to, path| symlink(to, path).unwrap(), |to, path| fs::hard_link(to, path).unwrap()];
    for way in ways {
        for name in names {
            let path = fixture.store(name);
            let had = fs::read(&path).ok();
            let _ = fs::remove_file(&path);
            way(&precious, &path);
            for line in ["ls", "gc", "rm nothing"] {
                let _ = fixture.blobd.line(line);
            }
            if name != "lock" {
                let mut daemon = TestDaemon::start_at(&fixture.store(""), None);
                daemon.stop();
            }
            assert_eq!(snapshot(&fixture.outside()), outside, "{name}");
            let _ = fs::remove_file(&path);
            had.into_iter().for_each(|content| fs::write(&path, content).unwrap());
        }
    }
}

#[test]
fn fifo_in_place_of_a_file_is_an_error_without_a_hang() {
    let fixture = Fixture::new();
    let blob = fixture.store("blobs").join(names(&fixture.store("blobs")).remove(0));
    let files =
        [fixture.store(TAG), fixture.recipe(), blob, fixture.store("store.json"), fixture.store("lock")];
    for path in &files {
        fixture.with(path, fifo, |fixture| {
            for line in ["ls", "gc --dry-run", "doctor", "show m", "verify", "export m -o /dev/null"] {
                // A shorter time limit than that of a test.
                let mut command = Command::new("timeout");
                command.arg("60").arg(blobd_tests::programs::blobd()).args(line.split_whitespace());
                fixture.blobd.prepare(&mut command);
                let code = run(&mut command).code;
                assert_ne!(code, 124, "{}: {line} hangs", path.display());
            }
        });
        let quarantined = fixture.store("quarantine");
        assert!(fs::read_dir(&quarantined).map_or(0, Iterator::count) <= 1, "only the FIFO is quarantined");
    }
    for name in ["m", "n"] {
        fixture.blobd.run(["export", name, "-o", "/dev/null"]).succeeds();
    }
}

#[test]
fn daemon_stops_with_fifos_in_its_store() {
    let fixture = Fixture::new();
    let blob = fixture.store("blobs").join(names(&fixture.store("blobs")).remove(0));
    fixture.with(&blob, fifo, |fixture| {
        fixture.with(&fixture.recipe(), fifo, |fixture| {
            let mut daemon = TestDaemon::start_at(&fixture.store(""), None);
            let _ = daemon.command().line("ls").succeeds();
            let _ = daemon.command().line("doctor");
            assert!(daemon.stop_within(std::time::Duration::from_secs(60)).is_some());
        });
    });
}

/// Each command mounts the store read-only in its own namespace.
#[test]
fn store_on_a_read_only_mount_is_listed_verified_exported_and_not_changed() {
    let fixture = Fixture::new();
    let root = fixture.store("");
    let script = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let wrapper = ["unshare", "--mount", "sh", "-c", script, root.to_str().unwrap()];
    let read_only = |line: &str| {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(blobd_tests::programs::blobd()).args(line.split_whitespace());
        fixture.blobd.prepare(&mut command);
        run(&mut command)
    };
    if read_only("--version").code != 0 {
        skipped("nothing can be mounted here");
        return;
    }
    let content =
        || ["manifests", "trash", "recipes", "blobs", "origins"].map(|name| snapshot(&root.join(name)));
    let before = content();
    for without_lock in [false, true] {
        if without_lock {
            fs::remove_file(fixture.store("lock")).unwrap();
        }
        for line in ["ls", "show m", "verify", "df", "doctor --json", "gc --dry-run", "export m -o /dev/null"]
        {
            let run = read_only(line);
            assert!(run.code == 0 || line.starts_with("doctor"), "{line}: {}", run.stderr);
        }
        assert!(read_only("ls --json").json()["read_only"].as_str().unwrap().contains("read-only"));
        for line in ["rm m --json", "tag m o --json", "pin m --json", "rm --keep 1d m --json"] {
            let error = read_only(line).exits_with(1).error();
            assert_eq!(error.code, ErrorCode::ReadOnly, "{line}: {error}");
            assert!(error.message.contains("store is read-only"), "{line}: {error}");
        }
    }
    fs::write(fixture.store("lock"), "").unwrap();
    assert_eq!(content(), before);
    let daemon = TestDaemon::start_at_under(&wrapper, &root, None);
    assert_eq!(daemon.client().models().unwrap().models.len(), 2);
    let metrics = http::get(&daemon.socket(), "/v1/metrics").body;
    assert!(metrics.lines().any(|line| line == "blobd_store_writable 0"), "{metrics}");
    assert!(daemon.command().line("export m -o -").succeeds().stdout == ModelFile::dense(1).bytes());
}

#[test]
fn store_without_permission_to_write_is_read() {
    if rustix::process::geteuid().is_root() {
        skipped("root may write anywhere");
        return;
    }
    let fixture = Fixture::new();
    let modes = |directory, lock| {
        fs::set_permissions(fixture.store("lock"), fs::Permissions::from_mode(lock)).unwrap();
        fs::set_permissions(fixture.store(""), fs::Permissions::from_mode(directory)).unwrap();
    };
    for lock in [0o400, 0o000] {
        modes(0o500, lock);
        fixture.blobd.line("ls").succeeds();
        fixture.blobd.line("export m -o /dev/null").succeeds();
        let error = fixture.blobd.line("rm m --json").exits_with(1).error();
        assert_eq!(error.code, ErrorCode::ReadOnly, "{error}");
        modes(0o700, 0o600);
    }
    fixture.blobd.line("rm m").succeeds();
}

#[test]
fn unknown_holder_of_the_lock_is_reported_as_another_process() {
    let fixture = Fixture::new();
    for record in ["", r#"{"pid":47"#] {
        fs::write(fixture.store("lock"), record).unwrap();
        let lock = fs::File::open(fixture.store("lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let error = fixture.blobd.line("ls --json").exits_with(4).error();
        assert!(error.message.ends_with("held by another process"), "{error}");
    }
}
