//! Stored models that a user names: by name, by ID, or by a pattern of names.
//!
//! A command for several models does what it does for every model that a pattern matches; one for a single model
//! takes a pattern that matches exactly one.

use std::collections::BTreeSet;
use std::str::FromStr;

use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::similar_names::{did_you_mean, not_in_the_store, similar_to_pattern};
use blobd_store_format::text::one_line;

use crate::advice::refused_name;
use crate::connect::client_error;
use crate::output::{print_message, printable};
use crate::{Client, ErrorBody, ErrorCode, Global, Reference, usage};

/// What a user types for stored models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelName {
    /// One model.
    Name(Reference),
    /// All models whose names match.
    Pattern(NamePattern),
}

impl FromStr for ModelName {
    type Err = ErrorBody;

    fn from_str(text: &str) -> Result<Self, ErrorBody> {
        let text = text.trim();
        if NamePattern::is_pattern(text) {
            return text.parse().map(Self::Pattern).map_err(usage);
        }
        parse_new_name(text).map(Self::Name)
    }
}

/// Parses the name that a model is to get.
pub fn parse_new_name(text: &str) -> Result<Reference, ErrorBody> {
    let text = text.trim();
    text.parse().map_err(|error| refused_name(text, &error))
}

/// A model that was named, by itself or by a pattern.
#[derive(Debug)]
pub struct Named {
    /// As typed by the user, or as found by the pattern.
    pub label: String,
    /// Its reference, or why there is none.
    pub reference: Result<Reference, ErrorBody>,
}

/// All models that are named, each once, with a failure for each pattern that matches nothing.
pub fn expand(client: &Client, names: &[ModelName]) -> Result<Vec<Named>, ErrorBody> {
    expand_among(names, || stored_names(client))
}

/// Every model of the store.
pub fn every_model(client: &Client) -> Result<Vec<Named>, ErrorBody> {
    let named = |reference: Reference| Named { label: reference.short(), reference: Ok(reference) };
    Ok(stored_names(client)?.into_iter().map(named).collect())
}

/// As [`expand`], but compares patterns with the `known` names.
pub fn expand_among(
    names: &[ModelName],
    known: impl FnOnce() -> Result<Vec<Reference>, ErrorBody>,
) -> Result<Vec<Named>, ErrorBody> {
    let has_patterns = names.iter().any(|name| matches!(name, ModelName::Pattern(_)));
    let known = if has_patterns { known()? } else { Vec::new() };
    let (mut named, mut seen) = (Vec::new(), BTreeSet::new());
    for name in names {
        let found = match name {
            ModelName::Name(reference) => vec![reference.clone()],
            ModelName::Pattern(pattern) => matching(pattern, &known),
        };
        if let (ModelName::Pattern(pattern), []) = (name, found.as_slice()) {
            named.push(Named { label: pattern.to_string(), reference: Err(no_match(pattern, &known)) });
        }
        for reference in found {
            // A name that is given twice is the user's wish, and reported twice.
            if seen.insert(reference.canonical()) || matches!(name, ModelName::Name(_)) {
                named.push(Named { label: reference.short(), reference: Ok(reference) });
            }
        }
    }
    Ok(named)
}

/// The only model that is named. Says on standard error which one a pattern has found.
pub fn only(global: &Global, client: &Client, name: &ModelName) -> Result<Reference, ErrorBody> {
    const WIDTH: usize = 200;
    let pattern = match name {
        ModelName::Name(reference) => return Ok(reference.clone()),
        ModelName::Pattern(pattern) => pattern,
    };
    let known = stored_names(client)?;
    match matching(pattern, &known).as_slice() {
        [] => Err(no_match(pattern, &known)),
        [only] => {
            if !global.hides_reports() {
                print_message(&printable(&format!("blobd: {pattern} is {}", only.short())));
                print_message("\n");
            }
            Ok(only.clone())
        }
        several => {
            let names: Vec<String> = several.iter().map(Reference::short).collect();
            let message = format!("{pattern}: matches {} models: expected one", several.len());
            let hint = format!("name one of them: {}", one_line(&names, WIDTH));
            Err(ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(hint))
        }
    }
}

/// Whether the name matches one of the patterns; true if there are no patterns.
pub fn is_any(patterns: &[NamePattern], name: &str) -> bool {
    let matches = |name: &Reference| patterns.iter().any(|pattern| pattern.matches(name));
    patterns.is_empty() || name.parse().is_ok_and(|name| matches(&name))
}

fn matching(pattern: &NamePattern, known: &[Reference]) -> Vec<Reference> {
    known.iter().filter(|name| pattern.matches(name)).cloned().collect()
}

fn no_match(pattern: &NamePattern, known: &[Reference]) -> ErrorBody {
    let body = ErrorBody::new(ErrorCode::NotFound, not_in_the_store(&pattern.to_string()));
    match did_you_mean(&similar_to_pattern(pattern, known)) {
        Some(hint) => body.with_hint(hint),
        None => body,
    }
}

fn stored_names(client: &Client) -> Result<Vec<Reference>, ErrorBody> {
    let models = client.models().map_err(client_error)?.models;
    Ok(names(models.iter().map(|model| model.name.as_str())))
}

/// The texts that are names of models.
pub fn names<'t>(texts: impl Iterator<Item = &'t str>) -> Vec<Reference> {
    texts.filter_map(|text| text.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(texts: &[&str]) -> Vec<(String, bool)> {
        let texts: Vec<ModelName> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let known = || Ok(names(["llama3:8b", "llama3:70b", "hf.co/Qwen/Qwen3:Q8_0"].into_iter()));
        let named = expand_among(&texts, known).unwrap();
        named.into_iter().map(|named| (named.label, named.reference.is_ok())).collect()
    }

    #[test]
    fn patterns_stand_for_the_names_that_match_each_once() {
        let ok = |name: &str| (name.to_owned(), true);
        assert_eq!(expanded(&["LLAMA*", "*:8b"]), [ok("llama3:8b"), ok("llama3:70b")]);
        assert_eq!(expanded(&["qwen*"]), [ok("hf.co/Qwen/Qwen3:Q8_0")]);
        assert_eq!(expanded(&[" other:1\n", "x*"]), [ok("other:1"), ("x*".to_owned(), false)]);
    }
}
