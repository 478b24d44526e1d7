//! Deltas that `blobd save --given` writes: the parts of models that another machine lacks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use blobd_cli_common::connect::client_error;
use blobd_cli_common::internal;
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_client::protocol::response::{ModelDetails, OpenLayer, OpenPiece};
use blobd_store_format::delta::{Delta, HeaderPatch, patch};
use blobd_store_format::inventory::Inventory;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Piece, Recipe};

use crate::inventory::{digests_of, read};
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// What the other machine has.
#[derive(Debug)]
pub(crate) struct Given {
    has: Inventory,
    /// The models that were named.
    names: Vec<Reference>,
    inventories: bool,
}

impl Given {
    /// Reads inventories, and looks at models of this store, each of which is named by a text.
    pub(crate) fn new(client: &Client, given: &[String]) -> Result<Self, ErrorBody> {
        let (mut has, mut names, mut inventories) = (Vec::new(), Vec::new(), false);
        for text in given {
            let path = Path::new(text);
            if path.is_file() {
                has.extend(read(path)?.iter());
                inventories = true;
                continue;
            }
            let reference: Reference = text.parse().map_err(|error| {
                let message = format!("--given {text}: neither a file nor the name of a model: {error}");
                ErrorBody::new(ErrorCode::InvalidRequest, message)
            })?;
            let details = client.model(&reference).map_err(|error| {
                client_error(error)
                    .with_hint("--given takes a model of this store, or a file of `blobd inventory`")
            })?;
            has.extend(digests_of(&details));
            names.push(reference);
        }
        names.truncate(Delta::MAX_GIVEN);
        Ok(Self { has: Inventory::new(has), names, inventories })
    }

    fn names(&self) -> Vec<String> {
        self.names.iter().map(Reference::short).collect()
    }

    /// The files of the other machine whose headers may be similar to those of this model.
    fn similar_files(&self, client: &Client, model: &ModelDetails) -> Result<Vec<SimilarFile>, ErrorBody> {
        let named = if self.names.is_empty() && self.inventories {
            self.most_similar(client, model)?
        } else {
            self.names.clone()
        };
        let mut files = Vec::new();
        for reference in named {
            let opened = open(client, &reference)?;
            for (number, layer) in opened.layers().iter().enumerate() {
                if layer.header.is_some() && self.has.has(layer.digest) {
                    let header = opened.layer_header(number).map_err(internal)?;
                    files.push(SimilarFile { file: layer.digest, header: header.to_vec() });
                }
            }
        }
        Ok(files)
    }

    /// The model that shares most tensors with this one, of those that both machines have.
    fn most_similar(&self, client: &Client, model: &ModelDetails) -> Result<Vec<Reference>, ErrorBody> {
        /// The most models that are compared.
        const MAX_COMPARED: usize = 200;
        let own: BTreeSet<Digest> = digests_of(model).collect();
        let mut best = (0, None);
        for listed in client.models().map_err(client_error)?.models.into_iter().take(MAX_COMPARED) {
            let Ok(reference) = listed.name.parse::<Reference>() else { continue };
            let Ok(details) = client.model(&reference) else { continue };
            let is_there = details.layers.iter().any(|layer| self.has.has(layer.digest));
            let shared = digests_of(&details).filter(|digest| own.contains(digest)).count();
            if is_there && listed.digest != model.digest && shared > best.0 {
                best = (shared, Some(reference));
            }
        }
        Ok(best.1.into_iter().collect())
    }
}

/// A file of the other machine, and its header, which this machine has too.
struct SimilarFile {
    file: Digest,
    header: Vec<u8>,
}

/// Opens a model with all its tensors and files, always with the same numbers of descriptors.
pub(crate) fn open(client: &Client, reference: &Reference) -> Result<OpenModel, ErrorBody> {
    let request = OpenParams {
        reference: reference.clone(),
        tensors: TensorSelection::All,
        component: None,
        files: FileSelection::All,
        purpose: OpenPurpose::Export,
    };
    client.open_with(&request).map_err(client_error)
}

/// The delta of a model: its manifest, and the content of its parts.
#[derive(Debug)]
pub(crate) struct DeltaPlan {
    pub(crate) manifest: Manifest,
    /// The contents that are written from memory, by their digests.
    pub(crate) bytes: BTreeMap<Digest, Vec<u8>>,
    /// The sizes of files that are stored as one blob.
    pub(crate) files: BTreeMap<Digest, u64>,
    /// The numbers of the descriptors of blobs in the opened model, and their sizes.
    pub(crate) blobs: BTreeMap<Digest, (u32, u64)>,
}

impl DeltaPlan {
    pub(crate) fn new(
        client: &Client,
        reference: &Reference,
        manifest: &Manifest,
        given: &Given,
    ) -> Result<Self, ErrorBody> {
        let details = client.model(reference).map_err(client_error)?;
        let model = open(client, reference)?;
        let delta = Delta {
            manifest: Delta::manifest_layer(manifest),
            recipes: BTreeMap::new(),
            blobs: BTreeMap::new(),
            patches: BTreeMap::new(),
            given: given.names(),
        };
        let similar = given.similar_files(client, &details)?;
        let bytes = BTreeMap::from([
            (Digest::of(Delta::CONFIG), Delta::CONFIG.to_vec()),
            (manifest.digest(), manifest.raw().to_vec()),
        ]);
        let (files, blobs) = (BTreeMap::new(), BTreeMap::new());
        let mut parts =
            Parts { model: &model, details: &details, given, similar, delta, bytes, files, blobs };
        for file in manifest.files() {
            let place = model.layers().iter().position(|layer| layer.digest == file.digest);
            let place = place.ok_or_else(|| cannot_be_saved(&model, file.digest))?;
            if file.size > 0 && !given.has.has(file.digest) {
                parts.add_file(place)?;
            }
        }
        let Parts { delta, bytes, files, blobs, .. } = parts;
        let manifest = delta.compose().map_err(|error| {
            let body = ErrorBody::new(ErrorCode::InvalidRequest, format!("{}: {error}", reference.short()));
            body.with_hint("save the model without --given")
        })?;
        Ok(Self { manifest, bytes, files, blobs })
    }
}

