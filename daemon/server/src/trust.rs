//! The rules `[[trust]]`: which models must be signed, and by whom. `ops::trust` applies them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use blobd_keys::PublicKey;
use blobd_store_format::digest::Digest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// A key that may have signed models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedKey {
    pub(crate) name: String,
    pub(crate) key: PublicKey,
}

/// What happens to a model that is not signed as its rule demands. The strictest comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TrustMode {
    /// Nothing: the rule excepts models from later rules.
    Off,
    /// The log says so.
    Warn,
    /// It is refused.
    Enforce,
}

impl TrustMode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Warn => "warn",
            Self::Enforce => "enforce",
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct TrustRule {
    pub(crate) pattern: NamePattern,
    pub(crate) keys: Vec<NamedKey>,
    pub(crate) mode: TrustMode,
    /// Whether a model may lack files that its signature lists.
    pub(crate) partial: bool,
    pub(crate) line: Option<usize>,
}

/// The rules in their order, and what is known about stored models. It is forgotten with the rules, when the configuration
/// is read again.
#[derive(Debug, Default)]
pub(crate) struct Trust {
    rules: Vec<TrustRule>,
    file: Option<PathBuf>,
    /// The models that are signed as a rule demands, by the number of the rule. Their manifests never change, so this is true
    /// for as long as the rules are the same.
    signed: Mutex<BTreeSet<(usize, Digest)>>,
    /// Those that the log was warned of.
    warned: Mutex<BTreeSet<(usize, Digest)>>,
}

/// A rule that applies to a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedRule<'t> {
    number: usize,
    pub(crate) rule: &'t TrustRule,
    trust: &'t Trust,
}

impl Trust {
    pub(crate) fn new(rules: Vec<TrustRule>, file: Option<PathBuf>) -> Self {
        Self { rules, file, ..Self::default() }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rule for a model with these names. The first rule whose pattern matches a name decides for that name. Of
    /// several names the strictest rule applies: giving a model another name changes nothing about where it came from.
    pub(crate) fn rule_for<'n>(
        &self,
        names: impl IntoIterator<Item = &'n Reference>,
    ) -> Option<AppliedRule<'_>> {
        let first_for = |name: &Reference| {
            let mut rules = self.rules.iter().enumerate();
            rules.find(|(_, rule)| rule.pattern.matches(name))
        };
        let found = names.into_iter().filter_map(first_for).filter(|(_, rule)| rule.mode != TrustMode::Off);
        // Of equal ones, the first in the file.
        let (number, rule) = found.max_by_key(|(number, rule)| (rule.mode, std::cmp::Reverse(*number)))?;
        Some(AppliedRule { number, rule, trust: self })
    }

    /// The keys of all rules, each once.
    pub(crate) fn keys(&self) -> Vec<NamedKey> {
        let mut keys: Vec<NamedKey> = Vec::new();
        for key in self.rules.iter().flat_map(|rule| &rule.keys) {
            if !keys.contains(key) {
                keys.push(key.clone());
            }
        }
        keys
    }
}

impl AppliedRule<'_> {
    /// 40 bytes each.
    const MAX_REMEMBERED: usize = 10_000;

    pub(crate) fn is_known_as_signed(&self, manifest: Digest) -> bool {
        lock(&self.trust.signed).contains(&(self.number, manifest))
    }

    pub(crate) fn note_signed(&self, manifest: Digest) {
        self.remember(&self.trust.signed, manifest);
    }

    /// Whether the log was not warned of the model yet.
    pub(crate) fn note_warned(&self, manifest: Digest) -> bool {
        self.remember(&self.trust.warned, manifest)
    }

    fn remember(&self, known: &Mutex<BTreeSet<(usize, Digest)>>, manifest: Digest) -> bool {
        let mut known = lock(known);
        if known.len() >= Self::MAX_REMEMBERED {
            known.clear();
        }
        known.insert((self.number, manifest))
    }

    /// What the rule demands, and where it is.
    pub(crate) fn description(&self) -> String {
        let TrustRule { pattern, keys, line, .. } = self.rule;
        let keys: Vec<_> = keys.iter().map(|key| key.name.as_str()).collect();
        let demand = format!("[[trust]] demands that models {pattern} are signed by {}", keys.join(" or "));
        match self.trust.file.as_ref().zip(*line) {
            Some((file, line)) => format!("{}:{line}: {demand}", file.display()),
            None => demand,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trust(rules: &[(&str, TrustMode)]) -> Trust {
        let rule = |(pattern, mode): &(&str, TrustMode)| TrustRule {
            pattern: pattern.parse().unwrap(),
            keys: Vec::new(),
            mode: *mode,
            partial: false,
            line: None,
        };
        Trust::new(rules.iter().map(rule).collect(), None)
    }

    #[test]
    fn first_rule_decides_for_a_name_and_the_strictest_name_for_a_model() {
        use TrustMode::{Enforce, Off, Warn};
        let trust = trust(&[("hf.co/org/x", Off), ("hf.co/org/*", Enforce), ("scratch/*", Off), ("*", Warn)]);
        let found = |names: &[&str]| {
            let names: Vec<Reference> = names.iter().map(|name| name.parse().unwrap()).collect();
            trust.rule_for(&names).map(|applied| applied.rule.mode)
        };
        assert_eq!(found(&["hf.co/org/y:Q4"]), Some(Enforce));
        assert_eq!(found(&["hf.co/ORG/x:Q4"]), None);
        assert_eq!(found(&["scratch/m"]), None);
        assert_eq!(found(&["llama3"]), Some(Warn));
        assert_eq!(found(&["scratch/m", "hf.co/org/y"]), Some(Enforce), "it came from there");
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn what_is_known_belongs_to_the_rule() {
        let trust = trust(&[("a", TrustMode::Enforce), ("b", TrustMode::Warn)]);
        let [a, b]: [Reference; 2] = ["a", "b"].map(|name| name.parse().unwrap());
        let manifest = Digest::of(b"m");
        trust.rule_for([&a]).unwrap().note_signed(manifest);
        assert!(trust.rule_for([&a]).unwrap().is_known_as_signed(manifest));
        assert!(!trust.rule_for([&b]).unwrap().is_known_as_signed(manifest));
        assert!(trust.rule_for([&b]).unwrap().note_warned(manifest));
        assert!(!trust.rule_for([&b]).unwrap().note_warned(manifest));
    }
}
