//! A tensor of a stored model, mapped.

use std::borrow::Cow;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use blobd_cli_common::connect::{client_error, model_error};
use blobd_cli_common::local_files::describe_path;
use blobd_client::error::ClientError;
use blobd_client::model::{BlobSlice, OpenModel};
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::TensorLocation;
use blobd_client::weights::{ManifestWeights, WeightsError};
use blobd_model::diff::TensorFile;
use blobd_model::quant::{ElementType, swap_bytes};
use blobd_model::tensor_layers::PackedTensor;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::gguf::{ByteOrder, Header};
use blobd_store_format::tensor::Experts;
use blobd_store_format::tensor::TensorFormat;

use super::packed::Packed;
use super::{quant_error, usage};
use crate::local_model::{LocalModel, LocalTensor};
use crate::tensor_choice::{WantedTensor, file_of_layer, file_of_open, layer_of};
use crate::{Client, ErrorBody, ErrorCode, Reference};

/// A tensor, or one expert of a stack.
#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    /// Its file, if several have a tensor of its name.
    pub(super) file: Option<String>,
    pub(super) type_name: String,
    pub(super) shape: Vec<u64>,
    pub(super) is_fastest_first: bool,
    pub(super) expert: Option<u64>,
    pub(super) bytes: Bytes,
    /// `None` if the type is not known.
    element_type: Option<ElementType>,
    packed: Option<Packed>,
    is_big_endian: bool,
    experts: Option<Experts>,
}

#[derive(Clone, Debug)]
pub(super) enum Bytes {
    Mapped(BlobSlice),
    Read { file: Arc<[u8]>, range: Range<usize> },
}

impl Bytes {
    /// `None` if the bytes are shorter.
    fn part(&self, offset: u64, length: u64) -> Option<Self> {
        match self {
            Self::Mapped(slice) => slice.part(offset, length).map(Self::Mapped),
            Self::Read { file, range } => {
                let start = range.start.checked_add(usize::try_from(offset).ok()?)?;
                let end = start.checked_add(usize::try_from(length).ok()?)?;
                (end <= range.end).then(|| Self::Read { file: Arc::clone(file), range: start..end })
            }
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(slice) => slice,
            Self::Read { file, range } => file.get(range.clone()).unwrap_or_default(),
        }
    }
}

/// The tensor that is meant, and its file if several have one; `None` if no file's table has the name. Equal tensors need
/// no choice.
fn chosen<'m>(
    model: &'m OpenModel,
    wanted: &WantedTensor,
) -> Result<Option<(&'m TensorLocation, Option<String>)>, ErrorBody> {
    let named: Vec<_> = model.tensors().iter().filter(|tensor| tensor.name == wanted.name).collect();
    let Some(first) = named.first() else { return Ok(None) };
    let is_first = |tensor: &&TensorLocation| {
        let layer_aside = TensorLocation { layer: first.layer, ..(*tensor).clone() };
        layer_aside == **first
    };
    if wanted.file.is_none() && named.iter().all(is_first) {
        return Ok(Some((first, None)));
    }
    let layer = |tensor: &TensorLocation| model.layers().get(usize::try_from(tensor.layer).ok()?);
    let files: Vec<TensorFile> = named.iter().filter_map(|tensor| layer(tensor).map(file_of_open)).collect();
    let place = wanted.choose(model.name(), &files)?;
    let file = files.get(place).filter(|_| files.len() > 1).map(|file| file.name().to_owned());
    Ok(named.get(place).map(|tensor| (*tensor, file)))
}

/// For a model that is not stored, says why its tensors are not read from a registry.
fn pull_first(error: ErrorBody) -> ErrorBody {
    if error.code != ErrorCode::NotFound {
        return error;
    }
    let reason = "a model at a registry has to be pulled first: one of its tensors alone cannot be verified";
    let hint = error.hint.as_ref().map_or_else(|| reason.to_owned(), |hint| format!("{reason}; {hint}"));
    error.with_hint(hint)
}

