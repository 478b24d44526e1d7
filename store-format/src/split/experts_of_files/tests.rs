use std::borrow::Cow;
use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::digest::Digest;
use crate::file_format::read_header;
use crate::gguf::GgufWriter;
use crate::recipe::{Recipe, RecipeOutline, TensorEntry};
use crate::safetensors::{Dtype, HeaderWriter};
use crate::split::{SplitPlan, Splitter, Target};

/// Names and content of tensors.
type Tensors = Vec<(String, Vec<u8>)>;

/// A file in which each tensor has 32-byte rows.
fn safetensors(tensors: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    for (name, content) in tensors {
        writer.tensor(name, Dtype::BF16, &[content.len() as u64 / 32, 16]).unwrap();
    }
    let data = tensors.iter().flat_map(|(_, content)| content);
    writer.header().unwrap().iter().chain(data).copied().collect()
}

fn layout(file: &[u8]) -> FileLayout {
    read_header(file).unwrap().file_layout(file.len() as u64).unwrap()
}

fn shared(files: &[Vec<u8>]) -> SharedGroups {
    let mut experts = ExpertsOfFiles::default();
    files.iter().enumerate().for_each(|(number, file)| experts.add(0, number, &layout(file)));
    experts.shared()
}

fn plans(files: &[Vec<u8>]) -> Vec<SplitPlan> {
    let groups = shared(files);
    let plan = |(number, file): (usize, &Vec<u8>)| SplitPlan::sharing(layout(file), groups.parts_of(number));
    files.iter().enumerate().map(plan).collect()
}

/// A blob of a file by its number, or of a group that several files share.
type BlobKey = (Option<usize>, usize);

fn key(file: usize, plan: &SplitPlan, blob: usize) -> BlobKey {
    match plan.blobs()[blob].shared_group() {
        Some(group) => (None, group),
        None => (Some(file), blob),
    }
}

/// The recipes of files that are read in this order, and all blobs.
fn stored(files: &[Vec<u8>]) -> (Vec<Recipe>, BTreeMap<Digest, Vec<u8>>) {
    let plans = plans(files);
    let mut blobs: BTreeMap<BlobKey, Vec<u8>> = BTreeMap::new();
    for (number, (plan, file)) in plans.iter().zip(files).enumerate() {
        for part in Splitter::new(plan).push(file).unwrap() {
            let Target::Blob { blob, offset_in_blob } = part.target else { panic!("a literal") };
            let size = usize::try_from(plan.blobs()[blob].size).unwrap();
            let content = blobs.entry(key(number, plan, blob)).or_insert_with(|| vec![0; size]);
            let start = usize::try_from(offset_in_blob).unwrap();
            content[start..start + part.bytes.len()].copy_from_slice(part.bytes);
        }
    }
    let recipe = |(number, (plan, file)): (usize, (&SplitPlan, &Vec<u8>))| {
        let digest = |blob| Digest::of(&blobs[&key(number, plan, blob)]);
        let digests: Vec<_> = (0..plan.blobs().len()).map(digest).collect();
        plan.clone().recipe(Digest::of(file), &digests, Vec::new()).unwrap()
    };
    let recipes = plans.iter().zip(files).enumerate().map(recipe).collect();
    (recipes, blobs.into_values().map(|content| (Digest::of(&content), content)).collect())
}

fn rebuilt(recipe: &Recipe, blobs: &BTreeMap<Digest, Vec<u8>>) -> Vec<u8> {
    let mut file = vec![0xee; usize::try_from(recipe.size()).unwrap()];
    let read = recipe.pieces().read_at(0, &mut file, |blob, offset, buffer| {
        let start = usize::try_from(offset).unwrap();
        buffer.copy_from_slice(&blobs[&blob][start..start + buffer.len()]);
        Ok::<_, std::convert::Infallible>(())
    });
    assert_eq!(read, Ok(file.len()));
    file
}

fn by_name(recipes: &[Recipe]) -> BTreeMap<Cow<'_, str>, TensorEntry<'_>> {
    let tensors = recipes.iter().flat_map(|recipe| recipe.tensors().iter());
    tensors.map(|tensor| (tensor.name.clone(), tensor)).collect()
}

/// The experts of two projections, and tensors that are none.
fn model(experts: usize, rows: usize) -> Tensors {
    let content = |name: &str| -> Vec<u8> {
        Digest::of(name.as_bytes()).to_string().bytes().cycle().take(32 * rows).collect()
    };
    let mut names = vec!["model.embed_tokens.weight".to_owned(), "model.layers.0.mlp.gate.weight".to_owned()];
    for matrix in ["up_proj", "down_proj"] {
        names.extend(
            (0..experts).map(|expert| format!("model.layers.0.mlp.experts.{expert}.{matrix}.weight")),
        );
    }
    names.into_iter().map(|name| (name.clone(), content(&name))).collect()
}

fn experts(numbers: &[usize]) -> Vec<u8> {
    let tensors = model(10, 2).into_iter().filter(|(name, _)| {
        numbers.iter().any(|number| name.ends_with(&format!(".{number}.up_proj.weight")))
    });
    safetensors(&tensors.collect::<Vec<_>>())
}

