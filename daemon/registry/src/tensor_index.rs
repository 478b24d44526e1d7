//! Tensor indexes at a registry: where they are looked up, and how one is published beside a model.

use std::io::{self, Read as _};
use std::time::Duration;

use blobd_store_format::descriptor::{Compression, Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor_index::TensorIndex;
use bytes::Bytes;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tokio::time::timeout;

use super::artifacts::{NewArtifact, may_have_artifacts};
use super::error::Result;
use super::origin::Registry;
use super::upload::{Delivery, Destination};
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

    /// What a registry has sent, if it is the recipe of `file`.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn checked(packed: Vec<u8>, file: Digest, size: u64) -> Result<Self, PackedRecipeError> {
        Self::read(&packed, file, size).map(|_recipe| Self { file, bytes: packed.into() })
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

pub(super) fn unpack(packed: &[u8]) -> Result<Vec<u8>, PackedRecipeError> {
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
pub struct NewTensorIndex(NewArtifact);

impl NewTensorIndex {
    /// The index of a model with these recipes; `None` if there are none.
    pub fn new(model: &Manifest, recipes: Vec<PackedRecipe>) -> Option<Self> {
        let subject = model.descriptor();
        let files: Vec<_> = recipes.iter().map(|recipe| (recipe.file, recipe.descriptor())).collect();
        let raw = TensorIndex::compose(&subject, &files).ok()?;
        let is_usable = !recipes.is_empty() && raw.len() as u64 <= TensorIndex::MAX_BYTES;
        let layers = recipes.into_iter().map(|recipe| recipe.bytes).collect();
        is_usable.then(|| Self(NewArtifact::new(&TensorIndex::KIND, subject.digest, layers, raw)))
    }

    /// The bytes that it adds to the registry.
    pub fn size(&self) -> u64 {
        self.0.size()
    }
}

impl RegistryClient {
    /// Whether the repository has this tensor index.
    pub async fn has_tensor_index(&self, destination: &Destination, index: &NewTensorIndex) -> Result<bool> {
        self.has_artifact(destination, &index.0).await
    }

    /// Publishes the tensor index of a model.
    pub async fn push_tensor_index(
        &self,
        destination: &Destination,
        index: &NewTensorIndex,
    ) -> Result<Delivery> {
        self.push_artifact(destination, &index.0).await
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
        for server in servers.iter().filter(|server| may_have_artifacts(server)) {
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
        self.artifact_layer(reference, recipe, "recipe").await
    }

    async fn tensor_index_at(
        &self,
        server: &Registry,
        reference: &Reference,
        subject: Digest,
    ) -> Result<Option<TensorIndex>> {
        for candidate in self.referrers(server, reference, subject, &TensorIndex::KIND).await?.candidates() {
            let raw = self.artifact_manifest(server, reference, candidate, &TensorIndex::KIND).await?;
            match raw.map(|raw| TensorIndex::parse(&raw, subject)) {
                Some(Ok(index)) => return Ok(Some(index)),
                None => tracing::debug!("{}: wrong digest of the tensor index", candidate.digest),
                Some(Err(error)) => tracing::debug!("{}: {error}", candidate.digest),
            }
        }
        Ok(None)
    }
}
