//! `heads`: the headers and short texts of a stored model, for commands that describe it in their own process. `fit`: an
//! estimate made from them.

use std::collections::BTreeSet;

use blobd_client::fit::{FitContent, FitFile, FitModel, Room};
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::fit::{FitParams, FitReport};
use blobd_client::protocol::response::{FileHead, ModelHeads};
use blobd_store::leases::Lease;
use blobd_store::{FileReader, NamedFile, Store, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::headers::{HeaderTurn, Texts, header_bytes, read_header, read_in_turn};
use super::layer_info::LayerHeaders;
use crate::ops::OpError;

/// The headers and texts of a model, which are read part by part: those of one file can have 100 MB.
#[derive(Debug)]
pub(crate) struct HeadsOutline {
    /// The files without their contents.
    pub(crate) heads: ModelHeads,
    pub(crate) contents: Vec<Option<HeadContent>>,
    /// Protects the model until all is read.
    pub(crate) lease: Lease,
}

/// A blob that is a header or a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadContent {
    pub(crate) blob: Digest,
    pub(crate) bytes: u64,
}

impl HeadContent {
    /// Reads a part of it, shorter at its end.
    pub(crate) fn read(self, store: &Store, offset: u64, length: u64) -> Result<Vec<u8>, OpError> {
        let end = offset.saturating_add(length).min(self.bytes);
        Ok(FileReader::for_blob(store.content(), self.blob, self.bytes).read_range(offset..end)?)
    }
}

/// Finds the headers and short texts of a model, and checks the headers. If the manifest names a file twice, its header is
/// given once. Does not count as use of the model. `rm` reports `holder` as the reason why bytes are kept.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::Damaged`] when a stored header does not parse.
pub(crate) fn heads(store: &Store, reference: &Reference, holder: String) -> Result<HeadsOutline, OpError> {
    let lease = store.liveness().leases().grant(holder);
    let model = store.names().leased_model(reference, &lease)?;
    let (mut short, mut seen) = ((Texts::new(), LayerHeaders::new()), BTreeSet::new());
    let named = model.contents()?;
    let (mut files, mut contents) = (Vec::with_capacity(named.len()), Vec::with_capacity(named.len()));
    for NamedFile { file, name, .. } in &named {
        let descriptor = &file.descriptor;
        files.push(FileHead {
            media_type: descriptor.media_type.clone(),
            name: name.clone(),
            digest: Some(descriptor.digest),
            size: descriptor.size,
            content: None,
        });
        contents.push(head_content(store, (file, name.as_deref()), &mut short, &mut seen)?);
    }
    let digest = model.manifest.digest();
    let origin = store.names().name_origin(&model.reference, digest).origin;
    let heads = ModelHeads { name: model.reference.short(), digest: Some(digest), origin, files };
    Ok(HeadsOutline { heads, contents, lease })
}

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
    let (mut short, mut files) = ((Texts::new(), LayerHeaders::new()), Vec::new());
    for NamedFile { file, name, .. } in model.contents()? {
        let content = fit_content(store, (&file, name.as_deref()), &mut short, &turn)?;
        let (media_type, size) = (file.descriptor.media_type.clone(), file.descriptor.size);
        files.extend(content.map(|content| FitFile { media_type, name, size, content }));
    }
    let is_limited = !params.vram_bytes.is_empty() || params.memory_bytes.is_some();
    let room = Room { devices: params.vram_bytes.clone(), memory_bytes: params.memory_bytes };
    let fit = FitModel::new(&model.reference.short(), Some(model.manifest.digest()), files);
    Ok(fit.and_then(|fit| fit.report(params, is_limited.then_some(&room))))
}

fn head_content(
    store: &Store,
    (file, name): (&StoredFile, Option<&str>),
    (texts, layers): &mut (Texts, LayerHeaders),
    seen: &mut BTreeSet<Digest>,
) -> Result<Option<HeadContent>, OpError> {
    if let Some(recipe) = &file.recipe {
        if !seen.insert(file.descriptor.digest) {
            return Ok(None);
        }
        let (Some((blob, _)), Some(header)) = (recipe.header(), read_header(store, recipe)?) else {
            return Ok(None);
        };
        return Ok(Some(HeadContent { blob, bytes: header.size() }));
    }
    let descriptor = &file.descriptor;
    if let Some(header) = layers.read(store, file)? {
        return Ok(Some(HeadContent { blob: descriptor.digest, bytes: header.data_offset() }));
    }
    let is_text = texts.admit(&descriptor.media_type, name, descriptor.size);
    Ok(is_text.then_some(HeadContent { blob: descriptor.digest, bytes: descriptor.size }))
}

fn fit_content(
    store: &Store,
    (file, name): (&StoredFile, Option<&str>),
    (texts, layers): &mut (Texts, LayerHeaders),
    turn: &HeaderTurn,
) -> Result<Option<FitContent>, OpError> {
    let descriptor = &file.descriptor;
    if let Some(recipe) = &file.recipe {
        let header = read_in_turn(store, recipe, turn)?;
        return Ok(header.and_then(|header| FitContent::from_header(header.bytes()?)));
    }
    if FitContent::is_layer(&descriptor.media_type) {
        let header = layers.read(store, file)?;
        return Ok(Some(header.map_or(FitContent::UnknownLayer, FitContent::Safetensors)));
    }
    let is_text = FitContent::is_text(&descriptor.media_type, name)
        && texts.admit(&descriptor.media_type, name, descriptor.size);
    if !is_text {
        return Ok(None);
    }
    let text = FileReader::for_blob(store.content(), descriptor.digest, descriptor.size)
        .read_range(0..descriptor.size)?;
    Ok(Some(FitContent::Text(text)))
}
