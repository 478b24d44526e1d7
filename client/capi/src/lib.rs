//! blobd's client library for C and C++.
//!
//! `include/blobd_client.h` is made from this file: every comment below is its text, and a test
//! compares them. Structures that C sees keep their form; new fields come with new functions.
//!
//! Nothing here is global, starts a thread or sets a signal handler. Strings are UTF-8. A panic, which
//! would be a mistake in blobd, ends the process instead of unwinding into C.
#![allow(unsafe_code)]

mod handle;

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use blobd_client::gguf_view::GgufView;

use crate::handle::{Failure, Handle, borrowed, text};

/// A model that is held open: its tensors, and the lease that shows it as in use.
#[derive(Debug)]
pub struct BlobdModel(Handle);

// Any number of threads may look at a model or an image at once.
const _: () = {
    const fn is_shared_by_threads<T: Send + Sync>() {}
    is_shared_by_threads::<BlobdModel>();
    is_shared_by_threads::<BlobdImage>();
};

/// A model as one GGUF file in memory.
#[derive(Debug)]
pub struct BlobdImage(GgufView);

/// Why a function failed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdError {
    /// 0 if nothing failed, else: 1 failed, 2 wrong use, 3 not found, 4 busy, 5 corrupt data,
    /// 6 no space, 7 denied.
    pub code: c_int,
    /// One line for people, which says what to do; ends with a zero byte.
    pub message: [c_char; 508],
}

/// Bytes that can be read and never change.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdBytes {
    /// The first byte; at the start of a page for a tensor with a blob of its own. Not null even if
    /// there are none.
    pub data: *const c_void,
    /// How many there are.
    pub size: usize,
}

/// A tensor as the model's table has it. The pointers are valid until the model is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdTensor {
    /// The name.
    pub name: *const c_char,
    /// The name of the ggml type, such as `Q4_K`.
    pub type_name: *const c_char,
    /// The dimensions in GGUF order, the fastest first.
    pub shape: *const u64,
    /// How many dimensions there are; 0 is a scalar.
    pub rank: usize,
    /// How many bytes the tensor has.
    pub size: u64,
    /// How many experts are stacked in it; 0 if it is no stack.
    pub expert_count: u64,
    /// How many bytes each expert has.
    pub expert_size: u64,
}

/// Opens a model with all its tensors: null on failure.
///
/// The daemon is the one behind `socket`; if that is null, the one that `BLOBD_SOCKET` names, or else
/// the one at the usual places. `error` may be null. The result belongs to the caller, who gives it to
/// `blobd_close`; any number of threads may use it at once.
///
/// # Safety
/// `socket` is null or a C string, `reference` is a C string, `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_open(
    socket: *const c_char,
    reference: *const c_char,
    error: *mut BlobdError,
) -> *mut BlobdModel {
    // SAFETY: Needed to read the caller's strings: its promise.
    let (socket, reference) = unsafe { (text(socket), text(reference)) };
    let opened = socket.and_then(|socket| Handle::open(socket, reference?));
    // SAFETY: Needed to tell the caller; its promise.
    let opened = unsafe { noted(opened, error) };
    opened.map_or(ptr::null_mut(), |handle| Box::into_raw(Box::new(BlobdModel(handle))))
}

/// Ends the lease and unmaps the tensors. Images stay. A null pointer is ignored.
///
/// # Safety
/// `model` is null or comes from `blobd_open` and was not closed; nobody uses it or its tensors any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_close(model: *mut BlobdModel) {
    if !model.is_null() {
        // SAFETY: Needed to take it back: `blobd_open` gave it, and this is the only call.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// The model's shortest unique name, valid until it is closed.
///
/// # Safety
/// `model` comes from `blobd_open` and is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_name(model: *const BlobdModel) -> *const c_char {
    // SAFETY: Needed to look at it: the caller's promise.
    unsafe { &*model }.0.name.as_ptr()
}

/// How many tensors the model has.
///
/// # Safety
/// `model` comes from `blobd_open` and is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_tensor_count(model: *const BlobdModel) -> usize {
    // SAFETY: Needed to look at it: the caller's promise.
    unsafe { &*model }.0.rows.len()
}

/// Tells what the tensor with this number is, from 0 on in file order; false if there is none.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `out` points to a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_tensor_at(
    model: *const BlobdModel,
    index: usize,
    out: *mut BlobdTensor,
) -> bool {
    // SAFETY: Needed to look at it: the caller's promise.
    let tensor = unsafe { &*model }.0.tensor(index);
    let found = tensor.is_some();
    if let Some(tensor) = tensor {
        // SAFETY: Needed to answer there: the caller's promise.
        unsafe { out.write(tensor) };
    }
    found
}

