//! Tensor indexes at the fake registry, right ones and forged ones.

use blobd_registry::PackedRecipe;
use blobd_store_format::artifact::Referrers;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::HeaderReader;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::split::{SplitPlan, Target};
use blobd_store_format::tensor::TensorFormat;
use blobd_store_format::tensor_index::TensorIndex;

use crate::registry::FakeRegistry;

/// The recipe of a model file, as a store has it.
///
/// # Panics
/// When the file is not a model.
#[must_use]
pub fn recipe_of(file: &[u8]) -> Recipe {
    let mut reader = HeaderReader::new();
    let _progress = reader.push(file).unwrap();
    let plan = SplitPlan::new(reader.finish().unwrap().file_layout(file.len() as u64).unwrap());
    let mut blobs: Vec<Vec<u8>> = plan.blobs().iter().map(|blob| vec![0; place(blob.size)]).collect();
    let mut literals = vec![Vec::new(); plan.literal_count()];
    for segment in plan.segments() {
        let (start, length) = (place(segment.offset_in_file), place(segment.length));
        let bytes = &file[start..start + length];
        match segment.target {
            Target::Blob { blob, offset_in_blob } => {
                let start = place(offset_in_blob);
                blobs[blob][start..start + length].copy_from_slice(bytes);
            }
            Target::Literal { literal } => literals[literal].extend_from_slice(bytes),
        }
    }
    let digests: Vec<_> = blobs.iter().map(|blob| Digest::of(blob)).collect();
    plan.recipe(Digest::of(file), &digests, literals).unwrap()
}

fn place(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// A recipe with changed pieces, of the same file.
///
/// # Panics
/// When it is not a valid recipe.
#[must_use]
pub fn forged(recipe: &Recipe, change: impl FnOnce(&mut Vec<Piece>)) -> Recipe {
    let mut pieces: Vec<Piece> = recipe.pieces().iter().cloned().collect();
    change(&mut pieces);
    Recipe::new(recipe.file(), TensorFormat::Gguf, pieces, Vec::new()).unwrap()
}

/// A model at a registry that keeps lists of referrers under tags.
#[derive(Debug)]
pub struct IndexedModel<'r> {
    /// The registry.
    pub registry: &'r FakeRegistry,
    /// Its repository and its tag.
    pub name: (&'r str, &'r str),
    /// Its manifest.
    pub manifest: Manifest,
    /// Its weights.
    pub file: Digest,
}

impl<'r> IndexedModel<'r> {
    /// Adds a model with these weights, and no index.
    ///
    /// # Panics
    /// When the registry cannot add it.
    #[must_use]
    pub fn new(registry: &'r FakeRegistry, name: (&'r str, &'r str), weights: &[u8]) -> Self {
        let layers = [(MediaType::OLLAMA_MODEL, weights)];
        let manifest = registry.add_model(&format!("{}:{}", name.0, name.1), b"{}", &layers).unwrap();
        Self { registry, name, manifest, file: Digest::of(weights) }
    }

    /// Its name, with the registry's host.
    #[must_use]
    pub fn reference(&self) -> String {
        self.registry.name(&format!("{}:{}", self.name.0, self.name.1))
    }

    /// Publishes an index with this recipe.
    ///
    /// # Panics
    /// When the recipe is too long for an index.
    pub fn publish(&self, recipe: &Recipe) {
        self.publish_bytes(PackedRecipe::new(recipe).unwrap().bytes());
    }

    /// Publishes an index with these bytes as the compressed recipe.
    pub fn publish_bytes(&self, packed: &[u8]) {
        self.registry.add_blob(packed);
        let recipe = descriptor(packed, TensorIndex::RECIPE_TYPE);
        self.publish_index(self.manifest.digest(), recipe);
    }

    /// Publishes an index, which says that it is of the manifest `subject`, with this descriptor of the recipe.
    ///
    /// # Panics
    /// Never.
    pub fn publish_index(&self, subject: Digest, recipe: Descriptor) {
        let of_model = descriptor(self.manifest.raw(), MediaType::DOCKER_MANIFEST);
        let subject = Descriptor { digest: subject, ..of_model };
        let index = TensorIndex::compose(&subject, &[(self.file, recipe)]).unwrap();
        self.registry.add_manifest(&format!("{}:index", self.name.0), &index);
        let index = descriptor(&index, MediaType::OCI_MANIFEST);
        let list = Referrers::with_artifact(None, &TensorIndex::KIND, &index).unwrap().unwrap();
        let tag = Referrers::fallback_tag(self.manifest.digest());
        self.registry.add_manifest(&format!("{}:{tag}", self.name.0), &list);
    }
}

/// The descriptor of these bytes.
#[must_use]
pub fn descriptor(bytes: &[u8], media_type: &str) -> Descriptor {
    let media_type = MediaType::new(media_type);
    Descriptor { media_type, digest: Digest::of(bytes), size: bytes.len() as u64 }
}
