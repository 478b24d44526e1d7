//! References: the names of models.
//!
//! The form is `[scheme://][host/][path/…/]model[:tag]`, and an optional `@sha256:…` that pins the manifest. It is
//! OCI's, and also allows what Ollama and Hugging Face allow. The last `:` after the last `/` splits off the tag, the
//! last part is the model, and the parts between it and the host are the namespace. The first of three or more parts
//! is a host, so that `a/b/c` means the same everywhere; of two, if it has a dot, a colon or a scheme.
//! A text with a host may omit the namespace: `docker.io/smollm2` is `docker.io/ai/smollm2`, and
//! `localhost:5000/m` is the repository `m`. A parsed reference has the [canonical](host::canonical) host.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::RangeInclusive;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::digest::Digest;
use crate::host;

mod syntax;

pub use self::syntax::ReferenceError;

/// A model's full name: host, namespace, model, tag, and the scheme for its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    host: String,
    namespace: String,
    model: String,
    tag: String,
    scheme: Scheme,
    digest: Option<Digest>,
    tag_omitted: TagOmitted,
}

/// Whether the tag was left out and is the default. Not part of the name: references that differ only in this are
/// equal.
#[derive(Clone, Copy, Debug, Default)]
struct TagOmitted(bool);

impl PartialEq for TagOmitted {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for TagOmitted {}

impl Hash for TagOmitted {
    fn hash<H: Hasher>(&self, _state: &mut H) {}
}

impl PartialOrd for TagOmitted {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TagOmitted {
    fn cmp(&self, _other: &Self) -> Ordering {
        Ordering::Equal
    }
}

/// The scheme of a registry's URLs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// Over TLS: the default.
    #[default]
    Https,
    /// Without TLS: when the user writes `http://`, and for this machine.
    Http,
}

impl Scheme {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }

    /// The port of a URL without one.
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }

    /// The scheme of a registry that is named without one.
    pub fn default_of(host: &str) -> Self {
        if host::is_loopback(host) { Self::Http } else { Self::Https }
    }
}

impl Reference {
    pub const DEFAULT_HOST: &str = "registry.ollama.ai";
    pub const DEFAULT_NAMESPACE: &str = "library";
    pub const DEFAULT_TAG: &str = "latest";

    /// Makes a reference from four parts, each checked. The host is kept as it is. The namespace may have several
    /// parts with `/` between them.
    pub fn from_parts(host: &str, namespace: &str, model: &str, tag: &str) -> Result<Self, ReferenceError> {
        syntax::check_parts(host, namespace, model, tag)?;
        Ok(Self {
            host: host.to_owned(),
            namespace: namespace.to_owned(),
            model: model.to_owned(),
            tag: tag.to_owned(),
            scheme: Scheme::default_of(host),
            digest: None,
            tag_omitted: TagOmitted(false),
        })
    }

    /// The registry's host, with its port if it has one.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The namespace: a user or organisation, or several parts with `/` between them. [`host::NO_NAMESPACE`] if the
    /// repository has none.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name of the repository at its registry: `namespace/model`.
    pub fn repository(&self) -> String {
        match self.namespace.as_str() {
            host::NO_NAMESPACE => self.model.clone(),
            namespace => format!("{namespace}/{}", self.model),
        }
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The manifest that the name is pinned to.
    pub const fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The same model under another tag.
    pub fn with_tag(&self, tag: &str) -> Result<Self, ReferenceError> {
        syntax::check_tag(tag)?;
        Ok(Self { tag: tag.to_owned(), tag_omitted: TagOmitted(false), ..self.clone() })
    }

    /// Whether both name the same model. Compares the four parts without case, like Ollama, and the names of
    /// a service as one; ignores scheme and digest.
    pub fn same_model(&self, other: &Self) -> bool {
        self.parts().iter().zip(other.parts()).all(|(a, b)| a.eq_ignore_ascii_case(b))
    }

    /// The same text for all references to one model, as [`Self::same_model`] compares them.
    pub fn canonical(&self) -> String {
        let [host, namespace, model, tag] = self.parts();
        format!("{host}/{namespace}/{model}:{tag}").to_ascii_lowercase()
    }

    /// Whether both are tags of the same model, such as other quantizations.
    pub fn is_sibling_of(&self, other: &Self) -> bool {
        // The tag is the last part.
        self.parts().iter().zip(other.parts()).take(3).all(|(a, b)| a.eq_ignore_ascii_case(b))
    }

    /// The shortest text that parses to this host, namespace, model and tag. The tag is always
    /// included; scheme and digest are not.
    pub fn short(&self) -> String {
        let Self { host, namespace, model, tag, .. } = self;
        let may_omit_namespace =
            host::is_evident(host) && host::default_namespace(host) == host::NO_NAMESPACE;
        match (self.omits_host(), namespace.as_str()) {
            (true, Self::DEFAULT_NAMESPACE) => format!("{model}:{tag}"),
            (true, namespace) => format!("{namespace}/{model}:{tag}"),
            (false, host::NO_NAMESPACE) if may_omit_namespace => format!("{host}/{model}:{tag}"),
            (false, namespace) => format!("{host}/{namespace}/{model}:{tag}"),
        }
    }

    /// Whether the short form has no host: it is the default, and the namespace does not look like a host.
    pub fn omits_host(&self) -> bool {
        let namespace = self.namespace.as_str();
        self.host == Self::DEFAULT_HOST && !namespace.contains('/') && !host::is_evident(namespace)
    }

    /// Whether the tag was left out, so that [`Self::DEFAULT_TAG`] is only assumed.
    pub const fn omits_tag(&self) -> bool {
        self.tag_omitted.0
    }

    /// The full name for a request: as [`Display`](fmt::Display) writes it, without a tag that was left out.
    pub fn as_requested(&self) -> String {
        let full = self.to_string();
        match (self.omits_tag(), self.digest) {
            (true, None) => full.strip_suffix(&format!(":{}", self.tag)).unwrap_or(&full).to_owned(),
            _ => full,
        }
    }

    /// The digits, in lower case, if the text can be the beginning of a model's ID: at least four hexadecimal
    /// digits in place of a name, or after `sha256:`.
    pub fn id_prefix(&self) -> Option<String> {
        const DIGITS: RangeInclusive<usize> = 4..=64;
        let is_plain = self.host == Self::DEFAULT_HOST && self.namespace == Self::DEFAULT_NAMESPACE;
        let text = if self.omits_tag() { &self.model } else { &self.tag };
        let is_id = self.omits_tag() || self.model == "sha256";
        let is_hex = DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_plain && is_id && is_hex && self.digest.is_none()).then(|| text.to_ascii_lowercase())
    }

    fn parts(&self) -> [&str; 4] {
        [host::canonical(&self.host), &self.namespace, &self.model, &self.tag]
    }
}

/// The full name, with scheme and digest if they are not the default.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, namespace, model, tag, scheme, digest, tag_omitted: _ } = self;
        if *scheme != Scheme::Https || Scheme::default_of(host) != Scheme::Https {
            write!(f, "{}://", scheme.as_str())?;
        }
        write!(f, "{host}/{namespace}/{model}:{tag}")?;
        digest.map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

impl Serialize for Reference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.as_requested())
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
