//! Bundles with signatures, and the statements in them.
//!
//! Invariant: any bytes are refused or make a bundle that reads back as it is, whose files have paths below a folder; such a
//! statement is about a model with exactly these files, and not about one with another file.
#![no_main]

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::signature::{Bundle, ModelFile, Statement};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let statement = match Bundle::parse(bytes) {
        Ok(bundle) => {
            assert!(Bundle::parse(bundle.text().as_bytes()).is_ok_and(|again| again == bundle));
            assert!(bundle.key_id().is_none_or(|id| id.bytes().all(|byte| byte.is_ascii_graphic())));
            bundle.statement().clone()
        }
        Err(_) => match Statement::parse(bytes) {
            Ok(statement) => statement,
            Err(_) => return,
        },
    };
    let files = statement.files();
    assert!(files.iter().all(|file| is_file_name(&file.path) || file.path == "." && files.len() == 1));
    let own =
        files.iter().map(|file| ModelFile { name: Some(&file.path), path: &file.path, digest: file.digest });
    let mut model: Vec<ModelFile<'_>> = own.collect();
    assert!(statement.compare(&model).is_ok_and(|missing| missing.is_empty()));
    let added =
        ModelFile { name: Some("added"), path: "added", digest: Digest::of(b"added, and not signed") };
    if files.iter().all(|file| file.digest != added.digest) {
        model.push(added);
        assert!(statement.compare(&model).is_err());
    }
});
