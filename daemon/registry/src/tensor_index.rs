//! Tensor indexes at a registry: where they are looked up, and how one is published beside a model.
//!
//! A registry lists the manifests that refer to a model, or the tag that OCI's specification names for registries without
//! such a list is one. Which registries have no list is remembered, so that the next look-up is one request.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::{self, Read as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_store_format::descriptor::{Compression, Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::host;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::HubFile;
use blobd_store_format::tensor_index::{Referrers, TensorIndex, TensorIndexError};
use bytes::Bytes;
use hyper::Method;
use hyper::header::{ACCEPT, HeaderValue};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tokio::time::timeout;
use url::form_urlencoded;

use super::error::{RegistryError, Result};
use super::origin::Registry;
use super::request::{Response, Target};
use super::upload::{Delivery, Destination, UploadContent, UploadError, is_absent, is_refusal};
use super::{Decoder, RegistryClient};

/// A model is downloaded without an index if that has not been found by then.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(10);

/// The recipe of a file, compressed.
#[derive(Clone, Debug)]
pub struct PackedRecipe {
    file: Digest,
    bytes: Bytes,
}

impl PackedRecipe {
    /// Compresses the recipe of a file; `None` if that is too long to be worth a download.
    pub fn new(recipe: &Recipe) -> Option<Self> {
        let json = recipe.to_json();
        if json.len() as u64 > TensorIndex::MAX_UNPACKED_BYTES {
            return None;
        }
        let packed = compress_to_vec(&*json, CompressionLevel::Fastest);
        // The compressor is younger than the decompressor.
        let is_sound = unpack(&packed).is_ok_and(|unpacked| unpacked == json);
        let packed = if is_sound { packed } else { compress_to_vec(&*json, CompressionLevel::Uncompressed) };
        let is_short = packed.len() as u64 <= TensorIndex::max_recipe_bytes(recipe.size());
        is_short.then(|| Self { file: recipe.file(), bytes: packed.into() })
    }

    /// The compressed bytes.
    pub const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The descriptor of the compressed recipe.
    pub fn descriptor(&self) -> Descriptor {
        let media_type = MediaType::new(TensorIndex::RECIPE_TYPE);
        Descriptor { media_type, digest: Digest::of(&self.bytes), size: self.bytes.len() as u64 }
    }

    /// Reads the recipe of `file` from what a registry has sent.
    ///
    /// # Errors
    /// [`PackedRecipeError`] if it is damaged, too long, or of another file.
    pub fn read(packed: &[u8], file: Digest, size: u64) -> Result<Recipe, PackedRecipeError> {
        let recipe = Recipe::parse(&unpack(packed)?)?;
        match (recipe.file(), recipe.size()) == (file, size) {
            true => Ok(recipe),
            false => Err(PackedRecipeError::File { found: recipe.file(), expected: file }),
        }
    }
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, PackedRecipeError> {
    let mut json = Vec::new();
    let limit = TensorIndex::MAX_UNPACKED_BYTES;
    Decoder::new(packed, Some(Compression::Zstd))?.take(limit + 1).read_to_end(&mut json)?;
    if json.len() as u64 > limit { Err(PackedRecipeError::TooLong { limit }) } else { Ok(json) }
}

/// Why a compressed recipe cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackedRecipeError {
    #[error("recipe: cannot be decompressed: {0}")]
    Compression(#[from] io::Error),
    #[error("recipe: too long: expected at most {limit} bytes, found more")]
    TooLong { limit: u64 },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error("recipe: of another file: expected {expected}, found {found}, or another size")]
    File { found: Digest, expected: Digest },
}

/// The tensor index of a model that is pushed.
#[derive(Debug)]
pub struct NewTensorIndex {
    subject: Digest,
    recipes: Vec<PackedRecipe>,
    raw: Vec<u8>,
}

impl NewTensorIndex {
    /// The index of a model with these recipes; `None` if there are none.
    pub fn new(model: &Manifest, recipes: Vec<PackedRecipe>) -> Option<Self> {
        let media_type = model.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
        let subject = Descriptor { media_type, digest: model.digest(), size: model.raw().len() as u64 };
        let files: Vec<_> = recipes.iter().map(|recipe| (recipe.file, recipe.descriptor())).collect();
        let raw = TensorIndex::compose(&subject, &files).ok()?;
        let is_usable = !recipes.is_empty() && raw.len() as u64 <= TensorIndex::MAX_BYTES;
        is_usable.then_some(Self { subject: subject.digest, recipes, raw })
    }

