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
    // Preloading requires glibc. Elsewhere the library is empty, and `blobd exec` reports that.
    if variable("CARGO_CFG_TARGET_ENV")? != "gnu" {
        return Ok(fs::write(library, [])?);
    }
    let mut rustc = Command::new(variable("RUSTC")?);
    rustc.args(["--crate-name", "blobd_preload", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.args(["-Cpanic=abort", "-Copt-level=2", "-Cstrip=symbols", "--cap-lints", "allow"]);
    rustc.args(["--target", &variable("TARGET")?]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    let status = rustc.arg("-o").arg(library).arg(format!("{SOURCES}/lib.rs")).status()?;
    if status.success() { Ok(()) } else { Err(format!("{SOURCES}: {status}").into()) }
}

fn variable(name: &str) -> Result<String, Box<dyn Error>> {
    env::var(name).map_err(|error| format!("{name}: {error}").into())
}
