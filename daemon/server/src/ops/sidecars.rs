//! The files beside an imported one that become components of the same model.

use blobd_client::protocol::request::{Sidecar, SidecarComponent};
use blobd_client::protocol::response::ImportedSidecar;
use blobd_store::{Ingest, StoreError};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::file_format::ModelHeader;

use super::OpError;
use super::import_source::{FileFacts, ImportSource, inspect, refuse_changed};
use super::new_model::NewFile;
use crate::ingest::{IngestedFile, begin_file};

/// Sidecars that were inspected.
pub(super) struct Sidecars(Vec<Inspected>);

struct Inspected {
    component: SidecarComponent,
    file_name: String,
    facts: FileFacts,
}

impl Sidecars {
    /// Inspects the files that follow the model's in the source. Then the source is the model's file again. `displayed`
    /// makes a file's name safe to print.
    pub(super) fn inspect(
        source: &mut dyn ImportSource,
        sidecars: &[Sidecar],
        displayed: fn(&str) -> String,
    ) -> Result<Self, OpError> {
        let mut inspected = Vec::with_capacity(sidecars.len());
        for (number, Sidecar { component, file_name }) in (1..).zip(sidecars) {
            let file_name = displayed(file_name);
            select(source, number, &file_name)?;
            let facts = inspect(source, &file_name)?;
            inspected.push(Inspected { component: *component, file_name, facts });
        }
        select(source, 0, "the file")?;
        Ok(Self(inspected))
    }

    /// The length of all of them in bytes.
    pub(super) fn size(&self) -> u64 {
        self.0.iter().map(|sidecar| sidecar.facts.size).fold(0, u64::saturating_add)
    }

    /// Adds them to the ingest. `progress` receives how much of them and of the `before` bytes of the model's file was
    /// read; `check` refuses a file by its header.
    pub(super) fn ingest(
        &self,
        ingest: &mut Ingest,
        source: &mut dyn ImportSource,
        (mut before, progress): (u64, &mut dyn FnMut(u64, u64)),
        check: impl Fn(&str, &dyn ModelHeader) -> Result<(), OpError>,
    ) -> Result<Vec<ImportedSidecar>, OpError> {
        let mut added = Vec::with_capacity(self.0.len());
        for (number, Inspected { component, file_name, facts }) in (1..).zip(&self.0) {
            let refused = |source| OpError::Ingest { name: file_name.clone(), source };
            select(source, number, file_name)?;
            let mut report = |read: u64, total| progress(before.saturating_add(read), total);
            let begun = begin_file(source, facts.size, &mut report).map_err(refused)?;
            check(file_name, begun.header())?;
            let IngestedFile { digest, size, .. } = begun.ingest(ingest).map_err(refused)?;
            refuse_changed(source, file_name, *facts)?;
            before = before.saturating_add(size);
            added.push(ImportedSidecar { component: *component, file_name: file_name.clone(), digest, size });
        }
        Ok(added)
    }
}

/// The files of an imported model. With sidecars they have names, as in a model that was pulled from a repository.
pub(super) fn files_of(model: &IngestedFile, file_name: &str, sidecars: &[ImportedSidecar]) -> Vec<NewFile> {
    let file = |media_type, digest, size, name: &str| NewFile {
        descriptor: Descriptor { media_type: MediaType::new(media_type), digest, size },
        name: Some(name.to_owned()),
        facts: Vec::new(),
        version: None,
    };
    let weights = file(MediaType::OLLAMA_MODEL, model.digest, model.size, file_name);
    let weights = NewFile { facts: vec![model.facts.clone()], ..weights };
    let sidecars = sidecars.iter().map(|sidecar| {
        let media_type = match sidecar.component {
            SidecarComponent::Projector => MediaType::OLLAMA_PROJECTOR,
            SidecarComponent::Draft => MediaType::OLLAMA_DRAFT,
        };
        file(media_type, sidecar.digest, sidecar.size, &sidecar.file_name)
    });
    std::iter::once(weights).chain(sidecars).collect()
}

fn select(source: &mut dyn ImportSource, number: usize, name: &str) -> Result<(), OpError> {
    Ok(source.select(number).map_err(StoreError::io("select", name))?)
}
