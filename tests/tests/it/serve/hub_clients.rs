//! The hub's own clients download from `[serve]`: `huggingface_hub` (Python) and `@huggingface/hub` (JavaScript), models that
//! are stored and models that are passed through. Skipped where they cannot be installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs::{is_unavailable, virtual_environment};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};

use super::Site;

const REPOSITORY: &str = "Org/Model-GGUF";
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/hub_client.py");
const JAVASCRIPT: &str = include_str!("../../../programs/hub_client.mjs");

/// A daemon with a repository, another that passes it on, and the SHA-256 of its files.
fn sites() -> ([Site; 2], Json) {
    let first = Site::start_with("hub = true");
    let one = first.add(&ModelFile::dense(1), &["hf.co/Org/Model-GGUF:Q4_0"]);
    let mirror = format!("[mirrors]\n\"hf.co\" = \"http://{}\"\n", first.address);
    let second = Site::start_with(&format!("hub = true\nupstream = [\"hf.co\"]\n{mirror}"));
    ([first, second], json!({ "Model-GGUF-Q4_0.gguf": sha256(&one) }))
}

fn printed(mut command: Command) -> Json {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn huggingface_hub_downloads_what_is_stored_and_what_is_passed_through() {
    let scratch = tmpfs_directory();
    let Some(python) = virtual_environment(scratch.path(), &["huggingface_hub==2.4.0"]) else { return };
    let (sites, expected) = sites();
    for (number, site) in sites.iter().enumerate() {
        let folder = scratch.path().join(number.to_string());
        let mut command = Command::new(&python);
        command.args([PYTHON, REPOSITORY]).arg(&folder);
        command.env("HF_ENDPOINT", format!("http://{}", site.address)).env("HF_HOME", scratch.path());
        command.env("HF_HUB_DISABLE_PROGRESS_BARS", "1").env("HF_HUB_DISABLE_TELEMETRY", "1");
        assert_eq!(printed(command), expected, "{number}");
    }
}

/// Installs the library; `false`, with the reason printed, where that is not possible.
fn install_library(folder: &Path) -> bool {
    fs::write(folder.join("package.json"), "{}").unwrap();
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=5000"]);
    let reason = match npm.arg("@huggingface/hub@2.17.5").current_dir(folder).output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) if is_unavailable(&error) => "npm is not installed".to_owned(),
        Err(error) => error.to_string(),
    };
    skipped(format_args!("@huggingface/hub cannot be installed: {}", reason.trim()));
    false
}

#[test]
fn javascript_library_downloads_what_is_stored_and_what_is_passed_through() {
    let scratch = tmpfs_directory();
    if !install_library(scratch.path()) {
        return;
    }
    let program = scratch.path().join("client.mjs");
    fs::write(&program, JAVASCRIPT).unwrap();
    let (sites, expected) = sites();
    for (number, site) in sites.iter().enumerate() {
        let mut command = Command::new("node");
        command.arg(&program).arg(format!("http://{}", site.address)).arg(REPOSITORY);
        command.arg(scratch.path().join(number.to_string()));
        assert_eq!(printed(command), expected, "{number}");
    }
}
