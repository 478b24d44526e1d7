//! `edit`: makes a model with other metadata and the same tensors.
//!
//! Only the header, the recipe and the manifest are written. The digest of the new file is computed by reading
//! the stored tensors once; the same pass proves that they are those of the source.

use std::sync::Arc;

use blobd_client::protocol::naming::{ChangedKey, EditParams, Edited, KeyChange, NameEffects, TemplateLayer};
use blobd_model::edit::{Change, EditedHeader, KeyEdit};
use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_model::metadata_json::Abridger;
use blobd_store::{FileReader, Ingest, Model, Store, Verb};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MetadataValue;
use blobd_store_format::gguf::Header;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::edit_record;

use super::OpError;
use super::name_change::{Leftover, NameChange, TargetName};
use super::new_model::{NewFile, NewModel, kind_of};
use super::policy::CallerPolicy;
use crate::requester::Requester;

mod weights;

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
    let (store, target) = (change.store, TargetName::given(&params.target)?);
    let source = params.source.short();
    let refused = |reason: String| OpError::Edit { model: source.clone(), reason };
    if params.keys.is_empty() && params.template_layer.is_none() {
        return Err(refused("no change is given".to_owned()));
    }
    let edits = params.keys.iter().map(key_edit).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let (model, lease) = change.stored_model(&params.source, policy, Some(&params.target))?;
    let (weights, source_header) = Weights::find(store, &model)?;
    let header = EditedHeader::new(&source_header, &edits).map_err(|error| refused(error.to_string()))?;
    let template = TemplateEdit::new(&model.manifest, params.template_layer.as_deref());
    let mut edited = Edited {
        name: params.target.short(),
        digest: None,
        new_bytes: 0,
        changed: changed_keys(&source_header, &header),
        template_layer: template.change(),
        unchanged: false,
        dry_run: params.dry_run,
        effects: NameEffects {
            notes: header.absent.iter().map(|key| absent_key(&source, key)).collect(),
            ..NameEffects::default()
        },
    };
    let quantizations =
        [&source_header, &header.header].map(|header| ModelFacts::from_header(header).quantization);
    let kind = ModelKind::from_header(&header.header);
    let file = EditedFile::new(&weights, &source_header, header)?;
    // Reading all tensors can take minutes, and headers are large.
    drop(source_header);
    let known = known_digest(change, &target, &file)?;
    if params.dry_run {
        edited.new_bytes = file.new_bytes().saturating_add(template.new_bytes());
        return Ok(edited);
    }
    let digest = match known {
        Some(digest) => digest,
        None => weights.hash_with(store, &file, report)?,
    };
    let mut ingest = change.begin(lease)?;
    let new_bytes = [file.new_bytes(), model.manifest.config().size, template.new_bytes()];
    ingest.admit(new_bytes.into_iter().filter(|bytes| *bytes > 0))?;
    let file = (weights.digest(), file.add(&mut ingest, digest)?);
    let manifest = compose(&mut ingest, &model, (file, &template), &quantizations, kind)?;
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

struct TemplateEdit<'t> {
    /// The new text, if it is set.
    text: Option<&'t str>,
    old: Option<Descriptor>,
}

impl<'t> TemplateEdit<'t> {
    fn new(manifest: &Manifest, text: Option<&'t str>) -> Self {
        let mut layers = manifest.layers().iter();
        Self { text, old: layers.find(|layer| layer.media_type.component() == "template").cloned() }
    }

    fn change(&self) -> Option<TemplateLayer> {
        match (self.text, &self.old) {
            (None, None) => None,
            (None, Some(_)) => Some(TemplateLayer::Kept),
            (Some(text), Some(old)) if old.digest == Digest::of(text.as_bytes()) => Some(TemplateLayer::Kept),
            (Some(_), Some(_)) => Some(TemplateLayer::Replaced),
            (Some(_), None) => Some(TemplateLayer::Added),
        }
    }

    fn new_bytes(&self) -> u64 {
        self.text.map_or(0, |text| text.len() as u64)
    }
}

/// The edited file, with the digest of the file that it replaces.
type Replaced = (Digest, Descriptor);

/// Composes the manifest of the source with the edited file and the new template.
fn compose(
    ingest: &mut Ingest,
    source: &Model,
    (file, template): (Replaced, &TemplateEdit<'_>),
    quantizations: &[Option<String>; 2],
    kind: ModelKind,
) -> Result<Manifest, OpError> {
    const OLLAMA_TEMPLATE: &str = "application/vnd.ollama.image.template";
    let manifest = &source.manifest;
    let (mut replaced, mut added) = (vec![file], None);
    if let Some(text) = template.text {
        let (digest, size) = (ingest.add_bytes(text.as_bytes())?, text.len() as u64);
        match &template.old {
            Some(old) => replaced.push((old.digest, Descriptor { digest, size, ..old.clone() })),
            None => added = Some(Descriptor { media_type: MediaType::new(OLLAMA_TEMPLATE), digest, size }),
        }
    }
    if added.is_none() && replaced.iter().all(|(old, new)| *old == new.digest) {
        ingest.note_kind(kind_of(manifest, kind));
        return Ok(manifest.clone());
    }
    let config = edited_config(ingest, source, &replaced, added.as_ref(), quantizations)?;
    let file = |(layer, name): (&Descriptor, Option<&str>)| {
        let new = replaced.iter().find(|(old, _)| *old == layer.digest).map_or(layer, |(_, new)| new);
        let descriptor = Descriptor { media_type: layer.media_type.clone(), ..new.clone() };
        NewFile::new(descriptor, name)
    };
    let files = manifest.layers().iter().zip(manifest.names().skip(1)).map(file);
    let files = files.chain(added.map(|template| NewFile::new(template, None))).collect();
    NewModel::new(source.reference.short(), files).compose_with(ingest, config, kind)
}

/// The configuration with the digests and the file type of the new layers. Everything else stays as it is, byte for
/// byte, because it may have fields that blobd does not know.
fn edited_config(
    ingest: &mut Ingest,
    source: &Model,
    replaced: &[Replaced],
    added: Option<&Descriptor>,
    quantizations: &[Option<String>; 2],
) -> Result<Descriptor, OpError> {
    /// The longest configuration that is adjusted. Ollama's have 500 bytes, Docker's some kilobytes.
    const MAX_CONFIG_BYTES: u64 = 1 << 20;
    let config = source.manifest.config();
    let (Some(stored), 0..=MAX_CONFIG_BYTES) = (source.files.first(), config.size) else {
        return Ok(config.clone());
    };
    let old = FileReader::new(ingest.store().content(), stored).read_range(0..config.size)?;
    let Ok(mut text) = String::from_utf8(old) else { return Ok(config.clone()) };
    for (digest, new) in replaced {
        text = text.replace(&digest.to_string(), &new.digest.to_string());
    }
    if let (Some(added), Some((_, file))) = (added, replaced.first()) {
        let listed = format!("\"{}\"", file.digest);
        text = text.replace(&listed, &format!("{listed},\"{}\"", added.digest));
    }
    if let [Some(before), Some(after)] = quantizations {
        text = text.replace(&format!("\"file_type\":\"{before}\""), &format!("\"file_type\":\"{after}\""));
    }
    let digest = ingest.add_bytes(text.as_bytes())?;
    Ok(Descriptor { media_type: config.media_type.clone(), digest, size: text.len() as u64 })
}
