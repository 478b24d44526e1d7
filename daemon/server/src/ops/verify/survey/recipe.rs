//! Compares a recipe with the one made from its file's header.

use blobd_store::Store;
use blobd_store::scrub::{DiskReader, Ended, Step};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_format::{FormatError, MAX_HEADER_BYTES, stream_header};
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::split::{SharedPart, SplitPlan, Target};

use crate::ingest::drop_header;
use crate::ops::describe::HeaderTurn;

/// Finds the fault of a recipe, if any: in its pieces, its tensor table, or the lengths of its blobs. A recipe whose header
/// blob is damaged or missing cannot be checked.
pub(super) fn mismatch(store: &Store, reader: &mut DiskReader, recipe: &Recipe) -> Option<String> {
    for (digest, needed) in recipe.blob_sizes() {
        // A blob that cannot be inspected is a finding already.
        let found = store.content().blob_size(digest).ok().flatten();
        if let Some(found) = found.filter(|found| *found != needed) {
            return Some(format!("names {needed} bytes of blob {digest}, which has {found}"));
        }
    }
    let _turn = recipe.header().map(|(_, size)| HeaderTurn::take(size));
    compare(header(store, reader, recipe)?, recipe).err()
}

/// The bytes of the header blob, if they have the right digest.
fn header(store: &Store, reader: &mut DiskReader, recipe: &Recipe) -> Option<Vec<u8>> {
    let (digest, size) = recipe.header()?;
    let _reading = store.content().begin_internal_read(digest);
    let file = store.content().open_blob(digest, size).ok()?;
    // A damaged recipe can name a large tensor as its header.
    if file.metadata().ok()?.len() > MAX_HEADER_BYTES {
        return None;
    }
    let (mut bytes, mut hasher) = (Vec::new(), Hasher::new());
    let ended = reader.read(&file, &mut |_| Step::Go, &mut |chunk| {
        bytes.extend_from_slice(chunk);
        hasher.update(chunk);
    });
    let is_whole = ended.is_ok_and(|ended| ended == Ended::Complete) && hasher.finish() == digest;
    is_whole.then_some(bytes)
}

