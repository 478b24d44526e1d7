//! The section `[policy]`: the users to whom models are allowed.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use toml::Spanned;

use super::Refusal;
use super::members::{Named, check_names, members, value};
use super::values::{self, OneOrMore, Value};
use crate::names::Names;
use crate::policy::{Action, FORMATS, NamePattern, Pattern, Policy, Rule};
use crate::user_set::{Member, UserSet};

/// Rules in their order; the first that applies decides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PolicyConfig {
    default: Action,
    rules: Vec<Spanned<RuleConfig>>,
    /// The lines of the rules in the file, counted from 1.
    #[serde(skip)]
    lines: Vec<usize>,
}

/// One rule. Conditions that are left out are met by every model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RuleConfig {
    action: Option<Action>,
    #[serde(deserialize_with = "values::one_or_more::<HostPattern, _>")]
    registry: OneOrMore<Pattern>,
    #[serde(deserialize_with = "values::one_or_more::<NamePattern, _>")]
    name: OneOrMore<NamePattern>,
    #[serde(deserialize_with = "values::one_or_more::<Pattern, _>")]
    license: OneOrMore<Pattern>,
    #[serde(deserialize_with = "values::one_or_more::<FormatPattern, _>")]
    format: OneOrMore<Pattern>,
    users: Option<Vec<Named>>,
    except: Option<Vec<Named>>,
    reason: Option<String>,
}

impl PolicyConfig {
    /// Stores the lines of the rules, for errors. `line_of` returns the line of an offset in the file.
    pub(super) fn note_lines(&mut self, line_of: impl Fn(usize) -> usize) {
        self.lines = self.rules.iter().map(|rule| line_of(rule.span().start)).collect();
    }

    /// Uses the name service if there are rules.
    pub(super) fn policy(&self, file: Option<&Path>) -> Policy {
        let file = file.map(Path::to_path_buf);
        if self.rules.is_empty() && self.default == Action::Allow {
            return Policy { file, ..Policy::default() };
        }
        let names = Names::system();
        let lines = self.lines.iter().copied().map(Some).chain(std::iter::repeat(None));
        let rules = self.rules.iter().zip(lines);
        let rules = rules.map(|(rule, line)| rule.get_ref().rule(&names, line)).collect();
        Policy { rules, default: self.default, file, names }
    }

    /// Refuses rules without an action, those that deny without a reason, and names that do not exist.
    pub(super) fn check(&self, names: impl Fn() -> Names) -> Result<(), Refusal> {
        for (index, rule) in self.rules.iter().enumerate() {
            let what = match rule.get_ref() {
                RuleConfig { action: None, .. } => "expected the action \"allow\" or \"deny\", found none",
                RuleConfig { action: Some(Action::Deny), reason: None, .. } => {
                    "expected a reason for the users who are denied, found none"
                }
                _ => continue,
            };
            let what = format!("rule {}: {what}", index.saturating_add(1));
            return Err(Refusal { start: Some(rule.span().start), ..Refusal::new("policy.rules", what) });
        }
        let rules = self.rules.iter().map(Spanned::get_ref);
        let lists = rules
            .flat_map(|rule| [("policy.rules.users", &rule.users), ("policy.rules.except", &rule.except)]);
        check_names(lists.filter_map(|(key, list)| Some((key, list.as_ref()?))), names)
    }

    pub(super) fn values(&self) -> [(&'static str, Json); 2] {
        let rules = self.rules.iter().map(|rule| rule.get_ref().value()).collect();
        [("policy.default", json!(self.default.name())), ("policy.rules", rules)]
    }
}

impl RuleConfig {
    fn rule(&self, names: &Names, line: Option<usize>) -> Rule {
        let except = self.except.as_ref().map(|listed| members(listed)).unwrap_or_default();
        Rule {
            action: self.action.unwrap_or_default(),
            registries: self.registry.as_slice().to_vec(),
            names: self.name.as_slice().to_vec(),
            licenses: self.license.as_slice().to_vec(),
            formats: self.format.as_slice().to_vec(),
            users: UserSet::new(&self.user_members(), names),
            except: UserSet::new(&except, names),
            reason: self.reason.clone(),
            line,
        }
    }

    fn user_members(&self) -> Vec<Member> {
        self.users.as_ref().map_or_else(|| vec![Member::Everyone], |listed| members(listed))
    }

    /// The rule as the file has it, without the keys that are left out.
    fn value(&self) -> Json {
        let list = |listed: &Vec<Named>| -> Json { members(listed).iter().map(value).collect() };
        let keys = [
            ("action", self.action.map(|action| json!(action.name()))),
            ("registry", patterns(&self.registry)),
            ("name", patterns(&self.name)),
            ("license", patterns(&self.license)),
            ("format", patterns(&self.format)),
            ("users", self.users.as_ref().map(list)),
            ("except", self.except.as_ref().map(list)),
            ("reason", self.reason.as_ref().map(|reason| json!(reason))),
        ];
        let keys = keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Json::Object(keys.collect::<Map<_, _>>())
    }
}

fn patterns<T: ToString>(given: &OneOrMore<T>) -> Option<Json> {
    let given = given.as_slice();
    (!given.is_empty()).then(|| given.iter().map(|pattern| json!(pattern.to_string())).collect())
}

const EXPECTED: &str = "a pattern in quotes";
const NOUN: &str = "pattern";

impl Value for Pattern {
    type Output = Self;

