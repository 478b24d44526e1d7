//! Models with a safetensors file per tensor: those of the table that the tests of all clients read, and what that table
//! does not show.
#![allow(clippy::unwrap_used)]

#[path = "daemon/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "daemon/layer_table.rs"]
#[allow(dead_code)]
mod layer_table;

use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_client::Client;
use blobd_client::weights::{Dtype, ManifestWeights, WeightsError};
use blobd_model::tensor_layers::TensorLayersError;
use blobd_store_format::reference::Reference;
use blobd_store_format::safetensors::HeaderWriter;
use fake::FakeModel;
use layer_table::{Found, FoundTensor, JSON, Opened, TENSOR, data, model, model_of_files, table};

/// A safetensors file whose data is 1, 2, 3, ….
fn file(metadata: &[(&str, &str)], tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
    let (mut writer, mut size) = (HeaderWriter::new(), 0);
    for (key, value) in metadata {
        writer.metadata(*key, *value);
    }
    for (name, dtype, shape) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
        size += usize::try_from(shape.iter().product::<u64>() * dtype.bits() / 8).unwrap();
    }
    let mut bytes = writer.header().unwrap();
    bytes.extend((1..=250).cycle().take(size));
    bytes
}

/// A client of a daemon with a model of these layers.
fn client(layers: &[(&str, &str, Vec<u8>)]) -> Client {
    let files = layers.iter().map(|(media_type, name, bytes)| (*media_type, *name, &**bytes));
    model_of_files(files).client()
}

fn name() -> Reference {
    "tiny".parse().unwrap()
}

fn open(layers: &[(&str, &str, Vec<u8>)], component: &str) -> Result<ManifestWeights, WeightsError> {
    ManifestWeights::open_component(&client(layers), &name(), component)
}

/// One F32 tensor of two elements under this key.
fn single(key: &str) -> Vec<u8> {
    file(&[], &[(key, Dtype::F32, &[2])])
}

#[test]
fn single_tensor_is_found_under_every_key_that_was_ever_used() {
    for key in ["norm.weight", "vae/norm.weight", "data"] {
        let layers = [(TENSOR, "vae/norm.weight", single(key)), (TENSOR, "other/x", single("x"))];
        let weights = open(&layers, "vae/").unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["norm.weight"], "{key}");
        let tensor = weights.tensor("norm.weight").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[2][..]));
        assert_eq!(tensor[..], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(tensor.mapped().is_some(), "no copy");
        assert!(!weights.has("vae/norm.weight") && weights.has("norm.weight"));

        let all = ManifestWeights::open(&client(&layers), &name()).unwrap();
        assert_eq!(all.names().collect::<Vec<_>>(), ["other/x", "vae/norm.weight"], "{key}");
        assert_eq!(all.tensor("vae/norm.weight").unwrap()[..], tensor[..]);
    }
}

/// A quantised tensor with all its parts.
fn combined(name: &str) -> Vec<u8> {
    let names =
        [name.to_owned(), format!("{name}.scale"), format!("{name}.bias"), format!("{name}.global_scale")];
    file(
        &[("quant_type", "int4"), ("group_size", "64")],
        &[
            (&names[0], Dtype::U32, &[2, 16]),
            (&names[1], Dtype::BF16, &[2, 2]),
            (&names[2], Dtype::BF16, &[2, 2]),
            (&names[3], Dtype::F32, &[]),
        ],
    )
}

/// Converting packed elements as if they were floats would destroy them.
#[test]
fn conversion_leaves_quantised_tensors_and_their_parts_alone() {
    let plain = file(&[], &[("norm", Dtype::BF16, &[4])]);
    // A quantised tensor may look like floats.
    let eight_bit = file(&[], &[("f", Dtype::F16, &[64]), ("f.scale", Dtype::F32, &[1])]);
    let ids = file(&[], &[("ids", Dtype::I64, &[1])]);
    let layers = [
        (TENSOR, "q", combined("q")),
        (TENSOR, "norm", plain),
        (TENSOR, "f", eight_bit),
        (TENSOR, "ids", ids),
    ];
    let weights = open(&layers, "").unwrap();
    for name in ["q", "q_scale", "q_qbias", "q_global_scale", "f", "f_scale", "ids"] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let (stored, asked) = (weights.tensor(name).unwrap(), weights.tensor_as(name, dtype).unwrap());
            assert_eq!((asked.dtype(), &asked[..]), (stored.dtype(), &stored[..]), "{name} as {dtype}");
            assert!(asked.mapped().is_some(), "{name} as {dtype}: no copy");
        }
    }
    let wide = weights.tensor_as("norm", Dtype::F32).unwrap();
    assert_eq!((wide.dtype(), wide.len(), wide.mapped().is_none()), (Dtype::F32, 16, true));
    assert_eq!(wide[..4], [0, 0, 1, 2], "the upper half of an F32");
    assert!(weights.tensor_as("norm", Dtype::BF16).unwrap().mapped().is_some());
    let text = weights.tensor_as("norm", Dtype::I32).unwrap_err().to_string();
    assert!(text.starts_with("tensor \"norm\": elements cannot be converted to I32"), "{text}");
}

