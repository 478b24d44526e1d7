//! Names of stored models that may have been meant by one that is not stored.

use crate::name_pattern::NamePattern;
use crate::reference::Reference;

const MAX_NAMES: usize = 5;

/// The error of a name, or of a pattern of names, that is not in the store.
pub fn not_in_the_store(name: &str) -> String {
    format!("model {name}: not in the store")
}

/// The hint of that error; `None` without similar names.
pub fn did_you_mean(similar: &[String]) -> Option<String> {
    match similar {
        [] => None,
        [only] => Some(format!("did you mean {only}?")),
        several => Some(format!("similar names in the store: {}", several.join(", "))),
    }
}

/// Stored names similar to a pattern that matches none.
pub fn similar_to_pattern(pattern: &NamePattern, stored: &[Reference]) -> Vec<String> {
    pattern.similar_name().map(|wanted| similar(&wanted, stored)).unwrap_or_default()
}

/// The first names, and how many others there are.
pub fn few(mut names: Vec<String>) -> Vec<String> {
    if let Some(more @ 1..) = names.len().checked_sub(MAX_NAMES) {
        names.truncate(MAX_NAMES);
        names.push(format!("{more} more"));
    }
    names
}

/// The stored names that may have been meant, the most likely first: other tags of the model, models of the same
/// name elsewhere, then names that differ in a few characters or contain the text.
pub fn similar(wanted: &Reference, tags: &[Reference]) -> Vec<String> {
    let mut found: Vec<_> = tags
        .iter()
        .filter_map(|tag| {
            let by_tag = if wanted.omits_tag() { 0 } else { strsim::osa_distance(wanted.tag(), tag.tag()) };
            let name = tag.short();
            Some((unlikeness(wanted, tag)?, by_tag, name.len(), name))
        })
        .collect();
    found.sort();
    few(found.into_iter().map(|(_, _, _, name)| name).collect())
}

/// How far a stored name is from the wanted one; `None` if they have nothing in common.
fn unlikeness(wanted: &Reference, tag: &Reference) -> Option<usize> {
    /// More than any distance that counts as near.
    const CONTAINS: usize = 100;
    if wanted.is_sibling_of(tag) {
        return Some(0);
    }
    let (wanted, model) = (wanted.model().to_ascii_lowercase(), tag.model().to_ascii_lowercase());
    let distance = strsim::osa_distance(&wanted, &model);
    let allowed = match wanted.len() {
        0..=3 => 1,
        4..=8 => 2,
        _ => 3,
    };
    if distance <= allowed {
        return distance.checked_add(1);
    }
    let contains =
        wanted.len() >= 3 && (model.contains(&wanted) || model.len() >= 3 && wanted.contains(&model));
    contains.then_some(CONTAINS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names_come_first_and_the_others_are_counted() {
        let names =
            |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<Reference>>();
        let mut stored = names(&["llama3:8b", "hf.co/me/llama3:q4", "llama2:7b", "codellama:7b", "qwen:1b"]);
        let similar_to = |wanted: &str, stored: &[Reference]| similar(&wanted.parse().unwrap(), stored);
        assert_eq!(similar_to("lama3", &stored), ["llama3:8b", "hf.co/me/llama3:q4", "llama2:7b"]);
        assert_eq!(similar_to("llama3:9b", &stored).first().map(String::as_str), Some("llama3:8b"));
        assert_eq!(similar_to("llama", &stored).len(), 4);
        assert_eq!(similar_to("xyzzy", &stored), [""; 0]);
        stored.extend((0..9).map(|number| format!("llama3:t{number}").parse::<Reference>().unwrap()));
        assert_eq!(similar_to("llama3", &stored).last().map(String::as_str), Some("7 more"));
    }

    #[test]
    fn pattern_that_matches_nothing_is_compared_without_its_wildcards() {
        let stored: Vec<Reference> = ["llama3:8b", "qwen:1b"].map(|text| text.parse().unwrap()).into();
        let similar = |pattern: &str| similar_to_pattern(&pattern.parse().unwrap(), &stored);
        assert_eq!(similar("lama3*"), ["llama3:8b"]);
        assert_eq!(similar("[q]wem:*"), ["qwen:1b"]);
        assert_eq!(similar("*"), [""; 0]);
    }

    #[test]
    fn short_texts_are_in_too_many_names_to_be_similar() {
        let similar_to = |wanted: &str, stored: &str| {
            !similar(&wanted.parse().unwrap(), &[stored.parse().unwrap()]).is_empty()
        };
        for (wanted, stored, is_similar) in [
            ("qwe", "my-long-qwen-model", true),
            ("my-long-qwen-model", "qwe", true),
            ("qw", "my-long-qwen-model", false),
            ("my-long-qwen-model", "qw", false),
        ] {
            assert_eq!(similar_to(wanted, stored), is_similar, "{wanted} {stored}");
        }
    }

    #[test]
    fn hint_names_the_only_one_or_lists_several() {
        let hint = |names: &[&str]| did_you_mean(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(not_in_the_store("m:1"), "model m:1: not in the store");
        assert_eq!(hint(&[]), None);
        assert_eq!(hint(&["m:1"]).unwrap(), "did you mean m:1?");
        assert_eq!(hint(&["m:1", "m:2"]).unwrap(), "similar names in the store: m:1, m:2");
    }
}
