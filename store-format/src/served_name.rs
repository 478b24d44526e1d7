//! The names of models as repositories of a registry that serves them.
//!
//! OCI's names are in lower case, and their parts are letters and digits with single separators between them. So a model
//! is found under its name without regard to case, and under the [spelling](repository) that is listed, in which every
//! other character is replaced. A name without a host finds models of all hosts, those of the default one first:
//! Ollama's names of models at a registry have two parts, so `hf.co/org/model` can only be requested as `org/model`.

use crate::host;
use crate::reference::Reference;

/// The name under which a model is listed: `library/llama3`, or with the host if that is not the default.
///
/// ```
/// use blobd_store_format::served_name::repository;
///
/// assert_eq!(repository(&"llama3:8b".parse()?), "library/llama3");
/// assert_eq!(repository(&"hf.co/Org/Model_:Q4".parse()?), "hf.co/org/model");
/// assert_eq!(repository(&"localhost:5000/m:1".parse()?), "localhost_5000/m");
/// # Ok::<(), blobd_store_format::reference::ReferenceError>(())
/// ```
pub fn repository(model: &Reference) -> String {
    let name = model.repository();
    let name = if model.omits_host() { name } else { format!("{}/{name}", model.host()) };
    spelled(&name)
}

/// The tags of the model that a client means by the name of a repository. `host` is the registry that it would have asked
/// otherwise, as mirrors are told (`?ns=`).
pub fn find<'t>(tags: &'t [Reference], name: &str, host: Option<&str>) -> Vec<&'t Reference> {
    let name = with_canonical_host(name).to_ascii_lowercase();
    let place = |tag| Some((place(tag, &name, host)?, tag));
    let found: Vec<(Place, &Reference)> = tags.iter().filter_map(place).collect();
    let Some((_, best)) = found.iter().min_by_key(|(place, _)| *place).copied() else { return Vec::new() };
    found.into_iter().map(|(_, tag)| tag).filter(|tag| tag.is_sibling_of(best)).collect()
}

/// How a name means a model, the surest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    WithHost,
    WithHostSpelled,
    AtDefaultHost,
    AtDefaultHostSpelled,
    AtAnyHost,
    AtAnyHostSpelled,
}

fn place(tag: &Reference, name: &str, host: Option<&str>) -> Option<Place> {
    let repository = tag.repository().to_ascii_lowercase();
    let is_library = tag.namespace() == Reference::DEFAULT_NAMESPACE && tag.host() == Reference::DEFAULT_HOST;
    let is_meant = name == repository || is_library && name.eq_ignore_ascii_case(tag.model());
    let is_spelled = || name == spelled(&repository);
    if let Some(host) = host {
        let is_there = host::canonical(host).eq_ignore_ascii_case(tag.host());
        return match (is_there, is_meant) {
            (false, _) => None,
            (true, true) => Some(Place::WithHost),
            (true, false) => is_spelled().then_some(Place::WithHostSpelled),
        };
    }
    let full = format!("{}/{repository}", tag.host().to_ascii_lowercase());
    let is_default = tag.host() == Reference::DEFAULT_HOST;
    if name == full {
        Some(Place::WithHost)
    } else if name == spelled(&full) {
        Some(Place::WithHostSpelled)
    } else if is_meant {
        Some(if is_default { Place::AtDefaultHost } else { Place::AtAnyHost })
    } else if is_spelled() {
        Some(if is_default { Place::AtDefaultHostSpelled } else { Place::AtAnyHostSpelled })
    } else {
        None
    }
}

fn with_canonical_host(name: &str) -> String {
    match name.split_once('/') {
        Some((host, rest)) => format!("{}/{rest}", host::canonical(host)),
        None => name.to_owned(),
    }
}

/// A name as OCI's distribution specification allows it.
fn spelled(name: &str) -> String {
    name.to_ascii_lowercase().split('/').map(spelled_part).collect::<Vec<_>>().join("/")
}