    const EXPECTED: &'static str = EXPECTED;
    const NOUN: &'static str = NOUN;

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }
}

impl Value for NamePattern {
    type Output = Self;

    const EXPECTED: &'static str = EXPECTED;
    const NOUN: &'static str = NOUN;

    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }
}

struct HostPattern;

impl Value for HostPattern {
    type Output = Pattern;

    const EXPECTED: &'static str = EXPECTED;
    const NOUN: &'static str = NOUN;

    fn parse(text: &str) -> Result<Pattern, String> {
        Pattern::host(text).map_err(|error| error.to_string())
    }
}

struct FormatPattern;

impl Value for FormatPattern {
    type Output = Pattern;

    const EXPECTED: &'static str = EXPECTED;
    const NOUN: &'static str = NOUN;

    /// A pattern that no format matches is a mistake.
    fn parse(text: &str) -> Result<Pattern, String> {
        let pattern = Pattern::parse(text).map_err(|error| error.to_string())?;
        let is_known = FORMATS.iter().any(|format| pattern.matches(format));
        if is_known { Ok(pattern) } else { Err(FORMATS.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> Result<Config, (String, String)> {
        let error = |error: super::super::ConfigError| {
            let body = error.body();
            (body.message, body.hint.unwrap_or_default())
        };
        Config::parse(Path::new("c.toml"), text).map_err(error)
    }

    #[test]
    fn rules_are_read_in_their_order_with_their_lines() {
        let text = "[policy]\ndefault = \"deny\"\n\n[[policy.rules]]\naction = \"allow\"\nname = \"acme/*\"\n\n\
                    [[policy.rules]]\naction = \"deny\"\nlicense = [\"unknown\", \"cc-*\"]\nexcept = [7]\nreason = \"no\"\n";
        let config = parse(text).unwrap();
        let policy = config.policy();
        assert_eq!(policy.default, Action::Deny);
        assert_eq!(policy.rules.iter().map(|rule| rule.line).collect::<Vec<_>>(), [Some(4), Some(8)]);
        assert_eq!(
            policy.rules.iter().map(|rule| rule.action).collect::<Vec<_>>(),
            [Action::Allow, Action::Deny]
        );
        let [_, (_, rules)] = config.policy.values();
        let second =
            json!({ "action": "deny", "license": ["unknown", "cc-*"], "except": [7], "reason": "no" });
        assert_eq!(rules, json!([{ "action": "allow", "name": ["acme/*"] }, second]));
    }

    #[test]
    fn mistakes_in_rules_are_named_with_their_place() {
        let rule = "[[policy.rules]]\naction = \"deny\"\nreason = \"no\"\n";
        for (key, message, hint) in [
            (
                "licence = \"mit\"",
                "c.toml:4:1: unknown key \"licence\"",
                "did you mean policy.rules.license?",
            ),
            ("registry = \"https://hf.co\"", "c.toml:4:12: policy.rules.registry: expected a host such", ""),
            ("name = [\"a/*\", \"b c\"]", "c.toml:4:16: policy.rules.name: expected letters, digits", ""),
            (
                "name = []",
                "c.toml:4:8: policy.rules.name: expected at least one pattern, found an empty list",
                "",
            ),
            (
                "license = 5",
                "c.toml:4:11: policy.rules.license: expected a pattern or a list of patterns, found 5",
                "",
            ),
            (
                "format = \"ggml\"",
                "c.toml:4:10: policy.rules.format: expected gguf, safetensors, dduf, other, found \"ggml\"",
                "",
            ),
            (
                "users = [\"nobody-has-this-name\"]",
                "c.toml:4:10: policy.rules.users: no such user: expected a user that",
                "give the number",
            ),
        ] {
            let (found, found_hint) = parse(&format!("{rule}{key}\n")).unwrap_err();
            assert!(found.starts_with(message), "{key}: {found}");
            assert!(found_hint.contains(hint), "{key}: {found_hint}");
        }
        for (text, message) in [
            ("[[policy.rules]]\nname = \"a\"", "c.toml:1:1: policy.rules: rule 1: expected the action"),
            ("[[policy.rules]]\naction = \"deny\"", "c.toml:1:1: policy.rules: rule 1: expected a reason"),
            (
                "[[policy.rules]]\naction = \"block\"",
                "c.toml:2:10: policy.rules.action: expected \"allow\" or \"deny\", found \"block\"",
            ),
            (
                "[policy]\ndefault = \"no\"",
                "c.toml:2:11: policy.default: expected \"allow\" or \"deny\", found \"no\"",
            ),
            ("[polcy]\ndefault = \"deny\"", "c.toml:1:2: unknown key \"polcy\""),
        ] {
            let (found, _) = parse(text).unwrap_err();
            assert!(found.starts_with(message), "{text}: {found}");
        }
    }
}
