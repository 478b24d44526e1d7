//! The metadata in a model's header, and the tensors of a GGUF model by layer.

use std::ffi::c_char;
use std::ptr;

use blobd_model::layers::parameter_count;
use blobd_model::metadata::Scalar;

use crate::handle::{Failure, Handle, LayerRow, text, to_c_bytes};
use crate::{BlobdBytes, BlobdError, BlobdModel, report};

/// Facts from the header of a model's first GGUF file. The pointers are valid until the model is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdFacts {
    /// The architecture, such as `llama`; `unknown` if the header has none.
    pub architecture: *const c_char,
    /// The template of a chat, in Jinja; null if the header has none.
    pub chat_template: *const c_char,
    /// The number of elements of all tensors in this file, whatever `general.parameter_count` says.
    pub parameter_count: u64,
    /// The number of the file type in llama.cpp; 0 if unknown, as in Ollama.
    pub file_type: u64,
    /// The number of blocks; 0 if missing.
    pub block_count: u64,
    /// The longest context for which the model was trained, in tokens; 0 if missing.
    pub context_length: u64,
    /// The length of an embedding; 0 if missing.
    pub embedding_length: u64,
    /// The most attention heads of a block; 1 if missing.
    pub head_count_max: u64,
    /// The fewest attention heads of a block; 1 if missing.
    pub head_count_min: u64,
    /// The most key and value heads of a block; 1 if missing.
    pub head_count_kv_max: u64,
    /// The fewest key and value heads of a block; 1 if missing.
    pub head_count_kv_min: u64,
}

/// The sizes of a model's attention heads, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdHeadSizes {
    /// The largest size of a head: the embedding length divided by the fewest heads; 0 if there are none.
    pub max: u64,
    /// The size of a key head: `attention.key_length`; `max` if missing.
    pub k: u64,
    /// The size of a value head: `attention.value_length`; `max` if missing.
    pub v: u64,
}

/// Reads the header of the model's first GGUF file. Returns false on failure, for example if the model has none.
///
/// # Safety
/// `out` points to facts; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_facts_of(
    model: &BlobdModel,
    out: *mut BlobdFacts,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { report(facts(&model.0), error).map(|facts| out.write(facts)).is_some() }
}

/// Reads the sizes of the heads from the header of the model's first GGUF file. Returns false on failure, for example if
/// the model has none.
///
/// # Safety
/// `out` points to sizes; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_head_sizes_of(
    model: &BlobdModel,
    out: *mut BlobdHeadSizes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { report(head_sizes(&model.0), error).map(|sizes| out.write(sizes)).is_some() }
}

/// Functions that read the value of a key; the type is exactly that of the value.
macro_rules! value_functions {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        #[allow(clippy::missing_safety_doc, reason = "as for the first of the functions")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(model: &BlobdModel, key: *const c_char, out: *mut $type) -> bool {
            // SAFETY: Needed to read the key and to write the result. The caller guarantees valid pointers.
            unsafe { write_value::<$type, _>(model, key, out, |value| value) }
        }
    )*};
}

value_functions! {
    /// Writes the `uint32` with this key in the header of the model's first GGUF file to `out`. Returns false if the
    /// header has none of exactly this type, even if it has one of another width, or if it cannot be read.
    ///
    /// Keys that start with `general.` or `tokenizer.` are looked up as they are, all others with the architecture
    /// in front: `block_count` is `llama.block_count`.
    ///
    /// # Safety
    /// `key` is a C string; `out` points to a value of the type.
    blobd_metadata_u32: u32;
    /// Writes the `uint64` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_u64: u64;
    /// Writes the `int32` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_i32: i32;
    /// Writes the `int64` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_i64: i64;
    /// Writes the `float32` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_f32: f32;
    /// Writes the `float64` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_f64: f64;
    /// Writes the `bool` with this key to `out`; see `blobd_metadata_u32`.
    blobd_metadata_bool: bool;
}

/// Writes the text with this key to `out`: UTF-8, not terminated by a zero byte, valid until the model is closed.
/// Returns false if the header has none of type `string`, or if it is not UTF-8.
///
/// # Safety
/// As for `blobd_metadata_u32`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_metadata_string(
    model: &BlobdModel,
    key: *const c_char,
    out: *mut BlobdBytes,
) -> bool {
    // SAFETY: Needed to read the key and to write the result. The caller guarantees valid pointers.
    unsafe { write_value::<&str, _>(model, key, out, |text| to_c_bytes(text.as_bytes())) }
}

/// Functions that read the elements of an array; the type is exactly that of an element.
macro_rules! array_functions {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        #[allow(clippy::missing_safety_doc, reason = "as for the first of the functions")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            model: &BlobdModel,
            key: *const c_char,
            out: *mut $type,
            capacity: usize,
        ) -> usize {
            // SAFETY: Needed to read the key and to write the result. The caller guarantees valid pointers.
            unsafe { write_array::<$type, _>(model, key, out, capacity, |value| value) }
        }
    )*};
}

