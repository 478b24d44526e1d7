//! Compiles the library that `blobd exec` preloads (`client/preload`). It is embedded in the binary, so that
//! no separate file can be missing. It has no dependencies, so one call of `rustc` builds it.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    const SOURCES: &str = "../../../client/preload/src";
    println!("cargo::rerun-if-changed={SOURCES}");
    println!("cargo::rerun-if-changed=build.rs");
    let library = PathBuf::from(variable("OUT_DIR")?).join("libblobd_preload.so");
    let Some(target) = target_with_glibc(&variable("TARGET")?) else { return Ok(fs::write(library, [])?) };
    let is_static = target != variable("TARGET")?;
    let mut rustc = Command::new(variable("RUSTC")?);
    rustc.args(["--crate-name", "blobd_preload", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.args(["-Cpanic=abort", "-Copt-level=2", "-Cstrip=symbols", "--cap-lints", "allow"]);
    rustc.args(["--target", &target]);
    // For a static binary, cargo's linker is that of musl.
    let linker = if is_static { "BLOBD_PRELOAD_LINKER" } else { "RUSTC_LINKER" };
    println!("cargo::rerun-if-env-changed=BLOBD_PRELOAD_LINKER");
    if let Ok(linker) = env::var(linker) {
        rustc.arg(format!("-Clinker={linker}"));
    }
    let status = rustc.arg("-o").arg(&library).arg(format!("{SOURCES}/lib.rs")).status()?;
    match (status.success(), is_static) {
        (true, _) => Ok(()),
        (false, true) => {
            println!("cargo::warning=`blobd exec` will not work: it needs the standard library of {target}");
            Ok(fs::write(library, [])?)
        }
        (false, false) => Err(format!("{SOURCES}: {status}").into()),
    }
}

/// The target whose programs can load the library. Preloading requires glibc. A static binary, made for musl, can
/// preload a library into programs that use glibc.
fn target_with_glibc(target: &str) -> Option<String> {
    let is_linux = target.contains("-linux-");
    (is_linux && (target.ends_with("-gnu") || target.ends_with("-musl")))
        .then(|| target.replace("-musl", "-gnu"))
}

fn variable(name: &str) -> Result<String, Box<dyn Error>> {
    env::var(name).map_err(|error| format!("{name}: {error}").into())
}
