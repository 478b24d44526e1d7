//! The shapes of responses are defined once, in Rust: this test writes the types of docs/JSON.md, of the Python client
//! and of the Go client from the sources, and compares them with the files.
//!
//! `BLESS=1 cargo test -p blobd-tests --test types` writes the files. That the Rust types say what is printed is
//! tested by `json_shapes`, which runs every command.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod golang;
mod python;
mod rust_types;
mod typescript;

use std::path::{Path, PathBuf};
use std::{env, fs};

use self::rust_types::RustTypes;

/// Where the types are that responses consist of.
const SOURCES: [&str; 9] = [
    "client/src/protocol",
    "client/src/protocol.rs",
    "store-format/model/src/card.rs",
    "store-format/model/src/diff.rs",
    "store-format/model/src/manifest_config.rs",
    "store-format/src/recipe.rs",
    "store-format/src/signature.rs",
    "store-format/src/stored_file.rs",
    "store-format/src/tensor.rs",
];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn rust_types() -> RustTypes {
    let mut types = RustTypes::default();
    for source in SOURCES {
        types.read(&top().join(source));
    }
    types
}

/// Compares a file with what it should be, or writes it.
fn check(file: &str, expected: &str) {
    let path = top().join(file);
    if env::var_os("BLESS").is_some() {
        return fs::write(&path, expected).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let (mut found, mut expected) = (found.lines(), expected.lines());
    for number in 1.. {
        match (found.next(), expected.next()) {
            (None, None) => break,
            (found, expected) => assert!(
                found == expected,
                "{file}:{number}: differs from the Rust types:\n  expected: {}\n  found:    {}\n\
                 `BLESS=1 cargo test -p blobd-tests --test types` writes the file",
                expected.unwrap_or("(the end of the file)"),
                found.unwrap_or("(the end of the file)")
            ),
        }
    }
}

#[test]
fn json_document_has_the_types_of_rust() {
    let document = fs::read_to_string(top().join("docs/JSON.md")).unwrap();
    check("docs/JSON.md", &typescript::renewed(&document, &rust_types()));
}

#[test]
fn python_client_has_the_types_of_rust() {
    check("client/python/src/blobd/types.py", &python::module(&rust_types()));
}

#[test]
fn go_client_has_the_types_of_rust() {
    check("client/go/types.go", &golang::file(&rust_types()));
}
