//! The stored models that can be compared with their sources, for `outdated` and `pull --all`.

use blobd_client::protocol::response::ModelSummary;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, PullSource, PulledSource};

use super::nothing::{NO_MATCH, NO_MODELS};

/// A stored model, and where a newer one would come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Followed {
    pub(super) name: Reference,
    pub(super) source: PullSource,
    /// What was chosen when it was pulled.
    pub(super) components: Components,
}

/// What a stored model is compared with; `None` if it does not follow a source: it was imported or edited, or is
/// fixed to a digest, or is a copy, made by `blobd tag`, of a model that has its source's own name, or is in a lower store, which its own
/// administrator updates.
pub(super) fn followed(model: &ModelSummary, all: &[ModelSummary]) -> Option<Followed> {
    if model.store.is_some() {
        return None;
    }
    let PulledSource { source, components } = model.origin.as_deref()?.parse().ok()?;
    let source = source.latest()?;
    let (name, own): (Reference, Reference) = (model.name.parse().ok()?, source.name().ok()?);
    let names =
        |other: &ModelSummary| other.name.parse::<Reference>().is_ok_and(|name| name.same_model(&own));
    let is_copy = !name.same_model(&own) && all.iter().any(names);
    (!is_copy).then_some(Followed { name, source, components })
}

/// Why no model is compared with its source, of `listed` models in the store and `wanted` ones that were asked for.
pub(super) fn nothing_to_compare(listed: usize, wanted: usize) -> String {
    match (listed, wanted) {
        (0, _) => NO_MODELS.to_owned(),
        (_, 0) => NO_MATCH.to_owned(),
        (_, 1) => {
            "the model has no source to compare with: it was not pulled, or is fixed to a digest\n".to_owned()
        }
        (_, count) => {
            format!(
                "{count} models, none has a source to compare with: they were not pulled, or are fixed to a digest\n"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;
    use blobd_store_format::source::{Draft, Projector};

    use super::*;

    fn model(name: &str, origin: Option<&str>) -> ModelSummary {
        ModelSummary {
            name: name.to_owned(),
            digest: Digest::of(b"m"),
            size: 1,
            modified: String::new(),
            pinned: false,
            origin: origin.map(str::to_owned),
            damage: None,
            store: None,
        }
    }

    fn source_of(name: &str, origin: &str, others: &[ModelSummary]) -> Option<String> {
        followed(&model(name, Some(origin)), others).map(|followed| followed.source.to_string())
    }

    #[test]
    fn pulled_models_follow_their_sources() {
        let tag = "registry.ollama.ai/library/llama3:8b";
        assert_eq!(source_of("llama3:8b", tag, &[]).as_deref(), Some(tag));
        assert_eq!(source_of("mine:8b", tag, &[]).as_deref(), Some(tag), "pulled with --name");
        assert_eq!(source_of("mine:8b", tag, &[model("llama3:8b", Some(tag))]), None, "a copy");
        let commit = "https://huggingface.co/me/x/resolve/0123456789abcdef0123456789abcdef01234567/x.gguf";
        assert_eq!(source_of("hf.co/me/x:x", commit, &[]).as_deref(), Some("hf.co/me/x/x.gguf"));
    }

    #[test]
    fn models_follow_their_sources_with_the_components_that_were_chosen() {
        let model = model("hf.co/me/x:Q8_0", Some("hf.co/me/x:Q8_0 --no-projector --no-draft"));
        let Followed { source, components, .. } = followed(&model, &[]).unwrap();
        assert_eq!(source.to_string(), "hf.co/me/x:Q8_0");
        assert_eq!(components, Components { projector: Projector::None, draft: Draft::None });
    }

    #[test]
    fn other_models_follow_nothing() {
        for origin in [
            "import x.gguf",
            "url https://a/x.gguf",
            "edit llama3:8b",
            &format!("llama3:8b@{}", Digest::of(b"m")),
        ] {
            assert_eq!(source_of("m:latest", origin, &[]), None, "{origin}");
        }
        assert_eq!(followed(&model("m:latest", None), &[]), None);
    }
}
