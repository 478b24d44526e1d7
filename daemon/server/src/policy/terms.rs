//! Licenses and formats of a model, collected from its manifest and its files.

use std::collections::BTreeSet;

use blobd_model::card::LICENSE_KEY;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{FileFormat, ModelHeader};
use blobd_store_format::manifest::Manifest;

use super::license::{OTHER, UNKNOWN, of_expression, of_text};
use super::subject::{Known, Terms};

/// The annotation of a manifest with the license of the whole model.
const LICENSE_ANNOTATION: &str = "org.opencontainers.image.licenses";

/// Collects the [`Terms`] of a model.
#[derive(Debug, Default)]
pub(crate) struct TermsBuilder {
    licenses: BTreeSet<String>,
    formats: BTreeSet<String>,
}

impl TermsBuilder {
    pub(crate) fn add_manifest(&mut self, manifest: &Manifest) {
        let annotation = manifest.annotation(LICENSE_ANNOTATION);
        self.licenses.extend(annotation.iter().flat_map(|text| of_expression(text)));
    }

    pub(crate) fn add_header(&mut self, header: &dyn ModelHeader) {
        self.formats.insert(header.format().name().to_owned());
        let license = header.metadata().find(|(key, _)| *key == LICENSE_KEY.as_bytes());
        let license = license.and_then(|(_, value)| value.as_str().map(of_expression));
        self.licenses.extend(license.into_iter().flatten());
    }

    /// A file without a header that was read. Its type and its name tell the format.
    pub(crate) fn add_file(&mut self, media_type: &MediaType, name: Option<&str>) {
        self.formats.extend(announced(media_type, name).map(str::to_owned));
    }

    /// A license's text; `None` if it is too long to be read.
    pub(crate) fn add_license(&mut self, text: Option<&[u8]>) {
        let text = text.and_then(|text| std::str::from_utf8(text).ok());
        self.licenses.insert(text.map_or_else(|| OTHER.to_owned(), of_text));
    }

    pub(crate) fn finish(self) -> Terms {
        let or = |values: BTreeSet<String>, none: &str| match values.is_empty() {
            true => Known::Are([none.to_owned()].into()),
            false => Known::Are(values),
        };
        Terms { licenses: or(self.licenses, UNKNOWN), formats: or(self.formats, OTHER) }
    }
}

/// The format of weights; `None` if the file is none.
fn announced(media_type: &MediaType, name: Option<&str>) -> Option<&'static str> {
    let is_tensor = media_type.component() == "tensor";
    let ends = |extension: &str| name.is_some_and(|name| name.to_ascii_lowercase().ends_with(extension));
    match FileFormat::announced(media_type, name) {
        _ if is_tensor || ends(".safetensors") => Some("safetensors"),
        _ if ends(".dduf") => Some("dduf"),
        Some(format) => Some(format.name()),
        None if !media_type.holds_tensors() => None,
        None => {
            let named = ["safetensors", "dduf"].into_iter().find(|word| media_type.as_str().contains(word));
            Some(named.unwrap_or(OTHER))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn are(values: &[&str]) -> Known {
        Known::Are(values.iter().map(|value| (*value).to_owned()).collect())
    }

    #[test]
    fn model_that_states_nothing_has_an_unknown_license() {
        let terms = TermsBuilder::default().finish();
        assert_eq!(terms, Terms { licenses: are(&[UNKNOWN]), formats: are(&[OTHER]) });
    }

    #[test]
    fn format_of_a_file_without_a_header_is_that_of_its_type_and_name() {
        for (media_type, name, format) in [
            (MediaType::OLLAMA_MODEL, None, Some("gguf")),
            (MediaType::OLLAMA_MODEL, Some("a.safetensors"), Some("safetensors")),
            ("application/vnd.ollama.image.tensor", Some("blk.0"), Some("safetensors")),
            (MediaType::PACK_SAFETENSORS, None, Some("safetensors")),
            ("application/vnd.docker.ai.dduf", Some("m.dduf"), Some("dduf")),
            ("application/vnd.ollama.image.license", None, None),
        ] {
            assert_eq!(announced(&MediaType::new(media_type), name), format, "{media_type} {name:?}");
        }
    }

    #[test]
    fn licenses_of_all_files_are_collected() {
        let mut builder = TermsBuilder::default();
        builder.add_license(Some(b"MIT License"));
        builder.add_license(Some(b"\xff"));
        builder.add_license(None);
        let json = r#"{"schemaVersion":2,"config":FILE,"layers":[FILE],"annotations":{
            "org.opencontainers.image.licenses":"Apache-2.0 OR (CC-BY-4.0 AND MIT)"}}"#;
        let file = format!(r#"{{"mediaType":"m","digest":"sha256:{}","size":1}}"#, "0".repeat(64));
        let manifest = Manifest::parse(json.replace("FILE", &file).into_bytes()).unwrap();
        builder.add_manifest(&manifest);
        assert_eq!(builder.finish().licenses, are(&["apache-2.0", "cc-by-4.0", "mit", OTHER]));
    }
}
