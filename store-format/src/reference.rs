//! References: the names of models.
//!
//! The form is Ollama's, `[scheme://][host/][namespace/]model[:tag]`, and an optional
//! `@sha256:…` that pins the manifest. It is parsed from the right: the last `:` after the last
//! `/` splits off the tag, then `/` splits off the model and the namespace; the rest is the host.
//! A text with a host may omit the namespace: `docker.io/smollm2` is `docker.io/ai/smollm2`, and
//! `localhost:5000/m` is the repository `m`. A parsed reference has the [canonical](host::canonical) host.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::digest::{Digest, DigestError};
use crate::host;

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

/// Whether the tag was left out and is the default. No part of the name: references that differ only in this
/// are equal.
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
    /// `https` or `http`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }

    /// The port of a URL without one.
    #[must_use]
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }

    /// The scheme of a registry that is named without one.
    #[must_use]
    pub fn default_of(host: &str) -> Self {
        if host::is_loopback(host) { Self::Http } else { Self::Https }
    }
}

impl Reference {
    /// The registry of a name without a host.
    pub const DEFAULT_HOST: &str = "registry.ollama.ai";
    /// The namespace of a name without one.
    pub const DEFAULT_NAMESPACE: &str = "library";
    /// The tag of a name without one.
    pub const DEFAULT_TAG: &str = "latest";

