//! What happens to the bytes of models that have lost their tags.

use std::sync::Arc;

use super::*;
use crate::liveness::gc::{collect_from, free};
use crate::testing::{begin, manifest, name, new_store};
use crate::{Actor, Store, Verb};

const BLOCK: u64 = 4096;

/// A file of this many blocks.
fn file(seed: u8, blocks: usize) -> Vec<u8> {
    vec![seed; blocks * 4096]
}

fn add(store: &Arc<Store>, reference: &str, files: &[&[u8]]) -> Untagged {
    let mut ingest = begin(store);
    for bytes in files {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.commit(&name(reference), &manifest(files), None).unwrap();
    Untagged::new(&store.liveness, name(reference), manifest(files).raw().to_vec())
}

fn remove(store: &Store, models: &[Untagged]) {
    for model in models {
        store.names.remove_tag(&model.reference, Actor::daemon(Verb::Rm)).unwrap();
    }
}

fn kept(blocks: u64, by: &[&str]) -> KeptBytes {
    KeptBytes { bytes: blocks * BLOCK, by: by.iter().map(|by| (*by).to_owned()).collect() }
}

/// The numbers of blocks that are freed and that can be reclaimed, and what stays.
fn lost(model: &Untagged, freed: u64, reclaimable: u64, kept: &[KeptBytes]) -> LostModel {
    LostModel {
        reference: model.reference.clone(),
        manifest: model.manifest,
        size: model.size,
        freed_bytes: freed * BLOCK,
        reclaimable_bytes: reclaimable * BLOCK,
        kept: kept.to_vec(),
    }
}

/// Models `a` and `b` have one file each (1 and 2 blocks) and share one (4). Each shares another with `c` (8 and 16).
fn three_models() -> (tempfile::TempDir, Arc<Store>, [Untagged; 2]) {
    let (folder, store) = new_store();
    let [of_a, of_b, of_both, first, second] = [file(1, 1), file(2, 2), file(3, 4), file(4, 8), file(5, 16)];
    let a = add(&store, "a", &[&of_a, &of_both, &first]);
    let b = add(&store, "b", &[&of_b, &of_both, &second]);
    add(&store, "c", &[&first, &second]);
    (folder, store, [a, b])
}

#[test]
fn freed_bytes_count_for_the_last_model_and_kept_ones_for_their_holders() {
    let (_folder, store, models) = three_models();
    remove(&store, &models);
    let (report, deleted) = free(&store.liveness, &models);
    assert_eq!(deleted.unwrap().freed_bytes(), 7 * BLOCK);
    let expected = LossReport {
        models: vec![
            lost(&models[0], 1, 0, &[kept(8, &["c:latest"])]),
            lost(&models[1], 6, 0, &[kept(16, &["c:latest"])]),
        ],
        kept: vec![kept(24, &["c:latest"])],
    };
    assert_eq!(report, expected);
    assert!(models[0].size > 0 && models[0].nodes.len() >= 3);
}

#[test]
fn bytes_that_nothing_needs_are_reclaimable_until_they_are_deleted() {
    let (_folder, store, models) = three_models();
    // As in a dry run: they still have their tags.
    let expected = LossReport {
        models: vec![
            lost(&models[0], 0, 1, &[kept(8, &["c:latest"])]),
            lost(&models[1], 0, 6, &[kept(16, &["c:latest"])]),
        ],
        kept: vec![kept(24, &["c:latest"]), kept(7, &[])],
    };
    assert_eq!(LossReport::new(&store.liveness, &models, &[]), expected);
    remove(&store, &models);
    assert_eq!(LossReport::new(&store.liveness, &models, &[]), expected);
    let own = Node::Blob(Digest::of(&file(2, 2)));
    let deleted = collect_from(&store.liveness, [own.digest()].into()).unwrap().deletions;
    assert_eq!(deleted, [(own, 2 * BLOCK)]);
    let report = LossReport::new(&store.liveness, &models, &deleted);
    assert_eq!(report.models[1], lost(&models[1], 2, 4, &[kept(16, &["c:latest"])]));
    assert_eq!(report.kept, [kept(24, &["c:latest"]), kept(5, &[])]);
}

#[test]
fn model_that_shares_everything_with_another_one_that_goes_frees_it_once() {
    let (_folder, store) = new_store();
    let bytes = file(1, 3);
    let models = [add(&store, "a", &[&bytes]), add(&store, "b", &[&bytes])];
    let both = [lost(&models[0], 0, 0, &[]), lost(&models[1], 0, 3, &[])];
    assert_eq!(LossReport::new(&store.liveness, &models, &[]).models, both);
    let one = LossReport::new(&store.liveness, &models[..1], &[]);
    assert_eq!(one.models, [lost(&models[0], 0, 0, &[kept(3, &["b:latest"])])]);
    assert_eq!(one.kept, [kept(3, &["b:latest"])]);
    remove(&store, &models);
    let (report, _) = free(&store.liveness, &models);
    assert_eq!(report.models, [lost(&models[0], 0, 0, &[]), lost(&models[1], 3, 0, &[])]);
    assert!(report.kept.is_empty());
}

#[test]
fn sessions_and_programs_that_hold_bytes_are_named() {
    let (_folder, store) = new_store();
    let [leased, open, both] = [file(1, 1), file(2, 2), file(3, 4)];
    let model = add(&store, "m", &[&leased, &open, &both]);
    let (first, second) = (store.liveness.leases().grant("one"), store.liveness.leases().grant("two"));
    first.protect(Digest::of(&leased));
    first.protect(Digest::of(&both));
    second.protect(Digest::of(&both));
    let opened = store.content.open_blob(Digest::of(&open), 0).unwrap();
    remove(&store, std::slice::from_ref(&model));
    let (report, deleted) = free(&store.liveness, std::slice::from_ref(&model));
    // This process is not listed in `/proc` as another program would be.
    let all = [kept(2, &[UNKNOWN_HOLDER]), kept(1, &["one"]), kept(4, &["one", "two"])];
    assert_eq!(
        (report.models.as_slice(), report.kept.as_slice()),
        (&[lost(&model, 0, 0, &all)][..], &all[..])
    );
    let deleted = deleted.unwrap();
    assert_eq!((deleted.held_bytes(), deleted.held.len(), deleted.deletions.len()), (2 * BLOCK, 1, 0));
    drop((first, second, opened));
    let freed = crate::liveness::gc::collect_condemned(&store.liveness).unwrap();
    assert_eq!(freed.freed_bytes(), 7 * BLOCK, "they were condemned");
}

#[test]
fn refused_collection_is_named_as_the_holder_of_everything() {
    let (_folder, store, models) = three_models();
    remove(&store, &models);
    let foreign = store.path("manifests/notes.txt");
    std::fs::write(&foreign, "").unwrap();
    let (report, refusal) = free(&store.liveness, &models);
    let refusal = refusal.unwrap_err().to_string();
    let by = [refusal.as_str()];
    let expected = LossReport {
        models: vec![lost(&models[0], 0, 0, &[kept(13, &by)]), lost(&models[1], 0, 0, &[kept(22, &by)])],
        kept: vec![kept(31, &by)],
    };
    assert_eq!(report, expected);
    std::fs::remove_file(foreign).unwrap();
    assert_eq!(crate::liveness::gc::collect_condemned(&store.liveness).unwrap().freed_bytes(), 7 * BLOCK);
    let nothing = Untagged::new(&store.liveness, name("damaged"), b"no manifest".to_vec());
    assert_eq!((nothing.size, nothing.nodes.len()), (0, 0));
    let error = StoreError::MissingBlob { digest: Digest::of(b"") };
    let report = LossReport::unknown(&store.liveness, std::slice::from_ref(&nothing), &error);
    assert_eq!(report, LossReport { models: vec![lost(&nothing, 0, 0, &[])], kept: Vec::new() });
}
