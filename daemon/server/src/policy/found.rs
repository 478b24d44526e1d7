//! What rules have found in a model, for errors: `license unknown, format gguf`.

use super::subject::{Host, Known, ModelName, Subject};
use super::{Pattern, Rule};

/// The most values of one kind that are listed.
const MAX_LISTED: usize = 3;

impl Rule {
    /// The values of a model that the conditions of a rule which denies match; `None` for a rule without conditions.
    pub(super) fn found(&self, subject: &Subject) -> Option<String> {
        let Subject { registries, source_names, names, terms } = subject;
        let is_host = |host: &&Host| self.registries.iter().any(|pattern| pattern.matches_host(host));
        let is_name = |name: &&ModelName| self.names.iter().any(|pattern| pattern.matches(name, self.action));
        joined([
            ("registry", registries.iter().filter(is_host).map(host).collect()),
            ("name", source_names.union(names).filter(is_name).map(name).collect()),
            ("license", matching(&self.licenses, &terms.licenses)),
            ("format", matching(&self.formats, &terms.formats)),
        ])
    }
}

/// The values of a model about which any of these rules has a condition.
pub(super) fn compared(rules: &[&Rule], subject: &Subject) -> Option<String> {
    let Subject { registries, source_names, names, terms } = subject;
    let any = |has: fn(&Rule) -> bool| rules.iter().any(|rule| has(rule));
    let if_any = |has: fn(&Rule) -> bool, values: Vec<String>| if any(has) { values } else { Vec::new() };
    joined([
        ("registry", if_any(|rule| !rule.registries.is_empty(), registries.iter().map(host).collect())),
        ("name", if_any(|rule| !rule.names.is_empty(), source_names.union(names).map(name).collect())),
        ("license", if_any(|rule| !rule.licenses.is_empty(), known(&terms.licenses))),
        ("format", if_any(|rule| !rule.formats.is_empty(), known(&terms.formats))),
    ])
}

fn host(Host { name, port }: &Host) -> String {
    match port {
        Some(port) if ![80, 443].contains(port) => format!("{name}:{port}"),
        _ => name.clone(),
    }
}

fn name(ModelName { repository, tag }: &ModelName) -> String {
    tag.as_ref().map_or_else(|| repository.clone(), |tag| format!("{repository}:{tag}"))
}

fn matching(patterns: &[Pattern], values: &Known) -> Vec<String> {
    let mut values = known(values);
    values.retain(|value| patterns.iter().any(|pattern| pattern.matches(value)));
    values
}

fn known(values: &Known) -> Vec<String> {
    match values {
        Known::NotYet => Vec::new(),
        Known::Are(values) => values.iter().cloned().collect(),
    }
}

fn joined(kinds: [(&str, Vec<String>); 4]) -> Option<String> {
    let listed = |(kind, values): (&str, Vec<String>)| {
        let listed = values.get(..MAX_LISTED).unwrap_or(&values);
        let more = match values.len().saturating_sub(listed.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!values.is_empty()).then(|| format!("{kind} {}{more}", listed.join(" and ")))
    };
    let listed: Vec<String> = kinds.into_iter().filter_map(listed).collect();
    (!listed.is_empty()).then(|| listed.join(", "))
}
