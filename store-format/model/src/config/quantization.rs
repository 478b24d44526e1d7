//! How the weights of a folder are quantised, as its `config.json` and the files of quantisation tools say, and how many
//! parameters the packed tensors stand for.
//!
//! Sources: `quantization_config` of transformers with the methods that it names, MLX's `quantization`,
//! `hf_quant_config.json` of NVIDIA's ModelOpt, and the older `quantize_config.json` (GPTQ) and `quant_config.json` (AWQ).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use blobd_store_format::python_json;
use blobd_store_format::recipe::TensorEntry;
use blobd_store_format::safetensors::Dtype;
use serde_json::Value as Json;

/// The quantisation of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigQuantization {
    method: String,
    bits: Option<u64>,
    /// Bits of single layers, by the path of the layer.
    of_layers: BTreeMap<String, u64>,
    codes: Option<Codes>,
}

/// Weights as numbers of entries in codebooks (AQLM): this many codes stand for this many weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Codes {
    codes: u64,
    weights: u64,
}

/// The files that say it, in the order in which they are asked.
pub const QUANTIZATION_FILES: [&str; 4] =
    ["config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"];

/// The longest method that is shown, in bytes.
const MAX_METHOD_BYTES: usize = 32;

impl ConfigQuantization {
    /// Reads one of [`QUANTIZATION_FILES`]; `None` if it says nothing of a quantisation.
    pub fn from_file(name: &str, json: &[u8]) -> Option<Self> {
        let json = python_json::parse(json).ok()?;
        match name {
            "config.json" => {
                let sections = [Some(&json), json.get("text_config")];
                let mut sections = sections.into_iter().flatten();
                sections.find_map(|section| {
                    let of_transformers = section.get("quantization_config").and_then(Self::of_transformers);
                    of_transformers.or_else(|| section.get("quantization").and_then(Self::of_mlx))
                })
            }
            "hf_quant_config.json" => Self::of_transformers(json.get("quantization")?),
            "quantize_config.json" => Self::new("gptq", bits(&json)),
            "quant_config.json" => Self::new("awq", bits(&json)),
            _ => None,
        }
    }

    fn new(method: &str, bits: Option<u64>) -> Option<Self> {
        let is_name = method.len() <= MAX_METHOD_BYTES && !method.chars().any(char::is_control);
        let method = method.to_owned();
        (is_name && !method.is_empty()).then_some(Self {
            method,
            bits,
            of_layers: BTreeMap::new(),
            codes: None,
        })
    }

    fn of_transformers(config: &Json) -> Option<Self> {
        let text = |key: &str| config.get(key).and_then(Json::as_str);
        // ModelOpt's method is itself; what it did is in `quant_algo`.
        match text("quant_algo").or_else(|| text("quant_method")) {
            Some(method) => {
                let found = Self::new(method, bits(config).or_else(|| bits_of_name(method)))?;
                Some(Self { codes: Codes::of(config), ..found })
            }
            // MLX writes its section under both names, here without a method.
            None => Self::of_mlx(config),
        }
    }

    fn of_mlx(config: &Json) -> Option<Self> {
        let bits = bits(config)?;
        let mode = config.get("mode").and_then(Json::as_str).filter(|mode| *mode != "affine");
        let layers = config.as_object()?.iter();
        let of_layers = layers.filter_map(|(path, layer)| Some((path.clone(), self::bits(layer)?))).collect();
        Some(Self { of_layers, ..Self::new(mode.unwrap_or("mlx"), Some(bits))? })
    }

    /// The method and the bits of a weight, such as `GPTQ 4-bit` or `NVFP4`.
    pub fn label(&self) -> String {
        let is_name = self.method.len() >= 12 || self.method.contains('-');
        let method = if is_name { self.method.clone() } else { self.method.to_uppercase() };
        match self.bits {
            Some(bits) if !method.contains(char::is_numeric) => format!("{method} {bits}-bit"),
            _ => method,
        }
    }

