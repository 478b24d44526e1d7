//! The tensors of models that have one safetensors file per tensor.

use std::ffi::{CString, c_char};
use std::ptr;

use crate::handle::{no_tensor, text, to_c_bytes};
use crate::weight_rows::{WeightRow, WeightRows};
use crate::{BlobdBytes, BlobdError, report, write_bytes};

/// The tensors of an open model that has one safetensors file per tensor or group of experts, such as Ollama's models for
/// image generation and for MLX, or those of one component; and the lease that marks it as in use.
#[derive(Debug)]
pub struct BlobdWeights(WeightRows);

/// A tensor, or a part of a quantised one. The parts of a quantised tensor `T` are `T_scale`, `T_qbias` and
/// `T_global_scale`. The pointers are valid until the weights are closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdWeight {
    /// The name; it starts with the component unless one was requested.
    pub name: *const c_char,
    /// The name of the element type in the file, such as `BF16`; that of packed elements is `U32`.
    pub dtype: *const c_char,
    /// The dimensions in the file, the slowest first.
    pub shape: *const u64,
    /// The number of dimensions; 0 for a scalar.
    pub rank: usize,
    /// The size of the tensor in bytes.
    pub size: u64,
    /// How it is quantised: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, …; null if it is not, or if that is unknown.
    pub quant_type: *const c_char,
    /// How many elements of a row share a scale; 0 if it is not quantised, or if that is unknown.
    pub group_size: u32,
    /// Whether it has a scale and is therefore quantised.
    pub is_quantized: bool,
    /// Whether it is a scale or bias of another tensor.
    pub is_part: bool,
}

/// Opens the tensors of a model. Returns null on failure, for example if the model has no tensor layer.
///
/// `component` is a component such as `transformer` or `text_encoder`, whose files are then the only ones opened; null or
/// empty means the whole model. `socket` and `error` are as for `blobd_open`. The caller must release the result with
/// `blobd_weights_close`. Any number of threads may use it at once.
///
/// # Safety
/// `socket` and `component` are null or C strings. `reference` is a C string. `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weights_open(
    socket: *const c_char,
    reference: *const c_char,
    component: *const c_char,
    error: *mut BlobdError,
) -> *mut BlobdWeights {
    // SAFETY: Needed to read the strings. The caller guarantees C strings or null.
    let (socket, reference, component) = unsafe { (text(socket), text(reference), text(component)) };
    let opened = socket.and_then(|socket| WeightRows::open(socket, reference?, component?));
    // SAFETY: Needed to report the error. The caller guarantees a valid pointer or null.
    let opened = unsafe { report(opened, error) };
    opened.map_or(ptr::null_mut(), |rows| Box::into_raw(Box::new(BlobdWeights(rows))))
}

/// Releases the lease and unmaps the tensors. A null pointer is ignored.
///
/// # Safety
/// `weights` is null or comes from `blobd_weights_open` and was not closed. It and its tensors are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weights_close(weights: *mut BlobdWeights) {
    if !weights.is_null() {
        // SAFETY: Needed to free it. It comes from `blobd_weights_open`, and the caller closes it only once.
        drop(unsafe { Box::from_raw(weights) });
    }
}

/// The number of tensors, with the parts of quantised tensors.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weight_count(weights: &BlobdWeights) -> usize {
    weights.0.rows.len()
}

/// Writes the tensor with this index to `out`; they are sorted by name. Returns false if there is no such tensor.
///
/// # Safety
/// `out` points to a weight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weight_at(
    weights: &BlobdWeights,
    index: usize,
    out: *mut BlobdWeight,
) -> bool {
    let row = weights.0.rows.get(index);
    // SAFETY: Needed to write the result. The caller guarantees a valid pointer.
    row.map(|row| unsafe { out.write(to_c(row)) }).is_some()
}

/// The index of the tensor or part with this name; `SIZE_MAX` if there is none.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weight_find(weights: &BlobdWeights, name: *const c_char) -> usize {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let name = unsafe { text(name) };
    name.ok().flatten().and_then(|name| weights.0.find(name)).unwrap_or(usize::MAX)
}

/// The bytes of a tensor, as they are stored, without a copy; valid until the weights are closed. Returns false on failure.
///
/// # Safety
/// `out` points to bytes; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weight_map(
    weights: &BlobdWeights,
    index: usize,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    let rows = &weights.0;
    let bytes =
        rows.rows.get(index).map(|row| to_c_bytes(&row.map)).ok_or_else(|| no_tensor(index, rows.rows.len()));
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { write_bytes(bytes, out, error) }
}

/// The bytes of one element of a tensor's slowest dimension, such as an expert of a stack. Returns false on failure.
///
/// # Safety
/// As for `blobd_weight_map`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weight_expert(
    weights: &BlobdWeights,
    index: usize,
    expert: u64,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { write_bytes(weights.0.expert(index, expert).map(to_c_bytes), out, error) }
}

/// How the model is quantised, in capital letters (`INT4`, `NVFP4`, `Q8`, …): as the first file that declares it says, else
/// as `model_index.json` says, else as inferred from scales in separate layers; null if unknown.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weights_quantization(weights: &BlobdWeights) -> *const c_char {
    weights.0.quant_type.as_ref().map_or(ptr::null(), |name| name.as_ptr())
}

/// How many elements share a scale, as the source of `blobd_weights_quantization` says, else the default of that type; 0 if
/// unknown.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weights_group_size(weights: &BlobdWeights) -> u32 {
    weights.0.group_size()
}

/// The name of the model's component with this number, whichever is requested; they are sorted. Null if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weights_component(weights: &BlobdWeights, number: usize) -> *const c_char {
    weights.0.components.get(number).map_or(ptr::null(), as_ptr)
}

/// The name of the group of tensors with this number, such as the experts of a layer; they are sorted. Null if there is
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weights_group(weights: &BlobdWeights, number: usize) -> *const c_char {
    weights.0.groups.get(number).map_or(ptr::null(), |group| group.name.as_ptr())
}

/// The index of a group's tensor, in the order of the group's file; `SIZE_MAX` if the group has no such tensor.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_weights_group_member(weights: &BlobdWeights, group: usize, number: usize) -> usize {
    let group = weights.0.groups.get(group);
    group.and_then(|group| group.members.get(number)).copied().unwrap_or(usize::MAX)
}

/// The bytes of a JSON file of the model by its path, such as `tokenizer/tokenizer_config.json`; valid until the weights are
/// closed. Returns false on failure, for example if the model has no such file.
///
/// # Safety
/// `path` is a C string; `out` points to bytes; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_weights_json(
    weights: &BlobdWeights,
    path: *const c_char,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let path = unsafe { text(path) };
    let bytes = path.and_then(|path| weights.0.document(path)).map(to_c_bytes);
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { write_bytes(bytes, out, error) }
}

fn as_ptr(name: &CString) -> *const c_char {
    name.as_ptr()
}

fn to_c(row: &WeightRow) -> BlobdWeight {
    BlobdWeight {
        name: row.name.as_ptr(),
        dtype: row.dtype.as_ptr(),
        shape: row.map.shape().as_ptr(),
        rank: row.map.shape().len(),
        size: row.map.len() as u64,
        quant_type: row.quant_type.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
        group_size: row.group_size,
        is_quantized: row.is_quantized,
        is_part: row.is_part,
    }
}
