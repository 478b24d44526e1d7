//! Fetches the manifest that a reference names; the tags of a repository, for the error about a wrong one.

use blobd_store_format::descriptor::Archive;
use blobd_store_format::digest::Digest;
use blobd_store_format::index::{IndexError, ManifestIndex};
use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::HubFile;
use hyper::header::{ACCEPT, HeaderValue};
use serde::Deserialize;

use super::RegistryClient;
use super::error::{RegistryError, Result};
use super::mirrors::first_of;
use super::origin::Registry;
use super::request::{Response, Target};

impl RegistryClient {
    /// The manifest that `reference` names, or the only model in the image index that it names. Its digest is
    /// checked if the reference has one.
    pub async fn manifest(&self, reference: &Reference) -> Result<Manifest> {
        let servers = &self.shared.mirrors.for_model(reference)?;
        let ask = |registry| self.manifest_at(registry, reference);
        self.retried(|| first_of(servers, reference.host(), ask)).await
    }

    async fn manifest_at(&self, registry: &Registry, reference: &Reference) -> Result<Manifest> {
        match self.manifest_of(registry, reference).await {
            Err(error @ RegistryError::NotFound { .. }) => {
                Err(self.with_known_tags(registry, reference, error).await)
            }
            outcome => outcome,
        }
    }

    async fn manifest_of(&self, registry: &Registry, reference: &Reference) -> Result<Manifest> {
        let response = match reference.digest() {
            None => self.get_manifest(registry, reference, reference.tag()).await?,
            Some(pin) => match self.get_manifest(registry, reference, &pin.to_string()).await {
                // Ollama's registry may not serve manifests by digest, since its own client never requests one. The tag
                // works too while it still points to the pinned manifest.
                Err(RegistryError::NotFound { .. }) => {
                    self.get_manifest(registry, reference, reference.tag()).await?
                }
                response => response?,
            },
        };
        let raw = self.manifest_bytes(response, reference.digest()).await?;
        let malformed = |error| RegistryError::unusable_model(reference, &error);
        let manifest = match Manifest::parse(raw.clone()) {
            Err(ManifestError::Index) => self.indexed_manifest(registry, reference, &raw).await?,
            parsed => parsed.map_err(malformed)?,
        };
        refuse_unusable(reference, &manifest)?;
        Ok(manifest)
    }

    /// The only model of an image index. A nested index is refused, like anything else that is not a manifest.
    async fn indexed_manifest(
        &self,
        registry: &Registry,
        reference: &Reference,
        raw: &[u8],
    ) -> Result<Manifest> {
        let malformed = |error: IndexError| RegistryError::unusable_model(reference, &error);
        let index = ManifestIndex::parse(raw).map_err(malformed)?;
        let chosen = index.model().map_err(malformed)?.digest;
        let response = match self.get_manifest(registry, reference, &chosen.to_string()).await {
            Err(RegistryError::NotFound { host, reason, .. }) => {
                return Err(RegistryError::BlobMissing { digest: chosen, host, reason });
            }
            response => response?,
        };
        let raw = self.manifest_bytes(response, Some(chosen)).await?;
        Manifest::parse(raw).map_err(|error| RegistryError::unusable_model(reference, &error))
    }

    /// Reads the body and checks it against the announced and the expected digest.
    async fn manifest_bytes(&self, response: Response, expected: Option<Digest>) -> Result<Vec<u8>> {
        let (host, announced) = (response.host(), announced_digest(&response));
        let raw = response.document("manifest", Manifest::MAX_BYTES, self.shared.limits.document).await?;
        if raw.trim_ascii_start().starts_with(b"<") {
            return Err(RegistryError::web_page(host));
        }
        let found = Digest::of(&raw);
        match announced.into_iter().chain(expected).find(|expected| *expected != found) {
            Some(expected) => Err(RegistryError::unusable(
                host,
                format!("manifest: wrong digest: expected {expected}, found {found}"),
            )),
            None => Ok(raw),
        }
    }

    async fn get_manifest(&self, registry: &Registry, reference: &Reference, name: &str) -> Result<Response> {
        let path = format!("manifests/{name}");
        let target = Target::new(registry, reference, &path)?;
        self.shared.get(&target.with(ACCEPT, HeaderValue::from_static(MANIFEST_TYPES))).await
    }
}

