//! Licenses and formats of a model, collected from its manifest and its files. A license is named as by SPDX, or found by
//! the title of its text.

use std::collections::BTreeSet;

use blobd_model::card::LICENSE_KEY;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{FileFormat, ModelHeader};
use blobd_store_format::manifest::Manifest;

use super::subject::{Known, OTHER, Terms};

/// The annotation of a manifest with the license of the whole model.
const LICENSE_ANNOTATION: &str = "org.opencontainers.image.licenses";

/// No license is stated.
const UNKNOWN: &str = "unknown";

/// How much of a text is searched for its title.
const TITLE_BYTES: usize = 400;

/// The beginnings of licenses' texts in lower case, with single spaces, and their SPDX identifiers, or the identifiers
/// of Hugging Face for licenses that SPDX does not list. The first that occurs counts, so more specific ones come
/// first. `docs/USERS.md` has the same table.
const TITLES: [(&str, &str); 21] = [
    ("apache license version 2.0", "apache-2.0"),
    ("apache license, version 2.0", "apache-2.0"),
    ("mit license", "mit"),
    ("permission is hereby granted, free of charge", "mit"),
    ("bsd 3-clause", "bsd-3-clause"),
    ("bsd 2-clause", "bsd-2-clause"),
    ("gnu affero general public license version 3", "agpl-3.0"),
    ("gnu general public license version 3", "gpl-3.0"),
    ("attribution-noncommercial-sharealike 4.0", "cc-by-nc-sa-4.0"),
    ("attribution-noncommercial-noderivatives 4.0", "cc-by-nc-nd-4.0"),
    ("attribution-noncommercial 4.0", "cc-by-nc-4.0"),
    ("attribution-sharealike 4.0", "cc-by-sa-4.0"),
    ("attribution 4.0", "cc-by-4.0"),
    ("cc0 1.0 universal", "cc0-1.0"),
    ("llama 4 community license", "llama4"),
    ("llama 3.3 community license", "llama3.3"),
    ("llama 3.2 community license", "llama3.2"),
    ("llama 3.1 community license", "llama3.1"),
    ("meta llama 3 community license", "llama3"),
    ("llama 2 community license", "llama2"),
    ("gemma terms of use", "gemma"),
];

#[derive(Clone, Debug, Default)]
pub(crate) struct TermsBuilder {
    licenses: BTreeSet<String>,
    formats: BTreeSet<String>,
}

impl TermsBuilder {
    pub(crate) fn add_manifest(&mut self, manifest: &Manifest) {
        let annotation = manifest.annotation(LICENSE_ANNOTATION);
        self.licenses.extend(annotation.iter().flat_map(|text| licenses_of_expression(text)));
    }

    pub(crate) fn add_header(&mut self, header: &dyn ModelHeader) {
        self.formats.insert(header.format().name().to_owned());
        let license = header.metadata().find(|(key, _)| *key == LICENSE_KEY.as_bytes());
        let license = license.and_then(|(_, value)| value.as_str().map(licenses_of_expression));
        self.licenses.extend(license.into_iter().flatten());
    }

    /// A file without a header that was read. Its type and its name tell the format.
    pub(crate) fn add_file(&mut self, media_type: &MediaType, name: Option<&str>) {
        self.formats.extend(announced(media_type, name).map(str::to_owned));
    }

    /// A license's text; `None` if it is too long to be read.
    pub(crate) fn add_license(&mut self, text: Option<&[u8]>) {
        let text = text.and_then(|text| std::str::from_utf8(text).ok());
        self.licenses.insert(text.map_or_else(|| OTHER.to_owned(), license_of_text));
    }