impl StoredTensor {
    pub(super) fn of_file(path: &Path, wanted: &WantedTensor) -> Result<Self, ErrorBody> {
        let described = describe_path(path)?;
        let model = LocalModel::open(&described)?;
        let has = |wanted: &WantedTensor| {
            model.named(&wanted.name).iter().any(|found| wanted.file.is_none() || wanted.is_in(found.file))
        };
        let in_name = || wanted.with_file_in_name().find(has);
        let wanted = if has(wanted) { wanted.clone() } else { in_name().unwrap_or_else(|| wanted.clone()) };
        let named = model.named(&wanted.name);
        let name = &wanted.name;
        if named.is_empty() {
            let message = format!("{}: no tensor {name:?}", path.display());
            return Err(with_nearest(ErrorBody::new(ErrorCode::NotFound, message), name, model.names()));
        }
        let files: Vec<TensorFile> = named.iter().map(|found| found.file.clone()).collect();
        let chosen = wanted.choose(&described.name, &files)?;
        let gone = || ErrorBody::new(ErrorCode::Internal, "the tensor's file is not open");
        let LocalTensor { file, format, range: tensor } = named.get(chosen).ok_or_else(gone)?;
        let bytes = model.read(file, name)?.ok_or_else(gone)?;
        let file_name = (files.len() > 1).then(|| file.name().to_owned());
        let (file, range) = (bytes.into(), 0..usize::try_from(tensor.size).unwrap_or(usize::MAX));
        Ok(Self {
            name: tensor.name.to_owned(),
            file: file_name,
            type_name: tensor.type_name.to_string(),
            shape: tensor.shape.to_vec(),
            is_fastest_first: format.is_gguf(),
            expert: None,
            bytes: Bytes::Read { file, range },
            element_type: ElementType::from_name(*format, &tensor.type_name),
            packed: None,
            is_big_endian: format.is_gguf() && model.byte_order() == ByteOrder::Big,
            experts: tensor.experts,
        })
    }

    pub(super) fn open(
        client: &Client,
        reference: &Reference,
        wanted: &WantedTensor,
    ) -> Result<Self, ErrorBody> {
        let tensors = TensorSelection::Names(vec![wanted.name.clone()]);
        match client.open_with(&OpenParams { tensors, ..OpenParams::new(reference.clone()) }) {
            Ok(model) => match chosen(&model, wanted)? {
                Some((tensor, file)) => Ok(Self { file, ..Self::of_split(&model, tensor)? }),
                // The name is that of a layer.
                None => Self::of_layers(client, reference, wanted),
            },
            Err(ClientError::Daemon(error)) if error.code == ErrorCode::NotFound => {
                Self::open_unlisted(client, reference, wanted, error)
            }
            Err(error) => Err(client_error(error)),
        }
    }

    /// A name that no file's table has: one with its file, a tensor inside a layer, or a wrong name.
    fn open_unlisted(
        client: &Client,
        reference: &Reference,
        wanted: &WantedTensor,
        error: ErrorBody,
    ) -> Result<Self, ErrorBody> {
        let details = client.model(reference).map_err(|error| pull_first(client_error(error)))?;
        if details.layers.iter().any(|layer| layer.media_type.component() == "tensor") {
            return Self::of_layers(client, reference, wanted);
        }
        let is_listed = |wanted: &WantedTensor| {
            let mut named = details.tensors.iter().filter(|tensor| tensor.name == wanted.name);
            named.any(|tensor| {
                layer_of(tensor, &details.layers).is_some_and(|layer| wanted.is_in(&file_of_layer(layer)))
            })
        };
        if let Some(listed) = wanted.with_file_in_name().find(is_listed) {
            return Self::open(client, reference, &listed);
        }
        Err(with_nearest(error, &wanted.name, details.tensors.iter().map(|tensor| tensor.name.as_str())))
    }

