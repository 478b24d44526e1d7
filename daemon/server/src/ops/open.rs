//! `open`: locates a model's bytes, and leases them.
//!
//! Reads no blob and hashes nothing: the reference names a manifest, the manifest names recipes, and the recipes
//! contain the tensor table.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use blobd_client::protocol::frame::{self, Frame};
use blobd_client::protocol::request::{ExpertSelection, FileSelection, OpenParams, TensorSelection};
use blobd_client::protocol::response::{HeaderLocation, OpenHead, OpenLayer, OpenPiece, TensorLocation};
use blobd_client::protocol::{MAX_FDS_PER_BATCH, MAX_OPEN_LAYERS};
use blobd_store::leases::Lease;
use blobd_store::{Model, NamedFile, Store, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::expert::separate_expert;
use blobd_store_format::recipe::{Piece, Recipe, TensorEntry};
use blobd_store_format::reference::Reference;

use super::policy::CallerPolicy;
use super::{OpError, damage};

mod cache;

pub use cache::{OpenCache, OpenResponse};

/// Everything that an open session needs.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub struct Located {
    pub reference: Reference,
    pub manifest: Digest,
    pub response: Arc<OpenResponse>,
    /// The blobs of the first batch, opened.
    pub first_files: Vec<File>,
    /// Protects the whole model from collection.
    pub lease: Lease,
    /// While a session holds them, other opens of the model reuse them and the response, however large they are.
    pub recipes: Vec<Arc<Recipe>>,
}

/// Locates what `params` selects, or takes the response from `open_cache`, for the user `uid`. `rm` reports `holder` as the
/// reason why bytes are kept.
///
/// # Errors
/// [`blobd_store::StoreError`]; [`OpError::NotInModel`] for an unknown component or tensor;
/// [`OpError::DamagedParts`] when something selected is damaged; [`OpError::DeniedByPolicy`], also if the model is not signed
/// as it must be.
pub fn open(
    store: &Store,
    open_cache: &OpenCache,
    params: &OpenParams,
    policy: &CallerPolicy,
    uid: u32,
    holder: String,
) -> Result<Located, OpError> {
    let lease = store.liveness().leases().grant(holder);
    let model = store.names().leased_model(&params.reference, &lease)?;
    policy.check_content(store, &model)?;
    store.content().index().note_use(model.manifest.digest(), uid);
    let response = match open_cache.find(params, &model) {
        Some(response) => response,
        None => {
            let response = Arc::new(locate(&model, params)?);
            open_cache.keep(params, &model, &response);
            response
        }
    };
    damage::refuse(store, &model, &response.blobs)?;
    let first = response.blobs.get(..MAX_FDS_PER_BATCH).unwrap_or(&response.blobs);
    let first_files = open_blobs(store, first)?;
    let recipes = model.files.into_iter().filter_map(|file| file.recipe).collect();
    let manifest = model.manifest.digest();
    Ok(Located { reference: model.reference, manifest, response, first_files, lease, recipes })
}

fn locate(model: &Model, params: &OpenParams) -> Result<OpenResponse, OpError> {
    /// Tables up to this length are appended to the previous frame, which saves a system call. Longer ones are not copied.
    const JOINED_BYTES: usize = 256 << 10;
    let mut locator = Locator::new(params);
    for NamedFile { file, name, .. } in &model.contents()? {
        locator.add(file, name.as_deref())?;
    }
    locator.flush()?;
    locator.check_selection(&model.reference)?;
    let head = OpenHead {
        name: model.reference.short(),
        digest: model.manifest.digest(),
        layers: locator.layers,
        tensor_count: locator.tensor_count,
        fd_count: locator.fds.next_number(),
    };
    // Thousands of layers with long names can exceed the largest frame.
    let (name, count) = (head.name.clone(), head.layers.len());
    let too_many = |_too_long| OpError::TooManyLayers { model: name, count };
    let mut frames = vec![Frame::Open(head).encode().map_err(too_many)?];
    for table in [locator.pieces, locator.tables] {
        match frames.last_mut() {
            Some(last) if last.len() + table.len() <= JOINED_BYTES => last.extend(table),
            _ => frames.push(table),
        }
    }
    Ok(OpenResponse::new(frames, locator.fds.order))
}

