//! The verbs through the client library and the socket of a real daemon.

use std::fs::File;
use std::path::Path;

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{EditParams, Edited};
use blobd_client::protocol::naming::{Pinned, TrashList, Undeleted};
use blobd_client::protocol::naming::{Removed, Renamed, Tagged};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{
    FileSelection, GcParams, ImportParams, OpenParams, OpenPurpose, PinParams, RemoveParams, RenameParams,
    TagParams, TensorSelection, UndeleteParams,
};
use blobd_client::protocol::response::{ModelDetails, ModelList};
use blobd_client::protocol::space::DiskUsage;
use blobd_client::protocol::upkeep::GcReport;
use blobd_client::protocol::upkeep::{DoctorReport, EvictionPlan};

use super::{Verbs, reference};
use crate::daemon::TestDaemon;

/// A daemon and a client of it.
#[derive(Debug)]
pub struct ThroughSocket {
    client: Client,
    daemon: TestDaemon,
}

impl ThroughSocket {
    /// Starts a daemon on an empty store.
    #[must_use]
    pub fn start() -> Self {
        let daemon = TestDaemon::start();
        Self { client: daemon.client(), daemon }
    }
}

impl Verbs for ThroughSocket {
    fn root(&self) -> &Path {
        self.daemon.root()
    }

    fn import_with(&self, file: &Path, name: Option<&str>, force: bool) -> Result<Imported, ErrorBody> {
        let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let params = ImportParams { name: name.map(reference), force, ..ImportParams::new(file_name) };
        let file = File::open(file).map_err(|error| ErrorBody::new(ErrorCode::NotFound, error))?;
        self.client.import(&params, &file, |_, _| ()).map_err(body)
    }

    fn export(&self, name: &str) -> Result<Vec<u8>, ErrorBody> {
        let params = OpenParams {
            reference: reference(name),
            tensors: TensorSelection::None,
            component: Some("model".to_owned()),
            files: FileSelection::All,
            purpose: OpenPurpose::Export,
        };
        let model = self.client.open_with(&params).map_err(body)?;
        let mut bytes = Vec::new();
        model.write_layer(0, &mut bytes).map_err(|error| ErrorBody::new(error.code(), error))?;
        Ok(bytes)
    }

    fn list(&self) -> Result<ModelList, ErrorBody> {
        self.client.models().map_err(body)
    }

    fn show(&self, name: &str) -> Result<ModelDetails, ErrorBody> {
        self.client.model(&reference(name)).map_err(body)
    }

    fn usage(&self) -> Result<DiskUsage, ErrorBody> {
        self.client.disk_usage().map_err(body)
    }

    fn tag_with(&self, source: &str, target: &str, force: bool) -> Result<Tagged, ErrorBody> {
        self.client
            .tag(&TagParams { source: reference(source), target: reference(target), force, origin: None })
            .map_err(body)
    }

    fn rename(&self, source: &str, target: &str, force: bool) -> Result<Renamed, ErrorBody> {
        let params = RenameParams { source: reference(source), target: reference(target), force };
        self.client.rename(&params).map_err(body)
    }

    fn edit(&self, params: &EditParams) -> Result<Edited, ErrorBody> {
        self.client.edit(params, |_| ()).map_err(body)
    }

    fn remove(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        self.client.remove(&RemoveParams { references, ..RemoveParams::default() }).map_err(body)
    }

    fn plan_removal(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        let params = RemoveParams { references, dry_run: true, ..RemoveParams::default() };
        self.client.remove(&params).map_err(body)
    }

    fn move_to_trash(&self, names: &[&str], keep_seconds: u64) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        self.client
            .remove(&RemoveParams { references, keep_seconds: Some(keep_seconds), ..RemoveParams::default() })
            .map_err(body)
    }

    fn undelete(&self, name: &str) -> Result<Undeleted, ErrorBody> {
        self.client
            .undelete(&UndeleteParams { reference: reference(name), name: None, force: false })
            .map_err(body)
    }

    fn trash(&self) -> Result<TrashList, ErrorBody> {
        self.client.trash().map_err(body)
    }

    fn pin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        self.client.pin(&PinParams { reference: reference(name), pinned: true }).map_err(body)
    }

    fn unpin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        self.client.pin(&PinParams { reference: reference(name), pinned: false }).map_err(body)
    }

    fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ErrorBody> {
        self.client.eviction_plan(bytes).map_err(body)
    }

    fn doctor(&self) -> Result<DoctorReport, ErrorBody> {
        self.client.doctor().map_err(body)
    }

    fn gc(&self, dry_run: bool) -> Result<GcReport, ErrorBody> {
        self.client.gc(&GcParams { dry_run, ..GcParams::default() }).map_err(body)
    }
}

fn body(error: ClientError) -> ErrorBody {
    match error {
        ClientError::Daemon(body) => body,
        error => ErrorBody::new(error.code(), error),
    }
}