    /// A tensor of a file that is split.
    fn of_split(model: &OpenModel, tensor: &TensorLocation) -> Result<Self, ErrorBody> {
        let map = model.map_tensor(tensor).map_err(model_error)?;
        let layer = usize::try_from(tensor.layer).unwrap_or(usize::MAX);
        let header = model.layer_header(layer).map_err(model_error)?;
        if FileFormat::from_start(&header).map(FileFormat::tensor_format) == Some(TensorFormat::Safetensors) {
            return Ok(Self::of_safetensors(tensor, map.bytes().clone()));
        }
        let header = Header::parse(&header).map_err(|error| ErrorBody::new(ErrorCode::Corrupt, error))?;
        Ok(Self {
            name: tensor.name.clone(),
            file: None,
            type_name: tensor.type_name.clone(),
            shape: tensor.shape.clone(),
            is_fastest_first: true,
            expert: None,
            bytes: Bytes::Mapped(map.bytes().clone()),
            element_type: ElementType::from_name(TensorFormat::Gguf, &tensor.type_name),
            packed: None,
            is_big_endian: header.byte_order() == ByteOrder::Big,
            experts: tensor.experts,
        })
    }

    fn of_safetensors(tensor: &TensorLocation, bytes: BlobSlice) -> Self {
        Self {
            name: tensor.name.clone(),
            file: None,
            type_name: tensor.type_name.clone(),
            shape: tensor.shape.clone(),
            is_fastest_first: false,
            expert: None,
            bytes: Bytes::Mapped(bytes),
            element_type: ElementType::from_name(TensorFormat::Safetensors, &tensor.type_name),
            packed: None,
            is_big_endian: false,
            experts: tensor.experts,
        }
    }

    /// A tensor of a model with a safetensors file per tensor.
    fn of_layers(client: &Client, reference: &Reference, wanted: &WantedTensor) -> Result<Self, ErrorBody> {
        // The names of the layers start with their component.
        let folder = wanted.file.as_ref().map(|file| format!("{}/", file.trim_end_matches('/')));
        let name = &(folder.unwrap_or_default() + &wanted.name);
        let weights = ManifestWeights::open(client, reference);
        let weights = weights.map_err(|error| ErrorBody::new(error.code(), error))?;
        let tensor = weights.tensor(name).map_err(|error| match error {
            WeightsError::NoTensor { ref model, .. } => {
                let message = format!("model {model}: no tensor {name:?}");
                with_nearest(ErrorBody::new(ErrorCode::NotFound, message), name, weights.names())
            }
            error => ErrorBody::new(error.code(), error),
        })?;
        let packed = Packed::of(&weights, &tensor)?;
        let dtype = tensor.dtype();
        let bytes = tensor.mapped().cloned().unwrap_or_default();
        let count = tensor.shape().first().copied().filter(|count| tensor.shape().len() > 2 && *count > 0);
        let experts = count.map(|count| Experts { count, stride: bytes.len() as u64 / count });
        Ok(Self {
            name: name.to_owned(),
            file: None,
            type_name: packed.as_ref().map_or_else(|| dtype.name().to_owned(), Packed::type_name),
            shape: packed.as_ref().map_or_else(|| tensor.shape().to_vec(), |packed| packed.shape(&tensor)),
            is_fastest_first: false,
            expert: None,
            bytes: Bytes::Mapped(bytes),
            element_type: Some(dtype.into()),
            packed,
            is_big_endian: false,
            experts,
        })
    }

    pub(super) fn expert(self, number: u64) -> Result<Self, ErrorBody> {
        let Some(Experts { count, stride }) = self.experts else {
            return Err(usage(format!("tensor {:?}: is not a stack of experts", self.name)));
        };
        let part = (number < count).then(|| self.bytes.part(number.saturating_mul(stride), stride)).flatten();
        let Some(bytes) = part else {
            let message = format!("tensor {:?}: no expert {number}, it has {count}", self.name);
            return Err(ErrorBody::new(ErrorCode::NotFound, message));
        };
        let mut shape = self.shape;
        if self.is_fastest_first {
            shape.pop()
        } else {
            (!shape.is_empty()).then(|| shape.remove(0))
        };
        let packed = self.packed.map(|packed| packed.expert(number, count)).transpose()?;
        Ok(Self { shape, bytes, packed, expert: Some(number), experts: None, ..self })
    }

