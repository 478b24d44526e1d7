//! The path of each API request occurs in the sources only once: in the table of requests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use blobd_client::protocol::route::Route;

/// Folders that have no sources of the product.
const NO_SOURCES: [&str; 4] = ["target", "tests", ".git", "fuzz"];

/// The Rust sources of the product below a folder, without tests.
fn sources(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap_or_default().to_owned();
        if path.is_dir() && !NO_SOURCES.contains(&name.as_str()) {
            sources(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = fs::read_to_string(&path).unwrap();
            let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            found.push((path, text[..end].to_owned()));
        }
    }
}

/// How often a path occurs in a text, comments included. A longer path with this prefix is another path.
fn count(text: &str, path: &str) -> usize {
    let goes_on = |rest: &str| rest.starts_with(|c: char| c.is_alphanumeric() || "/_-{".contains(c));
    text.match_indices(path).filter(|(start, _)| !goes_on(&text[start + path.len()..])).count()
}

#[test]
fn each_path_of_the_api_occurs_once_in_the_sources() {
    let mut found = Vec::new();
    sources(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap(), &mut found);
    assert!(found.len() > 300, "{} files", found.len());
    for path in Route::ALL.iter().map(|route| route.path()).collect::<BTreeSet<_>>() {
        let uses = found.iter().flat_map(|(file, text)| std::iter::repeat_n(file, count(text, path)));
        let uses: Vec<_> = uses.collect();
        assert!(matches!(uses[..], [file] if file.ends_with("protocol/route.rs")), "{path}: {uses:?}");
    }
}

#[test]
fn second_occurrence_of_a_path_is_found() {
    assert_eq!(count("GET /v1/pull, \"/v1/pull\"", "/v1/pull"), 2);
    assert_eq!(count("/v1/pull/plan /v1/pulls /v1/pull-x /v1/models/{reference}", "/v1/pull"), 0);
    assert_eq!(count("/v1/models/{reference}", "/v1/models"), 0);
}
