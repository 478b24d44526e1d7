//! `edit`: makes a model with other metadata or other small files, and the same tensors.
//!
//! Only the header, the recipe, the small files and the manifest are written. The digest of the new file is computed by reading
//! the stored tensors once; the same pass proves that they are those of the source.

use std::sync::Arc;

use blobd_client::protocol::naming::{ChangedKey, EditParams, Edited, KeyChange, NameEffects};
use blobd_model::edit::{Change, EditedHeader, KeyEdit};
use blobd_model::facts::ModelFacts;
use blobd_model::metadata_json::Abridger;
use blobd_store::{Model, RecordedFacts, Store, Verb};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MetadataValue;
use blobd_store_format::gguf::Header;
use blobd_store_format::origin::edit_record;

use super::OpError;
use super::name_change::{Leftover, NameChange, TargetName};
use super::policy::CallerPolicy;
use crate::requester::Requester;

mod files;
mod layers;
mod weights;

use files::edit_files;
use layers::EditedLayers;
use weights::{EditedFile, Weights};

/// Receives the bytes read and the bytes to be read; returns false to cancel.
type EditReport<'r> = dyn FnMut(u64, u64) -> bool + 'r;

/// Makes a model with other metadata. Copies no tensor.
///
/// # Errors
/// [`OpError`]; then nothing is stored.
pub fn edit(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &EditParams,
    report: &mut EditReport<'_>,
) -> Result<Edited, OpError> {
    let change = NameChange::new(store, requester, Verb::Edit, format!("edit of {}", params.source.short()));
    let change = change.replacing(params.force);
    NameChange::run(store, Leftover::Nothing, || edit_model(&change, policy, params, report))
}

fn edit_model(
    change: &NameChange<'_>,
    policy: &CallerPolicy,
    params: &EditParams,
    report: &mut EditReport<'_>,
) -> Result<Edited, OpError> {
    let target = TargetName::given(&params.target)?;
    let refused = |reason: String| OpError::Edit { model: params.source.short(), reason };
    if !edits_header(params) && params.files.is_empty() {
        return Err(refused("no change is given".to_owned()));
    }
    let keys = params.keys.iter().map(key_edit).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let (model, lease) = change.stored_model(&params.source, policy, Some(&params.target))?;
    let mut layers = EditedLayers::of(&model);
    let changed_files = edit_files(&mut layers, &params.files, policy.is_restricted()).map_err(refused)?;
    let mut edited = Edited {
        name: params.target.short(),
        digest: None,
        new_bytes: 0,
        changed: Vec::new(),
        changed_files: changed_files.changed,
        template_layer: None,
        unchanged: false,
        dry_run: params.dry_run,
        effects: NameEffects { notes: changed_files.notes, ..NameEffects::default() },
    };
    let header = match edits_header(params) {
        true => Some(edit_header(change, (&model, &keys), params, (&mut layers, &mut edited))?),
        false => None,
    };
    let known = match &header {
        Some(header) => known_digest(change, &target, &header.file)?,
        None => change.check(&target, |present| layers.are_those_of(present)).map(|()| None)?,
    };
    if params.dry_run {
        let of_header = header.map(|header| header.file.new_bytes());
        edited.new_bytes = layers.new_bytes().chain(of_header).fold(0, u64::saturating_add);
        return Ok(edited);
    }
    let header = header.map(|header| header.hashed(change.store, known, report)).transpose()?;
    let mut ingest = change.begin(lease)?;
    let of_header = header.as_ref().map(|header| header.file.new_bytes());
    let new_bytes = layers.new_bytes().chain(of_header).chain([model.manifest.config().size]);
    ingest.admit(new_bytes.filter(|bytes| *bytes > 0).collect::<Vec<_>>().into_iter())?;
    let facts = match header {
        Some(HashedHeader { source, file, digest, facts }) => {
            layers.replace(source, &file.add(&mut ingest, digest)?);
            facts
        }
        None => ChangedFacts::of_stored(change.store, &model),
    };
    let manifest = layers.compose(&mut ingest, &facts)?;
    // The stored name: the source may have been given by its ID.
    let origin = edit_record(&model.reference, model.manifest.digest());
    let origin = (manifest.digest() != model.manifest.digest()).then_some(origin.as_str());
    let named = change.commit(ingest, target, &manifest, origin, |_name| true)?;
    let notes = edited.effects.notes.into_iter().chain(named.effects.notes).collect();
    Ok(Edited {
        name: named.name,
        digest: Some(manifest.digest()),
        new_bytes: named.new_bytes,
        unchanged: named.unchanged,
        effects: NameEffects { notes, ..named.effects },
        ..edited
    })
}

