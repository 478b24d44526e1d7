//! One of the two models.

use std::collections::BTreeSet;

use blobd_client::model::OpenModel;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::model_tensor::TensorFormat;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{ByteOrder, Header};
use blobd_store_format::model_diff::packed_blobs;
use blobd_store_format::recipe::TensorEntry;
use blobd_store_format::reference::Reference;

use crate::cli::connect::{Connected, client_error};

/// A stored model.
pub(super) struct Side {
    pub(super) reference: Reference,
    pub(super) details: ModelDetails,
    pub(super) tensors: Vec<TensorEntry>,
    /// The header of its first weights, if they are split.
    pub(super) header: Option<Header>,
}

impl Side {
    pub(super) fn read(connected: &Connected, reference: &Reference) -> Result<Self, ErrorBody> {
        let client = &connected.client;
        let details = client.model(reference).map_err(client_error)?;
        let heads = client.heads(reference).map_err(client_error)?;
        let mut weights = heads.files.into_iter().filter(|file| file.media_type.holds_tensors());
        let header = weights.find_map(|file| Header::parse(&file.content?.0).ok());
        let tensors = details.tensors.iter().cloned().map(TensorEntry::from).collect();
        Ok(Self { reference: reference.clone(), details, tensors, header })
    }

    /// Opens some of the model's tensors.
    pub(super) fn open(&self, connected: &Connected, names: Vec<String>) -> Result<OpenModel, ErrorBody> {
        let tensors = TensorSelection::Names(names);
        let params = OpenParams { tensors, ..OpenParams::new(self.reference.clone()) };
        connected.client.open_with(&params).map_err(client_error)
    }

    /// The blobs that hold packed groups of experts. Layers of several tensors are not among them: their tensors
    /// cannot be opened singly.
    pub(super) fn packed_blobs(&self) -> BTreeSet<Digest> {
        let tensors = self.details.tensors.iter().zip(&self.tensors);
        let split = tensors.filter(|(tensor, _)| tensor.format == TensorFormat::Gguf);
        packed_blobs(split.map(|(_, entry)| entry))
    }

    /// The byte order of its tensors.
    pub(super) fn byte_order(&self) -> ByteOrder {
        self.header.as_ref().map_or(ByteOrder::Little, Header::byte_order)
    }

    /// Whether only one tensor has this name, so that the name identifies it.
    pub(super) fn is_unique(&self, name: &str) -> bool {
        self.tensors.iter().filter(|tensor| tensor.name == name).nth(1).is_none()
    }
}
