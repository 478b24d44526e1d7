//! The Rust side of an open model: it owns everything that C gets pointers to.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use blobd_client::Client;
use blobd_client::error::{ClientError, ModelError};
use blobd_client::gguf_view::GgufView;
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::response::TensorLocation;
use blobd_client::weights::WeightsError;
use blobd_model::layers::split_name;
use blobd_model::metadata::Metadata;
use blobd_store_format::gguf::Header;
use blobd_store_format::reference::Reference;

use crate::{BlobdBytes, BlobdError, BlobdTensor};

#[derive(Debug)]
pub(crate) struct Handle {
    model: OpenModel,
    pub(crate) name: CString,
    /// One per tensor of the model.
    pub(crate) rows: Vec<Row>,
    /// Read by the first request.
    header: OnceLock<ParsedHeader>,
    layers: OnceLock<Vec<LayerRow>>,
}

#[derive(Debug)]
pub(crate) struct LayerRow {
    pub(crate) name: CString,
    /// The indexes of its tensors, by name.
    pub(crate) tensors: Vec<usize>,
    pub(crate) size: u64,
}

/// A header, and the strings in it that C gets pointers to.
#[derive(Debug)]
pub(crate) struct ParsedHeader {
    pub(crate) header: Header,
    pub(crate) architecture: CString,
    /// `None` too if it has a zero byte.
    pub(crate) chat_template: Option<CString>,
}

/// A tensor's strings for C, and its map after the first request.
#[derive(Debug)]
pub(crate) struct Row {
    name: CString,
    type_name: CString,
    map: OnceLock<TensorMap>,
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

impl Handle {
    /// Connects to the daemon and opens the model. Without a socket, uses the default paths.
    pub(crate) fn open(socket: Option<&str>, reference: Option<&str>) -> Result<Self, Failure> {
        let (client, reference) = connect(socket, reference)?;
        let model = client.open(&reference)?;
        let rows: Result<Vec<_>, _> = model.tensors().iter().map(Row::new).collect();
        Ok(Self {
            name: c_string(model.name())?,
            rows: rows?,
            model,
            header: OnceLock::new(),
            layers: OnceLock::new(),
        })
    }

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

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.model.tensor_index(name)
    }

    /// A tensor's map, created by the first request.
    pub(crate) fn map(&self, index: usize) -> Result<&TensorMap, Failure> {
        let found = self.rows.get(index).zip(self.model.tensors().get(index));
        let (row, tensor) = found.ok_or_else(|| no_tensor(index, self.rows.len()))?;
        if let Some(map) = row.map.get() {
            return Ok(map);
        }
        // If another thread has mapped it meanwhile, that map is used and this one is dropped.
        let map = self.model.map_tensor(tensor)?;
        Ok(row.map.get_or_init(|| map))
    }

    pub(crate) fn expert(&self, index: usize, expert: u64) -> Result<&[u8], Failure> {
        let map = self.map(index)?;
        map.expert(expert).ok_or_else(|| no_expert(map.name(), expert))
    }

    pub(crate) fn metadata(&self) -> Result<Metadata<'_>, Failure> {
        Ok(Metadata::new(&self.header()?.header))
    }

    /// The tensors by layer, sorted by name.
    pub(crate) fn layers(&self) -> &[LayerRow] {
        self.layers.get_or_init(|| {
            let mut layers: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
            for (index, tensor) in self.model.tensors().iter().enumerate() {
                let (layer, name) = split_name(&tensor.name);
                layers.entry(layer).or_default().insert(name, index);
            }
            layers
                .into_iter()
                .map(|(name, tensors)| self.layer(name, tensors.into_values().collect()))
                .collect()
        })
    }

    fn layer(&self, name: &str, tensors: Vec<usize>) -> LayerRow {
        let sizes = tensors.iter().filter_map(|index| self.model.tensors().get(*index));
        let size = sizes.fold(0, |sum: u64, tensor| sum.saturating_add(tensor.size));
        // The names of tensors have no zero byte.
        LayerRow { name: CString::new(name).unwrap_or_default(), tensors, size }
    }

    pub(crate) fn header(&self) -> Result<&ParsedHeader, Failure> {
        if let Some(header) = self.header.get() {
            return Ok(header);
        }
        let bytes = self.model.header()?;
        let invalid = |error| Failure { code: ErrorCode::InvalidInput, message: format!("{error}") };
        let header = ParsedHeader::new(Header::parse(&bytes).map_err(invalid)?)?;
        Ok(self.header.get_or_init(|| header))
    }

    /// The image of a component; `model` if none is named.
    pub(crate) fn contiguous(&self, component: Option<&str>) -> Result<GgufView, Failure> {
        Ok(self.model.contiguous_component(component.unwrap_or("model"))?)
    }
}