    /// The parameters of these tensors: the elements of packed tensors unpacked, without scales, zero points and the
    /// other tensors that only quantisation adds.
    pub fn parameters<'t>(&self, tensors: impl Iterator<Item = TensorEntry<'t>> + Clone) -> u64 {
        let names: BTreeSet<Cow<'_, str>> = tensors.clone().map(|tensor| tensor.name).collect();
        let of_tensor = |tensor: TensorEntry<'_>| {
            let elements = tensor.shape.iter().fold(1, |count: u64, length| count.saturating_mul(*length));
            match part_of(&tensor.name, &names) {
                Part::Plain => elements,
                Part::Companion => 0,
                Part::Packed(layer) => self.unpacked(&tensor, layer, elements),
                Part::Codes => self.codes.map_or(elements, |codes| codes.weights_of(elements)),
            }
        };
        tensors.map(of_tensor).fold(0, u64::saturating_add)
    }

    fn unpacked(&self, tensor: &TensorEntry<'_>, layer: &str, elements: u64) -> u64 {
        let dtype = Dtype::from_name(&tensor.type_name);
        let is_packed = |dtype: &Dtype| matches!(dtype, Dtype::I32 | Dtype::U32 | Dtype::U8 | Dtype::I64);
        let bits = self.of_layers.get(layer).copied().or(self.bits).filter(|bits| *bits > 0);
        let (Some(dtype), Some(bits)) = (dtype.filter(is_packed), bits) else { return elements };
        elements.saturating_mul(dtype.bits()) / bits
    }
}

impl Codes {
    fn of(config: &Json) -> Option<Self> {
        let number = |key: &str| config.get(key).map_or(Some(1), Json::as_u64);
        config.get("num_codebooks")?;
        let (codes, inputs, outputs) =
            (number("num_codebooks")?, number("in_group_size")?, number("out_group_size")?);
        let weights = inputs.checked_mul(outputs)?;
        (codes > 0 && weights > 0).then_some(Self { codes, weights })
    }

    const fn weights_of(self, codes: u64) -> u64 {
        (codes / self.codes).saturating_mul(self.weights)
    }
}

/// What a tensor is for the layer that it belongs to.
enum Part<'n> {
    /// No quantisation has changed it.
    Plain,
    /// The weights of this layer, perhaps several in one number.
    Packed(&'n str),
    /// The weights of a layer as numbers of entries in codebooks.
    Codes,
    /// Scales and the like.
    Companion,
}

/// The names that quantisations give to packed weights, with those of their scales, one of which the layer must have.
const PACKED: [(&str, &[&str]); 4] = [
    (".qweight", &[".scales"]),
    (".weight_packed", &[".weight_scale"]),
    (".weight", &[".scales", ".weight_scale", ".weight_scale_inv", ".weight.absmax"]),
    ("_blocks", &["_scales"]),
];

/// The names of what quantisations add to a layer, with those of the weights, one of which the layer must have.
const COMPANIONS: [(&str, &[&str]); 21] = [
    (".qzeros", &[".qweight"]),
    (".g_idx", &[".qweight"]),
    (".scales", &[".qweight", ".weight", ".codes"]),
    (".codebooks", &[".codes"]),
    // bitsandbytes with 8 bits.
    (".SCB", &[".weight"]),
    (".weight_format", &[".weight"]),
    (".biases", &[".weight"]),
    (".global_scale", &[".weight"]),
    (".weight_scale", &[".weight", ".weight_packed"]),
    (".weight_scale_inv", &[".weight"]),
    (".weight_scale_2", &[".weight"]),
    (".weight_zero_point", &[".weight", ".weight_packed"]),
    (".weight_g_idx", &[".weight", ".weight_packed"]),
    (".weight_shape", &[".weight", ".weight_packed"]),
    (".weight_global_scale", &[".weight", ".weight_packed"]),
    (".input_global_scale", &[".weight", ".weight_packed"]),
    (".input_scale", &[".weight", ".weight_packed"]),
    (".k_scale", &[".weight", ".weight_packed"]),
    (".v_scale", &[".weight", ".weight_packed"]),
    (".output_scale", &[".weight", ".weight_packed"]),
    ("_scales", &["_blocks"]),
];