/// The number of the tensor with this name; `SIZE_MAX` if there is none.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_tensor_find(model: *const BlobdModel, name: *const c_char) -> usize {
    // SAFETY: Needed to look at both: the caller's promise.
    let (model, name) = unsafe { (&*model, text(name)) };
    name.ok().flatten().and_then(|name| model.0.find(name)).unwrap_or(usize::MAX)
}

/// Maps a tensor, if it is not mapped yet: false on failure. The bytes are valid until the model is
/// closed, whatever becomes of the daemon and the model; they are the page cache's, shared by all
/// processes.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `out` points to bytes; `error` is null or points to an
/// error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_map(
    model: *const BlobdModel,
    index: usize,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to look at it and to answer: the caller's promise.
    unsafe { answered((&*model).0.map(index).map(|tensor| borrowed(tensor)), out, error) }
}

/// Maps a stack of experts and finds one of them: false on failure, such as when the tensor is no stack.
/// Only the pages that are touched are read.
///
/// # Safety
/// As for `blobd_map`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_expert(
    model: *const BlobdModel,
    index: usize,
    expert: u64,
    out: *mut BlobdBytes,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to look at it and to answer: the caller's promise.
    unsafe { answered((&*model).0.expert(index, expert).map(borrowed), out, error) }
}

/// The model's weights as one GGUF file in memory, without a copy: null on failure.
///
/// `component` is `model`, `projector`, `adapter`, …; null means `model`. The image belongs to the caller,
/// who gives it to `blobd_image_free`; it outlives the model.
///
/// # Safety
/// `model` comes from `blobd_open` and is open; `component` is null or a C string; `error` is null or
/// points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_contiguous(
    model: *const BlobdModel,
    component: *const c_char,
    error: *mut BlobdError,
) -> *mut BlobdImage {
    // SAFETY: Needed to look at both: the caller's promise.
    let (model, component) = unsafe { (&*model, text(component)) };
    let image = component.and_then(|component| model.0.contiguous(component));
    // SAFETY: Needed to tell the caller; its promise.
    let image = unsafe { noted(image, error) };
    image.map_or(ptr::null_mut(), |image| Box::into_raw(Box::new(BlobdImage(image))))
}

/// The image's bytes, from a page's start on; valid until it is freed.
///
/// # Safety
/// `image` comes from `blobd_contiguous` and is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_image_bytes(image: *const BlobdImage) -> BlobdBytes {
    // SAFETY: Needed to look at it: the caller's promise.
    borrowed(unsafe { &(*image).0 })
}

/// How many bytes of the image's tensors had to be copied, because they do not start at a page's start
/// in their blob.
///
/// # Safety
/// `image` comes from `blobd_contiguous` and is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_image_copied_bytes(image: *const BlobdImage) -> usize {
    // SAFETY: Needed to look at it: the caller's promise.
    unsafe { &*image }.0.copied_bytes()
}

/// Unmaps an image. A null pointer is ignored.
///
/// # Safety
/// `image` is null or comes from `blobd_contiguous` and was not freed; nobody uses its bytes any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_image_free(image: *mut BlobdImage) {
    if !image.is_null() {
        // SAFETY: Needed to take it back: `blobd_contiguous` gave it, and this is the only call.
        drop(unsafe { Box::from_raw(image) });
    }
}

/// Puts bytes, or why there are none, where the caller wants them.
///
/// # Safety
/// `out` points to bytes; `error` is null or points to an error.
unsafe fn answered(bytes: Result<BlobdBytes, Failure>, out: *mut BlobdBytes, error: *mut BlobdError) -> bool {
    // SAFETY: Needed to answer there: the caller's promise.
    unsafe { noted(bytes, error).map(|bytes| out.write(bytes)).is_some() }
}

/// Writes down how it went, if the caller wants to know.
///
/// # Safety
/// `error` is null or points to an error.
unsafe fn noted<T>(result: Result<T, Failure>, error: *mut BlobdError) -> Option<T> {
    if !error.is_null() {
        let told = result.as_ref().err().map_or_else(BlobdError::none, Failure::to_c);
        // SAFETY: Needed to answer there: the caller's promise.
        unsafe { error.write(told) };
    }
    result.ok()
}