#[test]
fn wide_and_narrow_floats_are_converted_or_refused_by_name() {
    let (wide, narrow) = (Dtype::F64, Dtype::F8_E4M3FNUZ);
    let layers = [
        (TENSOR, "wide", file(&[], &[("wide", wide, &[1])])),
        (TENSOR, "narrow", file(&[], &[("narrow", narrow, &[2])])),
        (TENSOR, "tiny", file(&[], &[("tiny", Dtype::F4, &[2])])),
    ];
    let weights = open(&layers, "").unwrap();
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
    let single = weights.tensor_as("wide", Dtype::F32).unwrap();
    assert_eq!((single.dtype(), single.len()), (Dtype::F32, 4));
    assert_eq!(single[..], [0; 4], "5e-270 is too small for an F32");
    assert_eq!(weights.tensor_as("wide", wide).unwrap()[..], bytes);
    // 2^-10 and 2 * 2^-10.
    let halves = weights.tensor_as("narrow", Dtype::F16).unwrap();
    assert_eq!(halves[..], [0x00, 0x14, 0x00, 0x18]);
    let text = weights.tensor_as("tiny", Dtype::F32).unwrap_err().to_string();
    assert!(text.starts_with("tensor \"tiny\": elements of F4 cannot be converted"), "{text}");
    assert_eq!(weights.tensor("tiny").unwrap().dtype(), Dtype::F4);
}

#[test]
fn group_of_experts_is_its_tensors() {
    let (up, down) = ("layers.3.mlp.experts.up.weight", "layers.3.mlp.experts.down.weight");
    let scale = format!("{up}.scale");
    for prefix in ["", "text_encoder/"] {
        let keys = [up, &scale, down].map(|key| format!("{prefix}{key}"));
        let metadata_key = format!("{}.quant_type", keys[0]);
        let bytes = file(
            &[(&metadata_key, "mxfp8"), ("group_size", "32")],
            &[
                (&keys[0], Dtype::U32, &[4, 2, 8]),
                (&keys[1], Dtype::U8, &[4, 2, 1]),
                (&keys[2], Dtype::BF16, &[4, 2, 8]),
            ],
        );
        let layers = [(TENSOR, "text_encoder/layers.3.mlp.experts", bytes)];
        let weights = open(&layers, "text_encoder").unwrap();
        let group = "layers.3.mlp.experts";
        assert_eq!(weights.group(group).unwrap(), [up, down]);
        let names: Vec<_> = weights.names().collect();
        assert_eq!(names, [group, down, up, &format!("{up}_scale")]);
        let stack = weights.tensor(up).unwrap();
        assert_eq!(stack.shape(), [4, 2, 8]);
        let experts: Vec<_> = (0..4).map(|expert| stack.expert_bytes(expert).unwrap().to_vec()).collect();
        assert_eq!((experts.concat(), experts[0].len()), (stack.to_vec(), 64));
        assert!(stack.expert_bytes(4).is_none());
        let said = weights.quantization_of(up).unwrap();
        assert_eq!((said.quant_type.as_deref(), said.group_size), (Some("mxfp8"), Some(32)));
        assert_eq!(weights.quantization_of(down), None, "without a scale it is not quantised");
        assert!(weights.has(group));
        let error = weights.tensor(group).unwrap_err().to_string();
        assert!(error.contains("group of tensors") && error.contains(up), "{error}");

        let all = open(&layers, "").unwrap();
        assert!(all.tensor(&format!("text_encoder/{up}_scale")).is_ok());
    }
}

/// An int4 tensor with 64 elements per scale, by its shapes; its metadata is the argument.
fn quantized(name: &'static str, metadata: &[(&str, &str)]) -> (&'static str, &'static str, Vec<u8>) {
    let scale = format!("{name}.scale");
    let tensors: [(&str, Dtype, &[u64]); 2] = [(name, Dtype::U32, &[2, 16]), (&scale, Dtype::BF16, &[2, 2])];
    (TENSOR, name, file(metadata, &tensors))
}

