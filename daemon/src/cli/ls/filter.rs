//! `--filter KEY=VALUE`

use std::str::FromStr;
use std::time::Duration;

use blobd_client::protocol::response::ModelSummary;

use super::facts::Facts;
use crate::times::{age, parse_period};

/// A condition that a listed model meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    Name(String),
    Origin(String),
    Architecture(String),
    Quantization(String),
    Pinned(bool),
    Damaged(bool),
    Older(Duration),
    Newer(Duration),
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("KEY=VALUE expected, such as name=llama")?;
        let pattern = value.to_ascii_lowercase();
        match key {
            "name" => Ok(Self::Name(pattern)),
            "origin" => Ok(Self::Origin(pattern)),
            "architecture" | "family" => Ok(Self::Architecture(pattern)),
            "quantization" => Ok(Self::Quantization(pattern)),
            "pinned" => truth(key, value).map(Self::Pinned),
            "damaged" => truth(key, value).map(Self::Damaged),
            "older" => duration(key, value).map(Self::Older),
            "newer" => duration(key, value).map(Self::Newer),
            _ => Err(format!(
                "key {key:?}: name, origin, architecture, family, quantization, pinned, damaged, older or newer \
                 expected"
            )),
        }
    }
}

fn truth(key: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_other| format!("{key} {value:?}: true or false expected"))
}

fn duration(key: &str, value: &str) -> Result<Duration, String> {
    parse_period(value).map_err(|refusal| format!("{key} {refusal}"))
}

impl Filter {
    /// Whether it needs what only the model's header says.
    pub(super) const fn needs_header(&self) -> bool {
        matches!(self, Self::Architecture(_) | Self::Quantization(_))
    }

    pub(super) fn matches(&self, model: &ModelSummary, facts: &Facts) -> bool {
        let is = |pattern: &str, text: Option<&str>| text.is_some_and(|text| wildcard(pattern, &lower(text)));
        match self {
            Self::Name(pattern) => contains(pattern, &model.name),
            Self::Origin(pattern) => model.origin.as_ref().is_some_and(|origin| contains(pattern, origin)),
            Self::Architecture(pattern) => is(pattern, facts.architecture(&model.name)),
            Self::Quantization(pattern) => is(pattern, facts.quantization(&model.name)),
            Self::Pinned(pinned) => model.pinned == *pinned,
            Self::Damaged(damaged) => model.damage.is_some() == *damaged,
            Self::Older(time) => age(&model.modified) >= *time,
            Self::Newer(time) => age(&model.modified) < *time,
        }
    }
}

fn lower(text: &str) -> String {
    text.to_ascii_lowercase()
}

/// A pattern with `*` is compared with the whole text, one without it with any part.
fn contains(pattern: &str, text: &str) -> bool {
    if pattern.contains('*') { wildcard(pattern, &lower(text)) } else { lower(text).contains(pattern) }
}

/// Whether the text is the pattern with each `*` replaced by some characters, or none. Each part between two
/// `*` is taken where it first occurs, which leaves the most text for the others.
fn wildcard(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts = rest.split('*');
    let last = parts.next_back().unwrap_or_default();
    for part in parts {
        let Some((_, after)) = text.split_once(part) else { return false };
        text = after;
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    #[test]
    fn star_stands_for_any_characters() {
        for (pattern, text, matches) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "abc", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("a**c", "ac", true),
            ("ab*ba", "aba", false),
            ("*b*", "abc", true),
            ("*x*", "abc", false),
        ] {
            assert_eq!(wildcard(pattern, text), matches, "{pattern} {text}");
        }
    }

    #[test]
    fn conditions_are_read_and_wrong_ones_are_explained() {
        assert_eq!("name=Llama".parse(), Ok(Filter::Name("llama".to_owned())));
        assert_eq!("family=llama".parse(), Ok(Filter::Architecture("llama".to_owned())));
        assert_eq!("older=2d".parse(), Ok(Filter::Older(Duration::from_secs(2 * 86400))));
        for (text, part) in [
            ("llama", "KEY=VALUE"),
            ("size=3", "quantization, pinned"),
            ("pinned=yes", "true or false"),
            ("older=long", "30d"),
        ] {
            assert!(text.parse::<Filter>().unwrap_err().contains(part), "{text}");
        }
    }

    #[test]
    fn models_match_by_name_origin_and_age() {
        let model = ModelSummary {
            name: "hf.co/me/Llama:Q4".to_owned(),
            digest: Digest::of(b""),
            size: 1,
            modified: "2020-01-01T00:00:00Z".to_owned(),
            pinned: true,
            origin: Some("https://hf.co/me/Llama".to_owned()),
            follows: None,
            damage: None,
            store: None,
        };
        let matches = |text: &str| text.parse::<Filter>().unwrap().matches(&model, &Facts::default());
        for text in
            ["name=llama", "name=hf.co/*", "origin=hf.co", "pinned=true", "damaged=false", "older=30d"]
        {
            assert!(matches(text), "{text}");
        }
        for text in
            ["name=qwen", "name=me/*", "pinned=false", "newer=30d", "architecture=llama", "damaged=true"]
        {
            assert!(!matches(text), "{text}");
        }
    }
}
