//! Finds the programs under test, which are beside the test's own executable.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

use blobd_fixtures::skipped::skipped;

/// The `blobd` binary.
///
/// `cargo test --workspace` builds it, because its package has integration tests;
/// `cargo test -p blobd-tests` does not, so a binary that is missing or older than its sources is
/// built here, once.
///
/// # Panics
/// When there is none and it cannot be built.
pub fn blobd() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = profile_dir().join("blobd");
        if !is_fresh(&path) {
            build_blobd();
        }
        assert!(path.is_file(), "{}: not built", path.display());
        path
    })
}

/// Python in a new virtual environment with these packages from PyPI. `None`, with the reason recorded as that of a skipped
/// test, where they cannot be installed.
#[must_use]
pub fn virtual_environment(scratch: &Path, packages: &[&str]) -> Option<PathBuf> {
    let environment = scratch.join("venv");
    let python = environment.join("bin/python3");
    let mut create = Command::new("python3");
    create.args(["-m", "venv"]).arg(&environment);
    let mut install = Command::new(&python);
    // A network that drops packets would make pip wait for minutes.
    install.args(["-m", "pip", "install", "--quiet", "--timeout", "5", "--retries", "0"]).args(packages);
    for mut step in [create, install] {
        let reason = match step.output() {
            Ok(output) if output.status.success() => continue,
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        skipped(format_args!("{} cannot be installed: {}", packages.join(", "), reason.trim()));
        return None;
    }
    Some(python)
}

/// The client program of this package.
#[must_use]
pub fn test_client() -> PathBuf {
    profile_dir().join("test-client")
}

/// Whether a program could not be started because it is not found, or because this user may not access or run
/// it.
#[must_use]
pub fn is_unavailable(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
}

/// The directory of the profile, such as `target/debug`. Tests run from `deps` or `examples` in it.
fn profile_dir() -> PathBuf {
    let executable = env::current_exe().expect("a process knows its executable");
    let directory = executable.parent().expect("an executable lies in a directory");
    let is_below = ["deps", "examples"].iter().any(|name| directory.ends_with(name));
    if is_below { directory.parent().unwrap_or(directory) } else { directory }.to_path_buf()
}

/// Whether no source of the binary is newer than it. Cargo lists the sources beside the binary as a makefile
/// rule.
fn is_fresh(binary: &Path) -> bool {
    let Some(built) = modified(binary) else { return false };
    let Ok(rule) = fs::read_to_string(binary.with_extension("d")) else { return false };
    let sources = rule.split_once(": ").map_or("", |(_binary, sources)| sources);
    // A space within a path is escaped.
    let sources = sources.trim_end().replace("\\ ", "\0");
    let is_older =
        |source: &str| modified(Path::new(&source.replace('\0', " "))).is_some_and(|newest| newest <= built);
    sources.split(' ').all(is_older)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// Writes to the terminal, also from a test whose output libtest keeps back.
fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn build_blobd() {
    tell("the blobd under test is older than its sources: running `cargo build -p blobd`, about a minute");
    let profile_dir = profile_dir();
    let name = profile_dir.file_name().and_then(|name| name.to_str()).unwrap_or("debug");
    let profile = if name == "debug" { "dev" } else { name };
    let target = profile_dir.parent().expect("a profile's directory lies in the target directory");
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo's variables for the test's package would make it rebuild some dependencies.
    let is_of_the_test = |name: &str| {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_TARGET_TMPDIR"];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_the_test)) {
        cargo.env_remove(name);
    }
    let built = cargo
        .args(["build", "--quiet", "--package", "blobd", "--bin", "blobd", "--profile", profile])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let problem = match built {
        Ok(output) if output.status.success() => return,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    // The tests run even if the sources do not compile, for instance because one is being edited.
    assert!(profile_dir.join("blobd").is_file(), "cargo build -p blobd: {problem}");
    tell(&format!("the blobd under test may be older than its sources: {problem}"));
}