/// Refuses models that could be stored but not opened, before anything is downloaded.
pub(super) fn refuse_unusable(reference: &Reference, manifest: &Manifest) -> Result<()> {
    for (file, name) in manifest.files().zip(manifest.names()) {
        if file.media_type.archive_of_weights() != Some(Archive::Unknown) {
            continue;
        }
        let name = name.map_or_else(|| file.digest.short(), str::to_owned);
        let what = format!(
            "weights {name}: wrong type of archive: expected one without compression, or with gzip or zstd, found {}; pull \
             another variant, or unpack them and `blobd import` the file",
            file.media_type
        );
        return Err(RegistryError::unusable_model(reference, &what));
    }
    let layers = manifest.layers();
    if !layers.is_empty() && layers.iter().all(|layer| layer.media_type.is_container_layer()) {
        return Err(RegistryError::unusable_model(reference, &container_image(reference, manifest)));
    }
    Ok(())
}

/// What a container image is, and what can be pulled in its place.
fn container_image(reference: &Reference, manifest: &Manifest) -> String {
    match manifest.annotation(Manifest::MODEL_ANNOTATION).and_then(|text| text.parse::<Digest>().ok()) {
        None => "is a container image, not a model".to_owned(),
        Some(model) => format!(
            "is a container image with the files of model {}, made by `blobd push --as image` for programs that mount images; \
             pull the model itself, under the name that it was pushed with without `--as image`, or, if that is in the same \
             repository, {}/{}@{model}",
            model.short(),
            reference.host(),
            reference.repository(),
        ),
    }
}

/// Accepted media types: manifests and image indexes of Docker and OCI. Some registries serve only one of the two.
pub(super) const MANIFEST_TYPES: &str = "application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// The digest in the response's header, if it is well-formed. Ollama's registry writes its own header without
/// `sha256:`.
pub(super) fn announced_digest(response: &Response) -> Option<Digest> {
    let claim = |name: &str| {
        let text = response.headers().get(name)?.to_str().ok()?;
        text.parse().or_else(|_| Digest::from_hex(text)).ok()
    };
    claim("docker-content-digest").or_else(|| claim("ollama-content-digest"))
}

impl RegistryClient {
    /// Adds existing tags to a "not found" error: the nearest ones, if the registry lists tags. Ollama's registry does
    /// not, so it is asked for `latest`, which most of its models have.
    async fn with_known_tags(
        &self,
        registry: &Registry,
        reference: &Reference,
        error: RegistryError,
    ) -> RegistryError {
        let RegistryError::NotFound { subject, host, reason } = error else { return error };
        match self.tags(registry, reference).await {
            Ok(tags) if !tags.is_empty() => {
                let nearest = nearest(reference.tag(), &tags);
                RegistryError::NoSuchName { subject, host, reason, nearest }
            }
            _ => {
                let latest = self.latest(registry, reference).await;
                RegistryError::NoSuchTag {
                    subject,
                    host,
                    reason,
                    latest: latest.map(String::into_boxed_str),
                    page: tags_page(reference).map(String::into_boxed_str),
                    hub: hub_name(reference).map(String::into_boxed_str),
                }
            }
        }
    }

    /// The name of the model with the tag `latest`, if the registry has one.
    async fn latest(&self, registry: &Registry, reference: &Reference) -> Option<String> {
        if reference.tag() == Reference::DEFAULT_TAG {
            return None;
        }
        let response = self.get_manifest(registry, reference, Reference::DEFAULT_TAG).await.ok()?;
        if response.web_page().is_some() {
            return None;
        }
        reference.with_tag(Reference::DEFAULT_TAG).ok().map(|latest| latest.short())
    }

    async fn tags(&self, registry: &Registry, reference: &Reference) -> Result<Vec<String>> {
        #[derive(Deserialize)]
        struct TagList {
            #[serde(default)]
            tags: Option<Vec<String>>,
        }
        let path = format!("tags/list?n={MAX_TAGS}");
        let target = Target::new(registry, reference, &path)?;
        let response = self.shared.get(&target).await?;
        let document = response.document("list of tags", MAX_LIST_BYTES, self.shared.limits.document).await?;
        let list: Option<TagList> = serde_json::from_slice(&document).ok();
        Ok(list.and_then(|list| list.tags).unwrap_or_default())
    }
}

