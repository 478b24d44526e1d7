//! `import`: makes a model from files that the caller has opened: one file with its sidecars, or the files of a folder.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::ImportParams;
use blobd_store::{Store, Verb};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::name_change::{Leftover, NameChange, TargetName, display_name, origin_record};
use super::new_model::NewModel;
use super::policy::CallerPolicy;
use super::space::StoredBlobs;
use crate::ingest::give_back_memory_of;
use crate::policy::Terms;
use crate::requester::Requester;

mod files;
mod shards;
mod signed;
mod source;

use files::{Files, StoredFiles};
use signed::Signatures;
pub use source::{FileAccess, FileFacts, ImportSource};

/// Imports a model. `progress` receives the bytes read of all files, and how many will be read; `stored` counts the blobs.
///
/// # Errors
/// [`OpError`]; then nothing is stored.
pub fn import(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &ImportParams,
    source: &mut dyn ImportSource,
    (progress, stored): (&mut dyn FnMut(u64, u64), &Arc<StoredBlobs>),
) -> Result<Imported, OpError> {
    let title = display_name(&params.file_name);
    let change = NameChange::new(store, requester, Verb::Import, format!("import of {title}"));
    let change = change.replacing(params.force).counted_by(stored);
    let import = || import_files(&change, (store, policy), (params, title), source, progress);
    NameChange::run(store, Leftover::Nothing, import)
}

fn import_files(
    change: &NameChange<'_>,
    (store, policy): (&Store, &CallerPolicy),
    (params, title): (&ImportParams, String),
    source: &mut dyn ImportSource,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Imported, OpError> {
    let origin = origin_record(&params.file_name, params.copied_from.as_ref(), params.program.as_deref());
    let target = target_name(params)?;
    let copied_from = params.copied_from.as_ref();
    let check_name =
        |file: &str, name: &Reference, terms| policy.check_import(file, (name, copied_from), terms);
    check_name(&title, target.preferred(), Terms::default())?;
    let published =
        params.manifest.as_ref().map(|text| Manifest::parse(text.clone().into_bytes())).transpose()?;
    let signatures = Signatures::new((store, policy), params, target.preferred(), published.as_ref())?;
    signatures.check(None)?;
    let files = Files::from_params(params, published.as_ref(), source)?;
    // Before any file is read.
    change.check(&target, |present| may_be(present, published.as_ref(), &files))?;
    let mut ingest = change.begin(change.lease())?;
    ingest.staging().expect(files.size());
    ingest.refuse_hopeless(files.distinct_sizes())?;
    let check = |file: &str, terms| check_name(file, target.preferred(), terms);
    let stored = files.ingest(&mut ingest, !policy.is_restricted(), source, progress, check)?;
    // The commit reads recipes.
    source.close();
    let StoredFiles { files: new, terms, tensor_count } = stored;
    give_back_memory_of(tensor_count);
    let manifest = match &published {
        Some(manifest) => {
            NewModel::new(title.clone(), new).check_published(&mut ingest, manifest)?;
            signatures.check(Some(&ingest))?;
            manifest.clone()
        }
        None => NewModel::from_chosen(title.clone(), new).compose(&mut ingest)?,
    };
    let is_allowed = |name: &Reference| check_name(&title, name, terms.clone()).is_ok();
    let kept = target.clone().retaining(is_allowed);
    signatures.keep(&ingest)?;
    let named = change.commit(ingest, kept, &manifest, Some(&origin), is_allowed)?;
    let imported = Imported {
        name: named.name,
        digest: manifest.digest(),
        file: None,
        size: 0,
        file_count: None,
        files: Vec::new(),
        new_bytes: named.new_bytes,
        reused_bytes: named.reused_bytes,
        tensor_count,
        new_blob_count: named.new_blob_count,
        sidecars: Vec::new(),
        unchanged: named.unchanged,
        effects: named.effects,
    };
    Ok(files.described(&manifest, imported))
}

/// Whether a model may be the one that is imported. That is certain only if that has a manifest already; otherwise the sizes
/// of the files are compared.
fn may_be(present: &Manifest, published: Option<&Manifest>, files: &Files) -> bool {
    if let Some(published) = published {
        return present.digest() == published.digest();
    }
    let sizes: BTreeSet<u64> = present.layers().iter().map(|layer| layer.size).collect();
    files.sizes().all(|size| sizes.contains(&size))
}

pub(crate) fn client_has_gone() -> io::Error {
    io::Error::other("the client of this import has disconnected")
}

/// The name that the model gets: the requested one, or one made from the file's. A name in another program's store is not
/// the user's choice: it is made distinct from that of another model.
fn target_name(params: &ImportParams) -> Result<TargetName, OpError> {
    if let Some(name) = &params.name {
        let is_chosen = params.program.is_none() || params.force || name.digest().is_some();
        let given = TargetName::given(name)?;
        return Ok(match is_chosen {
            true => given,
            false => TargetName::Derived(DerivedName::from_program(name.clone())),
        });
    }
    let names = DerivedName::from_path(&params.file_name);
    let from = || display_name(&params.file_name);
    names.map(TargetName::Derived).map_err(|source| OpError::Name { from: from(), source })
}