#[test]
fn type_and_group_size_of_a_model_come_from_one_source() {
    let only_type = quantized("a", &[("quant_type", "nvfp4")]);
    let only_size = quantized("b", &[("group_size", "128")]);
    let both = quantized("c", &[("quant_type", "int8"), ("group_size", "32")]);
    let index = (JSON, "model_index.json", br#"{"quantization":"int8","group_size":"128"}"#.to_vec());
    let size_index = (JSON, "model_index.json", br#"{"group_size":32}"#.to_vec());
    for (layers, expected) in [
        (vec![only_type.clone(), both.clone()], (Some("NVFP4"), Some(16))),
        (vec![only_type.clone(), index.clone()], (Some("NVFP4"), Some(16))),
        (vec![only_size.clone(), both.clone()], (Some("INT8"), Some(32))),
        (vec![only_size.clone(), index.clone()], (Some("INT8"), Some(128))),
        (vec![only_size.clone(), size_index], (None, Some(128))),
        (vec![quantized("d", &[]), index], (Some("INT8"), Some(128))),
    ] {
        let weights = open(&layers, "").unwrap();
        assert_eq!((weights.quantization(), weights.group_size()), expected);
    }
}

#[test]
fn index_decides_before_scales_in_separate_layers_if_it_names_a_known_type() {
    let layer =
        |name: &'static str, dtype, shape: &[u64]| (TENSOR, name, file(&[], &[("data", dtype, shape)]));
    let layers = [layer("w", Dtype::U32, &[2, 8]), layer("w_scale", Dtype::U8, &[2, 4])];
    for (index, quant_type, group_size) in [
        (r#"{"quantization":"INT4","group_size":64}"#, "INT4", 64),
        (r#"{"quantization":"int8"}"#, "INT8", 64),
        (r#"{"quantization":"nvfp4","group_size":32}"#, "NVFP4", 32),
        (r#"{"quantization":"none","group_size":32}"#, "NVFP4", 16),
        (r#"{"group_size":32}"#, "NVFP4", 32),
        ("{}", "NVFP4", 16),
    ] {
        let index = (JSON, "model_index.json", index.as_bytes().to_vec());
        let weights = open(&[layers[0].clone(), layers[1].clone(), index], "").unwrap();
        assert_eq!((weights.quantization(), weights.group_size()), (Some(quant_type), Some(group_size)));
    }
}

#[test]
fn shapes_that_allow_the_quantisation_of_the_index_imply_it() {
    let layer =
        |name: &'static str, dtype, shape: &[u64]| (TENSOR, name, file(&[], &[("data", dtype, shape)]));
    // 128 elements of 4 bits in a group, or 64 of 8 bits.
    let layers = [
        layer("w", Dtype::U32, &[2, 16]),
        layer("w_scale", Dtype::BF16, &[2, 1]),
        layer("w_qbias", Dtype::BF16, &[2, 1]),
    ];
    for (index, quant_type, group_size) in [
        (r#"{"quantization":"INT4","group_size":128}"#, "int4", 128),
        (r#"{"quantization":"int8","group_size":64}"#, "int8", 64),
        (r#"{"quantization":"INT4","group_size":64}"#, "int8", 64),
        ("{}", "int8", 64),
    ] {
        let index = (JSON, "model_index.json", index.as_bytes().to_vec());
        let all: Vec<_> = layers.iter().cloned().chain([index]).collect();
        let found = open(&all, "").unwrap().quantization_of("w").unwrap();
        assert_eq!((found.quant_type.as_deref(), found.group_size), (Some(quant_type), Some(group_size)));
    }
}

#[test]
fn type_and_group_size_of_a_tensor_belong_together() {
    for (metadata, expected) in [
        // The type of the tensor with the size of all others.
        (&[("a.quant_type", "nvfp4"), ("quant_type", "int8"), ("group_size", "128")][..], ("nvfp4", 16)),
        (&[("a.quant_type", "INT4"), ("quant_type", "q4"), ("group_size", "32")], ("INT4", 32)),
        (&[("a.quant_type", "mxfp8"), ("group_size", "128")], ("mxfp8", 128)),
        (&[("a.group_size", "32"), ("quant_type", "int8"), ("group_size", "64")], ("int8", 32)),
        // Without a size, that of the shapes for the bits of the type.
        (&[("quant_type", "int8")], ("int8", 32)),
        (&[("quant_type", "int4")], ("int4", 64)),
        // A size without a type leaves the type that has this size.
        (&[("group_size", "32")], ("int8", 32)),
    ] {
        let found = open(&[quantized("a", metadata)], "").unwrap().quantization_of("a").unwrap();
        assert_eq!((found.quant_type.as_deref(), found.group_size), (Some(expected.0), Some(expected.1)));
    }
}

#[test]
fn type_without_a_size_has_its_default_size() {
    for (quant_type, expected) in [
        ("int4", Some(64)),
        ("Q4", Some(64)),
        ("FP4", Some(64)),
        ("int8", Some(64)),
        ("Q8", Some(64)),
        ("FP8", Some(64)),
        ("nvfp4", Some(16)),
        ("NVFP4", Some(16)),
        ("mxfp4", Some(32)),
        ("mxfp8", Some(32)),
        ("new", None),
    ] {
        // The shapes do not determine a size.
        let tensors: [(&str, Dtype, &[u64]); 2] =
            [("w", Dtype::U32, &[2, 3]), ("w.scale", Dtype::U8, &[2, 5])];
        let bytes = file(&[("quant_type", quant_type)], &tensors);
        let weights = open(&[(TENSOR, "w", bytes)], "").unwrap();
        assert_eq!(weights.group_size(), expected, "{quant_type}");
        let of_tensor = weights.quantization_of("w").unwrap();
        assert_eq!((of_tensor.quant_type.as_deref(), of_tensor.group_size), (Some(quant_type), expected));
    }
}

/// Without this rule, these would be read as int4 with groups of 32 and of 64.
#[test]
fn scales_of_one_byte_identify_types_with_block_scales() {
    for (columns, scale, groups, expected) in [
        (8, Dtype::U8, 2, Some(("mxfp4", 32))),
        (8, Dtype::F8_E8M0, 2, Some(("mxfp4", 32))),
        (16, Dtype::U8, 2, Some(("mxfp8", 32))),
        (16, Dtype::F8_E8M0, 2, Some(("mxfp8", 32))),
        (8, Dtype::U8, 4, Some(("nvfp4", 16))),
        (8, Dtype::F8_E4M3, 4, Some(("nvfp4", 16))),
        (8, Dtype::F8_E8M0, 4, None),
        (8, Dtype::F8_E4M3, 2, None),
        (8, Dtype::U8, 1, Some(("mxfp8", 32))),
        (16, Dtype::U8, 1, None),
        (8, Dtype::BF16, 2, Some(("int4", 32))),
    ] {
        let tensors: [(&str, Dtype, &[u64]); 2] =
            [("w", Dtype::U32, &[2, columns]), ("w.scale", scale, &[2, groups])];
        let found = open(&[(TENSOR, "w", file(&[], &tensors))], "").unwrap().quantization_of("w").unwrap();
        let expected = expected.map(|(quant_type, size)| (quant_type.to_owned(), size));
        assert_eq!(found.quant_type.zip(found.group_size), expected, "{columns} {scale} {groups}");
    }
}

#[test]
fn bias_without_a_scale_is_a_tensor_and_not_a_part() {
    let bytes = file(&[], &[("a", Dtype::F32, &[1]), ("a.bias", Dtype::F32, &[1])]);
    let weights = open(&[(TENSOR, "group", bytes)], "").unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "a.bias", "group"]);
}

#[test]
fn scales_in_layers_of_their_own_say_how_the_model_is_quantised() {
    let layer =
        |name: &'static str, dtype, shape: &[u64]| (TENSOR, name, file(&[], &[("data", dtype, shape)]));
    let weight = layer("w", Dtype::U32, &[2, 8]);
    let scale = |count| layer("w_scale", Dtype::BF16, &[2, count]);
    let bias = layer("w_qbias", Dtype::BF16, &[2, 1]);
    let index = (JSON, "model_index.json", br#"{"quantization":"q8","group_size":32}"#.to_vec());
    for (layers, expected) in [
        (vec![weight.clone(), scale(4)], "NVFP4"),
        (vec![weight.clone(), scale(2), bias.clone()], "Q4"),
        (vec![weight.clone(), scale(1), bias.clone()], "Q8"),
        (vec![weight.clone(), scale(1), bias.clone(), index.clone()], "Q8"),
        (vec![weight.clone(), index.clone()], "Q8"),
    ] {
        let weights = open(&layers, "").unwrap();
        assert_eq!(weights.quantization(), Some(expected));
        let asked = weights.tensor_as("w_qbias", Dtype::F32);
        assert!(asked.is_err() || asked.unwrap().dtype() == Dtype::BF16, "a part, wherever it is");
    }
    assert_eq!(open(&[weight.clone(), index], "").unwrap().group_size(), Some(32));
    assert_eq!(open(&[weight], "").unwrap().quantization(), None);
}

#[test]
fn shapes_say_how_a_tensor_is_quantised_when_its_file_does_not() {
    // Columns of 32 bits, scales in a row, whether there is a bias, the model's hint.
    for (columns, scales, bias, hint, expected) in [
        (8, 2, true, "", Some(("int4", 32))),
        (8, 2, true, "int8", Some(("int4", 32))),
        (16, 1, true, "", Some(("int8", 64))),
        (16, 2, true, "", Some(("int4", 64))),
        (16, 2, true, "int8", Some(("int8", 32))),
        (8, 4, false, "", Some(("nvfp4", 16))),
        (8, 4, true, "", Some(("int4", 16))),
        (32, 1, true, "", Some(("int8", 128))),
        (8, 3, true, "", None),
        (8, 64, true, "", None),
        (0, 1, true, "", None),
    ] {
        let mut tensors: Vec<(&str, Dtype, &[u64])> = Vec::new();
        let (row, groups) = ([2, columns], [2, scales]);
        tensors.push(("w", Dtype::U32, &row));
        tensors.push(("w.scale", Dtype::BF16, &groups));
        if bias {
            tensors.push(("w.bias", Dtype::BF16, &groups));
        }
        let index = format!(r#"{{"quantization":"{hint}"}}"#).into_bytes();
        let layers = [(TENSOR, "w", file(&[], &tensors)), (JSON, "model_index.json", index)];
        let found = open(&layers, "").unwrap().quantization_of("w").unwrap();
        let expected = expected.map(|(quant_type, size)| (quant_type.to_owned(), size));
        assert_eq!(found.quant_type.zip(found.group_size), expected, "{columns} {scales} {bias} {hint:?}");
    }
}

#[test]
fn json_files_are_read_by_their_path() {
    let config = (JSON, "vae/config.json", br#"{"a":1}"#.to_vec());
    let broken = (JSON, "broken.json", b"{".to_vec());
    let weights = open(&[(TENSOR, "w", single("w")), config, broken], "").unwrap();
    assert_eq!(weights.json("vae/config.json").unwrap().unwrap()["a"], 1);
    assert!(weights.json("config.json").unwrap().is_none());
    let error = weights.json("broken.json").unwrap_err().to_string();
    assert!(error.starts_with("file \"broken.json\": EOF"), "{error}");
}

#[test]
fn what_cannot_be_read_is_explained() {
    let error = |layers: &[(&str, &str, Vec<u8>)], component: &str| open(layers, component).unwrap_err();
    let whole = single("w");
    let cut = whole[..whole.len() - 1].to_vec();
    let text = error(&[(TENSOR, "w", cut)], "").to_string();
    assert!(text.starts_with("layer \"w\": safetensors: the tensors end at byte"), "{text}");
    assert!(matches!(error(&[(TENSOR, "w", vec![])], ""), WeightsError::Layer { .. }));
    let text = error(&[(TENSOR, "w", single("w"))], "vae").to_string();
    assert!(text.contains("no layer is a tensor of component \"vae\""), "{text}");
    assert!(matches!(error(&[(JSON, "w", b"{}".to_vec())], ""), WeightsError::NoWeights { .. }));
    let twice = [(TENSOR, "w", single("w")), (TENSOR, "g", file(&[], &[("w", Dtype::U8, &[1])]))];
    let text = error(&twice, "").to_string();
    assert_eq!(text, "tensor \"w\": in layer \"w\" and in layer \"g\"");
    let weights = open(&[(TENSOR, "w", single("w"))], "").unwrap();
    assert!(matches!(weights.tensor("x"), Err(WeightsError::NoTensor { .. })));
}

/// Hundreds of layers may be one file, which is a group of a thousand tensors of no bytes.
#[test]
fn too_many_names_are_refused() {
    let names: Vec<_> = (0..1100).map(|number| number.to_string()).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), Dtype::U8, &[0_u64][..])).collect();
    let bytes = file(&[], &tensors);
    let layers: Vec<_> = (0..250).map(|number| format!("{number}/group")).collect();
    let layers: Vec<_> = layers.iter().map(|name| (TENSOR, name.as_str(), bytes.clone())).collect();
    let error = ManifestWeights::open(&client_of_one_file(&layers), &name()).unwrap_err();
    assert!(matches!(error, WeightsError::Layers(TensorLayersError::TooMany { .. })), "{error}");
}

/// As [`client`], but all layers are the first one's file.
fn client_of_one_file(layers: &[(&str, &str, Vec<u8>)]) -> Client {
    let mut model = FakeModel::new();
    model.head.layers.clear();
    model.pieces.clear();
    let bytes = &layers[0].2;
    let fd = model.add_file(bytes);
    for (media_type, name, _) in layers {
        let number = model.add_layer(media_type, Some(fd), u64::try_from(bytes.len()).unwrap());
        model.head.layers[number].name = Some((*name).to_owned());
    }
    model.client()
}

#[test]
fn tensors_outlive_the_model() {
    let weights = open(&[(TENSOR, "w", single("w"))], "").unwrap();
    let tensor = weights.tensor("w").unwrap();
    drop(weights);
    assert_eq!(tensor[..], [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// Opens a model of the table.
fn open_component(model: &Arc<FakeModel>, component: &str) -> Result<ManifestWeights, WeightsError> {
    let model = Arc::clone(model);
    let client = fake::client_of(move |call| model.serve(call));
    ManifestWeights::open_component(&client, &name(), component)
}

#[test]
fn every_model_is_read_as_the_table_says() {
    let table = table();
    assert_eq!(table.models.len(), 22);
    for entry in table.models {
        let fake = Arc::new(model(&entry.layers, &entry.json));
        for opened in entry.opened {
            match opened {
                Opened::Failed { component, error, words } => {
                    let found = open_component(&fake, &component).unwrap_err();
                    assert_eq!(found.code().name(), error, "{}: {found}", entry.name);
                    assert!(found.to_string().contains(&words), "{}: {found}", entry.name);
                }
                Opened::Found(expected) => {
                    let weights = open_component(&fake, &expected.component).unwrap();
                    assert_eq!(weights.components(), entry.components, "{}", entry.name);
                    check(&entry.name, &weights, &expected);
                    for (path, document) in &entry.json {
                        assert_eq!(weights.json(path).unwrap().as_ref(), Some(document), "{path}");
                    }
                }
            }
        }
    }
}

fn check(model: &str, weights: &ManifestWeights, expected: &Found) {
    let found = (weights.quantization().map(str::to_owned), weights.group_size());
    assert_eq!(found, expected.quantization, "{model}");
    let mut names: Vec<_> = expected.tensors.keys().chain(expected.groups.keys()).collect();
    names.sort();
    names.dedup();
    assert_eq!(weights.names().collect::<Vec<_>>(), names, "{model}");
    for (name, members) in &expected.groups {
        assert_eq!(weights.group(name).unwrap(), members, "{model}: {name}");
    }
    for (name, tensor) in &expected.tensors {
        check_tensor(&format!("{model}: {name}"), weights, name, tensor);
    }
}

fn check_tensor(what: &str, weights: &ManifestWeights, name: &str, expected: &FoundTensor) {
    let tensor = weights.tensor(name).unwrap();
    assert_eq!((tensor.dtype().name(), tensor.shape()), (&*expected.dtype, &*expected.shape), "{what}");
    let bytes = data(expected.layer, expected.start, expected.size);
    assert_eq!(tensor[..], bytes, "{what}");
    assert_eq!(weights.is_part(name), expected.part, "{what}");
    let found = weights.quantization_of(name).map(|found| (found.quant_type, found.group_size));
    assert_eq!(found, expected.quantization, "{what}");
    if let Some(count) = expected.shape.first() {
        let experts: Vec<_> = (0..*count).map(|index| tensor.expert_bytes(index).unwrap().to_vec()).collect();
        assert_eq!(experts.concat(), bytes, "{what}");
    }
}

#[test]
fn every_invalid_file_is_refused() {
    for refused in table().refused {
        let fake = Arc::new(model([&refused.layer()], &BTreeMap::new()));
        let error = open_component(&fake, "").unwrap_err();
        assert!(matches!(error, WeightsError::Layer { .. }), "{}: {error}", refused.what);
        assert_eq!(error.code().name(), "invalid_input", "{}", refused.what);
        assert!(error.to_string().starts_with("layer \"w\": safetensors: "), "{}: {error}", refused.what);
    }
}
