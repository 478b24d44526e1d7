//! Describes stored models: `show`, and in submodules `heads` and `fit`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_client::protocol::response::{LayerSummary, ModelDetails, ModelTensor};
use blobd_model::facts::ModelFacts;
use blobd_model::metadata_json::Abridger;
use blobd_store::{NamedFile, Store, StoredFile};
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::gguf::key_text;
use blobd_store_format::recipe::{Recipe, TensorEntry};
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor::TensorFormat;

use super::OpError;
use super::new_model::{WEIGHTS, kind_of, short_facts};
use crate::ingest::give_back_memory_of;

mod headers;
mod heads;
mod layer_info;

use headers::StoredHeader;
pub(crate) use headers::header_bytes;
pub(super) use headers::{HeaderTurn, MAX_TEXT_BYTES, Texts, read_header, read_in_parts};
pub(crate) use heads::{HeadContent, HeadsOutline, fit, heads};

/// Describes a model: its files, its tensors, and what the first header says.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::Damaged`] when the stored header does not parse.
pub fn show(store: &Store, reference: &Reference) -> Result<ModelDetails, OpError> {
    let Shown { mut details, recipes } = outline(store, reference)?;
    details.tensors.extend(recipes.iter().flat_map(|(layer, recipe)| tensors(*layer, recipe)));
    Ok(details)
}

fn tensors(layer: u32, recipe: &Recipe) -> impl Iterator<Item = ModelTensor> {
    let of_format =
        move |format| recipe.tensors().iter().map(move |tensor| ModelTensor::new(layer, format, tensor));
    recipe.format().into_iter().flat_map(of_format)
}

/// The result of [`show`] with the tensors left in their recipes, where they take the least memory.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) details: ModelDetails,
    /// The recipes with the model's tensors, in order, each with the number of its layer.
    pub(crate) recipes: Vec<(u32, Arc<Recipe>)>,
}

/// Describes a model as [`show`] does, without copying the tensors.
pub(crate) fn outline(store: &Store, reference: &Reference) -> Result<Shown, OpError> {
    let model = store.names().model(reference)?;
    let contents = model.contents()?;
    let header = header(store, &contents)?;
    let has_header = header.is_some();
    let facts = header.as_ref().map(|header| ModelFacts::from_header(&**header)).unwrap_or_default();
    let metadata = header.iter().flat_map(|header| header.metadata());
    let mut abridger = Abridger::new();
    let metadata: BTreeMap<_, _> =
        metadata.map(|(key, value)| (key_text(key).into_owned(), abridger.json(&value))).collect();
    // Before other headers are read.
    let tensor_count = header.as_ref().map_or(0, |header| header.tensor_count());
    drop(header);
    give_back_memory_of(tensor_count);
    let parameters = parameters(store, &contents, &facts)?;
    let mut details = ModelDetails {
        name: model.reference.short(),
        digest: model.manifest.digest(),
        origin: store.names().name_origin(&model.reference, model.manifest.digest()).origin,
        store: store.names().lower_place_of(&model.reference)?.map(|place| place.display().to_string()),
        kind: Some(kind_of(&model.manifest, facts.kind)),
        architecture: facts.architecture.clone(),
        parameters,
        quantization: facts.quantization.clone(),
        metadata,
        layers: contents.iter().map(layer).collect(),
        tensors: Vec::new(),
        policy: None,
    };
    let recipes: Vec<_> = recipes(&contents).map(|(layer, recipe)| (layer, Arc::clone(recipe))).collect();
    if !has_header {
        layer_info::describe(store, &model, &mut details)?;
    } else if facts.format == Some(FileFormat::SAFETENSORS.name()) {
        layer_info::describe_config(store, &model, &mut details)?;
        if let Some(quantization) = layer_info::quantization(store, &model)? {
            details.parameters = quantization.parameters(split_tensors(&recipes));
            details.quantization = Some(quantization.label());
        } else {
            details.quantization = main_type(&recipes);
        }
    }
    Ok(Shown { details, recipes })
}

