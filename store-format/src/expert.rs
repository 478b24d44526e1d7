//! Expert tensors, and the position of each expert's bytes.
//!
//! A mixture-of-experts model has one weight matrix per block, projection and expert. Current GGUF files
//! stack them into one tensor; those from before April 2024, and most safetensors files, have one tensor per
//! expert. Packed in expert order, the latter have the same bytes as the former, so both become the same blob.
//!
//! The names of GGUF are in this file, those of safetensors in a submodule.

use std::collections::BTreeMap;

use crate::gguf::GgmlType;
use crate::tensor::Experts;
use crate::tensor::{Shape, TensorFormat, TensorInfo};

pub(crate) mod safetensors;

/// Separate tensors that are the experts of one projection of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertGroup {
    members: Vec<usize>,
    stride: u64,
}

impl ExpertGroup {
    /// A member's size must be a multiple of this, in bytes. Engines read tensors in vectors of up to
    /// 64 bytes, so every expert in a page-aligned blob is sufficiently aligned.
    pub const MEMBER_ALIGNMENT: u64 = 64;

    /// This group in a list where `first` other tensors come before.
    pub(crate) fn moved(&self, first: usize) -> Self {
        let members = self.members.iter().map(|member| member.saturating_add(first)).collect();
        Self { members, ..self.clone() }
    }

    /// The members in expert order, as indices of the list given to [`expert_groups`].
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The size of each member in bytes, which is also their distance when packed.
    pub fn stride(&self) -> u64 {
        self.stride
    }

    pub fn size_bytes(&self) -> u64 {
        // `pack` has proved that the product fits.
        self.stride.saturating_mul(self.members.len() as u64)
    }
}

/// Finds the tensors that can be packed: `blk.N.ffn_{gate,up,down}.E.weight` for every E from 0
/// to the last, at least two, all with the same known type and shape, and a size that is a
/// positive multiple of [`ExpertGroup::MEMBER_ALIGNMENT`].
pub fn expert_groups<'a>(tensors: impl IntoIterator<Item = TensorInfo<'a>>) -> Vec<ExpertGroup> {
    let mut projections: BTreeMap<Projection<'a>, Vec<Member<(GgmlType, Shape<'a>)>>> = BTreeMap::new();
    for (index, tensor) in tensors.into_iter().enumerate() {
        if let Some((projection, expert)) = projection_and_expert(tensor.name()) {
            let (form, size) = ((tensor.ggml_type(), tensor.shape()), tensor.size_bytes());
            projections.entry(projection).or_default().push(Member { expert, index, form, size });
        }
    }
    projections.into_values().filter_map(pack).collect()
}

/// The experts of a stacked tensor such as `blk.3.ffn_gate_exps.weight`: as many as its slowest
/// dimension says. `None` for any other tensor.
pub fn stacked_experts(name: &str, shape: Shape<'_>, size_bytes: u64) -> Option<Experts> {
    let is_stack = shape.dimensions().len() == stacked_rank(name)?;
    stack(*shape.dimensions().last().filter(|_| is_stack)?, size_bytes)
}

/// The expert number in a tensor name of a separate expert, such as `blk.3.ffn_up.7.weight` or
/// `model.layers.3.mlp.experts.7.up_proj.weight`. `None` for any other tensor.
pub fn separate_expert(name: &str) -> Option<u64> {
    let expert = projection_and_expert(name).map(|(_, expert)| expert);
    expert.or_else(|| safetensors::expert_number(name)).map(u64::from)
}

/// The group of a separate expert, as what comes before and after its number in the tensor's name, and the number.
pub(crate) fn group_and_number(format: TensorFormat, name: &str) -> Option<((&str, &str), u32)> {
    match format {
        TensorFormat::Gguf => {
            projection_and_expert(name).map(|(projection, expert)| ((projection, ""), expert))
        }
        TensorFormat::Safetensors => safetensors::name_parts_and_expert(name),
    }
}

/// So many experts in a tensor of this size.
fn stack(count: u64, size_bytes: u64) -> Option<Experts> {
    let stride = size_bytes.checked_div(count).filter(|stride| *stride > 0)?;
    (stride.checked_mul(count) == Some(size_bytes)).then_some(Experts { count, stride })
}