    /// What is known before all files have been added. What it decides is final: more licenses and formats never allow a
    /// model that these deny.
    pub(crate) fn so_far(&self) -> Terms {
        let known = |values: &BTreeSet<String>| match values.is_empty() {
            true => Known::NotYet,
            false => Known::Are(values.clone()),
        };
        Terms { licenses: known(&self.licenses), formats: known(&self.formats) }
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
    const DDUF: &str = "dduf";
    let is_tensor = media_type.component() == "tensor";
    let safetensors = FileFormat::SAFETENSORS;
    match FileFormat::announced(media_type, name) {
        _ if is_tensor || name.is_some_and(|name| safetensors.stem_of(name).is_some()) => {
            Some(safetensors.name())
        }
        _ if name.is_some_and(|name| name.to_ascii_lowercase().ends_with(".dduf")) => Some(DDUF),
        Some(format) => Some(format.name()),
        None if !media_type.holds_tensors() => None,
        None => Some(if media_type.as_str().contains(DDUF) { DDUF } else { OTHER }),
    }
}

/// The identifier of a license text: the text itself if it is one, as in `general.license`, else by its title.
fn license_of_text(text: &str) -> String {
    let trimmed = text.trim();
    if let Some(identifier) = spdx(trimmed) {
        return identifier;
    }
    let start: String = trimmed.chars().take(TITLE_BYTES).collect();
    let start = start.split_whitespace().collect::<Vec<_>>().join(" ").to_ascii_lowercase();
    let known = TITLES.iter().find(|(title, _)| start.contains(title));
    known.map_or(OTHER, |(_, identifier)| identifier).to_owned()
}

/// The identifiers in an SPDX expression such as `MIT OR (Apache-2.0 WITH LLVM-exception)`, without exceptions.
fn licenses_of_expression(text: &str) -> Vec<String> {
    let words = text.split(|c: char| c.is_whitespace() || "()".contains(c)).filter(|word| !word.is_empty());
    let (mut identifiers, mut is_exception) = (Vec::new(), false);
    for word in words {
        match word {
            "AND" | "OR" => {}
            "WITH" => is_exception = true,
            _ if std::mem::take(&mut is_exception) => {}
            word => identifiers.push(spdx(word).unwrap_or_else(|| OTHER.to_owned())),
        }
    }
    identifiers
}

/// The text in lower case if it can be an identifier: one word of letters, digits, `.`, `-` and `+`.
fn spdx(text: &str) -> Option<String> {
    const MAX_BYTES: usize = 64;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-+".contains(c);
    let is_one = !text.is_empty() && text.len() <= MAX_BYTES && text.chars().all(is_allowed);
    is_one.then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_an_identifier_or_begins_with_a_known_title() {
        for (text, identifier) in [
            ("MIT", "mit"),
            ("  Apache-2.0\n", "apache-2.0"),
            (
                "                                 Apache License\n                           Version 2.0, January 2004",
                "apache-2.0",
            ),
            ("MIT License\n\nCopyright (c) 2024", "mit"),
            ("Copyright (c) 2024 X\n\nPermission is hereby granted, free of charge, to any person", "mit"),
            ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nLlama 3.1 Version", "llama3.1"),
            ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
            ("Attribution-NonCommercial 4.0 International", "cc-by-nc-4.0"),
            ("The weights of this model are pseudo-random numbers.", OTHER),
            ("", OTHER),
        ] {
            assert_eq!(license_of_text(text), identifier, "{text}");
        }
        assert_eq!(spdx("two words"), None);
    }

    #[test]
    fn expression_has_the_identifiers_of_its_licenses() {
        assert_eq!(licenses_of_expression("MIT"), ["mit"]);
        assert_eq!(licenses_of_expression("MIT OR (Apache-2.0 WITH LLVM-exception)"), ["mit", "apache-2.0"]);
        assert_eq!(licenses_of_expression(" "), [""; 0]);
        assert_eq!(licenses_of_expression("see/LICENSE"), [OTHER]);
    }

    #[test]
    fn every_title_and_its_identifier_are_documented() {
        let documented = include_str!("../../../../docs/USERS.md").to_lowercase();
        for (title, identifier) in TITLES {
            assert!(documented.contains(&format!("| {title} | `{identifier}` |")), "{title}");
        }
    }

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
