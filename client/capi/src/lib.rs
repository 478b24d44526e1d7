//! blobd's client library for C and C++.
//!
//! `include/blobd_client.h` is generated from this file and its public modules, including the doc comments of
//! public items; a test compares them. The layout of a public structure never changes: new fields require new
//! structures and functions.
//!
//! The library has no global state, starts no thread and sets no signal handler. Strings are UTF-8. A panic,
//! which would be a bug in blobd, ends the process instead of unwinding into C.
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![allow(unsafe_code)]

pub mod fit;
pub mod metadata;
pub mod weights;

mod handle;
mod weight_rows;

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use blobd_client::gguf_view::GgufView;

use crate::handle::{Failure, Handle, text, to_c_bytes};

/// An open model: its tensors, and the lease that marks it as in use.
#[derive(Debug)]
pub struct BlobdModel(Handle);

// Any number of threads may use a model or an image at once.
const _: () = {
    const fn assert_shareable<T: Send + Sync>() {}
    assert_shareable::<BlobdModel>();
    assert_shareable::<BlobdImage>();
    assert_shareable::<weights::BlobdWeights>();
};

/// A model as one GGUF file in memory.
#[derive(Debug)]
pub struct BlobdImage(GgufView);

/// Why a function failed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdError {
    /// 0 no error, 1 other failure, 2 invalid request, 3 not found, 4 busy, 5 corrupt data,
    /// 6 no space left on the disk or in a quota, 7 denied by the rights or the policy,
    /// 8 no daemon answers.
    pub code: c_int,
    /// What happened and what to do, for people, in one line. Terminated by a zero byte.
    pub message: [c_char; 508],
}

/// Read-only bytes that never change.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdBytes {
    /// The first byte. It is page-aligned for a tensor that is a whole blob. Not null even if `size`
    /// is 0.
    pub data: *const c_void,
    /// The number of bytes.
    pub size: usize,
}

/// A tensor of a model. The pointers are valid until the model is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdTensor {
    /// The name.
    pub name: *const c_char,
    /// The name of the ggml type, such as `Q4_K`.
    pub type_name: *const c_char,
    /// The dimensions in GGUF order, the fastest first.
    pub shape: *const u64,
    /// The number of dimensions; 0 for a scalar.
    pub rank: usize,
    /// The size of the tensor in bytes.
    pub size: u64,
    /// The number of experts stacked in it; 0 if it is not a stack.
    pub expert_count: u64,
    /// The size of each expert in bytes.
    pub expert_size: u64,
}

/// Opens a model with all its tensors. Returns null on failure.
///
/// `socket` is the path of the daemon's socket. If it is null, `BLOBD_SOCKET` is used, or without that
/// the system's socket or, on a machine without a daemon for all users, this user's. `error` may be null. The caller must release the result with `blobd_close`. Any
/// number of threads may use it at once.
///
/// # Safety
/// `socket` is null or a C string. `reference` is a C string. `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_open(
    socket: *const c_char,
    reference: *const c_char,
    error: *mut BlobdError,
) -> *mut BlobdModel {
    // SAFETY: Needed to read the strings. The caller guarantees C strings or null.
    let (socket, reference) = unsafe { (text(socket), text(reference)) };
    let opened = socket.and_then(|socket| Handle::open(socket, reference?));
    // SAFETY: Needed to report the error. The caller guarantees a valid pointer or null.
    let opened = unsafe { report(opened, error) };
    opened.map_or(ptr::null_mut(), |handle| Box::into_raw(Box::new(BlobdModel(handle))))
}

/// Releases the lease and unmaps the tensors. Images stay valid. A null pointer is ignored.
///
/// # Safety
/// `model` is null or comes from `blobd_open` and was not closed. It and its tensors are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_close(model: *mut BlobdModel) {
    if !model.is_null() {
        // SAFETY: Needed to free it. It comes from `blobd_open`, and the caller closes it only once.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// The model's shortest unique name, valid until it is closed.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_name(model: &BlobdModel) -> *const c_char {
    model.0.name.as_ptr()
}