/// Drops the bytes and the header as soon as they were used: each may take as much memory as the recipe.
fn compare(bytes: Vec<u8>, recipe: &Recipe) -> Result<(), String> {
    let invalid = |error: FormatError| format!("its header is invalid: {error}");
    let read = stream_header(&mut bytes.as_slice());
    drop(bytes);
    let header = match read.map_err(|error| error.to_string())? {
        // Without a known format there is no plan to compare with.
        Err(error) if error.is_unknown_format() => return Ok(()),
        header => header.map_err(invalid)?,
    };
    let layout = header.file_layout(recipe.size()).map_err(invalid)?;
    drop_header(header);
    let plan = SplitPlan::sharing(layout, &shared_parts(recipe));
    let Some((blobs, literals)) = parts(&plan, recipe) else {
        let (found, expected) = (recipe.pieces().len(), plan.segments().len());
        return Err(format!("its {found} pieces do not match the {expected} of its header"));
    };
    match plan.recipe(recipe.file(), &blobs, literals) {
        Ok(expected) if expected == *recipe => Ok(()),
        Ok(_) => Err("its pieces or its table of tensors do not match its header".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The tensors that are in blobs that, by the recipe, other files have parts of too.
fn shared_parts(recipe: &Recipe) -> Vec<SharedPart> {
    let mut parts = Vec::new();
    for (group, (blob, size)) in recipe.shared_blobs().iter().enumerate() {
        let own = recipe.tensors().iter().enumerate().filter(|(_, tensor)| tensor.digest == *blob);
        parts.extend(own.map(|(tensor, entry)| SharedPart {
            tensor,
            group,
            blob_size: *size,
            offset_in_blob: entry.offset,
        }));
    }
    parts
}

/// Finds the recipe's digest for each blob and content for each literal of the plan; `None` if they differ in number or
/// kind.
fn parts(plan: &SplitPlan, recipe: &Recipe) -> Option<(Vec<Digest>, Vec<Vec<u8>>)> {
    if plan.segments().len() != recipe.pieces().len() {
        return None;
    }
    let mut blobs = vec![Digest::of(b""); plan.blobs().len()];
    let mut literals = Vec::new();
    for (segment, piece) in plan.segments().iter().zip(recipe.pieces().iter()) {
        match (segment.target, piece) {
            (Target::Blob { blob, .. }, Piece::Blob { blob: digest, .. }) => *blobs.get_mut(blob)? = *digest,
            (Target::Literal { .. }, Piece::Literal { literal }) => literals.push(literal.clone()),
            // The length is checked before allocating: a recipe can declare any number of zeros.
            (Target::Literal { .. }, Piece::Zeros { zeros }) if *zeros == segment.length => {
                literals.push(vec![0; usize::try_from(*zeros).ok()?]);
            }
            _ => return None,
        }
    }
    Some((blobs, literals))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blobd_store::testing::{add_blobs, new_store};
    use blobd_store_format::gguf::{GgmlType, GgufWriter};
    use tempfile::TempDir;

    use super::*;
    use blobd_store_format::file_format::read_header;
    use blobd_store_format::tensor::TensorFormat;

    /// A store with the blobs of a small file, and the file's recipe.
    fn stored() -> (TempDir, Arc<Store>, Recipe) {
        let (folder, store) = new_store();
        let mut writer = GgufWriter::new();
        writer.tensor("a", GgmlType::F32, &[6]).unwrap();
        writer.tensor("b", GgmlType::F32, &[6]).unwrap();
        let header = writer.header().unwrap();
        let file = [&header[..], &[1; 24], &[0; 8], &[2; 24], b"tail"].concat();
        let blobs = add_blobs(&store, [&header[..], &[1; 24], &[2; 24]]);
        let layout = read_header(&file).unwrap().file_layout(file.len() as u64).unwrap();
        let plan = SplitPlan::new(layout);
        let recipe = plan.recipe(Digest::of(&file), &blobs, vec![vec![0; 8], b"tail".to_vec()]).unwrap();
        (folder, store, recipe)
    }

    fn mismatch_of(store: &Store, recipe: &Recipe) -> Option<String> {
        mismatch(store, &mut DiskReader::default(), recipe)
    }

    fn with_pieces(recipe: &Recipe, pieces: Vec<Piece>) -> Recipe {
        Recipe::new(recipe.file(), TensorFormat::Gguf, pieces, recipe.tensors().clone()).unwrap()
    }

    #[test]
    fn recipe_that_matches_its_header_is_accepted() {
        let (_folder, store, recipe) = stored();
        assert_eq!(mismatch_of(&store, &recipe), None);
    }

    #[test]
    fn recipe_with_another_table_or_other_pieces_is_refused() {
        let (_folder, store, recipe) = stored();
        let renamed = |name: &str| {
            let mut tensors: Vec<_> = recipe.tensors().iter().collect();
            tensors[1].name = name.into();
            Recipe::new(recipe.file(), TensorFormat::Gguf, recipe.pieces().to_vec(), tensors).unwrap()
        };
        assert_eq!(mismatch_of(&store, &renamed("b")), None);
        assert!(mismatch_of(&store, &renamed("c")).unwrap().contains("table of tensors"));
        let mut pieces = recipe.pieces().to_vec();
        pieces.swap(2, 4);
        assert!(mismatch_of(&store, &with_pieces(&recipe, pieces)).unwrap().contains("pieces"));
        let mut pieces = recipe.pieces().to_vec();
        pieces.remove(2);
        assert!(mismatch_of(&store, &with_pieces(&recipe, pieces)).is_some());
    }

    #[test]
    fn recipe_with_a_wrong_blob_size_is_refused() {
        let (_folder, store, recipe) = stored();
        let mut pieces = recipe.pieces().to_vec();
        let Piece::Blob { blob, .. } = pieces[1].clone() else { panic!("{pieces:?}") };
        pieces[1] = Piece::Blob { blob, offset: 0, length: 32 };
        assert!(mismatch_of(&store, &with_pieces(&recipe, pieces)).unwrap().contains("which has 24"));
    }

    #[test]
    fn recipe_without_its_header_is_not_checked() {
        let (folder, store, recipe) = stored();
        let (header, _) = recipe.header().unwrap();
        let blob = blobd_store_format::layout::blob(header);
        std::fs::remove_file(folder.path().join("store").join(blob)).unwrap();
        assert_eq!(mismatch_of(&store, &recipe), None);
    }

    #[test]
    fn recipe_of_a_shard_is_compared_with_the_places_that_it_states() {
        let (_folder, store) = new_store();
        let mut writer = GgufWriter::new();
        writer.tensor("blk.0.ffn_up.1.weight", GgmlType::I8, &[64]).unwrap();
        let header = writer.header().unwrap();
        let file = [&header[..], &[1; 64]].concat();
        let group = [[0; 64], [1; 64]].concat();
        let blobs = add_blobs(&store, [&header[..], &group]);
        let layout = || read_header(&file).unwrap().file_layout(file.len() as u64).unwrap();
        let part = SharedPart { tensor: 0, group: 0, blob_size: 128, offset_in_blob: 64 };
        let recipe = |part| {
            SplitPlan::sharing(layout(), &[part]).recipe(Digest::of(&file), &blobs, Vec::new()).unwrap()
        };
        assert_eq!(mismatch_of(&store, &recipe(part)), None);
        let longer = recipe(SharedPart { blob_size: 192, ..part });
        assert!(mismatch_of(&store, &longer).unwrap().contains("names 192 bytes of blob"));
        let whole = recipe(part).sharing(std::collections::BTreeMap::new()).unwrap();
        assert!(mismatch_of(&store, &whole).is_some(), "the blob is not the tensor's own");
    }
}
