use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};
use blobd_store_format::split::{ExpertsOfFiles, SharedGroups};

use super::*;
use crate::assembler::tests::Slice;
use crate::testing::{begin, new_store};
use crate::{Ingest, StoreError};

/// A GGUF file with these experts.
fn shard(experts: &[u8]) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for expert in experts {
        writer.tensor(&format!("blk.0.ffn_up.{expert}.weight"), GgmlType::I8, &[128]).unwrap();
    }
    let mut file = writer.header().unwrap();
    experts.iter().for_each(|expert| file.extend([*expert; 128]));
    file
}

fn group(count: u8) -> Vec<u8> {
    (0..count).flat_map(|expert| [expert; 128]).collect()
}

fn plans(files: &[Vec<u8>]) -> Vec<SplitPlan> {
    let layout = |file: &Vec<u8>| Header::parse(file).unwrap().file_layout(file.len() as u64).unwrap();
    let mut experts = ExpertsOfFiles::default();
    files.iter().enumerate().for_each(|(number, file)| experts.add(0, number, &layout(file)));
    let groups: SharedGroups = experts.shared();
    let plan = |(number, file)| SplitPlan::sharing(layout(file), groups.parts_of(number));
    files.iter().enumerate().map(plan).collect()
}

/// Assembles the files one after the other; the sizes of the blobs that each completes, without headers.
fn assemble(
    ingest: &mut Ingest,
    shared: &mut SharedBlobs,
    files: &[Vec<u8>],
) -> Result<Vec<Vec<u64>>, StoreError> {
    let mut completed = Vec::new();
    for (plan, file) in plans(files).into_iter().zip(files) {
        let assembler = Assembler::new(ingest.staging(), plan).continuing(shared);
        let mut sizes = Vec::new();
        let mut add = |blob: crate::StagedBlob| {
            sizes.push(blob.size);
            ingest.add_blob(blob).map(drop)
        };
        let hashed = assembler.store_in_order(&mut Slice::new(file), &mut add)?;
        assembler.leave_shared(hashed, shared);
        completed.push(sizes.into_iter().filter(|size| *size == 512).collect());
    }
    Ok(completed)
}

#[test]
fn files_in_any_order_complete_a_blob_together() {
    for shards in
        [&[&[0, 1][..], &[2, 3]][..], &[&[2, 3], &[0, 1]], &[&[3], &[1, 0], &[2]], &[&[3], &[2], &[1], &[0]]]
    {
        let (_folder, store) = new_store();
        let (mut ingest, mut shared) = (begin(&store), SharedBlobs::default());
        let files: Vec<_> = shards.iter().map(|experts| shard(experts)).collect();
        let mut completed = assemble(&mut ingest, &mut shared, &files).unwrap();
        assert_eq!(completed.pop().unwrap(), [512], "the last file completes it: {shards:?}");
        assert!(completed.into_iter().all(|sizes| sizes.is_empty()), "{shards:?}");
        for (recipe, file) in shared.into_recipes().unwrap().iter().zip(&files) {
            assert_eq!(recipe.file(), Digest::of(file));
            assert_eq!(*recipe.shared_blobs(), BTreeMap::from([(Digest::of(&group(4)), 512)]));
        }
        drop(ingest);
        assert!(store.content.blobs().unwrap().is_empty());
    }
}

#[test]
fn blob_that_lacks_a_part_has_no_recipe() {
    let (_folder, store) = new_store();
    let (mut ingest, mut shared) = (begin(&store), SharedBlobs::default());
    let files = [shard(&[0, 1]), shard(&[2, 3])];
    let plan = plans(&files).remove(0);
    let assembler = Assembler::new(ingest.staging(), plan).continuing(&mut shared);
    let mut add = |blob| ingest.add_blob(blob).map(drop);
    let hashed = assembler.store_in_order(&mut Slice::new(&files[0]), &mut add).unwrap();
    assembler.leave_shared(hashed, &mut shared);
    let error = shared.into_recipes().unwrap_err();
    assert!(matches!(error, RecipeError::Parts { what: "blobs", expected: 2, found: 1 }), "{error}");
}

#[test]
fn bytes_are_compared_with_a_stored_blob_and_not_written() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let digest = ingest.add_bytes(&group(4)).unwrap();
    ingest.publish().unwrap();
    let stored = || {
        let mut shared = SharedBlobs::default();
        shared.take_stored(0, digest);
        shared
    };
    let (mut shared, files) = (stored(), [shard(&[0, 1]), shard(&[2, 3])]);
    let completed = assemble(&mut ingest, &mut shared, &files).unwrap();
    assert!(completed.iter().all(Vec::is_empty), "{completed:?}");
    assert_eq!(shared.into_recipes().unwrap().len(), 2);
    let mut changed = files;
    *changed[1].last_mut().unwrap() ^= 1;
    let refused = assemble(&mut ingest, &mut stored(), &changed);
    assert!(
        matches!(refused, Err(StoreError::BlobDiffers { digest: other }) if other == digest),
        "{refused:?}"
    );
}