fn cannot_be_saved(model: &OpenModel, file: Digest) -> ErrorBody {
    let message = format!("{}: file {file} cannot be written as its registry has it", model.name());
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint("`blobd save` without --given says why")
}

/// The parts of a delta, as far as they were found.
struct Parts<'p> {
    model: &'p OpenModel,
    details: &'p ModelDetails,
    given: &'p Given,
    similar: Vec<SimilarFile>,
    delta: Delta,
    bytes: BTreeMap<Digest, Vec<u8>>,
    files: BTreeMap<Digest, u64>,
    blobs: BTreeMap<Digest, (u32, u64)>,
}

impl Parts<'_> {
    fn add_file(&mut self, place: usize) -> Result<(), ErrorBody> {
        let layer = self.model.layers().get(place).ok_or_else(|| internal("save: no such layer"))?;
        if layer.fd.is_some() {
            self.delta.blobs.insert(layer.digest, Delta::blob_layer(layer.digest, layer.size));
            self.files.insert(layer.digest, layer.size);
            return Ok(());
        }
        let pieces = self.model.file(place).map_err(|_packed| cannot_be_saved(self.model, layer.digest))?;
        let mut known = self.digests_of_tensors(place)?;
        let mut listed = Vec::with_capacity(pieces.len());
        for piece in pieces.iter() {
            listed.push(match piece {
                OpenPiece::Zeros { zeros } => Piece::Zeros { zeros: *zeros },
                OpenPiece::Literal { literal } => Piece::Literal { literal: literal.clone() },
                OpenPiece::Fd { fd, offset, length } => {
                    let blob = self.add_blob(layer, *fd, &mut known)?;
                    Piece::Blob { blob, offset: *offset, length: *length }
                }
            });
        }
        let recipe = Recipe::new(layer.digest, layer.format, listed, Vec::new()).map_err(internal)?.to_json();
        let part = Delta::recipe_layer(&recipe);
        self.bytes.insert(part.digest, recipe);
        self.delta.recipes.insert(layer.digest, part);
        Ok(())
    }

    /// The digests of the blobs with tensors of a layer, by the numbers of their descriptors.
    fn digests_of_tensors(&self, place: usize) -> Result<HashMap<u32, Digest>, ErrorBody> {
        let number = u32::try_from(place).map_err(internal)?;
        let of_layer = self.details.tensors.iter().filter(|tensor| tensor.layer == Some(number));
        let digests: HashMap<&str, Digest> =
            of_layer.map(|tensor| (tensor.name.as_str(), tensor.digest)).collect();
        let tensors = self.model.tensors().iter().filter(|tensor| tensor.layer == number);
        Ok(tensors.filter_map(|tensor| Some((tensor.fd?, *digests.get(tensor.name.as_str())?))).collect())
    }

    /// Adds a blob of a layer if the other machine lacks it.
    fn add_blob(
        &mut self,
        layer: &OpenLayer,
        fd: u32,
        known: &mut HashMap<u32, Digest>,
    ) -> Result<Digest, ErrorBody> {
        let content =
            || self.model.blob_bytes(fd).map_err(|error| ErrorBody::new(error.code(), error.to_string()));
        let digest = match known.get(&fd) {
            Some(digest) => *digest,
            None => *known.entry(fd).or_insert(Digest::of(&content()?)),
        };
        let is_part = self.delta.blobs.contains_key(&digest) || self.delta.patches.contains_key(&digest);
        if is_part || self.given.has.has(digest) {
            return Ok(digest);
        }
        let content = content()?;
        let size = content.len() as u64;
        if layer.header.is_some_and(|header| header.fd == fd)
            && let Some((patch, base)) = self.shortest_patch(&content)
        {
            let part = HeaderPatch { layer: Delta::patch_layer(&patch), size, base };
            self.bytes.insert(part.layer.digest, patch);
            self.delta.patches.insert(digest, part);
            return Ok(digest);
        }
        self.delta.blobs.insert(digest, Delta::blob_layer(digest, size));
        self.blobs.insert(digest, (fd, size));
        Ok(digest)
    }

    /// The shortest patch that makes this header, if that is worth it, and the file that has the other header.
    fn shortest_patch(&self, header: &[u8]) -> Option<(Vec<u8>, Digest)> {
        let fits = |length: usize| length as u64 <= patch::MAX_BYTES;
        let similar = self.similar.iter().filter(|file| fits(file.header.len()) && fits(header.len()));
        let patches = similar.map(|file| (patch::make(&file.header, header), file.file));
        patches.min_by_key(|(patch, _)| patch.len()).filter(|(patch, _)| patch.len() < header.len() / 2)
    }
}
