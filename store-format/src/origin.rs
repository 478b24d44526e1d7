//! What the record of a model's origin says.
//!
//! The forms are those of `docs/STORE-FORMAT.md`. A source has no space, so no other form can be taken for one, and
//! what a client calls a file it imports follows `import `, whatever it is.

use std::borrow::Cow;

use crate::digest::Digest;
use crate::reference::Reference;
use crate::source::{HubFile, PullSource, PulledSource};

const IMPORT: &str = "import ";
const URL: &str = "url ";
const EDIT: &str = "edit ";
const COPY: &str = "copy ";
/// Between the source of a copy and the program that has it. A source has no space.
const IN: &str = " in ";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file with this name. Earlier versions recorded a URL with a query in this form.
    Import(String),
    /// A URL with a query, which is not recorded.
    Url(PullSource),
    /// A file or a store of another program, which says that it was pulled from this source. The source may not have it:
    /// programs give such names to models that were made on this machine, too.
    Copy(PullSource),
    /// A stored model with other metadata: its name then, and its manifest, which earlier versions did not record.
    Edit { name: Reference, manifest: Option<Digest> },
    /// A source that can be pulled again.
    Source(PullSource),
}

impl Origin {
    /// Parses a record. `None` if the text has none of the known forms.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(file) = text.strip_prefix(IMPORT) {
            return Some(Self::Import(file.to_owned()));
        }
        if let Some(url) = text.strip_prefix(URL) {
            return url.parse().ok().map(Self::Url);
        }
        if let Some(copied) = text.strip_prefix(COPY) {
            let (source, _program) = copied.split_once(IN).unwrap_or((copied, ""));
            return source.parse().ok().map(Self::Copy);
        }
        match text.strip_prefix(EDIT) {
            Some(edited) => {
                let (name, manifest) = match edited.split_once('@') {
                    Some((name, manifest)) => (name, Some(manifest.parse().ok()?)),
                    None => (edited, None),
                };
                Some(Self::Edit { name: name.parse().ok()?, manifest })
            }
            // A repair finds components by their digests, whatever was chosen.
            None => text.parse().ok().map(|pulled: PulledSource| Self::Source(pulled.source)),
        }
    }
}

impl Origin {
    /// The file of a repository at Hugging Face that the model came from, if it came from one.
    ///
    /// ```
    /// use blobd_store_format::origin::Origin;
    ///
    /// let origin = Origin::parse("https://huggingface.co/me/tiny/resolve/main/tiny-Q8_0.gguf").unwrap();
    /// assert_eq!(origin.hub_file().unwrap().path(), "tiny-Q8_0.gguf");
    /// assert!(Origin::parse("hf.co/me/tiny:Q8_0").unwrap().hub_file().is_none());
    /// ```
    pub const fn hub_file(&self) -> Option<&HubFile> {
        match self {
            Self::Copy(PullSource::Hub(file)) | Self::Source(PullSource::Hub(file)) => Some(file),
            _ => None,
        }
    }

    /// The name of the one file that the model came from, if it came from one.
    pub fn file_name(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Import(file) => Some(Cow::Borrowed(file)),
            Self::Url(source) | Self::Source(source) | Self::Copy(source) => source.file_name(),
            Self::Edit { .. } => None,
        }
    }
}

/// The record of a file that was imported.
pub fn import_record(file_name: &str) -> String {
    format!("{IMPORT}{file_name}")
}

/// The record of a model that another program says it has pulled from `source`. Only the same program's next version may
/// replace it unasked, so the record says which one that is; records of programs that are not known do not.
pub fn copy_record(source: &PullSource, program: Option<&str>) -> String {
    let program: String = program.into_iter().flat_map(str::chars).filter(|c| is_of_key(*c)).collect();
    match program.as_str() {
        "" => format!("{COPY}{source}"),
        program => format!("{COPY}{source}{IN}{program}"),
    }
}

const fn is_of_key(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-')
}

/// The program that has the model, by the record of a copy.
pub fn program_of_copy(origin: &str) -> Option<&str> {
    origin.strip_prefix(COPY)?.split_once(IN).map(|(_source, program)| program)
}

/// The record of a source that cannot be fetched again.
pub fn expiring_record(source: &PullSource) -> String {
    format!("{URL}{source}")
}

/// The record of a stored model with other metadata.
pub fn edit_record(name: &Reference, manifest: Digest) -> String {
    format!("{EDIT}{}@{manifest}", name.short())
}

/// An origin as a table shows it: without the digest of an edited model, which takes too much space.
pub fn shown(origin: &str) -> &str {
    match origin.split_once('@') {
        Some((edited, _digest)) if edited.starts_with(EDIT) => edited,
        _ => origin,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_is_read() {
        let (name, manifest): (Reference, _) = ("mine:8b".parse().unwrap(), Digest::of(b"m"));
        let edit = edit_record(&name, manifest);
        let read = Origin::Edit { name: name.clone(), manifest: Some(manifest) };
        assert_eq!(Origin::parse(&edit), Some(read));
        assert_eq!(shown(&edit), "edit mine:8b");
        assert_eq!(Origin::parse("edit mine:8b"), Some(Origin::Edit { name, manifest: None }));
        let url: PullSource = "https://e.com/a/x.gguf?token=secret".parse().unwrap();
        assert_eq!(expiring_record(&url), "url https://e.com/a/x.gguf");
        let without: PullSource = "https://e.com/a/x.gguf".parse().unwrap();
        assert_eq!(Origin::parse(&expiring_record(&url)), Some(Origin::Url(without.clone())));
        assert_eq!(Origin::parse("https://e.com/a/x.gguf"), Some(Origin::Source(without)));
        let hub: PullSource = "hf.co/me/x:Q4_K_M".parse().unwrap();
        assert_eq!(Origin::parse("hf.co/me/x:Q4_K_M --no-projector"), Some(Origin::Source(hub.clone())));
        assert_eq!(copy_record(&hub, Some("llama.cpp\n ")), "copy hf.co/me/x:Q4_K_M in llama.cpp");
        for program in [None, Some(""), Some("ollama")] {
            let record = copy_record(&hub, program);
            assert_eq!(Origin::parse(&record), Some(Origin::Copy(hub.clone())));
            assert_eq!(program_of_copy(&record), program.filter(|program| !program.is_empty()));
        }
        assert_eq!(Origin::parse("what is this"), None);
        assert_eq!(shown("llama3:8b@sha256:0"), "llama3:8b@sha256:0");
    }

    #[test]
    fn no_file_name_is_taken_for_a_source() {
        for file in ["https://ollama.com/acme/x/blobs/..", "url https://e.com/a/x.gguf", "edit mine", ""] {
            assert_eq!(Origin::parse(&import_record(file)), Some(Origin::Import(file.to_owned())));
        }
    }
}
