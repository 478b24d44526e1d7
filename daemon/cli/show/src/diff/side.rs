//! One of the two models: in the store, in local files, or not pulled.

use std::collections::{BTreeSet, HashSet};
use std::ops::Deref;
use std::sync::Arc;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{Connected, client_error, model_error};
use blobd_cli_common::described_model::{DescribedModel, ModelLocation};
use blobd_cli_common::local_files::describe_path;
use blobd_cli_common::model_source::ModelArgs;
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::TensorLocation;
use blobd_model::diff::{DiffTensor, TensorFile, packed_blobs};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::gguf::{ByteOrder, Header};

use crate::local_model::{LocalModel, entry};
use crate::tensor_choice::{file_of_described, file_of_layer, file_of_open};
use crate::{Digest, ErrorBody, ErrorCode, Reference};

pub(super) struct Side {
    pub(super) name: String,
    pub(super) tensors: Vec<DiffTensor>,
    /// The header of its first weights, if they are a GGUF file.
    pub(super) header: Option<Header>,
    /// The files without tensors: component and digest; `None` of local files, which have none.
    pub(super) texts: Option<Vec<(String, Digest)>>,
    place: SidePlace,
}

enum SidePlace {
    Stored {
        reference: Reference,
        /// The blobs that hold packed groups of experts.
        packed: BTreeSet<Digest>,
        /// The layers of several tensors, whose tensors cannot be opened singly.
        whole: HashSet<Digest>,
    },
    Files(LocalModel),
    /// Not pulled: only its headers are known.
    Remote,
}

impl Side {
    pub(super) fn read(
        global: &Global,
        model: &ModelArgs,
        connected: Option<&Connected>,
    ) -> Result<Self, ErrorBody> {
        let Some(connected) = connected.filter(|_| model.path().is_none()) else {
            return Self::of_files(global, model);
        };
        let described = model.describe_with(global, connected)?;
        match &described.place {
            ModelLocation::Store(reference) => Self::stored(connected, reference),
            ModelLocation::Registry(_) | ModelLocation::LocalFiles => Self::remote(&described),
        }
    }

    fn stored(connected: &Connected, reference: &Reference) -> Result<Self, ErrorBody> {
        let client = &connected.client;
        let details = client.model(reference).map_err(client_error)?;
        let heads = client.heads(reference).map_err(client_error)?;
        let mut weights = heads.files.into_iter().filter(|file| file.media_type.holds_tensors());
        let header = weights.find_map(|file| Header::parse(&file.content?.0).ok());
        let whole = details.whole_files();
        let files: Vec<_> = details.layers.iter().map(|layer| Arc::new(file_of_layer(layer))).collect();
        let unknown = Arc::new(TensorFile::new("", None));
        let file = |layer: Option<u32>| files.get(usize::try_from(layer?).ok()?).cloned();
        let tensors = details.tensors.iter().cloned().map(|tensor| DiffTensor {
            format: tensor.format,
            file: file(tensor.layer).unwrap_or_else(|| Arc::clone(&unknown)),
            entry: tensor.into(),
        });
        let tensors: Vec<_> = tensors.collect();
        let packed = packed_blobs(tensors.iter().filter(|tensor| !whole.contains(&tensor.digest)));
        let texts = details.layers.iter().map(|layer| (&layer.media_type, Some(layer.digest)));
        let texts = Some(texts_of(texts));
        let place = SidePlace::Stored { reference: reference.clone(), packed, whole };
        Ok(Self { name: details.name, tensors, header, texts, place })
    }

    fn of_files(global: &Global, model: &ModelArgs) -> Result<Self, ErrorBody> {
        let missing = || ErrorBody::new(ErrorCode::Internal, "a model without a path and a daemon");
        let path = model.path().ok_or_else(missing)?;
        let described = describe_path(&path)?;
        let files = LocalModel::open(&described)?;
        let tensors = files.entries(&described.name, global.hides_progress())?;
        let header = files.header().cloned();
        Ok(Self { name: described.name, tensors, header, texts: None, place: SidePlace::Files(files) })
    }

