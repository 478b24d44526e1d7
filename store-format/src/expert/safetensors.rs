//! Names of expert tensors in safetensors files.
//!
//! Separate: `….experts.7.gate_proj.weight` (and `up_proj`, `down_proj`), or `w1`, `w2`, `w3` as in Mixtral's
//! `….block_sparse_moe.experts.7.w1.weight`. Stacked, with the experts as the slowest dimension:
//! `….experts.gate_up_proj`, `….experts.down_proj`, gpt-oss's `…_blocks`, `…_scales` and `…_bias`, and
//! `….switch_mlp.gate_proj.weight` of MLX. A quantised matrix has companions beside it, such as `…weight_scale`: each kind
//! is a group, or a stack, of its own.

use std::collections::BTreeMap;

use super::{ExpertGroup, Experts, Member, number, pack, stack};
use crate::safetensors::{Dtype, Tensor};

/// Finds the tensors that can be packed: the same projection and kind of tensor of all experts from 0 to the last, at
/// least two, all of one type and shape, and a size that is a positive multiple of [`ExpertGroup::MEMBER_ALIGNMENT`].
pub(crate) fn expert_groups(tensors: &[Tensor]) -> Vec<ExpertGroup> {
    let mut groups: BTreeMap<NameParts<'_>, Vec<Member<Form<'_>>>> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some((place, expert)) = name_parts_and_expert(tensor.name()) {
            let (form, size) = ((tensor.dtype(), tensor.shape()), Some(tensor.size_bytes()));
            groups.entry(place).or_default().push(Member { expert, index, form, size });
        }
    }
    groups.into_values().filter_map(pack).collect()
}

/// The experts of a stacked tensor: as many as its first dimension says. `None` for any other tensor.
pub(crate) fn stacked_experts(tensor: &Tensor) -> Option<Experts> {
    let (parents, matrix) = match tensor.name().rsplit_once('.')? {
        // Without a kind.
        (parents, matrix) if is_container(parents) => (parents, without_form(matrix)),
        (path, kind) if KINDS.contains(&kind) => path.rsplit_once('.')?,
        _ => return None,
    };
    // One number for each expert, such as a scale, or for all experts does not make a stack.
    let is_stack = is_container(parents) && MATRICES.contains(&matrix) && tensor.shape().len() > 1;
    stack(*tensor.shape().first().filter(|_| is_stack)?, tensor.size_bytes())
}

pub(super) fn expert_number(name: &str) -> Option<u32> {
    name_parts_and_expert(name).map(|(_, expert)| expert)
}

/// Type and shape.
type Form<'a> = (Dtype, &'a [u64]);

/// The name before and after the number of the expert.
type NameParts<'a> = (&'a str, &'a str);

const CONTAINER: &str = ".experts.";
/// MLX's name of a stack.
const STACKS: [&str; 2] = ["experts", "switch_mlp"];
/// Weight matrices of an expert.
const MATRICES: [&str; 7] = ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"];
/// What a file has of a matrix: its weights, and what quantisations add (GPTQ, AWQ, FP8, compressed-tensors, ModelOpt, MLX).
const KINDS: [&str; 18] = [
    "weight",
    "bias",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_packed",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "biases",
    "global_scale",
];

pub(super) fn name_parts_and_expert(name: &str) -> Option<(NameParts<'_>, u32)> {
    // The last one: a prefix may be anything.
    let (prefix, rest) = name.rsplit_once(CONTAINER)?;
    let (expert, tensor) = rest.split_once('.')?;
    let (matrix, kind) = tensor.split_once('.')?;
    let is_matrix = MATRICES.contains(&matrix) && KINDS.contains(&kind);
    number(expert).filter(|_| is_matrix).map(|expert| ((prefix, tensor), expert))
}

/// Whether a path ends in the name of what holds stacks.
fn is_container(path: &str) -> bool {
    path.rsplit('.').next().is_some_and(|last| STACKS.contains(&last)) && path.contains('.')
}

