//! The units of systemd are valid, and take as many rights away as documented.
//!
//! `just systemd` shows that they work.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::programs;
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

/// The units of `systemd/NAME`, with the path of the binary under test: systemd checks that it exists.
struct Units {
    folder: TempDir,
    paths: Vec<PathBuf>,
}

impl Units {
    fn of(name: &str) -> Self {
        let folder = tmpfs_directory();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let binary = programs::blobd().display().to_string();
        let copy = |source: PathBuf| {
            let path = folder.path().join(source.file_name().unwrap());
            let text = fs::read_to_string(source).unwrap();
            fs::write(&path, text.replace("/usr/bin/blobd", &binary)).unwrap();
            path
        };
        let mut paths: Vec<_> =
            files(&repository().join("systemd").join(name)).into_iter().map(copy).collect();
        paths.sort();
        Self { folder, paths }
    }

    /// What `systemd-analyze` prints and its success; `None`, with a message, if it is not installed.
    fn analyze(&self, arguments: &[&str], units: &[PathBuf]) -> Option<(String, bool)> {
        let mut command = Command::new("systemd-analyze");
        command.args(arguments).args(units).env("XDG_RUNTIME_DIR", self.folder.path());
        // The final colon adds the system's units.
        command.env("SYSTEMD_UNIT_PATH", format!("{}:", self.folder.path().display()));
        match command.output() {
            Ok(output) => {
                let text = [output.stdout, output.stderr].concat();
                Some((String::from_utf8_lossy(&text).into_owned(), output.status.success()))
            }
            Err(error) => {
                skipped(format_args!("systemd-analyze cannot be run: {error}"));
                None
            }
        }
    }

    fn are_valid(&self, arguments: &[&str]) {
        if let Some((text, success)) = self.analyze(arguments, &self.paths) {
            assert!(success && text.is_empty(), "{text}");
        }
    }
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn units_are_valid() {
    Units::of("system").are_valid(&["verify", "--man=no"]);
    Units::of("user").are_valid(&["verify", "--man=no", "--user"]);
}

#[test]
fn system_services_have_a_low_exposure_level() {
    let units = Units::of("system");
    for service in units.paths.iter().filter(|path| path.extension().is_some_and(|kind| kind == "service")) {
        // Tenths: 0 is safe, 100 is a service without any restriction.
        let arguments = ["security", "--offline=true", "--no-pager", "--threshold=20"];
        let Some((text, success)) = units.analyze(&arguments, std::slice::from_ref(service)) else { return };
        if text.contains("unrecognized option") {
            skipped("this systemd-analyze cannot examine files");
            return;
        }
        assert!(success, "{}: {text}", service.display());
    }
}

/// Whoever reads the unit finds the reason for each line that takes a right away.
#[test]
fn every_restriction_of_the_daemon_is_explained() {
    let unit = fs::read_to_string(repository().join("systemd/system/blobd.service")).unwrap();
    let explanations = fs::read_to_string(repository().join("docs/SECURITY.md")).unwrap();
    let restrictions = unit.lines().skip_while(|line| !line.starts_with("CapabilityBoundingSet"));
    let names = restrictions.take_while(|line| !line.is_empty()).filter_map(|line| line.split_once('='));
    let mut count = 0;
    for (name, _) in names {
        assert!(explanations.contains(&format!("`{name}=")), "{name}");
        count += 1;
    }
    assert!(count > 20, "{count}");
}

/// System calls of the daemon that some version of systemd has in no group, or in one that the unit takes away.
const UNUSUAL_CALLS: [&str; 14] = [
    "copy_file_range",
    "fadvise64",
    "fallocate",
    "fstatfs",
    "getsockopt",
    "madvise",
    "memfd_create",
    "mincore",
    "prctl",
    "prlimit64",
    "renameat2",
    "statx",
    "sync_file_range",
    "syncfs",
];

/// The calls that `SystemCallFilter=` lines allow, in their order; groups as this systemd defines them.
fn allowed_calls(unit: &str, groups: &str) -> BTreeSet<String> {
    let members = |name: &str| -> Vec<String> {
        let mut lines = groups.lines().skip_while(|line| *line != name).skip(1);
        let lines = lines.by_ref().take_while(|line| line.starts_with(' '));
        lines.map(str::trim).filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    };
    let expand = |word: &str| {
        let (mut open, mut calls) = (vec![word.to_owned()], BTreeSet::new());
        while let Some(word) = open.pop() {
            if word.starts_with('@') {
                open.extend(members(&word));
            } else {
                calls.insert(word);
            }
        }
        calls
    };
    let mut allowed = BTreeSet::new();
    for words in unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        let (is_denied, words) = words.strip_prefix('~').map_or((false, words), |words| (true, words));
        for call in words.split_whitespace().flat_map(expand) {
            if is_denied {
                allowed.remove(&call);
            } else {
                allowed.insert(call);
            }
        }
    }
    allowed
}

/// `ps` did not show how much of a model is in memory, because the filter refused `mincore`.
#[test]
fn system_call_filter_allows_the_calls_of_the_daemon() {
    let output = Command::new("systemd-analyze").args(["syscall-filter", "--no-pager"]).output();
    let Ok(output) = output.map_err(|error| skipped(format_args!("systemd-analyze cannot be run: {error}")))
    else {
        return;
    };
    let groups = String::from_utf8_lossy(&output.stdout);
    let unit = fs::read_to_string(repository().join("systemd/system/blobd.service")).unwrap();
    let allowed = allowed_calls(&unit, &groups);
    assert!(allowed.len() > 200 && !allowed.contains("mount") && !allowed.contains("setuid"), "{allowed:?}");
    let missing: Vec<_> = UNUSUAL_CALLS.iter().filter(|call| !allowed.contains(**call)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn installed_paths_are_those_of_the_destination() {
    let folder = tmpfs_directory();
    let mut install = Command::new(repository().join("packaging/install"));
    install.env("DESTDIR", folder.path()).env("PREFIX", "/usr/local").env("HOME", folder.path());
    install.env("BUILD", programs::blobd().parent().unwrap());
    let output = install.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
    let unit = read("usr/local/lib/systemd/system/blobd.service");
    assert!(unit.contains("ExecStart=/usr/local/bin/blobd serve\n"), "{unit}");
    assert!(read("usr/local/share/man/man1/blobd-pull.1").contains(".TH BLOBD-PULL"));
    assert!(read("usr/local/share/man/man5/blobd.toml.5").contains(".TH BLOBD.TOML 5"));
    assert!(read("usr/local/share/bash-completion/completions/blobd").contains("complete -F"));
    assert!(read("etc/blobd/config.toml").lines().all(|line| line.is_empty() || line.starts_with('#')));
    let mode = fs::metadata(folder.path().join("usr/local/bin/blobd")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
}

/// The example is what an administrator edits: each of its lines must be a valid setting.
#[test]
fn configuration_of_the_package_is_valid_with_and_without_comment_signs() {
    let example = fs::read_to_string(repository().join("packaging/config.toml")).unwrap();
    let settings: String = example
        .lines()
        .filter(|line| !line.starts_with("# "))
        .map(|line| line.trim_start_matches('#').to_owned() + "\n")
        .collect();
    let folder = tmpfs_directory();
    for text in [&example, &settings] {
        let config = folder.path().join("config.toml");
        fs::write(&config, text).unwrap();
        let root = folder.path().join("store");
        let blobd = blobd_tests::command::Blobd::at_root(&root).configured_by(&config);
        blobd.line("ls").succeeds();
    }
}
