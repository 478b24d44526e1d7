//! What C holds, in Rust: everything it is given a pointer to is kept here.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use blobd_client::Client;
use blobd_client::error::{ClientError, ModelError};
use blobd_client::gguf_view::GgufView;
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::response::TensorLocation;

use crate::{BlobdBytes, BlobdError, BlobdTensor};

/// A model and what C points into.
#[derive(Debug)]
pub(crate) struct Handle {
    model: OpenModel,
    pub(crate) name: CString,
    /// One per tensor of the model.
    pub(crate) rows: Vec<Row>,
}

/// A tensor's texts as C has them, and its map once it was asked for.
#[derive(Debug)]
pub(crate) struct Row {
    name: CString,
    type_name: CString,
    map: OnceLock<TensorMap>,
}

/// Why something failed.
#[derive(Debug)]
pub(crate) struct Failure {
    code: ErrorCode,
    message: String,
}

impl Handle {
    /// Connects and opens; without a socket, the usual ones.
    pub(crate) fn open(socket: Option<&str>, reference: Option<&str>) -> Result<Self, Failure> {
        let reference = reference.ok_or_else(|| wrong("reference: is null"))?;
        let reference = reference.parse().map_err(wrong)?;
        let client = match socket {
            Some(socket) => Client::connect(PathBuf::from(socket))?,
            None => Client::connect_default()?,
        };
        let model = client.open(&reference)?;
        let rows: Result<Vec<_>, _> = model.tensors().iter().map(Row::new).collect();
        Ok(Self { name: c_text(model.name())?, rows: rows?, model })
    }

    /// What the table has on a tensor.
    pub(crate) fn tensor(&self, index: usize) -> Option<BlobdTensor> {
        let (row, tensor) = (self.rows.get(index)?, self.model.tensors().get(index)?);
        Some(BlobdTensor {
            name: row.name.as_ptr(),
            type_name: row.type_name.as_ptr(),
            shape: tensor.shape.as_ptr(),
            rank: tensor.shape.len(),
            size: tensor.size,
            expert_count: tensor.experts.map_or(0, |experts| experts.count),
            expert_size: tensor.experts.map_or(0, |experts| experts.stride),
        })
    }

    /// The number of a tensor.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.model.tensor_index(name)
    }

    /// A tensor's map, made when first asked for.
    pub(crate) fn map(&self, index: usize) -> Result<&TensorMap, Failure> {
        let known = self.rows.get(index).zip(self.model.tensors().get(index));
        let (row, tensor) = known.ok_or_else(|| self.no_tensor(index))?;
        if let Some(map) = row.map.get() {
            return Ok(map);
        }
        // Another thread may have been faster: its map stays, this one goes.
        let map = self.model.map_tensor(tensor)?;
        Ok(row.map.get_or_init(|| map))
    }

    /// One expert of a stack.
    pub(crate) fn expert(&self, index: usize, expert: u64) -> Result<&[u8], Failure> {
        let map = self.map(index)?;
        map.expert(expert).ok_or_else(|| Failure {
            code: ErrorCode::NotFound,
            message: format!("tensor {:?}: has no expert {expert}", map.name()),
        })
    }

    /// The image of a component.
    pub(crate) fn contiguous(&self, component: Option<&str>) -> Result<GgufView, Failure> {
        Ok(self.model.contiguous_component(component.unwrap_or("model"))?)
    }

    fn no_tensor(&self, index: usize) -> Failure {
        let message = format!("tensor {index}: no such tensor, the model has {}", self.rows.len());
        Failure { code: ErrorCode::NotFound, message }
    }
}

impl Row {
    fn new(tensor: &TensorLocation) -> Result<Self, Failure> {
        let (name, type_name) = (c_text(&tensor.name)?, c_text(&tensor.type_name)?);
        Ok(Self { name, type_name, map: OnceLock::new() })
    }
}

impl Failure {
    /// In C's form; a text that is too long loses its end.
    pub(crate) fn to_c(&self) -> BlobdError {
        let mut error = BlobdError::none();
        error.code = c_int::from(self.code.exit_code());
        let end = self.message.floor_char_boundary(error.message.len() - 1);
        let text = self.message.bytes().take(end).filter(|byte| *byte != 0);
        for (place, byte) in error.message.iter_mut().zip(text) {
            *place = c_char::from_ne_bytes([byte]);
        }
        error
    }
}

impl BlobdError {
    /// Nothing failed.
    pub(crate) const fn none() -> Self {
        Self { code: 0, message: [0; 508] }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self { code: error.code(), message: error.to_string() }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self { code: error.code(), message: error.to_string() }
    }
}

/// A caller's mistake.
fn wrong(message: impl std::fmt::Display) -> Failure {
    Failure { code: ErrorCode::InvalidRequest, message: message.to_string() }
}

fn c_text(text: &str) -> Result<CString, Failure> {
    let zero = |_zero| Failure { code: ErrorCode::Corrupt, message: format!("{text:?}: has a zero byte") };
    CString::new(text).map_err(zero)
}

/// A caller's string; `None` for null.
///
/// # Safety
/// `text` is null or a C string that lives as long as the result is used.
pub(crate) unsafe fn text<'t>(text: *const c_char) -> Result<Option<&'t str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: Needed to read it: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some).map_err(|_not_text| wrong("a string is not UTF-8"))
}

/// Bytes as C has them.
pub(crate) fn borrowed(bytes: &[u8]) -> BlobdBytes {
    BlobdBytes { data: bytes.as_ptr().cast(), size: bytes.len() }
}