fn part_of<'n>(name: &'n str, names: &BTreeSet<Cow<'_, str>>) -> Part<'n> {
    let has = |layer: &str, suffixes: &[&str]| {
        suffixes.iter().any(|suffix| names.contains(format!("{layer}{suffix}").as_str()))
    };
    let find = |table: &[(&str, &[&str])]| {
        table.iter().find_map(|(suffix, others)| name.strip_suffix(suffix).filter(|layer| has(layer, others)))
    };
    // bitsandbytes: `L.weight.absmax`, `L.weight.quant_map`, `L.weight.quant_state.…`.
    let of_weight = name.rfind(".weight.").and_then(|end| name.get(..end));
    if find(&COMPANIONS).is_some() || of_weight.is_some_and(|layer| has(layer, &[".weight"])) {
        return Part::Companion;
    }
    if name.strip_suffix(".codes").is_some_and(|layer| has(layer, &[".codebooks"])) {
        return Part::Codes;
    }
    find(&PACKED).map_or(Part::Plain, Part::Packed)
}

/// The bits of a weight, under one of the keys that tools use.
fn bits(config: &Json) -> Option<u64> {
    let number = ["bits", "w_bit", "num_bits"].iter().find_map(|key| config.get(*key)?.as_u64());
    let loads = |key: &str| config.get(key).and_then(Json::as_bool).unwrap_or(false);
    let loaded = [("load_in_4bit", 4), ("load_in_8bit", 8)].into_iter().find(|(key, _)| loads(key));
    let of_groups = || {
        let mut groups = config.get("config_groups")?.as_object()?.values();
        groups.find_map(|group| group.get("weights")?.get("num_bits")?.as_u64())
    };
    let found = number.or(loaded.map(|(_, bits)| bits)).or_else(of_groups);
    found.filter(|bits| (1..=16).contains(bits))
}