/// Records what the headers of a safetensors model and its configuration say together, which no single file does, so that
/// lists need none of them. If that fails, lists lack it, and the model is whole all the same.
pub(super) fn complete_facts(store: &Store, reference: &Reference) {
    let completed = || {
        let model = store.names().model(reference)?;
        let is_split = |file: &StoredFile| {
            file.recipe.as_ref().is_some_and(|recipe| recipe.format() == Some(TensorFormat::Safetensors))
        };
        let digest = model.manifest.digest();
        if store.names().facts(digest).quantization.is_some() || !model.files.iter().any(is_split) {
            return Ok(());
        }
        let ModelDetails { kind, architecture, quantization, .. } = outline(store, reference)?.details;
        Ok(store.names().complete_facts(digest, short_facts(kind, architecture, quantization))?)
    };
    if let Err(error) = completed() {
        let error: OpError = error;
        tracing::debug!("{}: what the model is was not recorded: {error}", reference.short());
    }
}

fn split_tensors(recipes: &[(u32, Arc<Recipe>)]) -> impl Iterator<Item = TensorEntry<'_>> + Clone {
    let recipes = recipes.iter().map(|(_, recipe)| recipe);
    let split = recipes.filter(|recipe| recipe.format() == Some(TensorFormat::Safetensors));
    split.flat_map(|recipe| recipe.tensors().iter())
}

/// The type of most bytes of the tensors, for models whose files do not name a quantisation.
fn main_type(recipes: &[(u32, Arc<Recipe>)]) -> Option<String> {
    let mut bytes: BTreeMap<Cow<'_, str>, u64> = BTreeMap::new();
    for tensor in recipes.iter().flat_map(|(_, recipe)| recipe.tensors().iter()) {
        let sum = bytes.entry(tensor.type_name).or_default();
        *sum = sum.saturating_add(tensor.size);
    }
    bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name.into_owned())
}

/// The recipe of each file once, even if the manifest names the file several times, with the number of its first layer.
fn recipes(contents: &[NamedFile]) -> impl Iterator<Item = (u32, &Arc<Recipe>)> {
    let mut seen = BTreeSet::new();
    let files = (0..).zip(contents.iter().map(|named| &named.file));
    let files = files.filter(move |(_, file)| seen.insert(file.descriptor.digest));
    files.filter_map(|(layer, file)| Some((layer, file.recipe.as_ref()?)))
}

/// The parameters of the first split file, or the sum over all shards if it is a shard. A safetensors file does not say
/// whether it is one: all of these files are counted.
fn parameters(store: &Store, contents: &[NamedFile], first: &ModelFacts) -> Result<u64, OpError> {
    if first.format == Some(FileFormat::SAFETENSORS.name()) {
        let with_tensors =
            recipes(contents).filter(|(_, recipe)| recipe.format() == Some(TensorFormat::Safetensors));
        let shapes = with_tensors.flat_map(|(_, recipe)| recipe.tensors().iter().map(|tensor| tensor.shape));
        let elements =
            |shape: Cow<'_, [u64]>| shape.iter().fold(1, |count: u64, length| count.saturating_mul(*length));
        return Ok(shapes.map(elements).fold(0, u64::saturating_add));
    }
    if first.shard.is_none() {
        return Ok(first.parameters);
    }
    let mut sum = 0u64;
    for (_, recipe) in recipes(contents) {
        let facts =
            read_header(store, recipe)?.map(|header| ModelFacts::from_header(&*header)).unwrap_or_default();
        sum = sum.saturating_add(facts.shard.map_or(0, |_shard| facts.parameters));
    }
    Ok(sum)
}

/// Reads the header that describes the model: that of the weights, or of the file in their place, such as an adapter.
fn header(store: &Store, contents: &[NamedFile]) -> Result<Option<StoredHeader>, OpError> {
    let with_headers = || {
        let files = contents.iter().map(|named| &named.file);
        files.filter(|file| file.recipe.as_ref().is_some_and(|recipe| recipe.header().is_some()))
    };
    let weights = with_headers().find(|file| file.descriptor.media_type.component() == WEIGHTS);
    let found = weights.or_else(|| with_headers().next());
    found.and_then(|file| file.recipe.as_ref()).map_or(Ok(None), |recipe| read_header(store, recipe))
}

fn layer(NamedFile { file, name, unpacked_from }: &NamedFile) -> LayerSummary {
    let descriptor = &file.descriptor;
    LayerSummary {
        media_type: descriptor.media_type.clone(),
        name: name.clone(),
        digest: descriptor.digest,
        size: descriptor.size,
        stored: file.form(),
        unpacked_from: *unpacked_from,
    }
}
