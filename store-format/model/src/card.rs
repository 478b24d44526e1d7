//! The model card: facts in the header for people, such as author, license and base models.
//!
//! Source: `Keys.General` of gguf-py 0.19.

use serde::Serialize;

use blobd_store_format::gguf::{Header, MetadataValue};

/// The texts of a header's `general.` keys; `None` if a key is missing or not text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelCard {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Who trained it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
    /// The organisation that published it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organization: Option<String>,
    /// Who quantised it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized_by: Option<String>,
    /// One sentence about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The identifier of the license, or its text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    /// The name of a license that has no identifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub license_name: Option<String>,
    /// Where the license can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub license_link: Option<String>,
    /// Its page, or its repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub languages: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The models from which it was made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub base_models: Vec<BaseModel>,
}

/// A model from which another one was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BaseModel {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The organisation that published it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organization: Option<String>,
    /// Its page, or its repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// The key of a license's identifier.
pub const LICENSE_KEY: &str = "general.license";
/// The most base models, languages and tags that are read.
const MAX_ENTRIES: usize = 64;

impl ModelCard {
    pub fn from_header(header: &Header) -> Self {
        let text = |key: &str| text(header, &format!("general.{key}"));
        let count = header.value("general.base_model.count").and_then(|count| count.as_u64()).unwrap_or(0);
        let bases = (0..count.min(MAX_ENTRIES as u64)).map(|number| BaseModel::from_header(header, number));
        Self {
            name: text("name"),
            author: text("author"),
            organization: text("organization"),
            quantized_by: text("quantized_by"),
            description: text("description"),
            license: text("license"),
            license_name: text("license.name"),
            license_link: text("license.link"),
            url: text("url").or_else(|| text("repo_url")).or_else(|| text("source.url")),
            languages: texts(header, "general.languages"),
            tags: texts(header, "general.tags"),
            base_models: bases.filter(|base| *base != BaseModel::default()).collect(),
        }
    }

    /// The license as one text: identifier, name and link.
    pub fn license_text(&self) -> Option<String> {
        let parts = [&self.license, &self.license_name, &self.license_link];
        let parts: Vec<&str> = parts.into_iter().flatten().map(String::as_str).collect();
        (!parts.is_empty()).then(|| parts.join("\n"))
    }
}

impl BaseModel {
    fn from_header(header: &Header, number: u64) -> Self {
        let text = |key: &str| text(header, &format!("general.base_model.{number}.{key}"));
        let url = text("repo_url").or_else(|| text("url"));
        Self { name: text("name"), organization: text("organization"), url }
    }
}

fn text(header: &Header, key: &str) -> Option<String> {
    let value = header.value(key)?;
    value.as_str().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned)
}

fn texts(header: &Header, key: &str) -> Vec<String> {
    let array = header.value(key).and_then(|value| value.as_array());
    let elements = array.iter().flat_map(blobd_store_format::gguf::ArrayRef::iter);
    let texts = elements.filter_map(|element| match element {
        MetadataValue::String(bytes) => std::str::from_utf8(bytes).ok().map(str::to_owned),
        _ => None,
    });
    texts.take(MAX_ENTRIES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use blobd_store_format::gguf::{GgufWriter, Value};

    fn card(keys: &[(&str, Value)]) -> ModelCard {
        let mut writer = GgufWriter::new();
        for (key, value) in keys {
            writer.metadata(*key, value.clone()).unwrap();
        }
        ModelCard::from_header(&Header::parse(&writer.header().unwrap()).unwrap())
    }

    #[test]
    fn facts_are_read_from_their_keys() {
        let card = card(&[
            ("general.name", Value::from("Tiny")),
            ("general.organization", Value::from("ACME")),
            ("general.license", Value::from("other")),
            ("general.license.name", Value::from("acme-1")),
            ("general.license.link", Value::from("https://a/LICENSE")),
            ("general.repo_url", Value::from("https://hf.co/acme/tiny")),
            ("general.languages", Value::strings([b"en".to_vec(), b"\xff".to_vec(), b"de".to_vec()])),
            ("general.base_model.count", Value::from(3_u32)),
            ("general.base_model.0.name", Value::from("Base")),
            ("general.base_model.2.repo_url", Value::from("https://hf.co/b/c")),
        ]);
        assert_eq!((card.name.as_deref(), card.organization.as_deref()), (Some("Tiny"), Some("ACME")));
        assert_eq!(card.license_text().as_deref(), Some("other\nacme-1\nhttps://a/LICENSE"));
        assert_eq!(card.url.as_deref(), Some("https://hf.co/acme/tiny"));
        assert_eq!(card.languages, ["en", "de"]);
        assert_eq!(card.base_models.len(), 2, "number 1 says nothing");
        assert_eq!(card.base_models[0].name.as_deref(), Some("Base"));
    }

    #[test]
    fn wrong_types_empty_texts_and_huge_counts_are_ignored() {
        let card = card(&[
            ("general.name", Value::from(7_u32)),
            ("general.author", Value::from("  ")),
            ("general.tags", Value::from("text")),
            ("general.base_model.count", Value::from(u64::MAX)),
        ]);
        assert_eq!(card, ModelCard::default());
        assert_eq!(card.license_text(), None);
    }
}