/// Whether the header of the model's weights is read.
pub(crate) fn edits_header(params: &EditParams) -> bool {
    !params.keys.is_empty() || params.template_layer.is_some()
}

/// A header that replaces that of the model, before the digest of the file is known.
struct NewHeader<'m> {
    weights: Weights<'m>,
    file: EditedFile,
    facts: ChangedFacts,
}

struct HashedHeader {
    /// The file that is replaced.
    source: Digest,
    file: EditedFile,
    digest: Digest,
    facts: ChangedFacts,
}

/// What the configuration and the records of a model say about its weights.
#[derive(Default)]
struct ChangedFacts {
    /// Before and after the edit.
    quantizations: [Option<String>; 2],
    /// Those of the weights after the edit; absent if they are not known.
    weights: Option<ModelFacts>,
}

impl ChangedFacts {
    /// The facts of an edit that keeps the weights of the model.
    fn of_stored(store: &Store, model: &Model) -> Self {
        let RecordedFacts { kind, architecture, quantization } = store.names().facts(model.manifest.digest());
        let weights =
            kind.map(|kind| ModelFacts { kind, architecture, quantization, ..ModelFacts::default() });
        Self { weights, ..Self::default() }
    }
}

/// Plans the changes of the header and of the template layer, and adds them to the report.
fn edit_header<'m>(
    change: &NameChange<'_>,
    (model, keys): (&'m Model, &[KeyEdit]),
    params: &EditParams,
    (layers, edited): (&mut EditedLayers<'_>, &mut Edited),
) -> Result<NewHeader<'m>, OpError> {
    let source = params.source.short();
    let (weights, source_header) = Weights::find(change.store, model)?;
    let header = EditedHeader::new(&source_header, keys);
    let header =
        header.map_err(|error| OpError::Edit { model: source.clone(), reason: error.to_string() })?;
    edited.changed = changed_keys(&source_header, &header);
    edited.effects.notes.extend(header.absent.iter().map(|key| absent_key(&source, key)));
    edited.template_layer = layers.set_template(params.template_layer.as_deref());
    let [before, after] = [&source_header, &header.header].map(|header| ModelFacts::from_header(header));
    let quantizations = [before.quantization, after.quantization.clone()];
    // Reading all tensors can take minutes, and headers are large: the source's is dropped.
    let file = EditedFile::new(&weights, &source_header, header)?;
    Ok(NewHeader { weights, file, facts: ChangedFacts { quantizations, weights: Some(after) } })
}

impl NewHeader<'_> {
    fn hashed(
        self,
        store: &Store,
        known: Option<Digest>,
        report: &mut EditReport<'_>,
    ) -> Result<HashedHeader, OpError> {
        let Self { weights, file, facts } = self;
        let digest = match known {
            Some(digest) => digest,
            None => weights.hash_with(store, &file, report)?,
        };
        Ok(HashedHeader { source: weights.digest(), file, digest, facts })
    }
}

fn key_edit(change: &KeyChange) -> Result<KeyEdit, String> {
    let parsed = change.value_type.as_deref().map(str::parse).transpose();
    let value_type = parsed.map_err(|error| format!("metadata key {:?}: {error}", change.key))?;
    let change_of = |text: &String| Change::Set { value_type, text: text.clone() };
    let key = change.key.clone();
    Ok(KeyEdit { key, change: change.value.as_ref().map_or(Change::Unset, change_of) })
}

fn absent_key(model: &str, key: &str) -> String {
    format!(
        "{model} has no metadata key {key:?}: there was nothing to remove; `blobd show --metadata` lists the keys"
    )
}

fn changed_keys(before: &Header, edited: &EditedHeader) -> Vec<ChangedKey> {
    let mut abridger = Abridger::new();
    let mut json = |value: Option<MetadataValue<'_>>| value.map(|value| abridger.json(&value));
    let changed = |key: &String| ChangedKey {
        key: key.clone(),
        from: json(before.value(key)),
        to: json(edited.header.value(key)),
    };
    edited.changed.iter().map(changed).collect()
}

/// The digest of the file if the target is this file already, as after an earlier equal edit. Refuses early if the
/// target is another model, before the tensors are read.
fn known_digest(
    change: &NameChange<'_>,
    target: &TargetName,
    file: &EditedFile,
) -> Result<Option<Digest>, OpError> {
    if let Some(unchanged) = file.unchanged() {
        return Ok(Some(unchanged));
    }
    let present = change.present(target)?;
    let recipes = present.iter().flat_map(|model| &model.files).filter_map(|file| file.recipe.as_ref());
    let same = recipes.into_iter().find(|recipe| file.is_stored_as(recipe)).map(|recipe| recipe.file());
    if same.is_none() {
        change.check(target, |_present| false)?;
    }
    Ok(same)
}
