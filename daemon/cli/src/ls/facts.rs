//! Facts for `ls` beyond the list of models: times of use, and facts from headers.

use std::collections::BTreeMap;

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::response::{ModelDetails, ModelSummary};
use blobd_model::kind::ModelKind;

use crate::connect::client_error;

/// The facts by model name. What was not read is absent.
#[derive(Debug, Default)]
pub(super) struct Facts {
    used: BTreeMap<String, String>,
    headers: BTreeMap<String, HeaderFacts>,
}

#[derive(Debug)]
struct HeaderFacts {
    kind: Option<ModelKind>,
    architecture: Option<String>,
    quantization: Option<String>,
}

impl Facts {
    /// Reads when each model was last opened.
    pub(super) fn read_use(&mut self, client: &Client) -> Result<(), ErrorBody> {
        let usage = client.disk_usage().map_err(client_error)?;
        self.used =
            usage.models.into_iter().filter_map(|model| Some((model.name, model.last_opened?))).collect();
        Ok(())
    }

    /// Reads the headers of these models. Those of damaged models are left out, as `ls` lists them anyway.
    pub(super) fn read_headers<'m>(
        &mut self,
        client: &Client,
        models: impl Iterator<Item = &'m ModelSummary>,
    ) {
        for model in models {
            let Ok(reference) = model.name.parse() else { continue };
            if let Ok(details) = client.model(&reference) {
                let ModelDetails { kind, architecture, quantization, .. } = details;
                self.headers.insert(model.name.clone(), HeaderFacts { kind, architecture, quantization });
            }
        }
    }

    /// When a model was last opened, RFC 3339.
    pub(super) fn used(&self, name: &str) -> Option<&str> {
        self.used.get(name).map(String::as_str)
    }

    pub(super) fn kind(&self, name: &str) -> Option<ModelKind> {
        self.headers.get(name)?.kind
    }

    pub(super) fn architecture(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.architecture.as_deref()
    }

    pub(super) fn quantization(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.quantization.as_deref()
    }
}