    fn remote(described: &DescribedModel) -> Result<Self, ErrorBody> {
        let (mut tensors, mut first) = (Vec::new(), None);
        for file in described.files.iter().filter(|file| file.media_type.holds_tensors()) {
            let Some(header) = file.model_header() else { continue };
            let layout = header.file_layout(file.size).map_err(|error| {
                ErrorBody::new(ErrorCode::InvalidInput, format!("{}: {error}", described.name))
            })?;
            let (file, format) = (Arc::new(file_of_described(file)), header.format().tensor_format());
            tensors.extend(layout.tensors().iter().map(|tensor| DiffTensor {
                format,
                file: Arc::clone(&file),
                entry: entry(&tensor),
            }));
            first = first.or_else(|| header.as_gguf().cloned());
        }
        let texts = described.files.iter().map(|file| (&file.media_type, file.digest));
        let texts = Some(texts_of(texts));
        Ok(Self { name: described.name.clone(), tensors, header: first, texts, place: SidePlace::Remote })
    }

    pub(super) const fn has_contents(&self) -> bool {
        !matches!(self.place, SidePlace::Remote)
    }

    pub(super) fn open(
        &self,
        connected: Option<&Connected>,
        names: Vec<String>,
    ) -> Result<Opened<'_>, ErrorBody> {
        match (&self.place, connected) {
            (SidePlace::Files(files), _) => Ok(Opened::Files(files)),
            (SidePlace::Stored { reference, .. }, Some(connected)) => {
                let tensors = TensorSelection::Names(names);
                let params = OpenParams { tensors, ..OpenParams::new(reference.clone()) };
                connected
                    .client
                    .open_with(&params)
                    .map(|model| Opened::Model(Box::new(model)))
                    .map_err(client_error)
            }
            _ => {
                Err(ErrorBody::new(ErrorCode::NotFound, format!("model {}: is not in the store", self.name)))
            }
        }
    }

    pub(super) fn packed_blobs(&self) -> BTreeSet<Digest> {
        match &self.place {
            SidePlace::Stored { packed, .. } => packed.clone(),
            SidePlace::Files(_) | SidePlace::Remote => BTreeSet::new(),
        }
    }

    /// Whether the tensor can be read alone.
    pub(super) fn opens(&self, tensor: &DiffTensor) -> bool {
        match &self.place {
            SidePlace::Stored { whole, .. } => !whole.contains(&tensor.digest),
            SidePlace::Files(_) | SidePlace::Remote => true,
        }
    }

    /// Whether several of its files have tensors.
    pub(super) fn has_several_files(&self) -> bool {
        let first = self.tensors.first();
        self.tensors.iter().any(|tensor| first.is_some_and(|first| tensor.file != first.file))
    }

    pub(super) fn byte_order(&self) -> ByteOrder {
        self.header.as_ref().map_or(ByteOrder::Little, Header::byte_order)
    }

    /// Whether one file has several tensors of this name.
    pub(super) fn repeats(&self, tensor: &DiffTensor) -> bool {
        let is_same = |other: &&DiffTensor| other.name == tensor.name && other.file == tensor.file;
        self.tensors.iter().filter(is_same).nth(1).is_some()
    }
}

fn texts_of<'m>(files: impl Iterator<Item = (&'m MediaType, Option<Digest>)>) -> Vec<(String, Digest)> {
    let is_text = |media_type: &MediaType| !media_type.holds_tensors() && media_type.component() != "tensor";
    let texts = files.filter(|(media_type, _)| is_text(media_type));
    texts.filter_map(|(media_type, digest)| Some((media_type.component().to_owned(), digest?))).collect()
}

pub(super) enum Opened<'s> {
    Model(Box<OpenModel>),
    Files(&'s LocalModel),
}

impl Opened<'_> {
    pub(super) fn bytes(&self, tensor: &DiffTensor) -> Result<TensorBytes, ErrorBody> {
        match self {
            Self::Model(model) => {
                let layer = |layer| model.layers().get(usize::try_from(layer).ok()?);
                let is_in_file = |found: &&TensorLocation| {
                    layer(found.layer).is_some_and(|layer| file_of_open(layer) == *tensor.file)
                };
                let named = || model.tensors().iter().filter(|found| found.name == tensor.name);
                let first = model.tensor(&tensor.name).filter(is_in_file);
                match first.or_else(|| named().find(is_in_file)) {
                    Some(found) => model.map_tensor(found),
                    None => model.map(&tensor.name),
                }
                .map(TensorBytes::Mapped)
                .map_err(model_error)
            }
            Self::Files(files) => {
                Ok(TensorBytes::Read(files.read(&tensor.file, &tensor.name)?.unwrap_or_default()))
            }
        }
    }
}

pub(super) enum TensorBytes {
    Mapped(TensorMap),
    Read(Vec<u8>),
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Read(bytes) => bytes,
        }
    }
}