pub(crate) fn open_blobs(store: &Store, blobs: &[(Digest, u64)]) -> Result<Vec<File>, OpError> {
    let _held = store.content().hold_lower_stores();
    let open = |(digest, least_size): &(Digest, u64)| store.content().open_blob(*digest, *least_size);
    Ok(blobs.iter().map(open).collect::<Result<_, _>>()?)
}

/// Numbers the descriptors in the order in which they are first needed.
#[derive(Default)]
struct FdTable {
    numbers: BTreeMap<Digest, u32>,
    order: Vec<(Digest, u64)>,
}

impl FdTable {
    /// The number of a blob's descriptor. The blob must have at least `end` bytes.
    fn number(&mut self, digest: Digest, end: u64) -> u32 {
        let next = self.next_number();
        let number = *self.numbers.entry(digest).or_insert(next);
        if number == next {
            self.order.push((digest, end));
        } else if let Some((_, least)) = usize::try_from(number).ok().and_then(|at| self.order.get_mut(at)) {
            *least = end.max(*least);
        }
        number
    }

    fn next_number(&self) -> u32 {
        // A recipe of 160 MiB cannot name 2^32 blobs.
        u32::try_from(self.order.len()).unwrap_or(u32::MAX)
    }
}

fn too_long(error: &frame::FrameError) -> OpError {
    OpError::Internal(error.to_string())
}

struct Locator<'p> {
    params: &'p OpenParams,
    names: Option<BTreeSet<&'p str>>,
    experts: BTreeSet<u64>,
    has_component: bool,
    layers: Vec<OpenLayer>,
    pieces: Vec<u8>,
    tables: Vec<u8>,
    tensors: Vec<TensorLocation>,
    tensor_count: u64,
    found: BTreeSet<String>,
    fds: FdTable,
    /// Files whose tables are encoded already: a manifest may name a file several times.
    described: BTreeSet<Digest>,
}

impl<'p> Locator<'p> {
    fn new(params: &'p OpenParams) -> Self {
        let names = match &params.tensors {
            TensorSelection::Names(names) => Some(names.iter().map(String::as_str).collect()),
            _ => None,
        };
        let experts = match &params.tensors {
            TensorSelection::Experts(experts) => experts.numbers.iter().copied().collect(),
            _ => BTreeSet::new(),
        };
        Self {
            params,
            names,
            experts,
            has_component: false,
            layers: Vec::new(),
            pieces: Vec::new(),
            tables: Vec::new(),
            tensors: Vec::new(),
            tensor_count: 0,
            found: BTreeSet::new(),
            fds: FdTable::default(),
            described: BTreeSet::new(),
        }
    }

    fn add(&mut self, file: &StoredFile, name: Option<&str>) -> Result<(), OpError> {
        let descriptor = &file.descriptor;
        let component = descriptor.media_type.component();
        let is_wanted = self.is_of_component(component, name);
        self.has_component |= is_wanted;
        if !is_wanted || !self.selects_layer(component, name) {
            return Ok(());
        }
        let mut layer = OpenLayer {
            media_type: descriptor.media_type.clone(),
            name: name.map(str::to_owned),
            digest: descriptor.digest,
            size: descriptor.size,
            fd: None,
            format: file.recipe.as_ref().and_then(|recipe| recipe.format()).unwrap_or_default(),
            header: None,
            piece_count: 0,
        };
        let number = u32::try_from(self.layers.len()).unwrap_or(u32::MAX);
        match &file.recipe {
            None => layer.fd = Some(self.fds.number(descriptor.digest, descriptor.size)),
            Some(recipe) if self.described.insert(descriptor.digest) => {
                self.add_split(number, recipe, &mut layer)?;
            }
            Some(_) => {}
        }
        self.layers.push(layer);
        Ok(())
    }