impl ParsedHeader {
    fn new(header: Header) -> Result<Self, Failure> {
        let metadata = Metadata::new(&header);
        let architecture = c_string(metadata.architecture())?;
        let chat_template = metadata.chat_template().and_then(|template| CString::new(template).ok());
        Ok(Self { architecture, chat_template, header })
    }
}

impl Row {
    fn new(tensor: &TensorLocation) -> Result<Self, Failure> {
        let (name, type_name) = (c_string(&tensor.name)?, c_string(&tensor.type_name)?);
        Ok(Self { name, type_name, map: OnceLock::new() })
    }
}

impl Failure {
    pub(crate) fn to_c(&self) -> BlobdError {
        let mut error = BlobdError::none();
        error.code = c_int::from(self.code.exit_code());
        let end = self.message.floor_char_boundary(error.message.len() - 1);
        let text = self.message.bytes().take(end).filter(|byte| *byte != 0);
        for (target, byte) in error.message.iter_mut().zip(text) {
            *target = c_char::from_ne_bytes([byte]);
        }
        error
    }
}

impl BlobdError {
    pub(crate) const fn none() -> Self {
        Self { code: 0, message: [0; 508] }
    }
}

macro_rules! failures {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self { code: error.code(), message: error.to_string() }
            }
        }
    )*};
}

failures!(ClientError, WeightsError, ModelError);

/// Connects to the daemon. Without a socket, uses the default paths.
pub(crate) fn connect(socket: Option<&str>, reference: Option<&str>) -> Result<(Client, Reference), Failure> {
    let reference = reference.ok_or_else(|| invalid_request("reference: is null"))?;
    let reference = reference.parse().map_err(invalid_request)?;
    let client = match socket {
        Some(socket) => Client::connect(PathBuf::from(socket))?,
        None => Client::connect_default()?,
    };
    Ok((client, reference))
}

/// An error in the caller's arguments.
pub(crate) fn invalid_request(message: impl std::fmt::Display) -> Failure {
    Failure { code: ErrorCode::InvalidRequest, message: message.to_string() }
}

pub(crate) fn no_tensor(index: usize, count: usize) -> Failure {
    let message = format!("tensor {index}: no such tensor, the model has {count}");
    Failure { code: ErrorCode::NotFound, message }
}

pub(crate) fn no_expert(tensor: &str, expert: u64) -> Failure {
    Failure { code: ErrorCode::NotFound, message: format!("tensor {tensor:?}: has no expert {expert}") }
}

pub(crate) fn c_string(text: &str) -> Result<CString, Failure> {
    let error =
        |_zero_byte| Failure { code: ErrorCode::Corrupt, message: format!("{text:?}: has a zero byte") };
    CString::new(text).map_err(error)
}

/// A string that the caller passed; `None` for null. `text` is null or a C string that stays valid as long as the
/// result is used.
pub(crate) unsafe fn text<'t>(text: *const c_char) -> Result<Option<&'t str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: Needed to read it. The caller guarantees a C string.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some).map_err(|_not_utf8| invalid_request("argument: string is not UTF-8"))
}

/// Bytes in C's form, without a copy.
pub(crate) fn to_c_bytes(bytes: &[u8]) -> BlobdBytes {
    BlobdBytes { data: bytes.as_ptr().cast(), size: bytes.len() }
}
