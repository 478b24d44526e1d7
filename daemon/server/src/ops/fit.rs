//! `fit`: the headers that an estimate of a stored model needs.

use blobd_client::fit::{FitContent, FitFile, FitModel, Room};
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::fit::{FitParams, FitReport};
use blobd_store::{FileReader, NamedFile, Store, StoredFile};
use blobd_store_format::gguf::Header;
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor::TensorFormat;

use super::OpError;
use super::stored_header::{HeaderTurn, header_bytes, read_in_turn};
use super::texts::Texts;

/// Estimates the memory that a stored model needs, and whether it fits into the memory in the parameters. Does not count
/// as use of the model. The second error is one of the estimate.
pub(crate) fn fit(
    store: &Store,
    reference: &Reference,
    params: &FitParams,
    holder: String,
) -> Result<Result<FitReport, ErrorBody>, OpError> {
    let lease = store.liveness().leases().grant(holder);
    let model = store.names().leased_model(reference, &lease)?;
    // All headers are in memory at once, so the turn is for their sum.
    let turn = HeaderTurn::take(header_bytes(store, reference)?);
    let (mut texts, mut files) = (Texts::new(), Vec::new());
    for NamedFile { file, .. } in &model.contents()? {
        let content = content(store, file, &mut texts, &turn)?;
        let descriptor = &file.descriptor;
        let (media_type, size) = (descriptor.media_type.clone(), descriptor.size);
        files.extend(content.map(|content| FitFile { media_type, size, content }));
    }
    let is_limited = !params.vram_bytes.is_empty() || params.memory_bytes.is_some();
    let room = Room { devices: params.vram_bytes.clone(), memory_bytes: params.memory_bytes };
    let fit = FitModel::new(&model.reference.short(), Some(model.manifest.digest()), files);
    Ok(fit.and_then(|fit| fit.report(params, is_limited.then_some(&room))))
}

fn content(
    store: &Store,
    file: &StoredFile,
    texts: &mut Texts,
    turn: &HeaderTurn,
) -> Result<Option<FitContent>, OpError> {
    let descriptor = &file.descriptor;
    if let Some(recipe) = &file.recipe {
        // Estimates are made from keys of GGUF.
        if recipe.format() != Some(TensorFormat::Gguf) {
            return Ok(None);
        }
        let header = read_in_turn(store, recipe, turn)?;
        return Ok(header.and_then(|header| Header::parse(header.bytes()).ok()).map(FitContent::Header));
    }
    if descriptor.media_type.component() != "params" || !texts.admit(&descriptor.media_type, descriptor.size)
    {
        return Ok(None);
    }
    let text = FileReader::of_blob(store.content(), descriptor.digest, descriptor.size)
        .read_range(0..descriptor.size)?;
    Ok(Some(FitContent::Text(text)))
}
