//! Folders of models: their files, and the small files that describe them.
//!
//! Invariant: any paths and any contents are refused or make a plan. Each file is taken or left out, each once; those that
//! are taken have paths that do not lead out of the folder; the shards to be checked are files that are taken. Shards of
//! one file beside others are files of the folder, and the one that was given is among them.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use blobd_store_format::model_file::check_paths;
use blobd_store_format::model_folder::{FolderFile, ListedFolder, Selection};
use blobd_store_format::shard_set::FolderShards;
use libfuzzer_sys::fuzz_target;

const INDEX: &str = "model.safetensors.index.json";
const PIPELINE: &str = "model_index.json";

// Lines of paths, an empty line, then an index, or the description of a pipeline after another empty line.
fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let mut parts = text.splitn(3, "\n\n");
    let mut next = || parts.next().unwrap_or_default();
    let (listed, index, pipeline) = (next(), next(), next());
    let paths: BTreeSet<&str> = listed.lines().chain([INDEX, PIPELINE, "model.safetensors"]).collect();
    let files = paths.iter().map(|path| FolderFile { path: (*path).to_owned(), size: path.len() as u64 });
    check_shards(&paths);
    let Ok(folder) = ListedFolder::new(files, &Selection::default()) else { return };
    let contents = [(INDEX, index), (PIPELINE, pipeline), ("config.json", pipeline)];
    let contents = contents.map(|(path, text)| (path.to_owned(), text.as_bytes().to_vec()));
    let texts: BTreeMap<_, _> =
        contents.into_iter().filter(|(path, _)| folder.texts().any(|text| text == path)).collect();
    let plan = folder.plan(&texts).expect("no text is long");
    let taken: BTreeSet<&str> = plan.files().iter().map(|file| file.path.as_str()).collect();
    let left_out: BTreeSet<&str> = plan.left_out().iter().map(|left| left.file.path.as_str()).collect();
    assert!(taken.is_disjoint(&left_out) && taken.union(&left_out).eq(&paths));
    check_paths(taken.iter().copied()).expect("paths are checked");
    assert!(plan.indexed_files().is_subset(&taken));
    let tensors = taken.iter().map(|path| (*path, [(*path, 1), ("a", 2)]));
    let faults = plan.faults().iter().cloned().chain(plan.check_tensors(tensors));
    faults.for_each(|fault| assert!(!fault.to_string().is_empty()));
});

fn check_shards(paths: &BTreeSet<&str>) {
    for given in paths.iter().take(4) {
        let Ok(shards) = FolderShards::new(given, paths.iter().copied()) else { continue };
        if let Ok(found) = shards.by_name() {
            assert!(found.contains(given) && found.iter().all(|name| paths.contains(name)));
        }
    }
}
