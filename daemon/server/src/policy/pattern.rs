//! Patterns of rules: texts with `*` for any characters, compared without case.

use std::fmt;

use blobd_store_format::glob::Glob;
use blobd_store_format::host;

use super::Action;
use super::subject::{Host, ModelName};

/// Longer than any host or name.
const MAX_BYTES: usize = 400;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    written: String,
    glob: Glob,
}

/// Why a pattern is refused: what is expected instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PatternError {
    #[error("at least one character")]
    Empty,
    #[error("at most 400 bytes")]
    TooLong,
    #[error("letters, digits, - _ . : / @ + [ ] and * for any characters")]
    Character,
    #[error("a host such as \"hf.co\" or \"*.example.com\", without scheme and path")]
    Host,
    #[error("a name such as \"acme/*\" or \"*:latest\", without scheme and digest")]
    Name,
}

impl Pattern {
    pub(crate) fn parse(text: &str) -> Result<Self, PatternError> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:/@+[]*".contains(c);
        match text {
            "" => Err(PatternError::Empty),
            _ if text.len() > MAX_BYTES => Err(PatternError::TooLong),
            _ if !text.chars().all(is_allowed) => Err(PatternError::Character),
            _ => Ok(Self { written: text.to_owned(), glob: Glob::with_stars(text) }),
        }
    }

    /// A pattern of hosts. Without `*` it stands for all spellings of one host.
    pub(crate) fn host(text: &str) -> Result<Self, PatternError> {
        if text.contains(['/', '@', '+']) {
            return Err(PatternError::Host);
        }
        let pattern = Self::parse(text)?;
        if pattern.has('*') {
            return Ok(pattern);
        }
        let spelled = match host::spelled(text) {
            (name, Some(port)) => format!("{name}:{port}"),
            (name, None) => name,
        };
        Ok(Self { written: pattern.written, glob: Glob::literal(&spelled) })
    }

    /// A pattern without a port matches a host with any. With `*` it also matches the other names of a service.
    pub(super) fn matches_host(&self, host: &Host) -> bool {
        let Host { name, port } = host;
        let is_alike = |name: &str| match port {
            Some(port) => self.matches(&format!("{name}:{port}")) || self.matches(name),
            None => self.matches(name),
        };
        // A server may have this name, too.
        let is_only_local = self.written == Host::LOCAL && port.is_some();
        !is_only_local && host::names_of(name).any(is_alike)
    }

    fn has(&self, character: char) -> bool {
        self.written.contains(character)
    }

    pub(crate) fn matches(&self, text: &str) -> bool {
        self.glob.matches(text)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

/// A pattern of names: `NAMESPACE/MODEL`, with `:TAG` if the tag matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamePattern {
    written: String,
    pattern: Pattern,
    /// The part before the `:`, if it has one.
    repository: Option<Pattern>,
}

impl NamePattern {
    pub(crate) fn parse(text: &str) -> Result<Self, PatternError> {
        if text.contains("://") || text.contains('@') {
            return Err(PatternError::Name);
        }
        // As in names of models, the namespace can be left out. A leading * matches it too.
        let full = if text.contains('/') || text.starts_with('*') || text.is_empty() {
            text.to_owned()
        } else {
            format!("library/{text}")
        };
        let repository = full.split_once(':').map(|(repository, _tag)| Pattern::parse(repository));
        let repository = repository.transpose()?;
        Ok(Self { written: text.to_owned(), pattern: Pattern::parse(&full)?, repository })
    }

