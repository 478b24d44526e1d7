//! The syntax of references: which texts are parts of a name, and how a text is split into them.

use std::str::FromStr;

use super::{Reference, Scheme, TagOmitted};
use crate::digest::DigestError;
use crate::host;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    #[error(
        "reference: {part} {found:?}: expected 1 to {max_length} letters, digits or {extra:?}, \
         the first a letter, a digit or '_'"
    )]
    Part { part: &'static str, found: String, max_length: usize, extra: &'static str },
    #[error("reference: path of {length} bytes: expected at most {MAX_REPOSITORY_LENGTH}")]
    Repository { length: usize },
    #[error("reference: scheme {found:?}: expected http or https")]
    Scheme { found: String },
    #[error("reference: {found:?} after a scheme: expected HOST/PATH/MODEL")]
    SchemeWithoutHost { found: String },
    #[error("reference: {0}")]
    Digest(#[from] DigestError),
    #[error("reference: {length} bytes: expected at most {MAX_LENGTH}")]
    TooLong { length: usize },
}

/// The syntax of one part of a name. The first character cannot be `.`, so that no part is `..` and no
/// path leads out of `manifests/`.
struct PartRule {
    part: &'static str,
    extra: &'static str,
    max_length: usize,
}

impl PartRule {
    fn check(&self, text: &str) -> Result<(), ReferenceError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || self.extra.contains(c);
        let first = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        if first && text.len() <= self.max_length && text.chars().all(allowed) {
            return Ok(());
        }
        let found = text.chars().take(100).collect();
        Err(ReferenceError::Part { part: self.part, found, max_length: self.max_length, extra: self.extra })
    }
}

/// The longest repository, `namespace/model`. OCI's registries allow 255 bytes together with the host, and a file
/// name has at most as many: the namespace is one in `manifests/`.
const MAX_REPOSITORY_LENGTH: usize = 255;
/// Ollama allows 350 bytes, but a file name ends at 255 and a host name at 253.
const HOST: PartRule = PartRule { part: "host", extra: "_-.:", max_length: 253 };
/// The parts of a repository. OCI's are in lower case; Ollama and Hugging Face have capital letters too.
const NAMESPACE: PartRule = PartRule { part: "namespace", extra: "_-.", max_length: MAX_REPOSITORY_LENGTH };
const MODEL: PartRule = PartRule { part: "model", extra: "_-.", max_length: MAX_REPOSITORY_LENGTH };
const TAG: PartRule = PartRule { part: "tag", extra: "_-.", max_length: 128 };
/// The sum of all parts at their longest, with scheme, digest and separators.
const MAX_LENGTH: usize = 8 + 253 + 1 + MAX_REPOSITORY_LENGTH + 1 + 128 + 72;

pub(super) fn check_parts(host: &str, namespace: &str, model: &str, tag: &str) -> Result<(), ReferenceError> {
    if !host::is_bracketed_address(host) {
        HOST.check(host)?;
    }
    namespace.split('/').try_for_each(|part| NAMESPACE.check(part))?;
    MODEL.check(model)?;
    let length = namespace.len().saturating_add(1).saturating_add(model.len());
    if length > MAX_REPOSITORY_LENGTH {
        return Err(ReferenceError::Repository { length });
    }
    check_tag(tag)
}

pub(super) fn check_tag(tag: &str) -> Result<(), ReferenceError> {
    TAG.check(tag)
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        if text.len() > MAX_LENGTH {
            return Err(ReferenceError::TooLong { length: text.len() });
        }
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest.parse()?)),
            None => (text, None),
        };
        let (scheme, name) = split_scheme(name)?;
        let (path, tag) = match name.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, tag),
            _ => (name, ""),
        };
        let tag_omitted = TagOmitted(path.len() == name.len());
        let tag = if tag_omitted.0 { Self::DEFAULT_TAG } else { tag };
        let (host, namespace, model) = split_path(path, scheme.is_some())?;
        let parsed = Self::from_parts(host, namespace, model, tag)?;
        Ok(Self { scheme: scheme.unwrap_or(parsed.scheme), digest, tag_omitted, ..parsed })
    }
}

/// Splits `[host/][path/…/]model` and fills in what is omitted. The first of three or more parts is a host, and so is
/// the first of two after a scheme or if it looks like one.
fn split_path(path: &str, has_scheme: bool) -> Result<(&str, &str, &str), ReferenceError> {
    let Some((first, rest)) = path.split_once('/') else {
        return match has_scheme {
            true => Err(ReferenceError::SchemeWithoutHost { found: path.to_owned() }),
            false => Ok((Reference::DEFAULT_HOST, Reference::DEFAULT_NAMESPACE, path)),
        };
    };
    if let Some((namespace, model)) = rest.rsplit_once('/') {
        return Ok((host::canonical(first), namespace, model));
    }
    if !has_scheme && !host::is_evident(first) {
        return Ok((Reference::DEFAULT_HOST, first, rest));
    }
    Ok((host::canonical(first), host::default_namespace(first), rest))
}

fn split_scheme(name: &str) -> Result<(Option<Scheme>, &str), ReferenceError> {
    match name.split_once("://") {
        None => Ok((None, name)),
        Some(("https", rest)) => Ok((Some(Scheme::Https), rest)),
        Some(("http", rest)) => Ok((Some(Scheme::Http), rest)),
        Some((scheme, _)) => Err(ReferenceError::Scheme { found: scheme.to_owned() }),
    }
}