/// Characters that are not allowed become `_`; several separators that may not follow each other become `-`; none is at
/// an end.
fn spelled_part(part: &str) -> String {
    let (mut spelled, mut separator) = (String::with_capacity(part.len()), String::new());
    for character in part.chars() {
        match character {
            'a'..='z' | '0'..='9' => {
                if !spelled.is_empty() && !separator.is_empty() {
                    let is_allowed = matches!(separator.as_str(), "." | "_" | "__")
                        || separator.chars().all(|character| character == '-');
                    spelled.push_str(if is_allowed { &separator } else { "-" });
                }
                separator.clear();
                spelled.push(character);
            }
            '.' | '-' => separator.push(character),
            _ => separator.push('_'),
        }
    }
    // A part of separators only.
    if spelled.is_empty() { "0".to_owned() } else { spelled }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(names: &[&str]) -> Vec<Reference> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn found(tags: &[Reference], name: &str, host: Option<&str>) -> Vec<String> {
        find(tags, name, host).into_iter().map(Reference::short).collect()
    }

    #[test]
    fn model_is_found_with_and_without_its_host_whatever_the_case() {
        let tags = tags(&["llama3:8b", "llama3:70b", "ann/own:1", "hf.co/Org/Model-GGUF:Q4_K_M"]);
        for name in ["llama3", "library/llama3", "registry.ollama.ai/library/llama3", "Library/LLaMA3"] {
            assert_eq!(found(&tags, name, None), ["llama3:8b", "llama3:70b"], "{name}");
        }
        for name in [
            "hf.co/Org/Model-GGUF",
            "hf.co/org/model-gguf",
            "huggingface.co/org/model-gguf",
            "org/model-gguf",
        ] {
            assert_eq!(found(&tags, name, None), ["hf.co/Org/Model-GGUF:Q4_K_M"], "{name}");
        }
        assert_eq!(found(&tags, "ann/own", None), ["ann/own:1"]);
        for name in ["", "llama", "library", "own", "hf.co/org", "ann/own/", "library/ann/own", "/llama3"] {
            assert!(find(&tags, name, None).is_empty(), "{name}");
        }
    }

    #[test]
    fn name_with_its_host_comes_before_the_default_host_and_that_before_others() {
        let tags = tags(&["org/m:1", "hf.co/org/m:2", "ghcr.io/org/m:3"]);
        assert_eq!(found(&tags, "org/m", None), ["org/m:1"]);
        assert_eq!(found(&tags, "hf.co/org/m", None), ["hf.co/org/m:2"]);
        assert_eq!(found(&tags[1..], "org/m", None), ["hf.co/org/m:2"]);
        assert_eq!(found(&tags, "org/m", Some("ghcr.io")), ["ghcr.io/org/m:3"]);
        assert_eq!(found(&tags, "org/m", Some("HuggingFace.co")), ["hf.co/org/m:2"]);
        assert!(found(&tags, "org/m", Some("quay.io")).is_empty());
    }

    #[test]
    fn what_is_listed_is_a_name_of_oci_and_finds_the_model() {
        for (name, listed) in [
            ("llama3:8b", "library/llama3"),
            ("hf.co/Org/Model_:Q4", "hf.co/org/model"),
            ("localhost:5000/m:1", "localhost_5000/m"),
            ("[::1]:5000/a/b:1", "1__5000/a/b"),
            ("x/a..b:1", "x/a-b"),
            ("x/a-_b:1", "x/a-b"),
            ("x/a---b__c.d:1", "x/a---b__c.d"),
            ("x/___:1", "x/0"),
            ("registry.example.com/a/b/c:1", "registry.example.com/a/b/c"),
        ] {
            let model: Reference = name.parse().unwrap();
            assert_eq!(repository(&model), listed, "{name}");
            let tags = [model];
            assert_eq!(find(&tags, listed, None).len(), 1, "{name}");
        }
        // The very name comes before one that is only spelled so.
        let tags = tags(&["x/a..b:1", "x/a-b:2"]);
        assert_eq!(found(&tags, "x/a-b", None), ["x/a-b:2"]);
        assert_eq!(found(&tags, "x/a..b", None), ["x/a..b:1"]);
    }
}