/// The web page that lists a model's tags, for registries with such a page but no list in their API.
fn tags_page(reference: &Reference) -> Option<String> {
    let is_ollama = reference.host() == Reference::DEFAULT_HOST;
    is_ollama.then(|| format!("https://ollama.com/{}/tags", reference.repository()))
}

/// The name at Hugging Face for a name without a host, since its pages show names like that. A name without a namespace
/// has none, unless a repository there is really called so.
fn hub_name(reference: &Reference) -> Option<String> {
    let is_ollama = reference.host() == Reference::DEFAULT_HOST;
    let tag = if reference.omits_tag() { String::new() } else { format!(":{}", reference.tag()) };
    let has_hub_form = reference.model().to_ascii_lowercase().ends_with("-gguf");
    let user = match reference.namespace() {
        Reference::DEFAULT_NAMESPACE if has_hub_form => "USER",
        Reference::DEFAULT_NAMESPACE => return None,
        user => user,
    };
    is_ollama.then(|| format!("{}/{user}/{}{tag}", HubFile::HOST, reference.model()))
}

const MAX_TAGS: usize = 1000;
const MAX_LIST_BYTES: u64 = 1 << 20;
const MAX_NEAREST: usize = 5;
/// OCI's limit for a tag.
const MAX_TAG_CHARS: usize = 128;

/// The most similar tags by edit distance, ignoring case, the most similar first.
pub(super) fn nearest(wanted: &str, tags: &[String]) -> String {
    let is_printable =
        |tag: &&String| (1..=MAX_TAG_CHARS).contains(&tag.len()) && tag.chars().all(|c| c.is_ascii_graphic());
    let mut tags: Vec<&String> = tags.iter().filter(is_printable).take(MAX_TAGS).collect();
    let wanted: String = wanted.chars().take(MAX_TAG_CHARS).collect::<String>().to_ascii_lowercase();
    let edits = |tag: &str| strsim::levenshtein(&wanted, &tag.to_ascii_lowercase());
    tags.sort_by_cached_key(|tag| (edits(tag), (*tag).clone()));
    tags.dedup();
    let more = tags.len().saturating_sub(MAX_NEAREST);
    let named: Vec<&str> = tags.iter().take(MAX_NEAREST).map(|tag| tag.as_str()).collect();
    match more {
        0 => named.join(", "),
        _ => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_with_tags_is_that_of_the_model_at_ollama() {
        let page = |name: &str| tags_page(&name.parse().unwrap());
        assert_eq!(page("llama3:9b").as_deref(), Some("https://ollama.com/library/llama3/tags"));
        assert_eq!(page("me/mine:x").as_deref(), Some("https://ollama.com/me/mine/tags"));
        assert_eq!(page("localhost:5000/library/llama3:9b"), None);
    }

    #[test]
    fn name_without_a_host_may_be_one_of_hugging_face() {
        let hub = |name: &str| hub_name(&name.parse().unwrap());
        assert_eq!(hub("Qwen/Qwen3-0.6B-GGUF").as_deref(), Some("hf.co/Qwen/Qwen3-0.6B-GGUF"));
        assert_eq!(hub("Qwen/Qwen3-0.6B-GGUF:Q4_K_M").as_deref(), Some("hf.co/Qwen/Qwen3-0.6B-GGUF:Q4_K_M"));
        assert_eq!(hub("me/mine").as_deref(), Some("hf.co/me/mine"));
        assert_eq!(hub("Qwen3-0.6B-GGUF:Q8_0").as_deref(), Some("hf.co/USER/Qwen3-0.6B-GGUF:Q8_0"));
        assert_eq!(hub("llama3:9b"), None);
        assert_eq!(hub("localhost:5000/me/mine"), None);
    }

    #[test]
    fn nearest_tags_come_first() {
        let tags = ["latest", "8b", "Q4_K_S", "Q4_K_M", "Q8_0", "70b", "bad\ntag"].map(str::to_owned);
        assert!(nearest("q4_k_l", &tags).starts_with("Q4_K_M, Q4_K_S, "), "{}", nearest("q4_k_l", &tags));
        assert!(nearest("x", &tags).ends_with("and 1 more"));
        assert_eq!(nearest("x", &tags[1..2]), "8b");
    }
}