    /// The dimensions in numpy's order, the slowest first.
    pub(super) fn numpy_shape(&self) -> Vec<u64> {
        let mut shape = self.shape.clone();
        if self.is_fastest_first {
            shape.reverse();
        }
        shape
    }

    pub(super) fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product, length| product.saturating_mul(*length))
    }

    pub(super) fn element_type(&self) -> Result<ElementType, ErrorBody> {
        self.element_type.ok_or_else(|| {
            let message = format!("tensor {:?}: type {} is not known", self.name, self.type_name);
            usage(message).with_hint("--dump writes its bytes as they are")
        })
    }

    /// All bytes in pieces of whole blocks, little-endian.
    pub(super) fn pieces(&self) -> Result<impl Iterator<Item = Result<Cow<'_, [u8]>, ErrorBody>>, ErrorBody> {
        self.pieces_of(&self.bytes)
    }

    pub(super) fn pieces_of<'b>(
        &'b self,
        bytes: &'b [u8],
    ) -> Result<impl Iterator<Item = Result<Cow<'b, [u8]>, ErrorBody>>, ErrorBody> {
        let element_type = self.element_type()?;
        let pieces = element_type.pieces(bytes).map_err(|error| quant_error(&self.name, &error))?;
        Ok(pieces.map(move |piece| {
            let (true, ElementType::Ggml(ggml_type)) = (self.is_big_endian, element_type) else {
                return Ok(Cow::Borrowed(piece));
            };
            let mut swapped = piece.to_vec();
            let done = swap_bytes(ggml_type, &mut swapped);
            done.map(|()| swapped.into()).map_err(|error| quant_error(&self.name, &error))
        }))
    }

    /// The numbers of a quantised tensor whose scales are other tensors; `None` for other tensors.
    pub(super) fn packed(&self) -> Result<Option<PackedTensor<'_>>, ErrorBody> {
        self.packed.as_ref().map(|packed| packed.view(&self.name, &self.bytes)).transpose()
    }

    pub(super) fn each_piece(&self, mut visit: impl FnMut(&[f64])) -> Result<(), ErrorBody> {
        if let Some(packed) = self.packed()? {
            for range in parts(packed.len()) {
                visit(&packed.unpack(range).into_iter().map(f64::from).collect::<Vec<_>>());
            }
            return Ok(());
        }
        let element_type = self.element_type()?;
        let mut numbers = Vec::new();
        for piece in self.pieces()? {
            let values = element_type.values(&piece?).map_err(|error| quant_error(&self.name, &error))?;
            numbers.clear();
            values.append_to(&mut numbers);
            visit(&numbers);
        }
        Ok(())
    }
}

pub(super) fn parts(elements: u64) -> impl Iterator<Item = Range<u64>> {
    const PART_ELEMENTS: usize = 1 << 16;
    let starts = (0..elements).step_by(PART_ELEMENTS);
    starts.map(move |start| start..start.saturating_add(PART_ELEMENTS as u64).min(elements))
}

fn with_nearest<'n>(error: ErrorBody, name: &str, names: impl Iterator<Item = &'n str>) -> ErrorBody {
    const SHOWN: usize = 3;
    let mut nearest: Vec<&str> = names.collect();
    nearest.sort_by_cached_key(|known| (strsim::levenshtein(name, known), *known));
    // Several files can have the name.
    nearest.dedup();
    nearest.truncate(SHOWN);
    if nearest.is_empty() {
        return error;
    }
    error.with_hint(format!("the most similar names are {}", nearest.join(", ")))
}
