//! `import`: makes a model from a file that the caller has opened.

use std::io;
use std::path::Path;
use std::sync::Arc;

use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::response::Imported;
use blobd_store::{Store, Verb};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::file_format::ModelHeader;
use blobd_store_format::origin::of_import;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::import_source::{ImportSource, inspect, refuse_changed};
use super::name_change::{NameChange, TargetName};
use super::new_model::NewModel;
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::sidecars::{Sidecars, files_of};
use crate::ingest::{IngestError, begin_file};
use crate::requester::Requester;

/// Imports one file. `progress` receives the bytes read, and how many will be read.
///
/// # Errors
/// [`OpError`]; then nothing is stored.
pub fn import(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &ImportParams,
    source: &mut dyn ImportSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Imported, OpError> {
    let import = || import_file(store, requester, policy, params, source, progress);
    NameChange::run(store, Leftover::Nothing, import)
}

fn import_file(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &ImportParams,
    source: &mut dyn ImportSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Imported, OpError> {
    let file_name = display_name(&params.file_name);
    let target = target_name(params)?;
    policy.check_import(&file_name, target.preferred(), None)?;
    let before = inspect(source, &file_name)?;
    let size = before.size;
    let sidecars = Sidecars::inspect(source, &params.sidecars, display_name)?;
    let change = NameChange::new(store, requester, Verb::Import, format!("import of {file_name}"));
    let change = change.replacing(params.force);
    // Before the file is read. A file of the same size may be the same one.
    change.check(&target, |present| present.layers().iter().any(|file| file.size == size))?;
    let mut ingest = change.begin(change.lease())?;
    ingest.staging().expect(size.saturating_add(sidecars.size()));
    let progress = &mut |read, _| progress(read, size.saturating_add(sidecars.size()));
    let refused = |source| OpError::Ingest { name: file_name.clone(), source };
    let begun = begin_file(source, size, progress).map_err(refused)?;
    policy.check_import(&file_name, target.preferred(), Some(begun.header()))?;
    let target = target.retaining(|name| policy.check_import(&file_name, name, Some(begun.header())).is_ok());
    let ingested = begun.ingest(&mut ingest).map_err(refused)?;
    let facts = &ingested.facts;
    if let Some(shard) = facts.shard {
        return Err(refused(IngestError::Shard { count: shard.count }));
    }
    refuse_changed(source, &file_name, before)?;
    let check =
        |file: &str, header: &dyn ModelHeader| policy.check_import(file, target.preferred(), Some(header));
    let added = sidecars.ingest(&mut ingest, source, (size, progress), check)?;
    let files = files_of(&ingested, &file_name, &added);
    let manifest = NewModel::new(file_name.clone(), files).compose(&mut ingest)?;
    let is_allowed = |name: &Reference| policy.check_import(&file_name, name, None).is_ok();
    let named = change.commit(ingest, target, &manifest, Some(&of_import(&file_name)), is_allowed)?;
    Ok(Imported {
        name: named.name,
        digest: manifest.digest(),
        file: ingested.digest,
        size,
        new_bytes: named.new_bytes,
        reused_bytes: named.reused_bytes,
        tensor_count: facts.tensor_count,
        new_blob_count: named.new_blob_count,
        sidecars: added,
        unchanged: named.unchanged,
        effects: named.effects,
    })
}

/// The error of an import whose client has disconnected.
pub(crate) fn client_has_gone() -> io::Error {
    io::Error::other("the client that asked for this import has gone")
}

/// The name that the model gets: the one that was asked for, or one made from the file's.
///
/// # Errors
/// [`OpError::Name`] if no name can be made from the file's; [`OpError::PinnedTarget`].
fn target_name(params: &ImportParams) -> Result<TargetName, OpError> {
    if let Some(name) = &params.name {
        return TargetName::given(name);
    }
    let names = DerivedName::of_file(&params.file_name);
    let from = || display_name(&params.file_name);
    names.map(TargetName::Derived).map_err(|source| OpError::Name { from: from(), source })
}

/// The last part of a path, without control characters. A path without one, such as `a/..`, is not that of a file:
/// nothing of it is used.
fn display_name(file_name: &str) -> String {
    const MAX_CHARS: usize = 200;
    let last = Path::new(file_name).file_name().and_then(|name| name.to_str()).unwrap_or("unnamed");
    last.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_to_print() {
        assert_eq!(display_name("/a/b/\u{1b}[31mred.gguf\n"), "[31mred.gguf");
        for path in ["https://ollama.com/acme/x/blobs/..", "..", "/", ""] {
            assert_eq!(display_name(path), "unnamed", "{path}");
        }
    }
}
