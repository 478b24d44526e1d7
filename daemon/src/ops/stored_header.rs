//! The headers of files in the store.

use blobd_store::{FileReader, Store};
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::{OpError, layer_info};

/// How much of a header is read at a time: the parser keeps a copy, and the largest headers have 100 MB.
const PART_BYTES: u64 = 1 << 20;

/// Reads a split file's header; `None` if its recipe has none.
pub(super) fn read_header(store: &Store, recipe: &Recipe) -> Result<Option<Box<dyn ModelHeader>>, OpError> {
    let Some((digest, size)) = recipe.header() else { return Ok(None) };
    let damaged = |source| OpError::Damaged { digest, source };
    let (mut file, mut reader) = (FileReader::of_recipe(store, recipe), HeaderReader::new());
    let (mut offset, end) = (0, size.min(MAX_HEADER_BYTES));
    while offset < end {
        let next = offset.saturating_add(PART_BYTES).min(end);
        reader.push(&file.read_range(offset..next)?).map_err(damaged)?;
        offset = next;
    }
    reader.finish().map(Some).map_err(damaged)
}

/// At most how many bytes [`show`](super::show) reads of the headers of a model's files.
pub(crate) fn header_bytes(store: &Store, reference: &Reference) -> Result<u64, OpError> {
    let model = store.model(reference)?;
    let contents = model.contents()?;
    let recipes = contents.iter().filter_map(|named| named.file.recipe.as_ref());
    let split = recipes.filter_map(|recipe| recipe.header()).map(|(_, size)| size);
    Ok(split.fold(layer_info::header_bytes(&model), u64::saturating_add))
}
