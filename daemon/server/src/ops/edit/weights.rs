//! The file of a model whose metadata is edited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_model::edit::EditedHeader;
use blobd_store::{FileReader, Ingest, Model, Store, StoredFile};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FormatError;
use blobd_store_format::gguf::{Header, HeaderParser};
use blobd_store_format::recipe::{Piece, Recipe, TensorEntries};
use blobd_store_format::tensor::TensorFormat;

use super::EditReport;
use crate::ops::OpError;
use crate::ops::describe::read_in_parts;
use crate::ops::new_model::WEIGHTS;

/// The stored GGUF file with the model's metadata.
pub(super) struct Weights<'m> {
    model: &'m Model,
    file: &'m StoredFile,
    recipe: &'m Arc<Recipe>,
    /// The length of the header with its padding.
    header_bytes: u64,
}

impl<'m> Weights<'m> {
    /// Finds the file with the metadata, which is the only file of weights or the first shard, and reads its header.
    pub(super) fn find(store: &Store, model: &'m Model) -> Result<(Self, Header), OpError> {
        let name = model.reference.short();
        let unsuitable = |reason| OpError::NotEditable { model: name.clone(), reason };
        let of_component = |component: &str| {
            let files = model.files.iter();
            files.filter(|file| file.descriptor.media_type.component() == component).collect::<Vec<_>>()
        };
        // An adapter or a projector that was imported by itself is in the place of the weights.
        let with_tensors = model.files.iter().find(|file| file.descriptor.media_type.holds_tensors());
        let in_place = with_tensors.map_or(WEIGHTS, |file| file.descriptor.media_type.component());
        let files = match of_component(WEIGHTS) {
            files if files.is_empty() => of_component(in_place),
            files => files,
        };
        if files.is_empty() {
            return Err(unsuitable(match of_component("tensor").is_empty() {
                true => "has no file of weights",
                false => {
                    "has one layer per tensor; its metadata is in JSON files, not in a GGUF header: \
                          `--file config.json=@FILE` edits one of them"
                }
            }));
        }
        let mut candidates = Vec::new();
        // A manifest may name a file several times.
        let mut seen = BTreeSet::new();
        for file in files.into_iter().filter(|file| seen.insert(file.descriptor.digest)) {
            if file.recipe.as_ref().is_some_and(|recipe| !recipe.members().is_empty()) {
                return Err(unsuitable(
                    "has its weights in an archive; export and import them, then edit that",
                ));
            }
            let split = file.recipe.as_ref().and_then(|recipe| Some((recipe, recipe.header()?)));
            let Some((recipe, (digest, header_bytes))) = split else {
                return Err(unsuitable(
                    "has weights that are stored whole, because their format is not known; only GGUF files \
                     can be edited",
                ));
            };
            if recipe.format() != Some(TensorFormat::Gguf) {
                return Err(unsuitable(
                    "has weights in safetensors files, which have no metadata to edit; `--file PATH=@FILE` edits its \
                     other files, such as `--file chat_template.jinja=@FILE` for the chat template",
                ));
            }
            let mut parser = HeaderParser::new();
            // It was valid when it was stored.
            let damaged = |error| OpError::Damaged { digest, source: FormatError::Gguf(error) };
            let part = |part: &[u8]| parser.push(part).map(drop).map_err(damaged);
            read_in_parts(&mut FileReader::new(store.content(), file), header_bytes, part)?;
            let header = parser.finish().map_err(damaged)?;
            candidates.push((Self { model, file, recipe, header_bytes }, header));
        }
        let first = candidates.iter().position(|(_, header)| shard_number(header) == Some(0)).unwrap_or(0);
        let only = candidates.len() == 1;
        let chosen = candidates.into_iter().nth(first);
        let chosen = chosen.filter(|(_, header)| only || shard_number(header).is_some());
        chosen.ok_or_else(|| unsuitable("has several files of weights that are not shards"))
    }

    /// The digest of the edited file. Reads the source once and checks its digest in the same pass.
    pub(super) fn hash_with(
        &self,
        store: &Store,
        file: &EditedFile,
        report: &mut EditReport<'_>,
    ) -> Result<Digest, OpError> {
        let total = self.file.descriptor.size;
        let mut reader = FileReader::new(store.content(), self.file);
        let hashed =
            reader.hash_with_start(self.header_bytes, &file.header, &mut |done| report(done, total))?;
        let Some([found, edited]) = hashed else {
            return Err(OpError::Internal("the client of this edit has disconnected".to_owned()));
        };
        let expected = self.file.descriptor.digest;
        if found != expected {
            return Err(OpError::DamagedFile { model: self.model.reference.short(), found, expected });
        }
        Ok(edited)
    }

    pub(super) fn digest(&self) -> Digest {
        self.file.descriptor.digest
    }
}

fn shard_number(header: &Header) -> Option<u64> {
    header.value("split.no")?.as_u64()
}

pub(super) struct EditedFile {
    /// With its padding; empty if nothing changes.
    header: Vec<u8>,
    media_type: MediaType,
    source: Descriptor,
    pieces: Vec<Piece>,
    tensors: TensorEntries,
    /// The blobs that other shards have parts of too, and their sizes.
    shared: BTreeMap<Digest, u64>,
    size: u64,
}

impl EditedFile {
    pub(super) fn new(
        weights: &Weights<'_>,
        source_header: &Header,
        edited: EditedHeader,
    ) -> Result<Self, OpError> {
        let (recipe, source) = (weights.recipe, weights.file.descriptor.clone());
        if weights.header_bytes != source_header.data_offset().min(source.size) {
            let model = weights.model.reference.short();
            let (found, expected) = (Digest::of(source_header.bytes()), source.digest);
            return Err(OpError::DamagedFile { model, found, expected });
        }
        let header = if edited.changed.is_empty() { Vec::new() } else { edited.header.into_padded() };
        let length = header.len() as u64;
        let first = Piece::Blob { blob: Digest::of(&header), offset: 0, length };
        // The tensors are in the same blobs, at the same places.
        let pieces = std::iter::once(first).chain(recipe.pieces().iter().skip(1).cloned()).collect();
        let size = source.size.saturating_sub(weights.header_bytes).saturating_add(length);
        let (media_type, tensors) = (source.media_type.clone(), recipe.tensors().clone());
        let shared = recipe.shared_blobs().clone();
        Ok(Self { header, media_type, source, pieces, tensors, shared, size })
    }

    pub(super) fn unchanged(&self) -> Option<Digest> {
        self.header.is_empty().then_some(self.source.digest)
    }

    pub(super) fn is_stored_as(&self, recipe: &Recipe) -> bool {
        recipe.pieces().iter().eq(&self.pieces) && *recipe.shared_blobs() == self.shared
    }

    /// The bytes of blobs that the store may not have.
    pub(super) fn new_bytes(&self) -> u64 {
        self.header.len() as u64
    }

    /// Adds the header and the recipe, if the file is not the source.
    pub(super) fn add(self, ingest: &mut Ingest, digest: Digest) -> Result<Descriptor, OpError> {
        if self.unchanged().is_some() {
            return Ok(self.source);
        }
        ingest.add_bytes(&self.header)?;
        let recipe = Recipe::new(digest, TensorFormat::Gguf, self.pieces, self.tensors)?;
        ingest.add_recipe(recipe.sharing(self.shared)?);
        Ok(Descriptor { media_type: self.media_type, digest, size: self.size })
    }
}