    fn add_split(&mut self, number: u32, recipe: &Recipe, layer: &mut OpenLayer) -> Result<(), OpError> {
        /// The tensors that are encoded at a time: some ten full frames.
        const MAX_PENDING_TENSORS: usize = 4096;
        let tensors_wanted = self.params.tensors != TensorSelection::None;
        if let Some((header, size)) = recipe.header().filter(|_| tensors_wanted) {
            layer.header = Some(HeaderLocation { fd: self.fds.number(header, size), size });
        }
        if self.params.files == FileSelection::All {
            let pieces = recipe.pieces().iter().map(|piece| self.piece(piece)).collect();
            let pieces = frame::cut_literals(pieces);
            layer.piece_count = pieces.len() as u64;
            frame::encode_pieces(number, &pieces, &mut self.pieces).map_err(|error| too_long(&error))?;
        }
        for tensor in recipe.tensors().iter() {
            if self.selects(&tensor.name, |experts| has_expert(&tensor, experts)) {
                let location = self.tensor(number, tensor);
                if self.names.is_some() {
                    self.found.insert(location.name.clone());
                }
                self.tensors.push(location);
                self.tensor_count += 1;
            }
            if self.tensors.len() >= MAX_PENDING_TENSORS {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Encodes the pending tensors. Collecting all of them first would take twice the memory of the frames.
    fn flush(&mut self) -> Result<(), OpError> {
        let tensors = std::mem::take(&mut self.tensors);
        frame::encode_tensors(&tensors, &mut self.tables).map_err(|error| too_long(&error))
    }

    /// A component that ends in a slash is a prefix of layer names.
    fn is_of_component(&self, component: &str, name: Option<&str>) -> bool {
        self.params.component.as_deref().is_none_or(|wanted| {
            wanted == component
                || (wanted.ends_with('/') && name.is_some_and(|name| name.starts_with(wanted)))
        })
    }

    /// A layer that is itself a tensor is selected like a tensor; if no tensors are requested, as a file.
    fn selects_layer(&self, component: &str, name: Option<&str>) -> bool {
        let Some(name) = name.filter(|_| component == "tensor") else { return true };
        self.params.tensors == TensorSelection::None || self.selects(name, |_experts| false)
    }

    fn selects(&self, name: &str, has_expert: impl FnOnce(&BTreeSet<u64>) -> bool) -> bool {
        match &self.params.tensors {
            TensorSelection::All => true,
            TensorSelection::None => false,
            TensorSelection::Prefix(prefix) => name.starts_with(prefix.as_str()),
            TensorSelection::Names(_) => self.names.as_ref().is_some_and(|names| names.contains(name)),
            TensorSelection::Experts(ExpertSelection { prefix, .. }) => {
                name.starts_with(prefix.as_str()) && has_expert(&self.experts)
            }
        }
    }

    fn tensor(&mut self, layer: u32, tensor: TensorEntry<'_>) -> TensorLocation {
        let end = tensor.offset.saturating_add(tensor.size);
        let fd = (tensor.size > 0).then(|| self.fds.number(tensor.digest, end));
        TensorLocation {
            name: tensor.name.into_owned(),
            type_name: tensor.type_name.into_owned(),
            shape: tensor.shape.into_owned(),
            layer,
            fd,
            offset: tensor.offset,
            size: tensor.size,
            experts: tensor.experts,
        }
    }

    fn piece(&mut self, piece: &Piece) -> OpenPiece {
        match piece {
            Piece::Blob { blob, offset, length } => {
                let fd = self.fds.number(*blob, offset.saturating_add(*length));
                OpenPiece::Fd { fd, offset: *offset, length: *length }
            }
            Piece::Zeros { zeros } => OpenPiece::Zeros { zeros: *zeros },
            Piece::Literal { literal } => OpenPiece::Literal { literal: literal.clone() },
        }
    }

    /// Checks that every requested name exists; a prefix may match nothing.
    fn check_selection(&self, model: &Reference) -> Result<(), OpError> {
        let count = self.layers.len();
        if count > MAX_OPEN_LAYERS {
            return Err(OpError::TooManyLayers { model: model.short(), count });
        }
        let lacks = |what: String| Err(OpError::NotInModel { model: model.short(), what });
        if let Some(component) = self.params.component.as_ref().filter(|_| !self.has_component) {
            return lacks(format!("component {component:?}"));
        }
        let Some(names) = &self.names else { return Ok(()) };
        let tensors = self.found.iter().map(String::as_str);
        let layers = self.layers.iter().filter(|layer| layer.media_type.component() == "tensor");
        let layers = layers.filter_map(|layer| layer.name.as_deref());
        let found: BTreeSet<&str> = tensors.chain(layers).collect();
        match names.iter().find(|name| !found.contains(*name)) {
            Some(name) => lacks(format!("tensor {name:?}")),
            None => Ok(()),
        }
    }
}

/// Whether a tensor is one of these experts, or a stack that contains one.
fn has_expert(tensor: &TensorEntry<'_>, experts: &BTreeSet<u64>) -> bool {
    match tensor.experts {
        Some(stack) => experts.first().is_some_and(|least| *least < stack.count),
        None => separate_expert(&tensor.name).is_some_and(|number| experts.contains(&number)),
    }
}
