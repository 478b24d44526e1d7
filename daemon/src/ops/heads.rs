//! `heads`: the headers and short texts of a stored model, for commands that describe it in their own process.

use std::collections::BTreeSet;

use blobd_client::protocol::heads::{Content, FileHead, ModelHeads};
use blobd_store::{FileReader, NamedFile, Store, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::OpError;
use super::stored_header::read_header;
use super::texts::Texts;

/// Reads the headers and short texts of a model. The header of a file that the manifest names twice is given once.
/// This is no use of the model.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::Damaged`] when a stored header does not parse.
pub fn heads(store: &Store, reference: &Reference) -> Result<ModelHeads, OpError> {
    let model = store.model(reference)?;
    let (mut texts, mut seen) = (Texts::new(), BTreeSet::new());
    let contents = model.contents()?;
    let mut files = Vec::with_capacity(contents.len());
    for NamedFile { file, name, .. } in &contents {
        let descriptor = &file.descriptor;
        files.push(FileHead {
            media_type: descriptor.media_type.clone(),
            name: name.clone(),
            digest: Some(descriptor.digest),
            size: descriptor.size,
            content: content(store, file, &mut texts, &mut seen)?.map(Content),
        });
    }
    let digest = model.manifest.digest();
    Ok(ModelHeads {
        name: model.reference.short(),
        digest: Some(digest),
        origin: store.name_origin(&model.reference, digest).origin,
        files,
    })
}

fn content(
    store: &Store,
    file: &StoredFile,
    texts: &mut Texts,
    seen: &mut BTreeSet<Digest>,
) -> Result<Option<Vec<u8>>, OpError> {
    if let Some(recipe) = &file.recipe {
        if !seen.insert(file.descriptor.digest) {
            return Ok(None);
        }
        return Ok(read_header(store, recipe)?.map(|header| header.bytes().to_vec()));
    }
    if !texts.admit(&file.descriptor.media_type, file.descriptor.size) {
        return Ok(None);
    }
    Ok(Some(FileReader::of(store, file).read_range(0..file.descriptor.size)?))
}