    /// Makes a reference from four parts, each checked. The host is kept as it is.
    ///
    /// # Errors
    /// [`ReferenceError`] when a part is empty, too long or has an invalid character.
    pub fn from_parts(host: &str, namespace: &str, model: &str, tag: &str) -> Result<Self, ReferenceError> {
        if !host::is_bracketed_address(host) {
            HOST.check(host)?;
        }
        NAMESPACE.check(namespace)?;
        MODEL.check(model)?;
        TAG.check(tag)?;
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
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The namespace: a user or organisation. [`host::NO_NAMESPACE`] if the repository has none.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name of the repository at its registry: `namespace/model`.
    #[must_use]
    pub fn repository(&self) -> String {
        match self.namespace.as_str() {
            host::NO_NAMESPACE => self.model.clone(),
            namespace => format!("{namespace}/{}", self.model),
        }
    }

    /// The model's own name.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The tag.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The scheme of the registry's URLs.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The manifest that the name is pinned to.
    #[must_use]
    pub const fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The same model under another tag.
    ///
    /// # Errors
    /// [`ReferenceError`] when `tag` is not a tag.
    pub fn with_tag(&self, tag: &str) -> Result<Self, ReferenceError> {
        TAG.check(tag)?;
        Ok(Self { tag: tag.to_owned(), tag_omitted: TagOmitted(false), ..self.clone() })
    }

    /// Whether both name the same model. Compares the four parts without case, like Ollama, and the names of
    /// a service as one; ignores scheme and digest.
    #[must_use]
    pub fn same_model(&self, other: &Self) -> bool {
        self.parts().iter().zip(other.parts()).all(|(a, b)| a.eq_ignore_ascii_case(b))
    }

    /// The same text for all references to one model, as [`Self::same_model`] compares them.
    #[must_use]
    pub fn canonical(&self) -> String {
        let [host, namespace, model, tag] = self.parts();
        format!("{host}/{namespace}/{model}:{tag}").to_ascii_lowercase()
    }

    /// Whether both are tags of the same model, such as other quantizations.
    #[must_use]
    pub fn is_sibling_of(&self, other: &Self) -> bool {
        // The tag is the last part.
        self.parts().iter().zip(other.parts()).take(3).all(|(a, b)| a.eq_ignore_ascii_case(b))
    }

    /// The shortest text that parses to this host, namespace, model and tag. The tag is always
    /// included; scheme and digest are not.
    #[must_use]
    pub fn short(&self) -> String {
        let Self { host, namespace, model, tag, .. } = self;
        match (host == Self::DEFAULT_HOST, namespace == Self::DEFAULT_NAMESPACE) {
            (true, true) => format!("{model}:{tag}"),
            (true, false) => format!("{namespace}/{model}:{tag}"),
            (false, _) if namespace == host::NO_NAMESPACE && host::is_evident(host) => {
                format!("{host}/{model}:{tag}")
            }
            (false, _) => format!("{host}/{namespace}/{model}:{tag}"),
        }
    }

    /// Whether the tag was left out, so that [`Self::DEFAULT_TAG`] is only assumed.
    #[must_use]
    pub const fn omits_tag(&self) -> bool {
        self.tag_omitted.0
    }

    /// The full name for a request: as [`Display`](fmt::Display) writes it, without a tag that was left out.
    #[must_use]
    pub fn as_requested(&self) -> String {
        let full = self.to_string();
        match (self.omits_tag(), self.digest) {
            (true, None) => full.strip_suffix(&format!(":{}", self.tag)).unwrap_or(&full).to_owned(),
            _ => full,
        }
    }

    /// The digits, in lower case, if the text can be the beginning of a model's ID: at least four hexadecimal
    /// digits in place of a name, or after `sha256:`.
    #[must_use]
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

/// Why a text is not a reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// One of the four parts is not well-formed.
    #[error(
        "reference: {part} {found:?}: 1 to {max_length} letters, digits or {extra:?} expected, \
         the first a letter, a digit or '_'"
    )]
    Part {
        /// Which part.
        part: &'static str,
        /// The text found.
        found: String,
        /// The greatest length in bytes.
        max_length: usize,
        /// The characters allowed besides letters and digits.
        extra: &'static str,
    },
    /// The scheme is neither `http` nor `https`.
    #[error("reference: scheme {found:?}: http or https expected")]
    Scheme {
        /// The scheme found.
        found: String,
    },
    /// A scheme without a host.
    #[error("reference: {found:?} after a scheme: host/namespace/model expected")]
    SchemeWithoutHost {
        /// The text after `://`.
        found: String,
    },
    /// A host whose models all have a namespace, and a name without one.
    #[error("reference: {found:?}: {host}/USER/MODEL expected")]
    NoNamespace {
        /// The host.
        host: String,
        /// The text without scheme and tag.
        found: String,
    },
    /// The text after `@` is not a digest.
    #[error("reference: {0}")]
    Digest(#[from] DigestError),
    /// Longer than all parts together may be.
    #[error("reference: {length} bytes, at most {MAX_LENGTH} allowed")]
    TooLong {
        /// The length in bytes.
        length: usize,
    },
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

/// Ollama allows 350 bytes, but a file name ends at 255 and a host name at 253.
const HOST: PartRule = PartRule { part: "host", extra: "_-.:", max_length: 253 };
const NAMESPACE: PartRule = PartRule { part: "namespace", extra: "_-", max_length: 80 };
const MODEL: PartRule = PartRule { part: "model", extra: "_-.", max_length: 80 };
const TAG: PartRule = PartRule { part: "tag", extra: "_-.", max_length: 80 };
/// The sum of all parts at their longest, with scheme, digest and separators.
const MAX_LENGTH: usize = 253 + 3 * 80 + 8 + 72 + 4;

/// Splits `[host/][namespace/]model` and fills in what is omitted. After a scheme the first part is a host.
fn split_path(path: &str, has_scheme: bool) -> Result<(&str, &str, &str), ReferenceError> {
    let mut from_right = path.rsplitn(3, '/');
    let model = from_right.next().unwrap_or_default();
    match (from_right.next(), from_right.next()) {
        (Some(namespace), Some(host)) => Ok((host::canonical(host), namespace, model)),
        (Some(host), None) if has_scheme || host::is_evident(host) => {
            let no_namespace =
                || ReferenceError::NoNamespace { host: host.to_owned(), found: path.to_owned() };
            let namespace = host::default_namespace(host).ok_or_else(no_namespace)?;
            Ok((host::canonical(host), namespace, model))
        }
        (None, _) if has_scheme => Err(ReferenceError::SchemeWithoutHost { found: path.to_owned() }),
        (namespace, _) => {
            Ok((Reference::DEFAULT_HOST, namespace.unwrap_or(Reference::DEFAULT_NAMESPACE), model))
        }
    }
}

fn split_scheme(name: &str) -> Result<(Option<Scheme>, &str), ReferenceError> {
    match name.split_once("://") {
        None => Ok((None, name)),
        Some(("https", rest)) => Ok((Some(Scheme::Https), rest)),
        Some(("http", rest)) => Ok((Some(Scheme::Http), rest)),
        Some((scheme, _)) => Err(ReferenceError::Scheme { found: scheme.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn defaults_fill_omitted_parts() {
        for (text, full, short) in [
            ("llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
            ("llama3:8b", "registry.ollama.ai/library/llama3:8b", "llama3:8b"),
            ("me/llama3", "registry.ollama.ai/me/llama3:latest", "me/llama3:latest"),
            ("hf.co/me/repo-GGUF:Q4_K_M", "hf.co/me/repo-GGUF:Q4_K_M", "hf.co/me/repo-GGUF:Q4_K_M"),
            ("localhost:5000/a/b", "http://localhost:5000/a/b:latest", "localhost:5000/a/b:latest"),
            ("https://localhost/a/b", "https://localhost/a/b:latest", "localhost/a/b:latest"),
            ("localhost:5000/x:y", "http://localhost:5000/_/x:y", "localhost:5000/x:y"),
            ("127.0.0.1:5000/x", "http://127.0.0.1:5000/_/x:latest", "127.0.0.1:5000/x:latest"),
            ("[::1]:5000/x", "http://[::1]:5000/_/x:latest", "[::1]:5000/x:latest"),
            ("[::1]/a/b", "http://[::1]/a/b:latest", "[::1]/a/b:latest"),
            ("lan:5000/x", "lan:5000/_/x:latest", "lan:5000/x:latest"),
            ("https://registry.example/x", "registry.example/_/x:latest", "registry.example/_/x:latest"),
            ("huggingface.co/a/b:c", "hf.co/a/b:c", "hf.co/a/b:c"),
            ("https://www.HuggingFace.co/a/b", "hf.co/a/b:latest", "hf.co/a/b:latest"),
            ("ollama.com/library/llama3:8b", "registry.ollama.ai/library/llama3:8b", "llama3:8b"),
            ("ollama.com/llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
            ("localhost/x", "registry.ollama.ai/localhost/x:latest", "localhost/x:latest"),
            ("https://hf.co/a/b:c", "hf.co/a/b:c", "hf.co/a/b:c"),
            ("docker.io/smollm2", "docker.io/ai/smollm2:latest", "docker.io/ai/smollm2:latest"),
            ("https://index.docker.io/x:y", "docker.io/ai/x:y", "docker.io/ai/x:y"),
            ("docker.io/library/x", "docker.io/library/x:latest", "docker.io/library/x:latest"),
            ("http://127.0.0.1:1/a/b:c", "http://127.0.0.1:1/a/b:c", "127.0.0.1:1/a/b:c"),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(reference.to_string(), full);
            assert_eq!(reference.short(), short);
        }
    }

    #[test]
    fn tag_that_was_left_out_is_left_out_of_requests_and_is_no_difference() {
        let (short, full): (Reference, Reference) = ("me/m".parse().unwrap(), "me/m:latest".parse().unwrap());
        assert_eq!(short, full);
        assert!(short.omits_tag() && !full.omits_tag());
        assert_eq!(short.as_requested(), "registry.ollama.ai/me/m");
        assert_eq!(full.as_requested(), "registry.ollama.ai/me/m:latest");
        let again: Reference = serde_json::from_str(&serde_json::to_string(&short).unwrap()).unwrap();
        assert!(again.omits_tag());
        assert!(!short.with_tag("latest").unwrap().omits_tag());
    }

    #[test]
    fn id_is_four_or_more_hexadecimal_digits_in_place_of_a_name() {
        let id = |text: &str| text.parse::<Reference>().unwrap().id_prefix();
        assert_eq!(id("A80c"), Some("a80c".to_owned()));
        assert_eq!(id("sha256:a80c4f"), Some("a80c4f".to_owned()));
        for text in ["a80", "a80c:latest", "me/a80c", "llama", "sha256:xyz", "other:a80c", "hf.co/a/a80c"] {
            assert_eq!(id(text), None, "{text}");
        }
    }

    #[test]
    fn digest_pins_a_name() {
        let digest = Digest::of(b"manifest");
        let reference: Reference = format!("llama3:8b@{digest}").parse().unwrap();
        assert_eq!(reference.digest(), Some(digest));
        assert_eq!(reference.to_string().parse(), Ok(reference));
    }

    #[test]
    fn hostile_and_malformed_names_are_refused() {
        for text in [
            "",
            ":",
            "/",
            "a:",
            ":b",
            "a/",
            "/a",
            "a//b",
            "..",
            "../a",
            "a/../b",
            "a/..",
            "a:..",
            "a:.hidden",
            "-a",
            ".a",
            "a b",
            "a\0",
            "a\n",
            "ä",
            "a/b/c/d",
            "host/name:space/model:tag",
            "ftp://a/b/c",
            "http://model",
            "hf.co/model",
            "[::1/a/b",
            "[::g]/a/b",
            "[::1]:65536/a/b",
            "[::1]x/a/b",
            "models.d/file",
            "a@",
            "a@sha256:00",
            "a@b@c",
            "a:b:c",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text:?} was accepted");
        }
        assert!("a".repeat(81).parse::<Reference>().is_err());
        assert!("a".repeat(1 << 20).parse::<Reference>().is_err());
    }

    #[test]
    fn repository_may_lack_a_namespace() {
        let repository = |text: &str| text.parse::<Reference>().unwrap().repository();
        assert_eq!(repository("localhost:5000/x"), "x");
        assert_eq!(repository("http://host/x"), "x");
        assert_eq!(repository("localhost:5000/a/x"), "a/x");
        assert_eq!(repository("x"), "library/x");
    }

    #[test]
    fn names_of_one_service_name_the_same_model() {
        let stored = Reference::from_parts("huggingface.co", "me", "x", "Q4_0").unwrap();
        let named: Reference = "huggingface.co/me/x:Q4_0".parse().unwrap();
        assert_eq!(named.host(), "hf.co");
        assert!(named.same_model(&stored) && stored.same_model(&named));
    }

    #[test]
    fn names_are_compared_without_case() {
        let [a, b]: [Reference; 2] = ["LLaMA3:8B", "llama3:8b"].map(|text| text.parse().unwrap());
        assert_ne!(a, b);
        assert!(a.same_model(&b));
        assert!(!a.same_model(&b.with_tag("70b").unwrap()));
    }

    proptest! {
        #[test]
        fn text_form_reads_back(
            host in "[a-z0-9_][a-zA-Z0-9_.:-]{0,40}", namespace in "[a-z0-9_][a-zA-Z0-9_-]{0,20}",
            model in "[a-z0-9_][a-zA-Z0-9_.-]{0,20}", tag in "[a-z0-9_][a-zA-Z0-9_.-]{0,20}",
        ) {
            let reference = Reference::from_parts(&host, &namespace, &model, &tag).unwrap();
            prop_assert_eq!(reference.to_string().parse(), Ok(reference.clone()));
            prop_assert_eq!(reference.short().parse(), Ok(reference));
        }

        #[test]
        fn any_text_is_refused_or_reads_back(text in "\\PC{0,60}") {
            if let Ok(reference) = text.parse::<Reference>() {
                prop_assert_eq!(reference.to_string().parse(), Ok(reference));
            }
        }
    }
}
