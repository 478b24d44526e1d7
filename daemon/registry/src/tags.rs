//! The tags of a repository, for the error about a wrong tag.

use blobd_store_format::reference::Reference;
use serde::Deserialize;

use super::RegistryClient;
use super::error::RegistryError;
use super::origin::Registry;
use super::request::Target;

impl RegistryClient {
    /// Adds the nearest tags to a "not found" error, if the registry lists tags. Ollama's does not.
    pub(super) async fn with_known_tags(
        &self,
        registry: &Registry,
        reference: &Reference,
        error: RegistryError,
    ) -> RegistryError {
        match (error, self.tags(registry, reference).await) {
            (RegistryError::NotFound { subject, host }, Ok(tags)) if !tags.is_empty() => {
                let nearest = nearest(reference.tag(), &tags);
                RegistryError::NoSuchName { subject, host, nearest }
            }
            (error, _) => error,
        }
    }

    async fn tags(&self, registry: &Registry, reference: &Reference) -> Result<Vec<String>, RegistryError> {
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
    fn nearest_tags_come_first() {
        let tags = ["latest", "8b", "Q4_K_S", "Q4_K_M", "Q8_0", "70b", "bad\ntag"].map(str::to_owned);
        assert!(nearest("q4_k_l", &tags).starts_with("Q4_K_M, Q4_K_S, "), "{}", nearest("q4_k_l", &tags));
        assert!(nearest("x", &tags).ends_with("and 1 more"));
        assert_eq!(nearest("x", &tags[1..2]), "8b");
    }
}
