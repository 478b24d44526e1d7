//! `import`: makes a model from a file that the caller has opened.

use std::io;
use std::path::Path;
use std::sync::Arc;

use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::response::Imported;
use blobd_store::{Ingest, Store, Verb};
use blobd_store_format::file_format::{FileFormat, ModelHeader};
use blobd_store_format::file_type::split_file_type;
use blobd_store_format::reference::Reference;

use super::collect_on_failure::collect_on_failure;
use super::compose::compose;
use super::import_source::{ImportSource, inspect, refuse_changed};
use super::lost_models::{Evictions, displaced};
use super::origin::of_import;
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::sidecars::{Sidecars, parts_of};
use super::taken_name::{MayTake, refuse_unless_movable};
use super::{OpError, error::refuse_pinned, soft_quota};
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
    collect_on_failure(store, Leftover::Nothing, import)
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
    let reference = imported_name(params)?;
    refuse_pinned(&reference)?;
    policy.check_import(&file_name, &reference, None)?;
    let before = inspect(source, &file_name)?;
    let size = before.size;
    let sidecars = Sidecars::inspect(source, &params.sidecars, display_name)?;
    // Before the file is read. A file of the same size may be the same one.
    let may_take = MayTake::with_force(requester, params.force);
    refuse_unless_movable(store, requester, &reference, may_take, |present| {
        present.layers().iter().any(|file| file.size == size)
    })?;
    let cause = format!("import of {file_name}");
    let evictions = Evictions::new(requester, cause.clone());
    store.make_reserve();
    let ingest = Ingest::begin(store, store.leases().grant(cause))?.may_move_pinned(params.force);
    let mut ingest = requester.acting(evictions.observe(ingest), Verb::Import);
    ingest.staging().expect(size.saturating_add(sidecars.size()));
    let progress = &mut |read, _| progress(read, size.saturating_add(sidecars.size()));
    let refused = |source| OpError::Ingest { name: file_name.clone(), source };
    let begun = begin_file(source, size, progress).map_err(refused)?;
    policy.check_import(&file_name, &reference, Some(begun.header()))?;
    let ingested = begun.ingest(&mut ingest).map_err(refused)?;
    let facts = &ingested.facts;
    if let Some(shard) = facts.shard {
        return Err(refused(IngestError::Shard { count: shard.count }));
    }
    refuse_changed(source, &file_name, before)?;
    let check = |file: &str, header: &dyn ModelHeader| policy.check_import(file, &reference, Some(header));
    let added = sidecars.ingest(&mut ingest, source, (size, progress), check)?;
    let manifest = compose(&mut ingest, &parts_of(&ingested, &file_name, &added), facts)?;
    let origin = of_import(&file_name);
    let committed = ingest.commit(&reference, &manifest, Some(&origin))?;
    let (new_bytes, reused_bytes, new_blob_count) =
        (committed.new_bytes, committed.reused_bytes, committed.new_blob_count);
    let unchanged = committed.is_unchanged();
    Ok(Imported {
        name: reference.short(),
        digest: manifest.digest(),
        file: ingested.digest,
        size,
        new_bytes,
        reused_bytes,
        tensor_count: facts.tensor_count,
        new_blob_count,
        sidecars: added,
        unchanged,
        displaced: displaced(store, requester, committed),
        evicted: evictions.take(),
        notes: soft_quota::notes(store, requester),
    })
}

/// The error of an import whose client has disconnected.
pub(crate) fn client_has_gone() -> io::Error {
    io::Error::other("the client that asked for this import has gone")
}

/// The last part of a path, without control characters. A path without one, such as `a/..`, is not that of a file:
/// nothing of it is used.
/// The name that the model gets: the one that was asked for, or one made from the file's.
///
/// # Errors
/// [`OpError::Name`] if no name can be made from the file's.
pub(crate) fn imported_name(params: &ImportParams) -> Result<Reference, OpError> {
    params.name.clone().map_or_else(|| name_from_file(&display_name(&params.file_name)), Ok)
}

fn display_name(file_name: &str) -> String {
    const MAX_CHARS: usize = 200;
    let last = Path::new(file_name).file_name().and_then(|name| name.to_str()).unwrap_or("unnamed");
    last.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}

/// `chain-llama-Q4_K_M.gguf` is `chain-llama:Q4_K_M`; without a file type the tag is `latest`.
fn name_from_file(file_name: &str) -> Result<Reference, OpError> {
    let stem = FileFormat::split_name(file_name).map_or(file_name, |(stem, _format)| stem);
    let (model, tag) = split_file_type(stem).unwrap_or((stem, Reference::DEFAULT_TAG));
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '-' };
    let model: String = model.chars().map(allowed).take(80).collect();
    let model = model.trim_start_matches(['-', '.']);
    Reference::from_parts(Reference::DEFAULT_HOST, Reference::DEFAULT_NAMESPACE, model, tag)
        .map_err(|source| OpError::Name { from: file_name.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_name_gives_model_and_tag() {
        for (file, name) in [
            ("chain-llama-Q4_K_M.gguf", "chain-llama:Q4_K_M"),
            ("Meta-Llama-3-8B.Q8_0.gguf", "Meta-Llama-3-8B:Q8_0"),
            ("gpt-oss-20b-MXFP4.gguf", "gpt-oss-20b:MXFP4"),
            ("Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B:UD-Q4_K_XL"),
            ("my model (1).gguf", "my-model--1-:latest"),
            ("Model.GGUF", "Model:latest"),
            ("model", "model:latest"),
        ] {
            assert_eq!(name_from_file(file).unwrap().short(), name, "{file}");
        }
        for file in [".gguf", "..gguf", "--.gguf"] {
            assert!(name_from_file(file).is_err(), "{file}");
        }
    }

    #[test]
    fn names_are_safe_to_print() {
        assert_eq!(display_name("/a/b/\u{1b}[31mred.gguf\n"), "[31mred.gguf");
        for path in ["https://ollama.com/acme/x/blobs/..", "..", "/", ""] {
            assert_eq!(display_name(path), "unnamed", "{path}");
        }
    }
}
