//! Tests the tensors found in layers and their descriptions. The client's tests cover reading models.

use proptest::prelude::*;

use super::*;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};

/// The header of a file with these tensors.
fn header(metadata: &[(&str, &str)], tensors: &[(&str, Dtype, &[u64])]) -> Header {
    let (mut writer, mut bits) = (HeaderWriter::new(), 0);
    for (key, value) in metadata {
        writer.metadata(*key, *value);
    }
    for (name, dtype, shape) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
        bits += shape.iter().product::<u64>() * dtype.bits();
    }
    let bytes = writer.header().unwrap();
    Header::parse(&bytes, bytes.len() as u64 + bits / 8).unwrap()
}

fn layers(headers: &[(&str, Header)]) -> TensorLayers {
    let mut layers = TensorLayers::new("");
    for (number, (name, header)) in headers.iter().enumerate() {
        layers.add(name, number, header).unwrap();
    }
    layers
}

/// Name, type and shape of each tensor.
fn described(layers: &TensorLayers) -> Vec<(&str, String, Vec<u64>)> {
    let described = layers.describe(&Quantization::default());
    described.map(|tensor| (tensor.name, tensor.type_name.into_owned(), tensor.shape)).collect()
}

fn totals(layers: &TensorLayers) -> (u64, Option<String>) {
    let Totals { parameters, quantization } = Totals::from_tensors(layers.describe(&Quantization::default()));
    (parameters, quantization)
}

#[test]
fn quantised_tensor_is_one_entry_with_its_elements_unpacked() {
    for (quant_type, scale, groups, elements, type_name) in [
        ("int4", Dtype::BF16, 2, 128, "INT4"),
        ("int8", Dtype::BF16, 1, 64, "INT8"),
        ("nvfp4", Dtype::U8, 8, 128, "NVFP4"),
        ("mxfp4", Dtype::U8, 4, 128, "MXFP4"),
        ("mxfp8", Dtype::U8, 2, 64, "MXFP8"),
        // No metadata: inferred from the scale.
        ("", Dtype::U8, 2, 64, "MXFP8"),
        ("", Dtype::U8, 4, 128, "MXFP4"),
        ("", Dtype::F8_E8M0, 4, 128, "MXFP4"),
        ("", Dtype::U8, 8, 128, "NVFP4"),
        ("", Dtype::F8_E4M3, 8, 128, "NVFP4"),
        ("", Dtype::BF16, 4, 128, "INT4"),
        // The shapes allow 8 bits too.
        ("", Dtype::BF16, 2, 128, "INT4"),
    ] {
        let (row, groups) = ([3, 16], [3, groups]);
        let tensors: [(&str, Dtype, &[u64]); 4] = [
            ("w", Dtype::U32, &row),
            ("w.scale", scale, &groups),
            ("w.bias", Dtype::BF16, &groups),
            ("w.global_scale", Dtype::F32, &[]),
        ];
        let with_bias = scale == Dtype::BF16;
        let tensors: Vec<_> =
            tensors.into_iter().filter(|(name, ..)| with_bias || *name != "w.bias").collect();
        let layers = layers(&[("w", header(&[("quant_type", quant_type)], &tensors))]);
        assert_eq!(described(&layers), [("w", type_name.to_owned(), vec![3, elements])]);
        assert_eq!(totals(&layers), (3 * elements, Some(type_name.to_owned())));
        let stored = layers.describe(&Quantization::default()).next().unwrap().stored.clone();
        assert_eq!((stored.size_bytes(), stored.shape(), stored.layer()), (192, &row[..], 0));
    }
}

#[test]
fn tensors_of_a_group_are_listed_singly() {
    let (up, down) = ("m.experts.up.weight", "m.experts.down.weight");
    let scale = format!("{up}.scale");
    let metadata = format!("{up}.quant_type");
    let packed = header(
        &[(&metadata, "mxfp8")],
        &[(up, Dtype::U32, &[4, 2, 8]), (&scale, Dtype::U8, &[4, 2, 1]), (down, Dtype::BF16, &[4, 2, 8])],
    );
    let norm = header(&[], &[("norm", Dtype::F32, &[7])]);
    let layers = layers(&[("m.experts", packed), ("norm", norm)]);
    let expected = [
        (down, "BF16".to_owned(), vec![4, 2, 8]),
        (up, "MXFP8".to_owned(), vec![4, 2, 32]),
        ("norm", "F32".to_owned(), vec![7]),
    ];
    assert_eq!(described(&layers), expected);
    assert_eq!(totals(&layers), (64 + 256 + 7, Some("MXFP8".to_owned())));
}

#[test]
fn lowest_precision_is_that_of_the_fewest_bits_per_element() {
    let single = |dtype, elements: u64| header(&[], &[("data", dtype, &[elements])]);
    for (tensors, expected) in [
        (vec![(Dtype::F32, 9), (Dtype::BF16, 1)], Some("BF16")),
        // Equally few bits: the type with the most elements wins.
        (vec![(Dtype::F16, 2), (Dtype::BF16, 3), (Dtype::F16, 2)], Some("F16")),
        // Token numbers and masks are not weights.
        (vec![(Dtype::I64, 9), (Dtype::Bool, 9), (Dtype::F32, 1)], Some("F32")),
        (vec![(Dtype::I64, 9)], None),
    ] {
        let names: Vec<_> = (0..tensors.len()).map(|number| format!("t{number}")).collect();
        let files = names.iter().map(String::as_str);
        let files: Vec<_> =
            files.zip(tensors.iter().map(|(dtype, elements)| single(*dtype, *elements))).collect();
        assert_eq!(totals(&layers(&files)).1.as_deref(), expected);
    }
}

