//! What a file of a repository is, by its name.

use super::file_name;
use crate::file_type::quantization_bits;

/// What a file is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Model,
    Projector,
    Draft(DraftKind),
    /// An importance matrix, an adapter, a control vector, a vocabulary.
    Other,
}

/// How a draft predicts, those first that are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DraftKind {
    Mtp,
    Eagle3,
    DFlash,
    DSpark,
    /// A smaller model.
    Model,
}

/// How surely a name tells what a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nature {
    Certain(Kind),
    /// Unless all models of the repository have such names.
    Likely(Kind),
}

pub(super) const DRAFTS: [(&str, DraftKind); 6] = [
    ("mtp", DraftKind::Mtp),
    ("eagle3", DraftKind::Eagle3),
    ("dflash", DraftKind::DFlash),
    ("dspark", DraftKind::DSpark),
    ("draft", DraftKind::Model),
    ("drafts", DraftKind::Model),
];
pub(super) const PROJECTORS: [&str; 3] = ["mmproj", "mm-proj", "mm_proj"];
pub(super) const PROJECTOR_FOLDERS: [&str; 4] = ["mmproj", "mmprojs", "projector", "projectors"];
const IMATRIX: &str = "imatrix";
const VOCABULARY: &str = "ggml-vocab-";
/// Words in the names of files that change a model and are none.
const OTHERS: [&str; 5] = ["lora", "adapter", "cvector", "control-vector", "control_vector"];

/// What a file is, from its path without extension and shard number.
pub(super) fn nature(stem: &str) -> Nature {
    let stem = stem.to_ascii_lowercase();
    let name = file_name(&stem);
    let folder = stem.rsplit('/').nth(1).unwrap_or_default();
    if PROJECTORS.iter().any(|word| name.contains(word)) || PROJECTOR_FOLDERS.contains(&folder) {
        return Nature::Certain(Kind::Projector);
    }
    if name.contains(IMATRIX) {
        let is_certain = name.starts_with(IMATRIX)
            || !name.split(['-', '.']).any(|part| quantization_bits(part).is_some());
        return if is_certain { Nature::Certain(Kind::Other) } else { Nature::Likely(Kind::Other) };
    }
    if name.starts_with(VOCABULARY) {
        return Nature::Certain(Kind::Other);
    }
    let is_draft = |(word, _): &&(&str, DraftKind)| {
        folder == *word
            || name
                .strip_prefix(word)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_', '.']))
    };
    if let Some((_, kind)) = DRAFTS.iter().find(is_draft) {
        return Nature::Certain(Kind::Draft(*kind));
    }
    likely(name).map_or(Nature::Certain(Kind::Model), Nature::Likely)
}

fn likely(name: &str) -> Option<Kind> {
    let has_part = |word: &str| name.split(['-', '.', '_', ' ']).any(|part| part == word);
    let draft = DRAFTS.iter().find(|(word, _)| has_part(word)).map(|(_, kind)| Kind::Draft(*kind));
    let other = || {
        OTHERS
            .iter()
            .any(|word| has_part(word) || word.len() > 8 && name.contains(word))
            .then_some(Kind::Other)
    };
    draft.or_else(other)
}