/// The bits that a name such as `nvfp4` or `W4A16_AWQ` states.
fn bits_of_name(name: &str) -> Option<u64> {
    let name = name.to_ascii_lowercase();
    let after = |mark: &str| name.find(mark).and_then(|start| name.get(start + mark.len()..)?.chars().next());
    let digit = ["fp", "int", "w"].into_iter().find_map(|mark| after(mark)?.to_digit(10));
    digit.map(u64::from).filter(|bits| [4, 6, 8].contains(bits))
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;
    use serde_json::json;

    use super::*;

    fn of(name: &str, config: &Json) -> Option<ConfigQuantization> {
        ConfigQuantization::from_file(name, config.to_string().as_bytes())
    }

    fn label(name: &str, config: &Json) -> Option<String> {
        of(name, config).map(|found| found.label())
    }

    fn tensors(entries: &[(&str, &str, &[u64])]) -> Vec<TensorEntry<'static>> {
        let entry = |(name, type_name, shape): &(&str, &str, &[u64])| TensorEntry {
            name: name.to_string().into(),
            type_name: type_name.to_string().into(),
            shape: shape.to_vec().into(),
            digest: Digest::of(b""),
            offset: 0,
            size: 0,
            experts: None,
        };
        entries.iter().map(entry).collect()
    }

    #[test]
    fn methods_and_bits_are_read_from_every_file() {
        let in_config = |section: &Json| label("config.json", &json!({ "quantization_config": section }));
        for (section, expected) in [
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 128}), Some("GPTQ 4-bit")),
            (json!({"quant_method": "awq", "bits": 4}), Some("AWQ 4-bit")),
            (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), Some("FP8")),
            (json!({"quant_method": "mxfp4"}), Some("MXFP4")),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), Some("NVFP4")),
            (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), Some("bitsandbytes 4-bit")),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}),
                Some("compressed-tensors 4-bit"),
            ),
            (json!({"group_size": 64, "bits": 4, "mode": "affine"}), Some("MLX 4-bit")),
            (json!({"quant_method": "x".repeat(40)}), None),
            (json!({}), None),
        ] {
            assert_eq!(in_config(&section).as_deref(), expected, "{section}");
        }
        let text = json!({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 8}}});
        assert_eq!(label("config.json", &text).as_deref(), Some("GPTQ 8-bit"));
        let mlx = json!({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}});
        assert_eq!(label("config.json", &mlx).as_deref(), Some("MXFP4"));
        let modelopt = json!({"quantization": {"quant_algo": "NVFP4", "group_size": 16}});
        assert_eq!(label("hf_quant_config.json", &modelopt).as_deref(), Some("NVFP4"));
        assert_eq!(label("quantize_config.json", &json!({"bits": 4})).as_deref(), Some("GPTQ 4-bit"));
        assert_eq!(label("quant_config.json", &json!({"w_bit": 4})).as_deref(), Some("AWQ 4-bit"));
        assert_eq!(of("config.json", &json!({"model_type": "llama"})), None);
    }

    #[test]
    fn packed_tensors_are_counted_unpacked_and_their_scales_not() {
        let parameters = |section: &Json, entries: &[(&str, &str, &[u64])]| {
            let found = of("config.json", &json!({ "quantization_config": section })).unwrap();
            found.parameters(tensors(entries).into_iter())
        };
        let gptq = json!({"quant_method": "gptq", "bits": 4});
        let layer: [(&str, &str, &[u64]); 6] = [
            ("l.qweight", "I32", &[16, 128]),
            ("l.qzeros", "I32", &[1, 16]),
            ("l.scales", "F16", &[1, 128]),
            ("l.g_idx", "I32", &[128]),
            ("norm.weight", "F16", &[128]),
            ("scales", "F16", &[5]),
        ];
        assert_eq!(parameters(&gptq, &layer), 128 * 128 + 128 + 5);
        let without_bits = json!({"quant_method": "gptq", "bits": 0});
        assert_eq!(parameters(&without_bits, &layer), 16 * 128 + 128 + 5, "as they are stored");
        let nvfp4 = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
        let layer: [(&str, &str, &[u64]); 4] = [
            ("l.weight", "U8", &[128, 64]),
            ("l.weight_scale", "F8_E4M3", &[128, 8]),
            ("l.weight_scale_2", "F32", &[]),
            ("l.input_scale", "F32", &[]),
        ];
        assert_eq!(parameters(&nvfp4, &layer), 128 * 128);
        let fp8 = json!({"quant_method": "fp8"});
        let layer: [(&str, &str, &[u64]); 2] =
            [("l.weight", "F8_E4M3", &[128, 128]), ("l.weight_scale_inv", "F32", &[1, 1])];
        assert_eq!(parameters(&fp8, &layer), 128 * 128);
        let gpt_oss = json!({"quant_method": "mxfp4"});
        let layer: [(&str, &str, &[u64]); 3] = [
            ("experts.down_proj_blocks", "U8", &[4, 8, 2, 16]),
            ("experts.down_proj_scales", "U8", &[4, 8, 2]),
            ("experts.down_proj_bias", "BF16", &[4, 8]),
        ];
        assert_eq!(parameters(&gpt_oss, &layer), 4 * 8 * 64 + 32);
        let bitsandbytes = json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
        let layer: [(&str, &str, &[u64]); 3] = [
            ("l.weight", "U8", &[8192, 1]),
            ("l.weight.absmax", "F32", &[256]),
            ("l.weight.quant_state.bitsandbytes__nf4", "U8", &[80]),
        ];
        assert_eq!(parameters(&bitsandbytes, &layer), 128 * 128);
        let bitsandbytes = json!({"quant_method": "bitsandbytes", "load_in_8bit": true});
        let layer: [(&str, &str, &[u64]); 3] =
            [("l.weight", "I8", &[128, 64]), ("l.SCB", "F32", &[128]), ("l.weight_format", "U8", &[])];
        assert_eq!(parameters(&bitsandbytes, &layer), 128 * 64);
        let aqlm = json!({
            "quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "num_codebooks": 2, "nbits_per_codebook": 8
        });
        let layer: [(&str, &str, &[u64]); 4] = [
            ("l.codes", "I8", &[128, 16, 2]),
            ("l.codebooks", "F16", &[2, 256, 1, 8]),
            ("l.scales", "F16", &[128, 1, 1, 1]),
            ("l.bias", "F16", &[128]),
        ];
        assert_eq!(parameters(&aqlm, &layer), 128 * 128 + 128);
    }

    #[test]
    fn layers_of_mlx_may_have_bits_of_their_own() {
        let config = json!({"quantization": {"group_size": 64, "bits": 4, "model.gate": {"group_size": 64, "bits": 8}}});
        let found = of("config.json", &config).unwrap();
        let entries = tensors(&[
            ("model.up.weight", "U32", &[64, 8]),
            ("model.up.scales", "BF16", &[64, 1]),
            ("model.up.biases", "BF16", &[64, 1]),
            ("model.gate.weight", "U32", &[64, 16]),
            ("model.gate.scales", "BF16", &[64, 1]),
            ("model.gate.biases", "BF16", &[64, 1]),
        ]);
        assert_eq!(found.parameters(entries.into_iter()), 2 * 64 * 64);
    }
}
