//! The memory that a model needs, before it is opened.

use std::ffi::{CString, c_char};
use std::{ptr, slice};

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::fit::{FitParams, FitReport};

use crate::handle::{Failure, c_string, connect, invalid_request, text};
use crate::{BlobdError, report};

/// How a model would be run, and into what memory it should fit. Set all to zero first: what is zero has the default of
/// `blobd fit`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdFitParams {
    /// The context of one sequence, in tokens.
    pub context: u64,
    /// The tokens that are processed together.
    pub batch: u64,
    /// The sequences that are processed at the same time, each with the whole context.
    pub parallel: u64,
    /// The type of keys in the cache, such as `f16` or `q8_0`.
    pub cache_type_k: *const c_char,
    /// The type of values in the cache.
    pub cache_type_v: *const c_char,
    /// The formulas: `llama.cpp` or `ollama`.
    pub basis: *const c_char,
    /// The memory of each device that the model may take.
    pub vram_bytes: *const u64,
    /// The number of devices.
    pub vram_count: usize,
    /// The machine's memory that the model may take; null if it is not limited.
    pub memory_bytes: *const u64,
    /// The context for which the model was trained, in place of `context`.
    pub trained_context: bool,
    /// Leave the experts of a mixture in the machine's memory.
    pub cpu_moe: bool,
}

/// The memory that a model needs, and whether it fits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlobdFit {
    /// What is needed in all, on devices and in the machine's memory.
    pub needed_bytes: u64,
    /// What one device must have so that everything fits on it.
    pub required_bytes: u64,
    /// The weights.
    pub weights_bytes: u64,
    /// The part of the weights that is read from the disk row by row.
    pub table_bytes: u64,
    /// The KV cache.
    pub kv_bytes: u64,
    /// The computation graph if all of the model is on one device.
    pub graph_bytes: u64,
    /// The context of one sequence, in tokens.
    pub context: u64,
    /// The context for which the model was trained; 0 if unknown.
    pub trained_context: u64,
    /// The largest context with which everything fits; 0 if none, or if it is not known into what.
    pub max_context: u64,
    /// The layers on devices; 0 if there are none.
    pub layers: u64,
    /// The layers of the model; 0 if it is not known into what the model should fit.
    pub layers_of: u64,
    /// What is in the machine's memory.
    pub memory_bytes: u64,
    /// Whether the formulas know this model. If not, KV cache and graph are unknown, and it never fits.
    pub has_rule: bool,
    /// Whether it is known into what the model should fit: the parameters have devices or memory.
    pub has_answer: bool,
    /// Whether everything fits; false without an answer.
    pub fits: bool,
}

/// Estimates the memory that a model needs, as `blobd fit` does, and writes it to `out`; opens and loads nothing. Returns
/// false on failure. `params` may be null; `socket` and `error` are as for `blobd_open`.
///
/// # Safety
/// `socket` is null or a C string. `reference` is a C string. `params` is null or points to parameters, whose strings are null
/// or C strings, whose `vram_bytes` has `vram_count` elements, and whose `memory_bytes` is null or points to a number. `out`
/// points to an estimate. `error` is null or points to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_fit_of(
    socket: *const c_char,
    reference: *const c_char,
    params: *const BlobdFitParams,
    out: *mut BlobdFit,
    error: *mut BlobdError,
) -> bool {
    // SAFETY: Needed to read the arguments and to write the result. The caller guarantees valid pointers.
    unsafe { report(ask(socket, reference, params), error).map(|fit| out.write(to_c(&fit))).is_some() }
}

/// The same estimate as `blobd fit --json` prints it, without `machine`: a C string that the caller must release with
/// `blobd_text_free`. Returns null on failure.
///
/// # Safety
/// As for `blobd_fit_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_fit_json(
    socket: *const c_char,
    reference: *const c_char,
    params: *const BlobdFitParams,
    error: *mut BlobdError,
) -> *mut c_char {
    // SAFETY: Needed to read the arguments. The caller guarantees valid pointers.
    let json = unsafe { ask(socket, reference, params) }.and_then(|fit| json(&fit));
    // SAFETY: Needed to report the error. The caller guarantees a valid pointer or null.
    unsafe { report(json, error) }.map_or(ptr::null_mut(), CString::into_raw)
}

