//! `--filter KEY=VALUE`

use std::str::FromStr;
use std::time::Duration;

use blobd_cli_common::times::{age, parse_period};
use blobd_client::protocol::response::ModelSummary;
use blobd_model::kind::{ModelKind, UnknownKind};
use blobd_store_format::glob::Glob;
use blobd_store_format::name_pattern::NamePattern;

use super::Facts;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    Name(NamePattern),
    Origin(Glob),
    Architecture(Glob),
    Quantization(Glob),
    Kind(Vec<ModelKind>),
    Pinned(bool),
    Damaged(bool),
    Older(Duration),
    Newer(Duration),
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| format!("wrong form: expected KEY=VALUE, such as name=llama, found {text:?}"))?;
        match key {
            "name" => NamePattern::search(value).map(Self::Name).map_err(|error| error.to_string()),
            "origin" if value.contains(['*', '?', '[']) => Ok(Self::Origin(Glob::new(value))),
            "origin" => Ok(Self::Origin(Glob::containing(value))),
            "architecture" | "family" => Ok(Self::Architecture(Glob::new(value))),
            "quantization" => Ok(Self::Quantization(Glob::new(value))),
            "kind" => {
                let kinds = value.split(',').map(str::parse).collect::<Result<_, UnknownKind>>();
                kinds.map(Self::Kind).map_err(|error| error.to_string())
            }
            "pinned" => truth(key, value).map(Self::Pinned),
            "damaged" => truth(key, value).map(Self::Damaged),
            "older" => duration(key, value).map(Self::Older),
            "newer" => duration(key, value).map(Self::Newer),
            _ => Err(format!(
                "unknown key: expected name, origin, kind, architecture, family, quantization, pinned, damaged, older or \
                 newer, found {key:?}"
            )),
        }
    }
}

fn truth(key: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_other| format!("{key}: wrong value: expected true or false, found {value:?}"))
}

fn duration(key: &str, value: &str) -> Result<Duration, String> {
    parse_period(value).map_err(|refusal| format!("{key} {refusal}"))
}

impl Filter {
    /// Whether only the model's header has what it compares. Usually it is recorded.
    pub(super) const fn needs_header(&self, model: &ModelSummary) -> bool {
        match self {
            Self::Architecture(_) => model.architecture.is_none(),
            Self::Quantization(_) => model.quantization.is_none(),
            Self::Kind(_) => model.kind.is_none(),
            _ => false,
        }
    }

    pub(super) fn matches(&self, model: &ModelSummary, facts: &Facts) -> bool {
        let is = |pattern: &Glob, text: Option<&str>| text.is_some_and(|text| pattern.matches(text));
        match self {
            Self::Name(pattern) => model.name.parse().is_ok_and(|name| pattern.matches(&name)),
            Self::Origin(pattern) => is(pattern, model.origin.as_deref()),
            Self::Architecture(pattern) => is(pattern, facts.architecture(model)),
            Self::Quantization(pattern) => is(pattern, facts.quantization(model)),
            Self::Kind(kinds) => facts.kind(model).is_some_and(|kind| kinds.contains(&kind)),
            Self::Pinned(pinned) => model.pinned == *pinned,
            Self::Damaged(damaged) => model.damage.is_some() == *damaged,
            Self::Older(time) => age(&model.modified) >= *time,
            Self::Newer(time) => age(&model.modified) < *time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::summary;
    use super::*;

    #[test]
    fn conditions_are_read_and_wrong_ones_are_explained() {
        assert_eq!("name=Llama".parse(), Ok(Filter::Name(NamePattern::search("Llama").unwrap())));
        assert_eq!("family=llama".parse(), Ok(Filter::Architecture(Glob::new("llama"))));
        assert_eq!("kind=adapter".parse(), Ok(Filter::Kind(vec![ModelKind::Adapter])));
        let several = Filter::Kind(vec![ModelKind::Reranker, ModelKind::Projector]);
        assert_eq!("kind=reranker,projector".parse(), Ok(several));
        assert_eq!("older=2d".parse(), Ok(Filter::Older(Duration::from_secs(2 * 86400))));
        for (text, part) in [
            ("llama", "KEY=VALUE"),
            ("size=3", "quantization, pinned"),
            ("kind=lora", "adapter"),
            ("kind=adapter,lora", "\"lora\""),
            ("pinned=yes", "true or false"),
            ("older=long", "30d"),
        ] {
            assert!(text.parse::<Filter>().unwrap_err().contains(part), "{text}");
        }
    }

    #[test]
    fn models_match_by_name_origin_and_age() {
        let model = ModelSummary {
            kind: Some(ModelKind::Reranker),
            modified: "2020-01-01T00:00:00Z".to_owned(),
            pinned: true,
            origin: Some("https://hf.co/me/Llama".to_owned()),
            ..summary("hf.co/me/Llama:Q4")
        };
        let matches = |text: &str| text.parse::<Filter>().unwrap().matches(&model, &Facts::default());
        let matching = "name=llama name=hf.co/* name=me/* name=ME/LLAMA* origin=hf.co origin=*/ME/* pinned=true \
                        damaged=false older=30d kind=reranker kind=projector,reranker";
        for text in matching.split(' ') {
            assert!(matches(text), "{text}");
        }
        let other = "name=qwen name=my/* origin=me/* pinned=false newer=30d architecture=llama damaged=true \
                     kind=projector,model";
        for text in other.split(' ') {
            assert!(!matches(text), "{text}");
        }
    }
}