/// The number of tensors of the model.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_tensor_count(model: &BlobdModel) -> usize {
    model.0.rows.len()
}

/// Writes the tensor with this index to `out`; the first in file order has index 0. Returns false if
/// there is no such tensor.
///
/// # Safety
/// `out` points to a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_tensor_at(model: &BlobdModel, index: usize, out: *mut BlobdTensor) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees a valid pointer.
    model.0.tensor(index).map(|tensor| unsafe { out.write(tensor) }).is_some()
}

/// The index of the tensor with this name; `SIZE_MAX` if there is none.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_tensor_find(model: &BlobdModel, name: *const c_char) -> usize {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let name = unsafe { text(name) };
    name.ok().flatten().and_then(|name| model.0.find(name)).unwrap_or(usize::MAX)
}

/// Maps a tensor, if it is not mapped yet. Returns false on failure. The bytes are valid until the model
/// is closed, even if the daemon ends or the model is removed. All processes share them in the page
/// cache.
///
/// # Safety
/// `out` points to bytes; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_map(
    model: &BlobdModel,
    index: usize,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { write_bytes(model.0.map(index).map(|tensor| to_c_bytes(tensor)), out, error) }
}

/// Maps a stack of experts and returns the bytes of one. Returns false on failure, for example if the
/// tensor is not a stack. A page is read from disk only when it is accessed.
///
/// # Safety
/// As for `blobd_map`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_expert(
    model: &BlobdModel,
    index: usize,
    expert: u64,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { write_bytes(model.0.expert(index, expert).map(to_c_bytes), out, error) }
}

/// The model's weights as one GGUF file in memory, without a copy. Returns null on failure.
///
/// `component` is `model`, `projector`, `adapter`, …; null means `model`. The caller must release the
/// image with `blobd_image_free`. It stays valid after the model is closed.
///
/// # Safety
/// `component` is null or a C string; `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_contiguous(
    model: &BlobdModel,
    component: *const c_char,
    error: *mut BlobdError,
) -> *mut BlobdImage {
    // SAFETY: Needed to read it. The caller guarantees a C string or null.
    let component = unsafe { text(component) };
    let image = component.and_then(|component| model.0.contiguous(component));
    // SAFETY: Needed to report the error. The caller guarantees a valid pointer or null.
    let image = unsafe { report(image, error) };
    image.map_or(ptr::null_mut(), |image| Box::into_raw(Box::new(BlobdImage(image))))
}

/// The image's bytes, page-aligned; valid until the image is freed.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_image_bytes(image: &BlobdImage) -> BlobdBytes {
    to_c_bytes(&image.0)
}

/// The number of bytes of the image's tensors that were copied, because they are not page-aligned in
/// their blob.
#[unsafe(no_mangle)]
pub extern "C" fn blobd_image_copied_bytes(image: &BlobdImage) -> usize {
    image.0.copied_bytes()
}

/// Unmaps an image. A null pointer is ignored.
///
/// # Safety
/// `image` is null or comes from `blobd_contiguous` and was not freed. Its bytes are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_image_free(image: *mut BlobdImage) {
    if !image.is_null() {
        // SAFETY: Needed to free it. It comes from `blobd_contiguous`, and the caller frees it only once.
        drop(unsafe { Box::from_raw(image) });
    }
}

/// Writes bytes to `out`, or the failure to `error`; false on failure. `out` points to bytes; `error` is null or
/// points to an error.
unsafe fn write_bytes(
    bytes: Result<BlobdBytes, Failure>,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to write the result. The caller guarantees valid pointers.
    unsafe { report(bytes, error).map(|bytes| out.write(bytes)).is_some() }
}

/// Writes the failure, or that there is none, to `error` unless it is null. Returns the value. `error` is null or
/// points to an error.
unsafe fn report<T>(result: Result<T, Failure>, error: *mut BlobdError) -> Option<T> {
    if !error.is_null() {
        let reported = result.as_ref().err().map_or_else(BlobdError::none, Failure::to_c);
        // SAFETY: Needed to report the error. The caller guarantees a valid pointer.
        unsafe { error.write(reported) };
    }
    result.ok()
}