array_functions! {
    /// Copies the elements of the `uint32` array with this key to `out`, at most `capacity` of them. Returns how many the
    /// array has, so a first call with a capacity of 0 tells how much room it needs; `SIZE_MAX` if the header has no array of
    /// exactly this type. Keys are those of `blobd_metadata_u32`.
    ///
    /// # Safety
    /// `key` is a C string; `out` points to `capacity` values, or is null if that is 0.
    blobd_metadata_u32_array: u32;
    /// Copies the elements of the `uint64` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_u64_array: u64;
    /// Copies the elements of the `int32` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_i32_array: i32;
    /// Copies the elements of the `int64` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_i64_array: i64;
    /// Copies the elements of the `float32` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_f32_array: f32;
    /// Copies the elements of the `float64` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_f64_array: f64;
    /// Copies the elements of the `bool` array with this key; see `blobd_metadata_u32_array`.
    blobd_metadata_bool_array: bool;
}

/// Writes where the texts of the `string` array with this key are to `out`, such as the tokens of a vocabulary; see
/// `blobd_metadata_u32_array`. Each is as `blobd_metadata_string` returns it. Texts that are not UTF-8 are left out.
///
/// # Safety
/// As for `blobd_metadata_u32_array`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_metadata_string_array(
    model: &BlobdModel,
    key: *const c_char,
    out: *mut BlobdBytes,
    capacity: usize,
) -> usize {
    // SAFETY: Needed to read the key and to write the result. The caller guarantees valid pointers.
    unsafe { write_array::<&str, _>(model, key, out, capacity, |text| to_c_bytes(text.as_bytes())) }
}

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
#[unsafe(no_mangle)]
pub extern "C" fn blobd_layer_count(model: &BlobdModel) -> usize {
    model.0.layers().len()
}

/// Writes the layer with this index to `out`; they are sorted by name. Returns false if there is no such layer.
///
/// # Safety
/// `out` points to a layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_at(model: &BlobdModel, index: usize, out: *mut BlobdLayer) -> bool {
    let Some(layer) = model.0.layers().get(index) else { return false };
    let layer = BlobdLayer { name: layer.name.as_ptr(), tensor_count: layer.tensors.len(), size: layer.size };
    // SAFETY: Needed to write the result. The caller guarantees a valid pointer.
    unsafe { out.write(layer) };
    true
}

/// The index of the layer with this name; `SIZE_MAX` if there is none.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_layer_find(model: &BlobdModel, name: *const c_char) -> usize {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let name = unsafe { text(name) };
    let Ok(Some(name)) = name else { return usize::MAX };
    let is_named = |layer: &LayerRow| layer.name.as_bytes() == name.as_bytes();
    model.0.layers().iter().position(is_named).unwrap_or(usize::MAX)
}

/// The index of a layer's tensor in the model, for `blobd_tensor_at` and `blobd_map`; `SIZE_MAX` if the layer has no such
/// tensor. The first by name has number 0.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_layer_tensor(model: &BlobdModel, layer: usize, number: usize) -> usize {
    let layer = model.0.layers().get(layer);
    layer.and_then(|layer| layer.tensors.get(number)).copied().unwrap_or(usize::MAX)
}

fn facts(handle: &Handle) -> Result<BlobdFacts, Failure> {
    let (header, metadata) = (handle.header()?, handle.metadata()?);
    Ok(BlobdFacts {
        architecture: header.architecture.as_ptr(),
        chat_template: header.chat_template.as_ref().map_or(ptr::null(), |template| template.as_ptr()),
        parameter_count: parameter_count(header.header.tensors()),
        file_type: metadata.file_type().unwrap_or(0).into(),
        block_count: metadata.block_count(),
        context_length: metadata.context_length(),
        embedding_length: metadata.embedding_length(),
        head_count_max: metadata.head_count_max(),
        head_count_min: metadata.head_count_min(),
        head_count_kv_max: metadata.head_count_kv_max(),
        head_count_kv_min: metadata.head_count_kv_min(),
    })
}

fn head_sizes(handle: &Handle) -> Result<BlobdHeadSizes, Failure> {
    let metadata = handle.metadata()?;
    Ok(BlobdHeadSizes { max: metadata.head_size_max(), k: metadata.head_size_k(), v: metadata.head_size_v() })
}

/// Writes the value of a key to `out`, if the header has one of exactly the type `T`. `key` is a C string; `out`
/// points to a value.
unsafe fn write_value<'m, T: Scalar<'m>, C>(
    model: &'m BlobdModel,
    key: *const c_char,
    out: *mut C,
    to_c: impl FnOnce(T) -> C,
) -> bool {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let key = unsafe { text(key) };
    let (Ok(metadata), Ok(Some(key))) = (model.0.metadata(), key) else { return false };
    let value = metadata.get::<T>(key);
    // SAFETY: Needed to write the result. The caller guarantees a valid pointer.
    value.map(|value| unsafe { out.write(to_c(value)) }).is_some()
}

/// Writes the first elements of an array to `out`, if its elements have exactly the type `T`. Returns how many it
/// has; `usize::MAX` without such an array. `key` is a C string; `out` points to `capacity` values.
unsafe fn write_array<'m, T: Scalar<'m>, C>(
    model: &'m BlobdModel,
    key: *const c_char,
    out: *mut C,
    capacity: usize,
    to_c: impl Fn(T) -> C,
) -> usize {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let key = unsafe { text(key) };
    let (Ok(metadata), Ok(Some(key))) = (model.0.metadata(), key) else { return usize::MAX };
    let Some(elements) = metadata.array::<T>(key) else { return usize::MAX };
    let mut count = 0;
    for element in elements {
        if count < capacity {
            // SAFETY: Needed to write the result. The caller guarantees room for `capacity` values.
            unsafe { out.add(count).write(to_c(element)) };
        }
        count += 1;
    }
    count
}