/// `down_proj` of gpt-oss's `down_proj_blocks`.
fn without_form(matrix: &str) -> &str {
    let forms = ["_blocks", "_scales", "_bias"];
    forms.into_iter().find_map(|form| matrix.strip_suffix(form)).unwrap_or(matrix)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::digest::Digest;
    use crate::file_format::read_header;
    use crate::recipe::Recipe;
    use crate::safetensors::{Header, HeaderWriter};
    use crate::split::{SplitPlan, Splitter, Target};

    type Row<'r> = (String, Dtype, &'r [u64]);

    fn header(rows: &[Row<'_>]) -> Vec<u8> {
        let mut writer = HeaderWriter::new();
        for (name, dtype, shape) in rows {
            writer.tensor(name, *dtype, shape).unwrap();
        }
        writer.header().unwrap()
    }

    fn groups(rows: &[Row<'_>]) -> Vec<ExpertGroup> {
        expert_groups(Header::parse_start(&header(rows)).unwrap().tensors())
    }

    fn experts(name: &str, dtype: Dtype, shape: &[u64]) -> Option<(u64, u64)> {
        let header = Header::parse_start(&header(&[(name.to_owned(), dtype, shape)])).unwrap();
        stacked_experts(&header.tensors()[0]).map(|experts| (experts.count, experts.stride))
    }

    fn of(names: &[&str]) -> usize {
        let rows: Vec<Row<'_>> =
            names.iter().map(|name| ((*name).to_owned(), Dtype::BF16, &[4, 8][..])).collect();
        groups(&rows).len()
    }

    #[test]
    fn each_spelling_of_separate_experts_is_a_group_of_its_matrix_and_kind() {
        for prefix in [
            "model.layers.0.mlp",
            "model.layers.12.block_sparse_moe",
            "layers.3.ffn",
            "a b.layers.1.feed_forward",
            "",
        ] {
            for matrix in MATRICES {
                for kind in KINDS {
                    let names = ["1", "0"].map(|expert| format!("{prefix}.experts.{expert}.{matrix}.{kind}"));
                    assert_eq!(of(&[&names[0], &names[1]]), 1, "{names:?}");
                    assert_eq!(names.each_ref().map(|name| expert_number(name)), [Some(1), Some(0)]);
                }
            }
        }
        let names =
            |layer, matrix, kind: &str| [0, 1].map(|e| format!("m.{layer}.mlp.experts.{e}.{matrix}.{kind}"));
        let all = [
            names(0, "w1", "weight"),
            names(0, "w1", "scales"),
            names(0, "w2", "weight"),
            names(1, "w1", "weight"),
        ];
        let all: Vec<&str> = all.iter().flatten().map(String::as_str).collect();
        assert_eq!(of(&all), 4);
    }

    #[test]
    fn incomplete_groups_and_other_names_stay_unpacked() {
        for names in [
            &["m.mlp.experts.0.w1.weight"][..],
            &["m.mlp.experts.0.w1.weight", "m.mlp.experts.2.w1.weight"],
            &["m.mlp.experts.1.w1.weight", "m.mlp.experts.2.w1.weight"],
            &["m.mlp.experts.0.w1.weight", "m.mlp.experts.01.w1.weight"],
            &["m.mlp.experts.0.w1.weight", "m.mlp.experts.4294967296.w1.weight"],
            &["m.mlp.experts.0.w1.weight", "m.mlp.experts.1.w2.weight"],
            &["m.mlp.experts.0.w1.weight", "n.mlp.experts.1.w1.weight"],
            &["m.mlp.experts.0.w4.weight", "m.mlp.experts.1.w4.weight"],
            &["m.mlp.experts.0.w1.lora_A", "m.mlp.experts.1.w1.lora_A"],
            &["m.mlp.experts.0.w1", "m.mlp.experts.1.w1"],
            &["experts.0.w1.weight", "experts.1.w1.weight"],
            &["m.mlp.expert.0.w1.weight", "m.mlp.expert.1.w1.weight"],
        ] {
            assert_eq!(of(names), 0, "{names:?}");
        }
    }

    #[test]
    fn members_that_differ_or_are_unaligned_stay_unpacked() {
        let pair = |first: (Dtype, &'static [u64]), second: (Dtype, &'static [u64])| {
            let name = |expert| format!("m.mlp.experts.{expert}.up_proj.weight");
            groups(&[(name(0), first.0, first.1), (name(1), second.0, second.1)]).len()
        };
        assert_eq!(pair((Dtype::F32, &[4, 4]), (Dtype::F32, &[4, 4])), 1);
        assert_eq!(pair((Dtype::F32, &[4, 4]), (Dtype::F32, &[16])), 0);
        assert_eq!(pair((Dtype::F32, &[4, 4]), (Dtype::I32, &[4, 4])), 0);
        assert_eq!(pair((Dtype::F32, &[4, 8]), (Dtype::F32, &[4, 4])), 0);
        for shape in [&[][..], &[0], &[15], &[1]] {
            assert_eq!(pair((Dtype::F32, shape), (Dtype::F32, shape)), 0, "{shape:?}");
        }
        assert_eq!(pair((Dtype::F4, &[128]), (Dtype::F4, &[128])), 1);
    }

    #[test]
    fn stacks_have_as_many_experts_as_their_first_dimension() {
        for (name, dtype, shape, expected) in [
            ("model.layers.0.mlp.experts.gate_up_proj", Dtype::BF16, &[4, 8, 16][..], Some((4, 256))),
            ("model.layers.0.mlp.experts.down_proj", Dtype::BF16, &[4, 8, 16], Some((4, 256))),
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", Dtype::U8, &[32, 8, 2, 16], Some((32, 256))),
            ("model.layers.0.mlp.experts.gate_up_proj_scales", Dtype::U8, &[32, 8, 2], Some((32, 16))),
            ("model.layers.0.mlp.experts.down_proj_bias", Dtype::BF16, &[32, 8], Some((32, 16))),
            ("model.layers.0.mlp.switch_mlp.up_proj.weight", Dtype::U32, &[2, 4, 4], Some((2, 64))),
            ("model.layers.0.mlp.switch_mlp.up_proj.scales", Dtype::BF16, &[2, 4, 1], Some((2, 8))),
            ("m.mlp.experts.w1.weight_packed", Dtype::F4, &[3, 2, 3], Some((3, 3))),
            // Numbers for each expert, and other tensors.
            ("m.mlp.experts.down_proj.input_scale", Dtype::F32, &[4], None),
            ("m.mlp.experts.down_proj", Dtype::F32, &[0, 4, 4], None),
            ("m.mlp.experts.down_proj", Dtype::F4, &[4, 1, 1], None),
            ("m.mlp.experts.0.down_proj.weight", Dtype::F32, &[4, 4], None),
            ("m.mlp.experts.norm.weight", Dtype::F32, &[4, 4], None),
            ("m.mlp.experts.w1.lora_A", Dtype::F32, &[4, 4], None),
            ("m.mlp.gate.weight", Dtype::F32, &[4, 4], None),
            ("experts.down_proj", Dtype::F32, &[4, 4, 4], None),
            ("down_proj", Dtype::F32, &[4, 4, 4], None),
            ("", Dtype::F32, &[4, 4, 4], None),
        ] {
            assert_eq!(experts(name, dtype, shape), expected, "{name} {shape:?}");
        }
    }

    /// The digest of each blob of a file with its content, and the recipe.
    fn split(file: &[u8]) -> (Vec<(Digest, Vec<u8>)>, Recipe) {
        let plan = SplitPlan::new(read_header(file).unwrap().file_layout(file.len() as u64).unwrap());
        let mut blobs: Vec<Vec<u8>> =
            plan.blobs().iter().map(|blob| vec![0; usize::try_from(blob.size).unwrap()]).collect();
        for part in Splitter::new(&plan).push(file).unwrap() {
            let Target::Blob { blob, offset_in_blob } = part.target else { panic!("a literal") };
            let start = usize::try_from(offset_in_blob).unwrap();
            blobs[blob][start..start + part.bytes.len()].copy_from_slice(part.bytes);
        }
        let blobs: Vec<_> = blobs.into_iter().map(|blob| (Digest::of(&blob), blob)).collect();
        let digests: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
        let recipe = plan.recipe(Digest::of(file), &digests, Vec::new()).unwrap();
        (blobs, recipe)
    }

    proptest! {
        #[test]
        fn separate_and_stacked_experts_are_the_same_blob(
            (count, order) in (2..13_usize).prop_flat_map(|count| {
                (Just(count), Just((0..count).collect::<Vec<_>>()).prop_shuffle())
            }),
            rows in 1..4_u64,
            seed in any::<u8>(),
            kind in prop::sample::select(KINDS.to_vec()),
        ) {
            let data = |expert: usize| -> Vec<u8> {
                (0..rows * 64).map(|place| seed.wrapping_add(u8::try_from((place + 7 * expert as u64) % 251).unwrap())).collect()
            };
            let (one, all) = ([rows, 32], [count as u64, rows, 32]);
            let name = |expert: usize| format!("model.layers.0.mlp.experts.{expert}.up_proj.{kind}");
            let separate: Vec<Row<'_>> = order.iter().map(|expert| (name(*expert), Dtype::BF16, &one[..])).collect();
            let mut separate = header(&separate);
            order.iter().for_each(|expert| separate.extend(data(*expert)));
            let mut stacked = header(&[(format!("model.layers.0.mlp.experts.up_proj.{kind}"), Dtype::BF16, &all[..])]);
            (0..count).for_each(|expert| stacked.extend(data(expert)));
            let ((from_separate, recipe), (from_stacked, stack)) = (split(&separate), split(&stacked));
            prop_assert_eq!(from_separate.len(), 2, "the header and the group");
            prop_assert_eq!(from_separate[1].0, from_stacked[1].0);
            prop_assert_eq!(stack.tensors().get(0).unwrap().experts, Some(Experts { count: count as u64, stride: rows * 64 }));
            for tensor in recipe.tensors().iter() {
                let expert = expert_number(&tensor.name).unwrap();
                prop_assert_eq!((tensor.offset, tensor.size), (u64::from(expert) * rows * 64, rows * 64));
            }
            let mut rebuilt = vec![0; separate.len()];
            let read = recipe.pieces().read_at(0, &mut rebuilt, |blob, offset, buffer| {
                let (_, content) = from_separate.iter().find(|(digest, _)| *digest == blob).unwrap();
                let start = usize::try_from(offset).unwrap();
                buffer.copy_from_slice(&content[start..start + buffer.len()]);
                Ok::<_, std::convert::Infallible>(())
            });
            prop_assert_eq!(read, Ok(separate.len()));
            prop_assert!(rebuilt == separate);
        }
    }
}
