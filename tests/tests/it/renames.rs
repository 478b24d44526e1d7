//! File systems that lack `RENAME_NOREPLACE`, such as NFS, and those that lack hard links too. `strace` makes the calls
//! fail as these do.

use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs;
use blobd_tests::store_dir::{check_blobs, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

/// A store on which system calls fail.
struct Fixture {
    blobd: Blobd,
    file: PathBuf,
    folder: TempDir,
}

impl Fixture {
    /// `None` if no process can be traced.
    fn new() -> Option<Self> {
        let traced = Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
        if !traced.is_ok_and(|run| run.status.success()) {
            skipped("strace is missing, or processes cannot be traced here");
            return None;
        }
        let folder = tmpfs_directory();
        let file = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
        Some(Self { blobd: Blobd::at_root(&folder.path().join("store")), file, folder })
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Runs a command with these faults, in the syntax of `strace --inject`. The tracer is not its parent, so that a
    /// signal ends it as if it were not traced.
    fn with_faults(&self, faults: &[&str], arguments: &[&str]) -> Run {
        let mut command = Command::new("strace");
        command.args(["-D", "-f", "-o"]).arg(self.folder.path().join("strace.log"));
        for fault in faults {
            command.args(["-e", &format!("inject={fault}")]);
        }
        command.arg(programs::blobd()).args(arguments);
        self.blobd.prepare(&mut command);
        command::run(&mut command)
    }

    fn import(&self, faults: &[&str], name: &str) -> Run {
        self.with_faults(faults, &["import", self.file.to_str().unwrap(), "--name", name, "--json"])
    }
}

fn exported(fixture: &Fixture, name: &str) -> String {
    sha256(&fixture.blobd.run(["export", name, "-o", "-"]).succeeds().stdout)
}

fn has_one_name(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    names(directory).iter().all(|name| directory.join(name).metadata().unwrap().nlink() == 1)
}

const ERRORS: [&str; 3] = ["EINVAL", "ENOSYS", "EOPNOTSUPP"];

#[test]
fn store_works_on_a_file_system_that_cannot_rename_without_replacing() {
    for error in ERRORS {
        let Some(fixture) = Fixture::new() else { return };
        let faults = [&*format!("renameat2:error={error}")];
        for name in ["m", "n"] {
            fixture.import(&faults, name).succeeds();
        }
        fixture.with_faults(&faults, &["rm", "n"]).succeeds();
        fixture.with_faults(&faults, &["verify"]).succeeds();
        check_blobs(&fixture.root());
        assert!(has_one_name(&fixture.root().join("blobs")), "{error}");
        assert_eq!(staged(&fixture.root()), [""; 0]);
        assert_eq!(exported(&fixture, "m"), sha256(&std::fs::read(&fixture.file).unwrap()));
        let report = fixture.with_faults(&faults, &["doctor", "--json"]).json();
        let checks = report["checks"].as_array().unwrap();
        let renames = checks.iter().find(|check| check["name"] == "renames").unwrap();
        assert_eq!(renames["status"], "ok", "{renames}");
    }
}

#[test]
fn kill_between_the_link_and_the_removal_of_the_old_name_damages_nothing() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.blobd.line("ls").succeeds();
    let mut kills = 0;
    for number in 1.. {
        let kill = format!("unlinkat:signal=KILL:when={number}");
        let run = fixture.import(&["renameat2:error=EINVAL", &kill], "m");
        if run.code == 0 {
            break;
        }
        kills += 1;
        assert_eq!(run.code, -1, "{}", run.stderr);
        // Opens the store, which removes what the killed process has left.
        let models = fixture.blobd.line("ls --json").succeeds().json()["models"].as_array().unwrap().len();
        assert_eq!(staged(&fixture.root()), [""; 0]);
        assert!(has_one_name(&fixture.root().join("blobs")), "after call {number}");
        check_blobs(&fixture.root());
        if models > 0 {
            fixture.blobd.line("rm m").succeeds();
        }
        fixture.blobd.line("gc").succeeds();
    }
    assert!(kills > 2, "a link was followed by a removal: {kills}");
    assert_eq!(exported(&fixture, "m"), sha256(&std::fs::read(&fixture.file).unwrap()));
}

#[test]
fn file_system_with_neither_is_refused_before_a_store_is_created() {
    let Some(fixture) = Fixture::new() else { return };
    let faults = ["renameat2:error=EINVAL", "linkat:error=EPERM"];
    let error = fixture.with_faults(&faults, &["ls", "--json"]).exits_with(1).error();
    assert!(error.message.contains("RENAME_NOREPLACE") && error.message.contains("hard links"), "{error}");
    assert!(error.hint.unwrap().contains("ext4"));
    assert!(!fixture.root().join("store.json").exists() && !fixture.root().join("store.json.new").exists());
    fixture.blobd.line("ls").succeeds();
    let error = fixture.import(&faults, "m").exits_with(1).error();
    assert!(error.message.contains("RENAME_NOREPLACE"), "a store that was moved there: {error}");
    let report = fixture.with_faults(&faults, &["doctor", "--json"]).json();
    let checks = report["checks"].as_array().unwrap();
    let renames = checks.iter().find(|check| check["name"] == "renames").unwrap();
    assert_eq!(renames["status"], "failure", "{renames}");
    assert_eq!(staged(&fixture.root()), [""; 0]);
}

#[test]
fn export_replaces_no_file_on_a_file_system_without_the_flag() {
    let Some(fixture) = Fixture::new() else { return };
    fixture.import(&[], "m").succeeds();
    // Without a file that has no name, the export has a temporary one.
    let target = fixture.folder.path().join("out.gguf");
    let words = ["export", "m", "-o", target.to_str().unwrap()];
    fixture.with_faults(&["renameat2:error=EINVAL"], &words).succeeds();
    assert_eq!(sha256(&std::fs::read(&target).unwrap()), exported(&fixture, "m"));
    std::fs::write(&target, "somebody else's").unwrap();
    assert_ne!(fixture.with_faults(&["renameat2:error=EINVAL"], &words).code, 0);
    assert_eq!(std::fs::read(&target).unwrap(), b"somebody else's");
}
