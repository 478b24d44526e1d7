//! The parts of tensors' names in Hugging Face's layout.

/// What the name of a tensor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorName<'n> {
    /// The name of its layer, such as `model.layers.0` or `model.embed_tokens`.
    pub(super) layer: &'n str,
    /// The number of its block, if it is in the stack of blocks of the language model.
    pub(super) block: Option<u64>,
    /// Whether it holds experts of a mixture that not every token uses.
    pub(super) is_expert: bool,
    /// Whether it belongs to the output, which follows the blocks.
    pub(super) is_output: bool,
}

/// The names of modules around the stack of blocks of a language model.
const OUTER: [&str; 8] =
    ["model", "language_model", "transformer", "gpt_neox", "decoder", "text_model", "backbone", "llm"];
/// The names of the stack.
const STACKS: [&str; 3] = ["layers", "h", "blocks"];
/// The names of the output's modules.
const OUTPUTS: [&str; 5] = ["lm_head", "embed_out", "norm", "ln_f", "final_layer_norm"];
/// The parts of names of experts, of Hugging Face and of MLX.
const EXPERTS: [&str; 2] = ["experts", "switch_mlp"];

impl<'n> TensorName<'n> {
    pub(super) fn new(name: &'n str) -> Self {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let mut end = 0;
        let mut module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        let mut number = None;
        for part in name.split('.') {
            end += part.len();
            if is_number(part) && end < name.len() {
                number = part.parse().ok();
                module = name.get(..end).unwrap_or(name);
                break;
            }
            end += 1;
        }
        let stack = module.rsplit_once('.').map_or("", |(stack, _)| stack);
        let outer = without_outer(module);
        Self {
            layer: module,
            block: number.filter(|_| STACKS.contains(&without_outer(stack))),
            is_expert: name.split('.').any(|part| EXPERTS.contains(&part)),
            is_output: number.is_none() && OUTPUTS.contains(&outer),
        }
    }
}

/// The module's name without the modules around it.
fn without_outer(module: &str) -> &str {
    let mut rest = module;
    while let Some((_, inner)) = rest.split_once('.').filter(|(first, _)| OUTER.contains(first)) {
        rest = inner;
    }
    rest
}

/// The tensor's name in its block, such as `self_attn.k_proj.weight`.
pub(super) fn in_block(name: &str) -> Option<(u64, &str)> {
    let TensorName { layer, block, .. } = TensorName::new(name);
    Some((block?, name.get(layer.len() + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_the_language_model_have_numbers_and_those_of_a_vision_tower_none() {
        let split = |name| {
            let TensorName { layer, block, .. } = TensorName::new(name);
            (layer, block)
        };
        assert_eq!(split("model.layers.31.self_attn.k_proj.weight"), ("model.layers.31", Some(31)));
        assert_eq!(
            split("model.language_model.layers.0.mlp.experts.7.up_proj.weight"),
            ("model.language_model.layers.0", Some(0))
        );
        assert_eq!(split("language_model.model.layers.2.x"), ("language_model.model.layers.2", Some(2)));
        assert_eq!(split("h.0.attn.c_attn.weight"), ("h.0", Some(0)));
        assert_eq!(split("transformer.h.11.ln_1.weight"), ("transformer.h.11", Some(11)));
        assert_eq!(split("visual.blocks.3.attn.qkv.weight"), ("visual.blocks.3", None));
        assert_eq!(
            split("vision_tower.vision_model.encoder.layers.1.a"),
            ("vision_tower.vision_model.encoder.layers.1", None)
        );
        assert_eq!(split("encoder.layers.1.a"), ("encoder.layers.1", None));
        assert_eq!(split("model.embed_tokens.weight"), ("model.embed_tokens", None));
        for odd in ["", ".", "7", "model.layers.3", "layers.99999999999999999999.a", "layers..a", "é.0.x"] {
            let TensorName { layer, .. } = TensorName::new(odd);
            assert!(odd.starts_with(layer), "{odd:?} {layer:?}");
            let _name = in_block(odd);
        }
    }

    #[test]
    fn outputs_and_experts_are_recognised_by_their_names() {
        let is_output = |name| TensorName::new(name).is_output;
        assert!(["lm_head.weight", "model.norm.weight", "transformer.ln_f.bias"].into_iter().all(is_output));
        assert!(!is_output("model.layers.0.norm.weight") && !is_output("model.embed_tokens.weight"));
        let is_expert = |name| TensorName::new(name).is_expert;
        assert!(is_expert("model.layers.0.mlp.experts.down_proj"));
        assert!(!is_expert("model.layers.0.mlp.shared_experts.down_proj.weight"));
    }
}