proptest! {
    /// However the tensors are distributed over files, every tensor is in the same blob as in one file.
    #[test]
    fn files_have_the_same_blobs_as_one_file(
        (tensors, homes) in (2..9_usize, 1..4_usize).prop_flat_map(|(experts, rows)| {
            let tensors = model(experts, 2 * rows);
            let homes = prop::collection::vec(0..5_usize, tensors.len());
            (Just(tensors).prop_shuffle(), homes)
        }),
    ) {
        let (whole, whole_blobs) = stored(&[safetensors(&tensors)]);
        let of_file = |number| -> Tensors {
            let own = tensors.iter().zip(&homes).filter(|(_, home)| **home == number);
            own.map(|(tensor, _)| tensor.clone()).collect()
        };
        let files: Vec<Vec<u8>> = (0..5).map(|number| safetensors(&of_file(number))).collect();
        let (recipes, blobs) = stored(&files);
        let (expected, found) = (by_name(&whole), by_name(&recipes));
        prop_assert_eq!(expected.len(), found.len());
        for (name, entry) in expected {
            prop_assert_eq!(&entry, &found[&name]);
            prop_assert_eq!(whole_blobs.get(&entry.digest), blobs.get(&entry.digest));
        }
        let groups = shared(&files);
        for (group, size) in groups.blob_sizes().iter().enumerate() {
            let slice = |place: &PlaceInFiles| {
                let start = usize::try_from(place.offset).unwrap();
                files[place.file][start..start + usize::try_from(place.size).unwrap()].to_vec()
            };
            let content = groups.places_of(group).iter().flat_map(slice).collect::<Vec<u8>>();
            prop_assert_eq!(content.len() as u64, *size);
            prop_assert!(blobs.contains_key(&Digest::of(&content)));
        }
        for (recipe, file) in recipes.iter().zip(&files) {
            prop_assert!(rebuilt(recipe, &blobs) == *file);
            let json = recipe.to_json();
            prop_assert_eq!(&Recipe::parse(&json).unwrap(), recipe);
            prop_assert!(RecipeOutline::parse(&json).unwrap().digests().iter().copied().eq(recipe.digests()));
            for (blob, size) in recipe.blob_sizes() {
                prop_assert_eq!(blobs[&blob].len() as u64, size, "the length that the store checks");
            }
        }
    }
}

#[test]
fn only_groups_that_are_complete_in_several_files_are_shared() {
    let sizes = |files: &[&[usize]]| {
        let files: Vec<_> = files.iter().map(|numbers| experts(numbers)).collect();
        shared(&files).blob_sizes().to_vec()
    };
    assert_eq!(sizes(&[&[0, 1], &[2, 3]]), [256]);
    assert_eq!(sizes(&[&[3], &[0, 2], &[1]]), [256]);
    assert_eq!(sizes(&[&[0, 1, 2, 3], &[]]), [0; 0], "its blob is the file's own");
    assert_eq!(sizes(&[&[0, 1], &[3]]), [0; 0], "one is missing");
    assert_eq!(sizes(&[&[0, 1], &[1, 2]]), [0; 0], "one comes twice");
    assert_eq!(sizes(&[&[0, 1], &[0, 1]]), [0; 0], "each file has all");
    assert_eq!(sizes(&[]), [0; 0]);
}

/// Each file has experts from 0 on, so that they are a group of the file alone.
#[test]
fn files_of_two_sets_share_nothing_and_keep_their_own_groups() {
    let files = [experts(&[0, 1]), experts(&[2, 3])];
    let mut of_two_sets = ExpertsOfFiles::default();
    files.iter().enumerate().for_each(|(number, file)| of_two_sets.add(number, number, &layout(file)));
    let groups = of_two_sets.shared();
    assert_eq!(groups, SharedGroups::default());
    let plan = SplitPlan::sharing(layout(&files[0]), groups.parts_of(0));
    assert_eq!(plan, SplitPlan::new(layout(&files[0])));
    assert_eq!(plan.blobs().len(), 2, "the header and a group");
    // In one set, the same two are a part of the group of all four.
    assert_eq!(plans(&files)[0].blobs()[1].size, 256);
}

#[test]
fn experts_that_differ_or_have_an_unknown_type_are_not_shared() {
    let file = |number: usize, dtype, shape: &[u64]| {
        let mut writer = HeaderWriter::new();
        writer.tensor(&format!("m.mlp.experts.{number}.w1.weight"), dtype, shape).unwrap();
        [writer.header().unwrap(), vec![0; 64]].concat()
    };
    let first = || file(0, Dtype::F32, &[4, 4]);
    assert_eq!(shared(&[first(), file(1, Dtype::F32, &[4, 4])]).blob_sizes(), [128]);
    assert_eq!(shared(&[first(), file(1, Dtype::F32, &[16])]), SharedGroups::default());
    assert_eq!(shared(&[first(), file(1, Dtype::I32, &[4, 4])]), SharedGroups::default());
    let gguf = |number: usize, ggml_type| {
        let mut writer = GgufWriter::new();
        writer.tensor_at(&format!("blk.0.ffn_up.{number}.weight"), ggml_type, &[16], 0).unwrap();
        [writer.header().unwrap(), vec![0; 64]].concat()
    };
    let of = |ggml_type| shared(&[gguf(0, ggml_type), gguf(1, ggml_type)]);
    assert_eq!(of(GgmlType::F32).blob_sizes(), [128]);
    assert_eq!(of(GgmlType::from_id(77)), SharedGroups::default());
}
