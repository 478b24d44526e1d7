//! `show`: describes one model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_client::protocol::response::{LayerSummary, ModelDetails};
use blobd_store::{Model, Store, StoredFile};
use blobd_store_format::file_format::{MetadataValue, ModelHeader};
use blobd_store_format::model_facts::ModelFacts;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use serde_json::{Value as Json, json};

use super::OpError;
use super::stored_header::read_header;

/// Describes a model: its files, its tensors, and what the first header says.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::Damaged`] when the stored header does not parse.
pub fn show(store: &Store, reference: &Reference) -> Result<ModelDetails, OpError> {
    let Shown { mut details, recipes } = outline(store, reference)?;
    details.tensors = recipes.iter().flat_map(|recipe| recipe.tensors().to_vec()).collect();
    Ok(details)
}

/// The result of [`show`] with the tensors left in their recipes, where they take the least memory.
#[derive(Debug)]
pub struct Shown {
    /// Everything except the tensors.
    pub details: ModelDetails,
    /// The recipes with the model's tensors, in order.
    pub recipes: Vec<Arc<Recipe>>,
}

/// Describes a model as [`show`] does, without copying the tensors.
pub fn outline(store: &Store, reference: &Reference) -> Result<Shown, OpError> {
    let model = store.model(reference)?;
    let header = header(store, &model)?;
    let facts = header.as_ref().map(|header| header.facts()).unwrap_or_default();
    let parameters = parameters(store, &model, &facts)?;
    let metadata = header.iter().flat_map(|header| header.metadata());
    let mut text_budget = MAX_TEXT_BYTES;
    let metadata: BTreeMap<String, Json> =
        metadata.map(|(key, value)| (key.into_owned(), metadata_json(&value, &mut text_budget))).collect();
    let details = ModelDetails {
        name: model.reference.short(),
        digest: model.manifest.digest(),
        architecture: facts.architecture,
        parameters,
        quantization: facts.quantization,
        metadata,
        layers: model.files.iter().zip(model.manifest.names()).map(layer).collect(),
        tensors: Vec::new(),
    };
    Ok(Shown { details, recipes: recipes(&model).cloned().collect() })
}

/// The recipe of each file once, even if the manifest names the file several times.
fn recipes(model: &Model) -> impl Iterator<Item = &Arc<Recipe>> {
    let mut seen = BTreeSet::new();
    let files = model.files.iter().filter(move |file| seen.insert(file.descriptor.digest));
    files.filter_map(|file| file.recipe.as_ref())
}

/// The parameters of the first split file, or the sum over all shards if it is a shard.
fn parameters(store: &Store, model: &Model, first: &ModelFacts) -> Result<u64, OpError> {
    if first.shard.is_none() {
        return Ok(first.parameters);
    }
    let mut sum = 0u64;
    for recipe in recipes(model) {
        let facts = read_header(store, recipe)?.map(|header| header.facts()).unwrap_or_default();
        sum = sum.saturating_add(facts.shard.map_or(0, |_shard| facts.parameters));
    }
    Ok(sum)
}

fn header(store: &Store, model: &Model) -> Result<Option<Box<dyn ModelHeader>>, OpError> {
    match recipes(model).find(|recipe| recipe.header().is_some()) {
        Some(recipe) => read_header(store, recipe),
        None => Ok(None),
    }
}

fn layer((file, name): (&StoredFile, Option<&str>)) -> LayerSummary {
    let descriptor = &file.descriptor;
    LayerSummary {
        media_type: descriptor.media_type.clone(),
        name: name.map(str::to_owned),
        digest: descriptor.digest,
        size: descriptor.size,
        stored: file.form(),
    }
}

/// Limit for the metadata strings of one model. Templates and licences of real models are some 100 KiB; a
/// header may have 32 MiB, which can be six times as long in JSON.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// A metadata value as JSON. An array of more than 64 elements, such as a vocabulary, is replaced by its type
/// and length, and a string longer than the remaining `text_budget` by its length.
fn metadata_json(value: &MetadataValue<'_>, text_budget: &mut usize) -> Json {
    const MAX_LISTED: usize = 64;
    match value {
        MetadataValue::Array(array) if array.len() > MAX_LISTED => {
            json!({"type": array.element_type().to_string(), "count": array.len()})
        }
        MetadataValue::Array(array) => {
            array.iter().map(|element| metadata_json(&element, text_budget)).collect()
        }
        MetadataValue::String(bytes) => match text_budget.checked_sub(bytes.len()) {
            Some(left) => {
                *text_budget = left;
                String::from_utf8_lossy(bytes).into_owned().into()
            }
            None => json!({"type": "string", "bytes": bytes.len()}),
        },
        MetadataValue::Bool(value) => (*value).into(),
        MetadataValue::F32(value) => f64::from(*value).into(),
        MetadataValue::F64(value) => (*value).into(),
        MetadataValue::I8(value) => (*value).into(),
        MetadataValue::I16(value) => (*value).into(),
        MetadataValue::I32(value) => (*value).into(),
        MetadataValue::I64(value) => (*value).into(),
        MetadataValue::U8(value) => (*value).into(),
        MetadataValue::U16(value) => (*value).into(),
        MetadataValue::U32(value) => (*value).into(),
        MetadataValue::U64(value) => (*value).into(),
    }
}