/// Layer and projection of separate expert tensors: the name before the expert's number.
type Projection<'a> = &'a str;

/// A tensor that may be a member of a group; all members have the same form.
pub(crate) struct Member<F> {
    pub(crate) expert: u32,
    pub(crate) index: usize,
    pub(crate) form: F,
    pub(crate) size: Option<u64>,
}

/// The group of all these members, if they can be packed.
pub(crate) fn pack<F: PartialEq>(mut members: Vec<Member<F>>) -> Option<ExpertGroup> {
    members.sort_unstable_by_key(|member| member.expert);
    let first = members.first()?;
    let stride = first.size.filter(|size| *size > 0 && size.is_multiple_of(ExpertGroup::MEMBER_ALIGNMENT))?;
    stride.checked_mul(members.len() as u64)?;
    let fits = |(place, member): (usize, &Member<F>)| {
        usize::try_from(member.expert) == Ok(place)
            && (&member.form, member.size) == (&first.form, first.size)
    };
    let complete = members.len() >= 2 && members.iter().enumerate().all(fits);
    complete.then(|| ExpertGroup { members: members.iter().map(|member| member.index).collect(), stride })
}

/// Parses `blk.N.ffn_{gate,up,down}.E.weight`.
fn projection_and_expert(name: &str) -> Option<(Projection<'_>, u32)> {
    let (projection, expert) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let (layer, matrix) = projection.strip_prefix("blk.")?.split_once(".ffn_")?;
    let is_projection = number(layer).is_some() && matches!(matrix, "gate" | "up" | "down");
    number(expert).filter(|_| is_projection).map(|expert| (projection, expert))
}

/// How many dimensions a stack of experts with this name has:
/// `[v.]blk.N.ffn_{gate,up,down,gate_up}_{exps,chexps}.{weight,bias,scale,input_scale}`.
fn stacked_rank(name: &str) -> Option<usize> {
    let name = name.strip_prefix("v.").unwrap_or(name);
    let (layer, rest) = name.strip_prefix("blk.")?.split_once(".ffn_")?;
    let (stack, kind) = rest.split_once('.')?;
    let projection = stack.strip_suffix("_exps").or_else(|| stack.strip_suffix("_chexps"))?;
    let is_stack = matches!(projection, "gate" | "up" | "down" | "gate_up");
    let is_layer = !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit());
    match kind {
        _ if !is_stack || !is_layer => None,
        "weight" => Some(3),
        "bias" => Some(2),
        "scale" | "input_scale" => Some(1),
        _ => None,
    }
}

