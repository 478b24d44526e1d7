//! The daemon's modules import downward only. Between the crates the compiler sees to that.

use std::fs;
use std::path::{Path, PathBuf};

/// The modules of `daemon/src`, from the bottom up. Those of one row know each other.
const LAYERS: [&[&str]; 9] = [
    &["sys", "size", "permits", "log_limit"],
    &["intake"],
    &["transfer"],
    &["ops"],
    &["config", "session", "socket", "limits", "large_models", "state", "client_file"],
    &["api"],
    &["server", "housekeeping"],
    &["demo", "mount"],
    &["cli"],
];

/// What `demo` takes from the command line: how sizes are written and tables set.
const EXCEPTIONS: [(&str, &str); 1] = [("demo", "cli")];

fn layer(module: &str) -> usize {
    LAYERS.iter().position(|row| row.contains(&module)).unwrap_or_else(|| panic!("{module}: in no layer"))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The modules that a source text takes something from, tests at its end left out.
fn imports(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let parts = code.flat_map(|line| line.split("crate::").skip(1));
    let name = |part: &'_ str| part.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(part.len());
    parts.map(|part| &part[..name(part)]).filter(|name| !name.is_empty()).collect()
}

#[test]
fn modules_import_downward_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../daemon/src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut checked = 0;
    for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
        let relative = file.strip_prefix(&root).unwrap();
        let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let text = fs::read_to_string(file).unwrap();
        for import in imports(&text).into_iter().filter(|import| *import != module) {
            let allowed = layer(import) <= layer(module) || EXCEPTIONS.contains(&(module, import));
            assert!(allowed, "{}: {module} imports {import}, which is above it", relative.display());
            checked += 1;
        }
    }
    assert!(checked > 50, "only {checked} imports seen: has the tree moved?");
}
