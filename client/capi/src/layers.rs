//! The tensors of a GGUF model by layer.

use std::ffi::c_char;

use crate::BlobdModel;
use crate::handle::text;

/// The tensors of one layer of a model, such as `blk.0`. The pointer is valid until the model is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdLayer {
    /// The name: what the names of its tensors start with.
    pub name: *const c_char,
    /// The number of its tensors.
    pub tensor_count: usize,
    /// The size of its tensors in bytes.
    pub size: u64,
}

/// The number of layers to which the model's tensors belong. The names of tensors are split at their dots: if one of the
/// parts is `blk` or `mm` and at least two follow, the layer's name ends with the part after it, as in `blk.0`; otherwise it
/// is the first part, as in `token_embd`.
///
/// # Safety
/// `model` comes from `blobd_open` and is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_count(model: *const BlobdModel) -> usize {
    // SAFETY: Needed to access it. The caller guarantees a valid pointer.
    unsafe { &*model }.0.layers().len()
}

/// Writes the layer with this index to `out`; they are sorted by name. Returns false if there is no such layer.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `out` points to a layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_at(
    model: *const BlobdModel,
    index: usize,
    out: *mut BlobdLayer,
) -> bool {
    // SAFETY: Needed to access it. The caller guarantees a valid pointer.
    let Some(layer) = unsafe { &*model }.0.layers().get(index) else { return false };
    let layer = BlobdLayer { name: layer.name.as_ptr(), tensor_count: layer.tensors.len(), size: layer.size };
    // SAFETY: Needed to write the result. The caller guarantees a valid pointer.
    unsafe { out.write(layer) };
    true
}

/// The index of the layer with this name; `SIZE_MAX` if there is none.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_find(model: *const BlobdModel, name: *const c_char) -> usize {
    // SAFETY: Needed to access both. The caller guarantees valid pointers.
    let (model, name) = unsafe { (&*model, text(name)) };
    let Ok(Some(name)) = name else { return usize::MAX };
    let is_named = |layer: &crate::handle::LayerRow| layer.name.as_bytes() == name.as_bytes();
    model.0.layers().iter().position(is_named).unwrap_or(usize::MAX)
}

/// The index of a layer's tensor in the model, for `blobd_tensor_at` and `blobd_map`; `SIZE_MAX` if the layer has no such
/// tensor. The first by name has number 0.
///
/// # Safety
/// `model` comes from `blobd_open` and is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_tensor(model: *const BlobdModel, layer: usize, number: usize) -> usize {
    // SAFETY: Needed to access it. The caller guarantees a valid pointer.
    let layer = unsafe { &*model }.0.layers().get(layer);
    layer.and_then(|layer| layer.tensors.get(number)).copied().unwrap_or(usize::MAX)
}
