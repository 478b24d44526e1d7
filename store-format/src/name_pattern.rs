//! Patterns of models' names: one rule for all commands that take them.
//!
//! A pattern has `*`, `?` or `[…]` and is compared with the short form of a name, or with the name without its host.
//! One that has a `/` is also compared with the full name; one without a `/` is not, so that `r*` is not all models of
//! `registry.ollama.ai`. A pattern without a tag means all tags. Case does not matter.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::glob::Glob;
use crate::host;
use crate::reference::Reference;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    written: String,
    glob: Glob,
    /// `glob` with any tag, if the pattern has no tag.
    with_any_tag: Option<Glob>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamePatternError {
    #[error("pattern of {length} bytes: expected at most {MAX_LENGTH}")]
    TooLong { length: usize },
}

/// Longer than any name.
const MAX_LENGTH: usize = 1000;

impl NamePattern {
    /// Whether the text is a pattern and not a name. The brackets of an IPv6 address are part of a name, and a URL may
    /// have a `?`.
    pub fn is_pattern(text: &str) -> bool {
        let (_address, rest) = split_address(text);
        !text.contains("://") && rest.contains(['*', '?', '['])
    }

    /// Matches all names that the pattern matches, or that contain the text if it is not a pattern.
    pub fn search(text: &str) -> Result<Self, NamePatternError> {
        if Self::is_pattern(text) {
            return text.parse();
        }
        check_length(text)?;
        Ok(Self { written: text.to_owned(), glob: Glob::containing(text), with_any_tag: None })
    }

    /// The pattern without its wildcards, to find similar names.
    pub fn similar_name(&self) -> Option<Reference> {
        let plain: String = self.written.chars().filter(|c| !"*?[]!^".contains(*c)).collect();
        plain.trim_matches(|c: char| !c.is_ascii_alphanumeric()).parse().ok()
    }

    pub fn matches(&self, name: &Reference) -> bool {
        let matches = |text: &str| {
            self.glob.matches(text) || self.with_any_tag.as_ref().is_some_and(|glob| glob.matches(text))
        };
        let has_slash = self.written.contains('/');
        let without_host = || format!("{}:{}", name.repository(), name.tag());
        matches(&name.short())
            || (has_slash || !name.omits_host()) && matches(&without_host())
            || has_slash && matches(&full(name))
    }
}

impl FromStr for NamePattern {
    type Err = NamePatternError;

    fn from_str(text: &str) -> Result<Self, NamePatternError> {
        check_length(text)?;
        let (address, rest) = split_address(text);
        let glob = Glob::literal(address).followed_by(&Glob::new(rest));
        let last = rest.rsplit('/').next().unwrap_or_default();
        let with_any_tag = (!last.contains(':')).then(|| glob.followed_by(&Glob::new(":*")));
        Ok(Self { written: text.to_owned(), glob, with_any_tag })
    }
}

impl Serialize for NamePattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.written)
    }
}

impl<'de> Deserialize<'de> for NamePattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// As it was written.
impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

fn check_length(text: &str) -> Result<(), NamePatternError> {
    let length = text.len();
    if length > MAX_LENGTH { Err(NamePatternError::TooLong { length }) } else { Ok(()) }
}

fn full(name: &Reference) -> String {
    format!("{}/{}/{}:{}", name.host(), name.namespace(), name.model(), name.tag())
}

/// An IPv6 address in brackets as the host, and what follows it.
fn split_address(text: &str) -> (&str, &str) {
    let end = text.find('/').unwrap_or(text.len());
    match text.split_at_checked(end) {
        Some((first, rest)) if host::is_bracketed_address(first) => (first, rest),
        _ => ("", text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        pattern.parse::<NamePattern>().unwrap().matches(&name.parse().unwrap())
    }

    #[test]
    fn patterns_match_names_without_case_and_all_tags() {
        for (pattern, name) in [
            ("llama3:*", "llama3:8b"),
            ("llama3*", "llama3.2:1b"),
            ("LLAMA3:8?", "llama3:8b"),
            ("llama3:[78]*b", "llama3:70b"),
            ("*", "hf.co/me/x:Q4_0"),
            ("hf.co/*:q4*", "hf.co/me/x:Q4_0"),
            ("llam?3", "llama3:70b"),
            ("*a*b*", "xaxxbx"),
            ("Qwen*", "qwen3:0.6b"),
            ("qwen*", "Qwen3-0.6B:Q8_0"),
            ("qwen*", "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"),
            ("qwen/*", "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"),
            ("*/qwen3*", "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"),
            ("library/*", "llama3:8b"),
            ("registry.ollama.ai/*", "llama3:8b"),
            ("registry.ollama.ai/library/llama?", "llama3:8b"),
            ("localhost:5000/m*", "localhost:5000/model:1"),
            ("m?del", "localhost:5000/model:1"),
            ("[::1]:5000/*", "[::1]:5000/a/b:1"),
            ("ghcr.io/*/model", "ghcr.io/owner/repo/model:1"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("llama3:*", "llama3.2:1b"),
            ("?", "ab:c"),
            ("*:8b", "llama3:70b"),
            ("a*b", "abx:c"),
            ("r*", "llama3:8b"),
            ("lib*", "llama3:8b"),
            ("hf*", "me/hf:1"),
            ("llama3:*", "hf.co/me/llama3:q4"),
            ("localhost:5000/m?", "localhost:5000/model:1"),
            ("[::2]:5000/*", "[::1]:5000/a/b:1"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn names_and_urls_are_not_patterns() {
        for text in ["llama3", "[::1]:5000/a/b", "[::1]/a/b", "https://h/x.gguf?download=true", ""] {
            assert!(!NamePattern::is_pattern(text), "{text}");
        }
        for text in ["*", "a?", "[ab]c", "[::1]:5000/*", "[abc"] {
            assert!(NamePattern::is_pattern(text), "{text}");
        }
        assert!(matches("llama3", "llama3:8b") && !matches("llama3", "llama3.2:8b"));
        assert!("*".repeat(1001).parse::<NamePattern>().is_err());
    }

    #[test]
    fn pattern_is_shown_as_it_was_written() {
        for text in ["LLAMA3:8?", "*", "llama3"] {
            assert_eq!(text.parse::<NamePattern>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn text_is_found_in_names() {
        let finds =
            |text: &str, name: &str| NamePattern::search(text).unwrap().matches(&name.parse().unwrap());
        let hub = "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0";
        for text in ["qwen", "QWEN3", "Qwen*", "gguf:q8", "hf.co/qwen", "wen/qwen"] {
            assert!(finds(text, hub), "{text}");
        }
        assert!(finds("library/ll", "llama3:8b") && finds("ollama.ai/l", "llama3:8b") && finds("", hub));
        assert!(!finds("ollama", "llama3:8b") && !finds("library", "llama3:8b") && !finds("q4", hub));
    }
}