    /// The bytes that it adds to the registry.
    pub fn size(&self) -> u64 {
        let recipes = self.recipes.iter().map(|recipe| recipe.bytes.len()).sum::<usize>();
        (recipes + self.raw.len()) as u64
    }

    fn descriptor(&self) -> Descriptor {
        let media_type = MediaType::new(MediaType::OCI_MANIFEST);
        Descriptor { media_type, digest: Digest::of(&self.raw), size: self.raw.len() as u64 }
    }
}

/// A short file in memory.
struct InMemory(Bytes);

impl UploadContent for InMemory {
    type Error = Infallible;

    async fn read(&mut self, offset: u64) -> Result<Bytes, Infallible> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        Ok(self.0.slice(start..))
    }
}

impl RegistryClient {
    /// Whether the repository has this tensor index.
    pub async fn has_tensor_index(&self, destination: &Destination, index: &NewTensorIndex) -> Result<bool> {
        let digest = index.descriptor().digest;
        Ok(self.find_manifest(destination, &digest.to_string()).await? == Some(digest))
    }

    /// Publishes the tensor index of a model.
    pub async fn push_tensor_index(
        &self,
        destination: &Destination,
        index: &NewTensorIndex,
    ) -> Result<Delivery> {
        let is_present = self.has_tensor_index(destination, index).await?;
        if !is_present {
            self.push_bytes(destination, TensorIndex::CONFIG.into()).await?;
            for recipe in &index.recipes {
                self.push_bytes(destination, recipe.bytes.clone()).await?;
            }
        }
        let own = index.descriptor();
        // Also if it is present: only the response says whether the registry lists it.
        let (name, media_type) = (own.digest.to_string(), &own.media_type);
        let stored = self.put_manifest(destination, &name, media_type, &index.raw).await?;
        if !stored.headers().contains_key("oci-subject") {
            self.list_tensor_index(destination, index.subject, &own).await?;
        }
        Ok(if is_present { Delivery::Present } else { Delivery::Sent })
    }

    async fn push_bytes(&self, destination: &Destination, bytes: Bytes) -> Result<()> {
        let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
        if self.has_blob(destination, digest).await? {
            return Ok(());
        }
        let file = Descriptor { media_type: MediaType::new(TensorIndex::RECIPE_TYPE), digest, size };
        match self.push_blob(destination, &file, &mut InMemory(bytes)).await {
            Ok(_delivery) => Ok(()),
            Err(UploadError::Registry(error)) => Err(error),
            Err(UploadError::Content(never)) => match never {},
        }
    }

