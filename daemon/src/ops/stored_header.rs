//! The header of a file in the store.

use blobd_store::{FileReader, Store};
use blobd_store_format::file_format::{self, MAX_HEADER_BYTES, ModelHeader};
use blobd_store_format::recipe::Recipe;

use super::OpError;

/// Reads a split file's header; `None` if its recipe has none.
pub(super) fn read_header(store: &Store, recipe: &Recipe) -> Result<Option<Box<dyn ModelHeader>>, OpError> {
    let Some((digest, size)) = recipe.header() else { return Ok(None) };
    let bytes = FileReader::of_recipe(store, recipe).read_range(0..size.min(MAX_HEADER_BYTES))?;
    file_format::read_header(&bytes).map(Some).map_err(|source| OpError::Damaged { digest, source })
}
