//! The policy: rules that allow and deny models by registry, name, license, format and user.
//!
//! [`Policy::decide`] is a pure function of the user and of the known facts about a model. `ops::policy` collects
//! these, and applies the decision.

mod pattern;
mod subject;
mod terms;

use std::path::PathBuf;

use blobd_client::protocol::access::PolicyDecision;

pub(crate) use self::pattern::{NamePattern, Pattern};
pub(crate) use self::subject::{FORMATS, Subject, Terms};
use self::subject::{Host, Known, ModelName};
pub(crate) use self::terms::TermsBuilder;
use crate::names::Names;
use crate::principal::Principal;
use crate::user_set::{Member, UserSet};

/// What happens to a model that a rule applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    #[default]
    Allow,
    Deny,
}

impl Action {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// One rule. Conditions that are empty are met by every model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) action: Action,
    pub(crate) registries: Vec<Pattern>,
    pub(crate) names: Vec<NamePattern>,
    pub(crate) licenses: Vec<Pattern>,
    pub(crate) formats: Vec<Pattern>,
    pub(crate) users: UserSet,
    /// Users that the rule is not for, although `users` contains them.
    pub(crate) except: UserSet,
    pub(crate) reason: Option<String>,
    pub(crate) line: Option<usize>,
}

/// The rules in their order, and what happens to models that no rule applies to. Everything is allowed by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) rules: Vec<Rule>,
    pub(crate) default: Action,
    pub(crate) file: Option<PathBuf>,
    pub(crate) names: Names,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) message: String,
    pub(crate) hint: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision<'p> {
    /// By a rule with its number from 1, or by default.
    Allowed(Option<(usize, &'p Rule)>),
    Denied(Option<(usize, &'p Rule)>),
    /// It depends on the license or the format, which is not known yet.
    Undecided,
}

impl Policy {
    pub(crate) fn allows_all_to(&self, principal: &Principal) -> bool {
        self.default == Action::Allow
            && !self.rules.iter().any(|rule| rule.action == Action::Deny && rule.is_for(principal))
    }

    /// A policy that allows to everybody only what this one allows to every user.
    pub(crate) fn for_every_user(&self) -> Self {
        let everyone = UserSet::new(&[Member::Everyone], &self.names);
        let rule = |rule: &Rule| match rule.action {
            Action::Deny => {
                Some(Rule { users: everyone.clone(), except: UserSet::default(), ..rule.clone() })
            }
            Action::Allow => {
                (rule.users == everyone && rule.except == UserSet::default()).then(|| rule.clone())
            }
        };
        Self { rules: self.rules.iter().filter_map(rule).collect(), ..self.clone() }
    }

    /// Whether a decision about this user depends on the names of models.
    pub(crate) fn names_matter_to(&self, principal: &Principal) -> bool {
        self.rules.iter().any(|rule| !rule.names.is_empty() && rule.is_for(principal))
    }

    pub(crate) fn decide(&self, principal: &Principal, subject: &Subject) -> Decision<'_> {
        let mut may_apply = Vec::new();
        let rules = self.rules.iter().enumerate().filter(|(_, rule)| rule.is_for(principal));
        let mut found = None;
        for (index, rule) in rules {
            match rule.applies(subject) {
                Some(true) => {
                    found = Some((index.saturating_add(1), rule));
                    break;
                }
                Some(false) => {}
                None => may_apply.push(rule.action),
            }
        }
        let action = found.map_or(self.default, |(_, rule)| rule.action);
        if may_apply.iter().any(|earlier| *earlier != action) {
            return Decision::Undecided;
        }
        match action {
            Action::Allow => Decision::Allowed(found),
            Action::Deny => Decision::Denied(found),
        }
    }

    /// `None` if it is not made yet.
    pub(crate) fn described(
        &self,
        principal: &Principal,
        subject: &Subject,
        decision: &Decision<'_>,
    ) -> Option<PolicyDecision> {
        let (allowed, rule) = match decision {
            Decision::Allowed(rule) => (true, rule),
            Decision::Denied(rule) => (false, rule),
            Decision::Undecided => return None,
        };
        let found = if allowed { None } else { self.found(principal, subject, *rule) };
        Some(PolicyDecision {
            allowed,
            rule: rule.map(|(number, _)| number as u64),
            reason: rule.and_then(|(_, rule)| rule.reason.clone()),
            found,
            place: rule.and_then(|(_, rule)| self.place(rule)),
        })
    }

    /// The facts that a denial depends on: what the rule matches, or what no rule allows.
    fn found(
        &self,
        principal: &Principal,
        subject: &Subject,
        rule: Option<(usize, &Rule)>,
    ) -> Option<String> {
        if let Some((_, rule)) = rule {
            return rule.matched(subject);
        }
        let rules = || self.rules.iter().filter(|rule| rule.is_for(principal));
        let has = |has_condition: fn(&Rule) -> bool| rules().any(has_condition);
        listed(
            subject,
            |_host| has(|rule| !rule.registries.is_empty()),
            |_name| has(|rule| !rule.names.is_empty()),
            |_license| has(|rule| !rule.licenses.is_empty()),
            |_format| has(|rule| !rule.formats.is_empty()),
        )
    }

    /// `what` names the model or the file.
    pub(crate) fn refusal(
        &self,
        principal: &Principal,
        what: &str,
        subject: &Subject,
        rule: Option<(usize, &Rule)>,
    ) -> Refusal {
        let who = self.names.describe(principal.uid);
        let found = self.found(principal, subject, rule);
        let found = found.map_or_else(String::new, |found| format!("; found: {found}"));
        match rule {
            Some((number, rule)) => {
                let reason = rule.reason.as_deref().unwrap_or("no reason is given");
                let place = self.place(rule).unwrap_or_else(|| "the daemon's configuration".to_owned());
                let message =
                    format!("{what}: denied to {who} by rule {number} of the policy: {reason}{found}");
                let hint = format!("the rule is in {place}; use another model, or ask an administrator");
                Refusal { message, hint }
            }
            None => {
                let file = self.file.as_ref().map(|file| file.display().to_string());
                let file = file.unwrap_or_else(|| "the daemon's configuration".to_owned());
                let message = format!(
                    "{what}: denied to {who} by the policy, which allows only what a rule allows{found}"
                );
                let hint = "use another model, or ask an administrator for a rule that allows it";
                Refusal { message, hint: format!("policy.default in {file} is \"deny\"; {hint}") }
            }
        }
    }

    /// `/etc/blobd/config.toml:12`.
    fn place(&self, rule: &Rule) -> Option<String> {
        Some(format!("{}:{}", self.file.as_ref()?.display(), rule.line?))
    }
}

impl Rule {
    fn is_for(&self, principal: &Principal) -> bool {
        self.users.contains(principal) && !self.except.contains(principal)
    }

    /// `None` if it depends on facts that are not known yet.
    fn applies(&self, subject: &Subject) -> Option<bool> {
        let of_terms = |patterns: &[Pattern], values: &Known| match values {
            _ if patterns.is_empty() => Some(true),
            Known::NotYet => None,
            Known::Are(values) => {
                Some(self.combined(values.iter(), |value| patterns.iter().any(|one| one.matches(value))))
            }
        };
        let conditions = [
            Some(self.registry_matches(subject)),
            Some(self.name_matches(subject)),
            of_terms(&self.licenses, &subject.terms.licenses),
            of_terms(&self.formats, &subject.terms.formats),
        ];
        match conditions {
            conditions if conditions.contains(&Some(false)) => Some(false),
            conditions if conditions.contains(&None) => None,
            _ => Some(true),
        }
    }

    fn registry_matches(&self, subject: &Subject) -> bool {
        let matches = |host: &Host| self.registries.iter().any(|pattern| pattern.matches_host(host));
        match self.action {
            _ if self.registries.is_empty() => true,
            Action::Deny => subject.registries.union(&subject.claimed_registries).any(matches),
            Action::Allow => self.combined(subject.registries.iter(), matches),
        }
    }

    /// A rule that allows looks at the names at registries, if there are any: names that users of the store give to a
    /// model allow nothing.
    fn name_matches(&self, subject: &Subject) -> bool {
        let matches = |name: &ModelName| self.names.iter().any(|pattern| pattern.matches(name, self.action));
        let Subject { source_names, names, .. } = subject;
        match self.action {
            _ if self.names.is_empty() => true,
            Action::Deny => source_names.iter().chain(names).any(matches),
            Action::Allow if source_names.is_empty() => self.combined(names.iter(), matches),
            Action::Allow => source_names.iter().all(matches),
        }
    }

    /// The values of a model that the conditions of a rule which denies match; `None` for a rule without conditions.
    fn matched(&self, subject: &Subject) -> Option<String> {
        let any = |patterns: &[Pattern], value: &str| patterns.iter().any(|pattern| pattern.matches(value));
        listed(
            subject,
            |host| self.registries.iter().any(|pattern| pattern.matches_host(host)),
            |name| self.names.iter().any(|pattern| pattern.matches(name, self.action)),
            |license| any(&self.licenses, license),
            |format| any(&self.formats, format),
        )
    }

    /// Any value for a rule that denies, all for one that allows. No value matches nothing.
    fn combined<T>(&self, mut values: impl Iterator<Item = T>, matches: impl Fn(T) -> bool) -> bool {
        match self.action {
            Action::Deny => values.any(matches),
            Action::Allow => {
                let mut has_value = false;
                values.all(|value| {
                    has_value = true;
                    matches(value)
                }) && has_value
            }
        }
    }
}

/// The most values of one kind that are listed.
const MAX_LISTED: usize = 3;

/// Facts about a model that a decision depends on, for errors: `license unknown, format gguf`.
fn listed(
    Subject { registries, claimed_registries, source_names, names, terms }: &Subject,
    is_host: impl Fn(&Host) -> bool,
    is_name: impl Fn(&ModelName) -> bool,
    is_license: impl Fn(&str) -> bool,
    is_format: impl Fn(&str) -> bool,
) -> Option<String> {
    joined([
        ("registry", registries.union(claimed_registries).filter(|value| is_host(value)).map(host).collect()),
        ("name", source_names.union(names).filter(|value| is_name(value)).map(name).collect()),
        ("license", known(&terms.licenses, is_license)),
        ("format", known(&terms.formats, is_format)),
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

fn known(values: &Known, is_listed: impl Fn(&str) -> bool) -> Vec<String> {
    match values {
        Known::NotYet => Vec::new(),
        Known::Are(values) => values.iter().filter(|value| is_listed(value)).cloned().collect(),
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

#[cfg(test)]
mod tests;