/// Frees a text. A null pointer is ignored.
///
/// # Safety
/// `text` is null or comes from `blobd_fit_json` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blobd_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: Needed to free it. It comes from `CString::into_raw`, and the caller frees it only once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Requests the estimate. The pointers must be as `blobd_fit_of` requires.
unsafe fn ask(
    socket: *const c_char,
    reference: *const c_char,
    params: *const BlobdFitParams,
) -> Result<FitReport, Failure> {
    // SAFETY: Needed to read the strings and the parameters. The caller guarantees valid pointers or null.
    let (socket, reference, params) = unsafe { (text(socket)?, text(reference)?, params.as_ref()) };
    // SAFETY: Needed to read the parameters. The caller guarantees valid pointers in them.
    let params = params.map(|params| unsafe { from_c(params) }).transpose()?.unwrap_or_default();
    let (client, reference) = connect(socket, reference)?;
    Ok(client.fit(&reference, &params)?)
}

/// The strings are null or C strings; `vram_bytes` has `vram_count` elements; `memory_bytes` is null or valid.
unsafe fn from_c(params: &BlobdFitParams) -> Result<FitParams, Failure> {
    let number = |value: u64| Some(value).filter(|value| *value > 0);
    // SAFETY: Needed to read the strings. The caller guarantees C strings or null.
    let (cache_type_k, cache_type_v) = unsafe { (text(params.cache_type_k)?, text(params.cache_type_v)?) };
    // SAFETY: As above, and the number is valid or null.
    let (basis, memory_bytes) = unsafe { (text(params.basis)?, params.memory_bytes.as_ref().copied()) };
    let vram_bytes = match params.vram_count {
        0 => Vec::new(),
        // SAFETY: Needed to read the devices. The caller guarantees that many.
        count => unsafe { slice::from_raw_parts(params.vram_bytes, count) }.to_vec(),
    };
    let cache_type = |name: Option<&str>| name.map(str::parse).transpose().map_err(invalid_request);
    let context = if params.trained_context { Some(0) } else { number(params.context) };
    Ok(FitParams {
        context,
        batch: number(params.batch),
        parallel: number(params.parallel),
        cache_type_k: cache_type(cache_type_k)?,
        cache_type_v: cache_type(cache_type_v)?,
        vram_bytes,
        memory_bytes,
        cpu_moe: params.cpu_moe,
        basis: basis.map(FitParams::basis_of_name).transpose().map_err(invalid_request)?,
    })
}

fn to_c(fit: &FitReport) -> BlobdFit {
    let (memory, answer) = (&fit.memory, fit.answer.as_ref());
    BlobdFit {
        needed_bytes: fit.needed_bytes,
        required_bytes: fit.required_bytes,
        weights_bytes: memory.weights_bytes,
        table_bytes: memory.table_bytes,
        kv_bytes: memory.kv_total_bytes,
        graph_bytes: memory.graph_full_bytes,
        context: memory.context,
        trained_context: fit.context_length.unwrap_or(0),
        max_context: answer.map_or(0, |answer| answer.max_context),
        layers: answer.map_or(0, |answer| answer.layers),
        layers_of: answer.map_or(0, |answer| answer.layers_of),
        memory_bytes: answer.map_or(0, |answer| answer.memory_bytes),
        has_rule: memory.has_rule,
        has_answer: answer.is_some(),
        fits: answer.is_some_and(|answer| answer.fits),
    }
}

fn json(fit: &FitReport) -> Result<CString, Failure> {
    let invalid =
        |error: serde_json::Error| Failure { code: ErrorCode::Internal, message: error.to_string() };
    c_string(&serde_json::to_string(fit).map_err(invalid)?)
}