    /// Adds a tensor index to the list that a tag names, at a registry that makes no list itself.
    async fn list_tensor_index(
        &self,
        destination: &Destination,
        subject: Digest,
        index: &Descriptor,
    ) -> Result<()> {
        let tag = Referrers::fallback_tag(subject);
        let target = destination.target(Method::GET, &format!("manifests/{tag}"), &[])?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_INDEX));
        let earlier = self.retried(|| async { self.list_in(self.shared.get(&target).await?).await }).await;
        let earlier = match earlier {
            Ok(raw) => Some(raw),
            Err(error) if is_absent(&error) => None,
            Err(error) => return Err(error),
        };
        // Something else than a list is answered for the tag by registries that take it for the name of the model.
        let list = match Referrers::with_index(earlier.as_deref(), index) {
            Err(TensorIndexError::Json(_)) => Referrers::with_index(None, index),
            list => list,
        };
        let unusable = |error| RegistryError::unusable_model(destination.reference(), &error);
        let Some(list) = list.map_err(unusable)? else { return Ok(()) };
        self.put_manifest(destination, &tag, &MediaType::new(MediaType::OCI_INDEX), &list).await?;
        Ok(())
    }

    async fn list_in(&self, response: Response) -> Result<Vec<u8>> {
        response.document("list of referrers", Referrers::MAX_BYTES, self.shared.limits.document).await
    }

    /// Looks for the tensor index of a model: in its own manifest, in the registry's list of what refers to it, and under
    /// the tag for registries without such a list. `None` if there is none, and if it cannot be had: then the model is
    /// downloaded without.
    pub async fn tensor_index(&self, reference: &Reference, manifest: &Manifest) -> Option<TensorIndex> {
        let own = TensorIndex::in_manifest(manifest);
        if !own.is_empty() {
            return Some(own);
        }
        let servers = self.shared.mirrors.for_model(reference).ok()?;
        match timeout(LOOK_UP_LIMIT, self.tensor_index_at_any(&servers, reference, manifest.digest())).await {
            Ok(index) => index,
            Err(_elapsed) => {
                tracing::debug!("no tensor index: no answer within {LOOK_UP_LIMIT:?}");
                None
            }
        }
    }

    async fn tensor_index_at_any(
        &self,
        servers: &[Registry],
        reference: &Reference,
        subject: Digest,
    ) -> Option<TensorIndex> {
        for server in servers.iter().filter(|server| may_have_indexes(server)) {
            match self.tensor_index_at(server, reference, subject).await {
                Ok(Some(index)) => return Some(index),
                Ok(None) => {}
                Err(error) => tracing::debug!("no tensor index: {error}"),
            }
        }
        None
    }

    /// Downloads a compressed recipe of a model's tensor index.
    pub async fn packed_recipe(&self, reference: &Reference, recipe: &Descriptor) -> Result<Vec<u8>> {
        let mut stream = self.blob(reference, recipe).await?;
        let mut bytes = Vec::new();
        while let Some(more) = stream.next().await? {
            bytes.extend_from_slice(&more);
        }
        let found = Digest::of(&bytes);
        match found == recipe.digest {
            true => Ok(bytes),
            false => {
                let what = format!("recipe: wrong digest: expected {}, found {found}", recipe.digest);
                Err(RegistryError::unusable_model(reference, &what))
            }
        }
    }

    async fn tensor_index_at(
        &self,
        server: &Registry,
        reference: &Reference,
        subject: Digest,
    ) -> Result<Option<TensorIndex>> {
        for candidate in self.referrers(server, reference, subject).await?.candidates() {
            let path = format!("manifests/{}", candidate.digest);
            let target = Target::new(server, reference, &path)?;
            let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_MANIFEST));
            let response = self.shared.get(&target).await?;
            let limits = (TensorIndex::MAX_BYTES, self.shared.limits.document);
            let raw = response.document("tensor index", limits.0, limits.1).await?;
            match TensorIndex::parse(&raw, subject) {
                Ok(index) if Digest::of(&raw) == candidate.digest => return Ok(Some(index)),
                Ok(_) => tracing::debug!("{}: wrong digest of the tensor index", candidate.digest),
                Err(error) => tracing::debug!("{}: {error}", candidate.digest),
            }
        }
        Ok(None)
    }

    /// What the registry says refers to a manifest.
    async fn referrers(
        &self,
        server: &Registry,
        reference: &Reference,
        subject: Digest,
    ) -> Result<Referrers> {
        if !self.shared.referrers.are_missing_at(server) {
            let kind = form_urlencoded::byte_serialize(TensorIndex::ARTIFACT_TYPE.as_bytes());
            let path = format!("referrers/{subject}?artifactType={}", kind.collect::<String>());
            match self.referrers_at(server, reference, &path).await {
                Err(error) if is_refusal(&error) => {
                    tracing::debug!("{error}; looking for the tag instead");
                    if is_absent(&error) {
                        self.shared.referrers.note_missing_at(server);
                    }
                }
                list => return list,
            }
        }
        let path = format!("manifests/{}", Referrers::fallback_tag(subject));
        match self.referrers_at(server, reference, &path).await {
            Err(error) if is_refusal(&error) => Ok(Referrers::default()),
            list => list,
        }
    }

    async fn referrers_at(&self, server: &Registry, reference: &Reference, path: &str) -> Result<Referrers> {
        let target = Target::new(server, reference, path)?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_INDEX));
        let raw = self.list_in(self.shared.get(&target).await?).await?;
        // Anything else that a server answers is not a list.
        Ok(Referrers::parse(&raw).unwrap_or_default())
    }
}

/// Whether tensor indexes can be at a server: not at those that take none, which are the most used ones.
fn may_have_indexes(server: &Registry) -> bool {
    !server.is_of(Reference::DEFAULT_HOST) && !server.is_of(HubFile::HOST)
}

impl Destination {
    /// Whether this registry takes tensor indexes.
    pub fn takes_tensor_indexes(&self) -> bool {
        let host = host::canonical(self.reference().host());
        ![Reference::DEFAULT_HOST, HubFile::HOST].iter().any(|known| host.eq_ignore_ascii_case(known))
    }
}

/// The servers that have no list of referrers, as far as they were asked.
#[derive(Debug, Default)]
pub(super) struct ReferrersLists {
    missing: Mutex<BTreeSet<String>>,
}

impl ReferrersLists {
    /// A program that asks more registries forgets earlier ones.
    const MAX_SERVERS: usize = 1000;

    fn are_missing_at(&self, server: &Registry) -> bool {
        self.lock().contains(server.name())
    }

    fn note_missing_at(&self, server: &Registry) {
        let mut missing = self.lock();
        if missing.len() >= Self::MAX_SERVERS {
            missing.clear();
        }
        missing.insert(server.name().to_owned());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
