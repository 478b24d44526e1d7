//! Compiles small C programs if a compiler is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;

/// Compiles a C file of this repository into `folder`, with warnings as errors and these arguments. Without a
/// C compiler, prints that and returns `None`; the test is then skipped.
///
/// # Panics
/// When the file does not compile.
#[must_use]
pub fn compile(source: &str, folder: &Path, arguments: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(source);
    let program = folder.join(source.file_stem().expect("a file's name"));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(&source);
    match cc.args(arguments).output() {
        Err(error) => {
            skipped(format_args!("no C compiler `cc` ({error})"));
            None
        }
        Ok(output) => {
            let problem = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {problem}", source.display());
            Some(program)
        }
    }
}

/// Whether a program can be run with `--version`; prints that it is missing if not.
#[must_use]
pub fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skipped(format_args!("no {program}"));
    }
    found
}