    /// A source that is fixed to a digest may have that under any tag. So a pattern of tags matches it for a rule that
    /// denies, and not for one that allows.
    pub(super) fn matches(&self, name: &ModelName, action: Action) -> bool {
        match (&self.repository, &name.tag) {
            (None, _) => self.pattern.matches(&name.repository),
            (Some(_), Some(tag)) => self.pattern.matches(&format!("{}:{tag}", name.repository)),
            (Some(repository), None) => action == Action::Deny && repository.matches(&name.repository),
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::reference::Scheme;

    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        Pattern::parse(pattern).unwrap().matches(text)
    }

    #[test]
    fn star_stands_for_any_characters_and_case_does_not_matter() {
        for (pattern, text, expected) in [
            ("hf.co", "hf.co", true),
            ("hf.co", "HF.co", true),
            ("hf.co", "hf.com", false),
            ("*.example.com", "a.b.example.com", true),
            ("*.example.com", "example.com", false),
            ("*", "", true),
            ("*", "a/b", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("*ab*ab", "xabab", true),
            ("*ab*ab", "xab", false),
            ("**", "x", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn pattern_without_a_port_matches_all_ports() {
        for (pattern, host, expected) in [
            ("127.0.0.1", "127.0.0.1:5000", true),
            ("127.0.0.1:5000", "127.0.0.1:5000", true),
            ("127.0.0.1:5000", "127.0.0.1:5001", false),
            ("*.example.com", "a.example.com:443", true),
            ("[::1]:80", "[::1]:80", true),
            ("[::1]:80", "[::1]", false),
            ("[::1]", "[::1]:80", true),
            ("hf.co", "hf.co", true),
            ("a.example:443", "a.example", true),
            ("a.example:80", "a.example", false),
            ("*:443", "a.example", true),
        ] {
            let host = Host::new(host, Scheme::Https);
            assert_eq!(Pattern::host(pattern).unwrap().matches_host(&host), expected, "{pattern} {host:?}");
        }
    }

    #[test]
    fn no_spelling_of_a_host_escapes_a_pattern() {
        for (pattern, hosts) in [
            (
                "hf.co",
                &["hf.co:443", "HuggingFace.co", "huggingface.co:443", "hf.co.", "www.huggingface.co:8080"][..],
            ),
            ("huggingface.co", &["hf.co", "huggingface.co:443"]),
            ("*.huggingface.co", &["hf.co"]),
            ("ollama.com", &["registry.ollama.ai", "ollama.com.:443"]),
            ("index.docker.io", &["docker.io", "registry-1.docker.io"]),
            ("R.Example.", &["r.example", "r.example.:5000"]),
            ("10.0.0.7", &["167772167", "0xa000007:80", "10.7", "[::ffff:10.0.0.7]", "[::ffff:a00:7]:80"]),
            ("167772167", &["10.0.0.7"]),
        ] {
            let pattern = Pattern::host(pattern).unwrap();
            for host in hosts {
                assert!(pattern.matches_host(&Host::new(host, Scheme::Https)), "{pattern} {host}");
            }
        }
        let local = Pattern::host("local").unwrap();
        assert!(
            local.matches_host(&Host::local()) && !local.matches_host(&Host::new("local", Scheme::Https))
        );
        assert!(Pattern::host("*").unwrap().matches_host(&Host::new("local", Scheme::Https)));
    }

    #[test]
    fn name_without_a_namespace_is_one_of_the_library() {
        let name = |text: &str| ModelName::new(&text.parse().unwrap());
        for (pattern, text, expected) in [
            ("llama3", "llama3:8b", true),
            ("llama3", "acme/llama3", false),
            ("llama*", "llama-evil/x", false),
            ("*llama*", "acme/llama3", true),
            ("acme/*", "acme/x:1", true),
            ("acme/*", "hf.co/acme/x", true),
            ("acme/*", "ghcr.io/acme/sub/x", true),
            ("acme/sub/x", "ghcr.io/acme/sub/x", true),
            ("sub/x", "ghcr.io/acme/sub/x", false),
            ("*/x", "ghcr.io/acme/sub/x", true),
            ("ACME/x", "acme/X", true),
            ("acme/x:latest", "acme/x", true),
            ("acme/x:q4*", "acme/x:Q4_K_M", true),
            ("acme/x:q4*", "acme/x:Q8_0", false),
            ("*:latest", "acme/x", true),
            ("*", "acme/x", true),
        ] {
            assert_eq!(
                NamePattern::parse(pattern).unwrap().matches(&name(text), Action::Deny),
                expected,
                "{pattern} {text}"
            );
        }
    }

    #[test]
    fn digest_does_not_bypass_a_rule_about_tags() {
        let fixed = format!("acme/x:stable@sha256:{}", "0".repeat(64));
        let name = ModelName::new(&fixed.parse().unwrap());
        for (pattern, denied, allowed) in [
            ("acme/x:stable", true, false),
            ("acme/x:bad*", true, false),
            ("*:latest", true, false),
            ("other/x:stable", false, false),
            ("acme/*", true, true),
            ("other/*", false, false),
        ] {
            let pattern = NamePattern::parse(pattern).unwrap();
            let found = [Action::Deny, Action::Allow].map(|action| pattern.matches(&name, action));
            assert_eq!(found, [denied, allowed], "{pattern}");
        }
    }

    #[test]
    fn malformed_patterns_are_refused() {
        assert_eq!(Pattern::parse(""), Err(PatternError::Empty));
        assert_eq!(Pattern::parse("a b"), Err(PatternError::Character));
        assert_eq!(Pattern::parse("a?"), Err(PatternError::Character));
        assert_eq!(Pattern::parse(&"a".repeat(401)), Err(PatternError::TooLong));
        assert_eq!(Pattern::host("https://hf.co"), Err(PatternError::Host));
        assert_eq!(NamePattern::parse("https://hf.co/a/b"), Err(PatternError::Name));
        assert_eq!(NamePattern::parse(""), Err(PatternError::Empty));
    }
}
