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

/// What a stored model is compared with; `None` if it follows no source, or is in a lower store, which its own
/// administrator updates.
pub(super) fn followed(model: &ModelSummary) -> Option<Followed> {
    if model.store.is_some() {
        return None;
    }
    let PulledSource { source, components } = model.follows.as_deref()?.parse().ok()?;
    Some(Followed { name: model.name.parse().ok()?, source, components })
}

/// Why no model is compared with its source, of `listed` models in the store and `wanted` ones that were asked for.
pub(super) fn nothing_to_compare(listed: usize, wanted: usize) -> String {
    match (listed, wanted) {
        (0, _) => NO_MODELS.to_owned(),
        (_, 0) => NO_MATCH.to_owned(),
        (_, 1) => {
            "the model has no source to compare with: it was not pulled, or is fixed to a digest or a commit\n".to_owned()
        }
        (_, count) => {
            format!(
                "{count} models, none has a source to compare with: they were not pulled, or are fixed to a digest or a commit\n"
            )
        }
    }
}
