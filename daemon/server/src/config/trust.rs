//! The rules `[[trust]]`: which models must be signed, and by whom.

use std::path::Path;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_keys::PublicKey;
use blobd_registry::read_regular;
use blobd_store_format::host;
use blobd_store_format::name_pattern::NamePattern;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use toml::Spanned;

use super::Refusal;
use super::stores::PlacedPath;
use crate::trust::{NamedKey, Trust, TrustMode, TrustRule};

/// Rules in their order; the first that matches a name decides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct TrustConfig(Vec<Spanned<RuleConfig>>);

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RuleConfig {
    pattern: Option<NamePattern>,
    keys: Vec<PlacedPath>,
    mode: Option<TrustMode>,
    partial: bool,
    /// The line of the rule in the file, counted from 1.
    #[serde(skip)]
    line: Option<usize>,
}

impl TrustConfig {
    /// Stores where the rules and their keys are, for errors.
    pub(super) fn note_places(
        &mut self,
        place_of: impl Fn(usize) -> String,
        line_of: impl Fn(usize) -> usize,
    ) {
        for rule in &mut self.0 {
            let start = rule.span().start;
            let rule = rule.get_mut();
            rule.line = Some(line_of(start));
            rule.keys.iter_mut().for_each(|key| key.note_place(&place_of));
        }
    }

    /// Refuses rules without a pattern or a mode, and those that demand a signature by no key.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        for (index, rule) in self.0.iter().enumerate() {
            let what = match rule.get_ref() {
                RuleConfig { pattern: None, .. } => "expected a pattern of names, found none",
                RuleConfig { mode: None, .. } => {
                    "expected the mode \"off\", \"warn\" or \"enforce\", found none"
                }
                RuleConfig { mode: Some(mode), keys, .. } if *mode != TrustMode::Off && keys.is_empty() => {
                    "expected the files of public keys, found none"
                }
                _ => continue,
            };
            let what = format!("rule {}: {what}", index.saturating_add(1));
            return Err(Refusal { start: Some(rule.span().start), ..Refusal::new("trust", what) });
        }
        Ok(())
    }

    /// Reads the files of the keys.
    pub(super) fn trust(&self, file: Option<&Path>) -> Result<Trust, ErrorBody> {
        let rules = self.0.iter().filter_map(|rule| rule.get_ref().rule().transpose());
        Ok(Trust::new(rules.collect::<Result<_, _>>()?, file.map(Path::to_path_buf)))
    }

    pub(super) fn value(&self) -> Json {
        self.0.iter().map(|rule| rule.get_ref().value()).collect()
    }
}

impl RuleConfig {
    fn rule(&self) -> Result<Option<TrustRule>, ErrorBody> {
        let Some((pattern, mode)) = self.pattern.clone().zip(self.mode) else { return Ok(None) };
        let keys = self.keys.iter().map(key).collect::<Result<_, _>>()?;
        let pattern = with_known_host(&pattern);
        Ok(Some(TrustRule { pattern, keys, mode, partial: self.partial, line: self.line }))
    }

    /// The rule as the file has it, without the keys that are left out.
    fn value(&self) -> Json {
        let keys: Vec<_> = self.keys.iter().map(|key| key.path().to_string_lossy()).collect();
        let keys = [
            ("pattern", self.pattern.as_ref().map(|pattern| json!(pattern))),
            ("keys", (!keys.is_empty()).then(|| json!(keys))),
            ("mode", self.mode.map(|mode| json!(mode.name()))),
            ("partial", self.partial.then_some(json!(true))),
        ];
        let keys = keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Json::Object(keys.collect::<Map<_, _>>())
    }
}

/// The pattern with the name of its host under which models are stored: `hf.co` for `huggingface.co`.
fn with_known_host(pattern: &NamePattern) -> NamePattern {
    let written = pattern.to_string();
    let known = written.split_once('/').filter(|(host, _)| !host.contains(['*', '?', '[']));
    let known = known.map(|(host, rest)| format!("{}/{rest}", host::canonical(host)));
    known.and_then(|known| known.parse().ok()).unwrap_or_else(|| pattern.clone())
}

fn key(placed: &PlacedPath) -> Result<NamedKey, ErrorBody> {
    let path = placed.path();
    let refused = |what: &dyn std::fmt::Display, hint: &str| {
        let message = format!("{}: trust.keys: {}: {what}", placed.place(), path.display());
        ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(hint)
    };
    let read = read_regular(path, blobd_keys::MAX_FILE_BYTES);
    let content = read.map_err(|error| {
        refused(&format_args!("cannot read: {error}"), "the daemon's user must be able to read it")
    })?;
    let parsed = PublicKey::parse(&String::from_utf8_lossy(&content));
    let key = parsed.map_err(|error| refused(&error, error.hint()))?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(NamedKey { name, key })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const KEY: &str = include_str!("../../../keys/tests/p256-public.pem");

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("c"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn rules_are_read_with_their_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("site.pub");
        std::fs::write(&path, KEY).unwrap();
        let text = format!(
            "\n[[trust]]\npattern = \"huggingface.co/Org/*\"\nkeys = [{path:?}]\nmode = \"enforce\"\npartial = true\n\
             [[trust]]\npattern = \"*\"\nmode = \"off\"\n"
        );
        let config = parse(&text).unwrap();
        let trust = config.trust().unwrap();
        let name = "hf.co/org/x:1".parse().unwrap();
        let applied = trust.rule_for([&name]).unwrap();
        assert!(applied.rule.partial && applied.rule.mode == TrustMode::Enforce);
        assert_eq!(
            applied.description(),
            "c:2: [[trust]] demands that models hf.co/Org/* are signed by site.pub"
        );
        assert_eq!(trust.keys().len(), 1);
        let first =
            json!({ "pattern": "huggingface.co/Org/*", "keys": [path], "mode": "enforce", "partial": true });
        assert_eq!(config.trust.value(), json!([first, { "pattern": "*", "mode": "off" }]));
        assert!(parse("").unwrap().trust().unwrap().is_empty());
    }

    #[test]
    fn mistakes_in_rules_are_named_with_their_place() {
        for (text, error) in [
            ("[[trust]]\nmode = \"off\"", "c:1:1: trust: rule 1: expected a pattern"),
            ("[[trust]]\npattern = \"*\"", "c:1:1: trust: rule 1: expected the mode"),
            (
                "[[trust]]\npattern = \"*\"\nmode = \"warn\"",
                "c:1:1: trust: rule 1: expected the files of public keys",
            ),
            (
                "[[trust]]\npattern = \"*\"\nmode = \"on\"",
                "expected \"off\", \"warn\" or \"enforce\", found \"on\"",
            ),
            ("[[trust]]\npattern = \"*\"\nkeys = [\"here\"]\nmode = \"warn\"", "expected an absolute path"),
            ("[[trust]]\npatern = \"*\"", "unknown key \"patern\""),
        ] {
            let found = parse(text).unwrap_err();
            assert!(found.contains(error), "{text}: {found}");
        }
        let rule = "[[trust]]\npattern = \"*\"\nmode = \"warn\"\nkeys = [\"/nonexistent\"]";
        let error = parse(rule).unwrap().trust().unwrap_err();
        assert!(error.message.starts_with("c:4:9: trust.keys: /nonexistent: cannot read: "), "{error}");
    }
}