/// A number as llama.cpp prints it. Accepting `01` or `+1` would let two tensors be the same expert.
fn number(digits: &str) -> Option<u32> {
    let plain =
        digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    digits.parse().ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info<'a>(name: &'a str, ggml_type: GgmlType, shape: &'a [u64]) -> TensorInfo<'a> {
        TensorInfo::new(name, ggml_type, Shape::new(shape).unwrap(), 0).unwrap()
    }

    /// Groups of 16-element F32 tensors (64 bytes) with these names.
    fn groups(names: &[&str]) -> Vec<ExpertGroup> {
        expert_groups(names.iter().map(|name| info(name, GgmlType::F32, &[4, 4])))
    }

    #[test]
    fn experts_are_packed_in_their_own_order() {
        let names: Vec<String> =
            [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9].iter().map(|e| format!("blk.3.ffn_up.{e}.weight")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let [group] = groups(&names).try_into().unwrap();
        assert_eq!(group.members(), [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]);
        assert_eq!((group.stride(), group.size_bytes()), (64, 704));
    }

    #[test]
    fn each_layer_and_projection_is_a_group() {
        let mut names = Vec::new();
        for layer in [0, 1] {
            for projection in ["gate", "up", "down"] {
                names.extend([0, 1].map(|e| format!("blk.{layer}.ffn_{projection}.{e}.weight")));
            }
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(groups(&names).len(), 6);
    }

    #[test]
    fn incomplete_or_single_experts_stay_unpacked() {
        assert!(groups(&["blk.0.ffn_up.0.weight"]).is_empty());
        assert!(groups(&["blk.0.ffn_up.0.weight", "blk.0.ffn_up.2.weight"]).is_empty());
        assert!(groups(&["blk.0.ffn_up.1.weight", "blk.0.ffn_up.2.weight"]).is_empty());
        assert!(groups(&["blk.0.ffn_up.0.weight", "blk.0.ffn_up.01.weight"]).is_empty());
        assert!(groups(&["blk.0.ffn_up.0.weight", "blk.0.ffn_up.4294967296.weight"]).is_empty());
    }

    #[test]
    fn names_of_other_tensors_are_not_experts() {
        for name in [
            "blk.0.ffn_up.weight",
            "blk.0.ffn_norm.0.weight",
            "blk.x.ffn_up.0.weight",
            "blk..ffn_up.0.weight",
            "blk.0.ffn_up.+1.weight",
            "blk.0.ffn_up.0.bias",
            "blk.0.ffn_up.0.0.weight",
            "v.blk.0.ffn_up.0.weight",
        ] {
            assert_eq!(separate_expert(name), None, "{name}");
        }
    }

    #[test]
    fn separate_experts_have_their_number() {
        assert_eq!(separate_expert("blk.31.ffn_down.10.weight"), Some(10));
    }

    #[test]
    fn members_that_differ_stay_unpacked() {
        let first = info("blk.0.ffn_up.0.weight", GgmlType::F32, &[4, 4]);
        let same = info("blk.0.ffn_up.1.weight", GgmlType::F32, &[4, 4]);
        let shape = info("blk.0.ffn_up.1.weight", GgmlType::F32, &[16]);
        let ggml_type = info("blk.0.ffn_up.1.weight", GgmlType::I32, &[4, 4]);
        assert_eq!(expert_groups([first, same]).len(), 1);
        assert!(expert_groups([first, shape]).is_empty());
        assert!(expert_groups([first, ggml_type]).is_empty());
    }

    #[test]
    fn members_with_unaligned_size_stay_unpacked() {
        for (ggml_type, shape) in [
            (GgmlType::F32, vec![8]),
            (GgmlType::F32, vec![0]),
            (GgmlType::Q4_0, vec![32]),
            (GgmlType::from_id(77), vec![64]),
            (GgmlType::I8, vec![1 << 62, 1]),
        ] {
            let names = ["0", "1", "2", "3"].map(|e| format!("blk.0.ffn_up.{e}.weight"));
            let members = names.iter().map(|name| info(name, ggml_type, &shape));
            assert!(expert_groups(members).is_empty(), "{ggml_type} {shape:?}");
        }
    }

    #[test]
    fn stacked_tensors_say_where_each_expert_is() {
        let stacked = |name, shape: &[u64], size| stacked_experts(name, Shape::new(shape).unwrap(), size);
        let found = |count, stride| Some(Experts { count, stride });
        assert_eq!(stacked("blk.3.ffn_gate_exps.weight", &[256, 2, 8], 2304), found(8, 288));
        assert_eq!(stacked("v.blk.31.ffn_down_exps.weight", &[4, 2, 2], 64), found(2, 32));
        assert_eq!(stacked("blk.0.ffn_gate_up_exps.bias", &[4, 32], 512), found(32, 16));
        assert_eq!(stacked("blk.0.ffn_up_exps.scale", &[32], 128), found(32, 4));
        assert_eq!(stacked("blk.0.ffn_up_exps.input_scale", &[32], 128), found(32, 4));
        assert_eq!(stacked("blk.0.ffn_up_chexps.weight", &[4, 2, 2], 64), found(2, 32));
    }

    #[test]
    fn other_tensors_have_no_experts() {
        let shape = Shape::new(&[4, 2, 2]).unwrap();
        for name in [
            "blk.0.ffn_norm_exps.weight",
            "blk.0.ffn_gate_shexp.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.x.ffn_gate_exps.weight",
            "blk..ffn_gate_exps.weight",
            "x.blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_gate_exps.weight.0",
            "blk.0.ffn_gate_exps",
            "blk.0.ffn_gate_exps.bias",
        ] {
            assert_eq!(stacked_experts(name, shape, 64), None, "{name}");
        }
        assert_eq!(stacked_experts("blk.0.ffn_up_exps.weight", shape, 63), None);
        assert_eq!(stacked_experts("blk.0.ffn_up_exps.weight", Shape::new(&[4, 2, 0]).unwrap(), 0), None);
    }
}
