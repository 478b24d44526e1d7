//! One of the two models.

use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::gguf::Header;
use blobd_store_format::reference::Reference;

use crate::cli::connect::{Connected, client_error};

/// A stored model.
pub(super) struct Side {
    pub(super) reference: Reference,
    pub(super) details: ModelDetails,
    /// The header of its first weights, if they are split.
    pub(super) header: Option<Header>,
}

impl Side {
    pub(super) fn read(connected: &Connected, reference: &Reference) -> Result<Self, ErrorBody> {
        let client = &connected.client;
        let details = client.model(reference).map_err(client_error)?;
        let model = client.open_with(&OpenParams::headers(reference.clone())).map_err(client_error)?;
        let header = match model.header() {
            Ok(bytes) => Header::parse(&bytes).ok(),
            Err(ModelError::NoHeader { .. }) => None,
            Err(error) => return Err(ErrorBody::new(error.code(), error)),
        };
        Ok(Self { reference: reference.clone(), details, header })
    }

    /// Opens some of the model's tensors.
    pub(super) fn open(&self, connected: &Connected, names: Vec<String>) -> Result<OpenModel, ErrorBody> {
        let tensors = TensorSelection::Names(names);
        let params = OpenParams { tensors, ..OpenParams::new(self.reference.clone()) };
        connected.client.open_with(&params).map_err(client_error)
    }

    /// Whether only one tensor has this name, so that the name identifies it.
    pub(super) fn is_unique(&self, name: &str) -> bool {
        self.details.tensors.iter().filter(|tensor| tensor.name == name).nth(1).is_none()
    }
}
