//! The names of tensors in layers' files, and in this API.

use blobd_store_format::safetensors::Header;

/// The parts of a quantised tensor: the suffix of their names in a file, and in this API.
pub(super) const PARTS: [(&str, &str); 3] =
    [(".scale", "_scale"), (".bias", "_qbias"), (".global_scale", "_global_scale")];
/// The name of the only tensor in a file of January 2026.
const LEGACY_KEY: &str = "data";

pub(super) fn scale_name(name: &str) -> String {
    format!("{name}_scale")
}

pub(super) fn bias_name(name: &str) -> String {
    format!("{name}_qbias")
}

/// The name without the component, if it starts with it.
pub(super) fn strip_component<'n>(name: &'n str, component: &str) -> &'n str {
    let rest = name.strip_prefix(component).and_then(|rest| rest.strip_prefix('/'));
    rest.filter(|_| !component.is_empty()).unwrap_or(name)
}

/// The name in the file of the tensor after which the layer is named; `None` for a group.
pub(super) fn tensor_key<'n>(header: &Header, layer: &'n str, component: &str) -> Option<&'n str> {
    let mut keys = vec![strip_component(layer, component), layer];
    // Even if no component was requested, names in a file may lack their component.
    keys.extend(layer.split_once('/').map(|(_, rest)| rest));
    keys.push(LEGACY_KEY);
    keys.into_iter().find(|key| header.tensor(key).is_some())
}

/// Whether a tensor is a part of another tensor in the same file, with which [`TensorLayers`](super::TensorLayers) adds
/// it. Parts have no parts themselves: `T.scale.scale` is an ordinary tensor.
pub(super) fn is_part(header: &Header, name: &str) -> bool {
    let mut depth = 0_usize;
    let mut next = whole_of(header, name);
    while let Some(whole) = next {
        depth += 1;
        next = whole_of(header, whole);
    }
    depth % 2 == 1
}

/// The tensor `T` to which `T.bias` belongs, if the file has `T` and `T.scale`.
fn whole_of<'n>(header: &Header, name: &'n str) -> Option<&'n str> {
    let has = |name: &str| header.tensor(name).is_some();
    let mut wholes = PARTS.into_iter().filter_map(|(suffix, _)| name.strip_suffix(suffix));
    wholes.find(|whole| has(whole) && has(&format!("{whole}.scale")))
}

/// The name of a group's tensor in this API: without the component if one was requested, otherwise with
/// the component of its layer.
pub(super) fn member_name(key: &str, layer: &str, component: &str) -> String {
    let layer_component = layer.split_once('/').map_or("", |(component, _)| component);
    match component {
        "" if !layer_component.is_empty() => {
            format!("{layer_component}/{}", strip_component(key, layer_component))
        }
        _ => strip_component(key, component).to_owned(),
    }
}
