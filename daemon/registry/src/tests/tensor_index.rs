//! Tensor indexes at registries with and without a list of what refers to a manifest.

use blobd_fixtures::registry::{FakeRegistry, Fault};
use blobd_store_format::artifact::Referrers;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Piece, Recipe, TensorEntry};
use blobd_store_format::tensor::TensorFormat;
use blobd_store_format::tensor_index::TensorIndex;
use serde_json::{Value as Json, json};

use super::*;
use crate::{Delivery, Destination, NewTensorIndex, PackedRecipe, PackedRecipeError};

/// The recipe of a file of 2 MB with this many tensors.
fn recipe(tensors: u64) -> Recipe {
    let (file, header) = (Digest::of(format!("file of {tensors}").as_bytes()), Digest::of(b"header"));
    let (size, blob) = (2_000_000 / tensors, |tensor: u64| Digest::of(&tensor.to_le_bytes()));
    let mut pieces = vec![Piece::Blob { blob: header, offset: 0, length: 64 }];
    pieces.extend((0..tensors).map(|tensor| Piece::Blob { blob: blob(tensor), offset: 0, length: size }));
    let entry = |tensor| TensorEntry {
        name: format!("blk.{tensor}.ffn_up.weight").into(),
        type_name: "Q4_K".into(),
        shape: vec![4096, 4096].into(),
        digest: blob(tensor),
        offset: 0,
        size,
        experts: None,
    };
    Recipe::new(file, TensorFormat::Gguf, pieces, (0..tensors).map(entry).collect::<Vec<_>>()).unwrap()
}

/// A registry with a model, and the client and the place that it is pushed to.
struct Published {
    registry: FakeRegistry,
    client: RegistryClient,
    model: Manifest,
    index: NewTensorIndex,
}

impl Published {
    fn new() -> Self {
        let registry = FakeRegistry::start().unwrap();
        let model = registry.add_model("me/tiny:1", b"{}", &[(MediaType::OLLAMA_MODEL, b"x")]).unwrap();
        let recipes = vec![PackedRecipe::new(&recipe(100)).unwrap()];
        let index = NewTensorIndex::new(&model, recipes).unwrap();
        Self { registry, client: client(), model, index }
    }

    fn reference(&self) -> Reference {
        self.registry.name("me/tiny:1").parse().unwrap()
    }

    fn destination(&self) -> Destination {
        self.client.destination(&self.reference(), false).unwrap()
    }

    async fn push(&self) -> Delivery {
        self.client.push_tensor_index(&self.destination(), &self.index).await.unwrap()
    }

    async fn find(&self) -> Option<TensorIndex> {
        self.client.tensor_index(&self.reference(), &self.model).await
    }

    fn fallback_path(&self) -> String {
        format!("/v2/me/tiny/manifests/{}", Referrers::fallback_tag(self.model.digest()))
    }

    /// Paths of the requests since the first `before`, without the repository.
    fn paths(&self, before: usize) -> Vec<String> {
        let requests = self.registry.requests().into_iter().skip(before);
        requests.map(|request| request.path.replace("/v2/me/tiny/", "")).collect()
    }

    fn count(&self) -> usize {
        self.registry.requests().len()
    }
}

#[tokio::test]
async fn index_is_found_where_the_registry_lists_referrers() {
    let published = Published::new();
    published.registry.list_referrers();
    assert_eq!(published.find().await, None);
    assert_eq!(published.push().await, Delivery::Sent);
    assert_eq!(published.registry.manifest(&published.fallback_path()), None);
    let before = published.count();
    let index = published.find().await.unwrap();
    let paths = published.paths(before);
    assert!(
        paths[0].starts_with(&format!("referrers/{}?artifactType=", published.model.digest())),
        "{paths:?}"
    );
    assert!(paths.len() == 2 && paths[1].starts_with("manifests/sha256:"), "{paths:?}");
    let recipe = recipe(100);
    let packed = index.recipe(recipe.file()).unwrap();
    let bytes = published.registry.blob(packed.digest).unwrap();
    assert_eq!(PackedRecipe::read(&bytes, recipe.file(), recipe.size()).unwrap(), recipe);
    assert_eq!(bytes.len() as u64, packed.size);
    assert_eq!(published.push().await, Delivery::Present);
}

