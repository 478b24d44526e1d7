//! `heads`: the headers and short texts of a stored model, for commands that describe it in their own process.

use std::collections::BTreeSet;

use blobd_client::protocol::heads::{FileHead, ModelHeads};
use blobd_store::leases::Lease;
use blobd_store::{FileReader, NamedFile, Store, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::stored_header::read_header;
use super::texts::Texts;

/// The headers and texts of a model, which are read part by part: those of one file can have 100 MB.
#[derive(Debug)]
pub struct HeadsOutline {
    /// The files without their contents.
    pub heads: ModelHeads,
    /// For each file, what to read of it.
    pub contents: Vec<Option<HeadContent>>,
    /// Protects the model until all is read.
    pub lease: Lease,
}

/// A blob that is a header or a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadContent {
    /// The blob.
    pub blob: Digest,
    /// Its length.
    pub bytes: u64,
}

impl HeadContent {
    /// Reads a part of it, shorter at its end.
    ///
    /// # Errors
    /// [`blobd_store::StoreError`].
    pub fn read(self, store: &Store, offset: u64, length: u64) -> Result<Vec<u8>, OpError> {
        let end = offset.saturating_add(length).min(self.bytes);
        Ok(FileReader::of_blob(store.content(), self.blob, self.bytes).read_range(offset..end)?)
    }
}

/// Finds the headers and short texts of a model, and checks the headers. The header of a file that the manifest names twice
/// is given once. Does not count as use of the model. `rm` reports `holder` as the reason why bytes are kept.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::Damaged`] when a stored header does not parse.
pub fn heads(store: &Store, reference: &Reference, holder: String) -> Result<HeadsOutline, OpError> {
    let lease = store.liveness().leases().grant(holder);
    let model = store.names().leased_model(reference, &lease)?;
    let (mut texts, mut seen) = (Texts::new(), BTreeSet::new());
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
        contents.push(content(store, file, &mut texts, &mut seen)?);
    }
    let digest = model.manifest.digest();
    let origin = store.names().name_origin(&model.reference, digest).origin;
    let heads = ModelHeads { name: model.reference.short(), digest: Some(digest), origin, files };
    Ok(HeadsOutline { heads, contents, lease })
}

fn content(
    store: &Store,
    file: &StoredFile,
    texts: &mut Texts,
    seen: &mut BTreeSet<Digest>,
) -> Result<Option<HeadContent>, OpError> {
    if let Some(recipe) = &file.recipe {
        if !seen.insert(file.descriptor.digest) {
            return Ok(None);
        }
        let (Some((blob, _)), Some(header)) = (recipe.header(), read_header(store, recipe)?) else {
            return Ok(None);
        };
        return Ok(Some(HeadContent { blob, bytes: header.bytes().len() as u64 }));
    }
    let descriptor = &file.descriptor;
    let is_text = texts.admit(&descriptor.media_type, descriptor.size);
    Ok(is_text.then_some(HeadContent { blob: descriptor.digest, bytes: descriptor.size }))
}