#[test]
fn model_decides_where_the_shapes_allow_4_and_8_bits() {
    let tensors: [(&str, Dtype, &[u64]); 3] =
        [("w", Dtype::U32, &[3, 16]), ("w.scale", Dtype::BF16, &[3, 2]), ("w.bias", Dtype::BF16, &[3, 2])];
    let layers = layers(&[("w", header(&[], &tensors))]);
    let type_for = |quant_type: &str| {
        let model = Quantization { quant_type: Some(quant_type.to_owned()), group_size: None };
        layers.describe(&model).next().unwrap().type_name.into_owned()
    };
    assert_eq!([type_for("int8"), type_for("int4")], ["INT8", "INT4"]);
}

#[test]
fn block_scales_of_another_type_than_their_size_has_are_not_understood() {
    for (scale, groups) in [(Dtype::F8_E8M0, 8), (Dtype::F8_E4M3, 4), (Dtype::F8_E4M3, 2)] {
        let shape = [3, groups];
        let tensors: [(&str, Dtype, &[u64]); 2] = [("w", Dtype::U32, &[3, 16]), ("w.scale", scale, &shape)];
        let layers = layers(&[("w", header(&[], &tensors))]);
        assert_eq!(described(&layers), [("w", "U32".to_owned(), vec![3, 16])], "{scale:?} {groups}");
    }
}

#[test]
fn quantised_tensor_of_an_unknown_type_is_described_as_it_is_stored() {
    let tensors: [(&str, Dtype, &[u64]); 2] = [("w", Dtype::U32, &[2, 3]), ("w.scale", Dtype::BF16, &[2, 5])];
    for metadata in [&[][..], &[("quant_type", "int5")]] {
        let layers = layers(&[("w", header(metadata, &tensors))]);
        assert_eq!(described(&layers), [("w", "U32".to_owned(), vec![2, 3])]);
        assert_eq!(totals(&layers), (6, None));
    }
}

#[test]
fn parts_in_separate_layers_are_left_out_too() {
    let layer = |dtype, shape: &[u64]| header(&[], &[("data", dtype, shape)]);
    let weight = layer(Dtype::U32, &[2, 8]);
    let (scale, bias) = (layer(Dtype::BF16, &[2, 1]), layer(Dtype::BF16, &[2, 1]));
    let layers = layers(&[("w", weight), ("w_scale", scale), ("w_qbias", bias)]);
    // The shapes allow 4 bits too; the ratio of the sizes decides, as in Ollama.
    assert_eq!(described(&layers), [("w", "INT8".to_owned(), vec![2, 32])]);
}

#[test]
fn sizes_that_overflow_are_the_largest_number() {
    let (rows, columns) = (1 << 32, 1 << 26);
    let mut writer = HeaderWriter::new();
    writer.metadata("quant_type", "int4");
    writer.tensor("w", Dtype::U32, &[rows, columns]).unwrap();
    writer.tensor("w.scale", Dtype::U8, &[1]).unwrap();
    let bytes = writer.header().unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64 + (rows * columns * 4) + 1).unwrap();
    let layers = layers(&[("w", header)]);
    assert_eq!(described(&layers)[0].2, [rows, columns * 8]);
    assert_eq!(totals(&layers).0, rows * columns * 8);
}

proptest! {
    #[test]
    fn every_tensor_of_a_file_is_a_tensor_or_a_part(
        names in prop::collection::btree_set("[ab](\\.(scale|bias|global_scale)){0,2}", 1..8),
        layer in "[abc]|data",
    ) {
        let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), Dtype::U32, &[4_u64, 4][..])).collect();
        let mut layers = TensorLayers::new("");
        if layers.add(&layer, 0, &header(&[], &tensors)).is_ok() {
            for name in layers.names().filter(|name| layers.tensor(name).is_some()) {
                prop_assert_eq!(layers.describe(&Quantization::default()).any(|tensor| tensor.name == name), !layers.is_part(name));
            }
            if !names.contains(&layer) {
                let listed = layers.group(&layer).unwrap().len();
                let parts = layers.names().filter(|name| layers.is_part(name)).count();
                prop_assert_eq!(listed + parts, names.len());
            }
        }
    }
}

#[test]
fn only_layers_of_the_requested_component_are_included() {
    for component in ["", "vision"] {
        assert_eq!(TensorLayers::new(component).component(), component);
    }
    for (component, layer, is_included) in
        [("", "text/w", true), ("vision", "vision/w", true), ("vision", "text/w", false)]
    {
        assert_eq!(TensorLayers::new(component).includes(layer), is_included, "{component:?} {layer}");
    }
}