#[tokio::test]
async fn index_is_found_under_a_tag_elsewhere_and_the_missing_list_is_remembered() {
    let published = Published::new();
    assert_eq!(published.find().await, None);
    assert_eq!(published.count(), 2);
    // What other programs have attached stays.
    let signature = json!({ "mediaType": MediaType::OCI_MANIFEST, "digest": Digest::of(b"s"), "size": 1, "artifactType": "a/b" });
    let list = json!({ "schemaVersion": 2, "mediaType": MediaType::OCI_INDEX, "manifests": [signature] });
    let tag = Referrers::fallback_tag(published.model.digest());
    published.registry.add_manifest(&format!("me/tiny:{tag}"), list.to_string().as_bytes());
    assert_eq!(published.push().await, Delivery::Sent);
    let before = published.count();
    assert!(published.find().await.is_some());
    let paths = published.paths(before);
    assert!(paths.len() == 2 && paths[0] == format!("manifests/{tag}"), "{paths:?}");
    let list: Json =
        serde_json::from_slice(&published.registry.manifest(&published.fallback_path()).unwrap()).unwrap();
    let kinds: Vec<_> =
        list["manifests"].as_array().unwrap().iter().map(|entry| &entry["artifactType"]).collect();
    assert_eq!(kinds, ["a/b", TensorIndex::ARTIFACT_TYPE]);
    // A second time nothing is sent and nothing is listed twice.
    assert_eq!(published.push().await, Delivery::Present);
    let again: Json =
        serde_json::from_slice(&published.registry.manifest(&published.fallback_path()).unwrap()).unwrap();
    assert_eq!(again, list);
}

#[tokio::test]
async fn answers_that_are_not_an_index_of_the_model_are_no_index() {
    let published = Published::new();
    let tag = Referrers::fallback_tag(published.model.digest());
    // Some registries answer the tag with the model itself.
    published.registry.add_manifest(&format!("me/tiny:{tag}"), published.model.raw());
    assert_eq!(published.find().await, None);
    assert_eq!(published.push().await, Delivery::Sent);
    assert!(published.find().await.is_some());
    // An index of another model, listed as one of this model.
    let model = Manifest::compose(weights(), vec![weights()]).unwrap();
    let other = NewTensorIndex::new(&model, vec![PackedRecipe::new(&recipe(3)).unwrap()]).unwrap();
    let destination = published.destination();
    published.client.push_tensor_index(&destination, &other).await.unwrap();
    let other_tag = Referrers::fallback_tag(model.digest());
    let list = published.registry.manifest(&format!("/v2/me/tiny/manifests/{other_tag}")).unwrap();
    published.registry.add_manifest(&format!("me/tiny:{tag}"), &list);
    assert_eq!(published.find().await, None);
}

#[tokio::test]
async fn registry_that_fails_has_no_index() {
    for status in [400, 401, 403, 405, 429, 500, 503] {
        let published = Published::new();
        published.push().await;
        published.registry.add_fault("/referrers/", 9, Fault::Status(status));
        published.registry.add_fault("/manifests/sha256", 9, Fault::Status(status));
        assert_eq!(published.find().await, None, "{status}");
    }
}

#[test]
fn packed_recipe_is_short_and_only_read_for_its_file() {
    let recipe = recipe(1000);
    let json = recipe.to_json();
    let packed = PackedRecipe::new(&recipe).unwrap();
    assert!(packed.bytes().len() < json.len() / 3, "{} of {}", packed.bytes().len(), json.len());
    let read = |bytes: &[u8]| PackedRecipe::read(bytes, recipe.file(), recipe.size());
    assert_eq!(read(packed.bytes()).unwrap(), recipe);
    let other = PackedRecipe::read(packed.bytes(), Digest::of(b"x"), recipe.size());
    assert!(matches!(other, Err(PackedRecipeError::File { .. })));
    let other = PackedRecipe::read(packed.bytes(), recipe.file(), 1);
    assert!(matches!(other, Err(PackedRecipeError::File { .. })));
    assert!(matches!(read(b"{}"), Err(PackedRecipeError::Compression(_))));
    let half = &packed.bytes()[..packed.bytes().len() / 2];
    assert!(read(half).is_err());
}

#[test]
fn recipe_that_is_too_long_is_not_unpacked() {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    let zeros = vec![b' '; 64 << 20];
    let packed = compress_to_vec(&*zeros, CompressionLevel::Fastest);
    assert!(packed.len() < 64 << 10, "{}", packed.len());
    let read = PackedRecipe::read(&packed, Digest::of(b"x"), 1);
    assert!(matches!(read, Err(PackedRecipeError::TooLong { .. })));
    // The recipe of a small file with too many tensors is not published.
    assert!(PackedRecipe::new(&recipe(4000)).is_none());
}

#[test]
fn servers_that_take_no_indexes_are_not_asked() {
    let takes = |name: &str| client().destination(&name.parse().unwrap(), false).unwrap().takes_artifacts();
    assert!(!takes("me/tiny") && !takes("registry.ollama.ai/me/tiny"));
    assert!(takes("registry.example/me/tiny") && takes("localhost:5000/me/tiny"));
}
