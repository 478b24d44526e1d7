//! The files beside a model: projectors, models for speculative decoding, and files that are neither.

use std::collections::BTreeSet;

use super::file_name;
use super::file_set::FileSet;
use super::tag::parts_of_name;
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

const DRAFTS: [(&str, DraftKind); 6] = [
    ("mtp", DraftKind::Mtp),
    ("eagle3", DraftKind::Eagle3),
    ("dflash", DraftKind::DFlash),
    ("dspark", DraftKind::DSpark),
    ("draft", DraftKind::Model),
    ("drafts", DraftKind::Model),
];
const PROJECTORS: [&str; 3] = ["mmproj", "mm-proj", "mm_proj"];
const PROJECTOR_FOLDERS: [&str; 4] = ["mmproj", "mmprojs", "projector", "projectors"];
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

/// The projector that belongs to a model.
pub(super) fn choose_projector<'s, 'p>(
    model: &FileSet<'p>,
    sets: &'s [FileSet<'p>],
) -> Option<&'s FileSet<'p>> {
    let projectors = sets.iter().filter(|set| set.kind() == Kind::Projector);
    nearest(model, projectors, sets)
}

/// The draft that belongs to a model.
pub(super) fn choose_draft<'s, 'p>(model: &FileSet<'p>, sets: &'s [FileSet<'p>]) -> Option<&'s FileSet<'p>> {
    let drafts = sets.iter().filter(|set| matches!(set.kind(), Kind::Draft(_)));
    nearest(model, drafts, sets)
}

fn nearest<'s, 'p: 's>(
    model: &FileSet<'p>,
    candidates: impl Iterator<Item = &'s FileSet<'p>>,
    sets: &'s [FileSet<'p>],
) -> Option<&'s FileSet<'p>> {
    let others = Others::of(model, sets);
    let measured =
        candidates.filter(|set| set.is_complete()).filter_map(|set| Some((others.distance(set)?, set)));
    measured.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, set)| set)
}

/// What a sidecar is compared with.
struct Others<'p> {
    folders: Vec<&'p str>,
    subject: String,
    quantization: Option<&'p str>,
    /// The subjects of the other models.
    subjects: BTreeSet<String>,
    /// The folders of all models.
    model_folders: BTreeSet<Vec<&'p str>>,
}

/// How far a sidecar is from a model, compared field by field.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Distance<'p> {
    kind: Kind,
    /// How many of the model's folders it is not in.
    folders: usize,
    /// Whether it is named after the model, after nothing, or otherwise.
    name: u8,
    is_other_quantization: bool,
    bits: u32,
    /// Of equal numbers of bits, every device computes with F16.
    is_not_f16: bool,
    path: &'p str,
}

impl<'p> Others<'p> {
    fn of(model: &FileSet<'p>, sets: &[FileSet<'p>]) -> Self {
        let parts = parts_of_name(model);
        let subject = parts.subject().to_owned();
        let models = || sets.iter().filter(|set| set.kind() == Kind::Model);
        let mut subjects: BTreeSet<_> = models().map(|set| parts_of_name(set).subject().to_owned()).collect();
        subjects.remove(&subject);
        let model_folders = models().map(FileSet::folders).collect();
        let (folders, quantization) = (model.folders(), parts.quantization());
        Self { folders, subject, quantization, subjects, model_folders }
    }

    /// `None` for a file that belongs to another model.
    fn distance(&self, set: &FileSet<'p>) -> Option<Distance<'p>> {
        let parts = parts_of_name(set);
        let subject = without_words(parts.subject());
        if self.subjects.contains(&subject) {
            return None;
        }
        let name = match subject.as_str() {
            own if own == self.subject => 0,
            "" | "model" => 1,
            _ => 2,
        };
        let quantization = parts.quantization();
        let (own, wanted) = (bits(quantization), bits(self.quantization));
        let is_same = |own: &str| self.quantization.is_some_and(|wanted| wanted.eq_ignore_ascii_case(own));
        let is_f16 = |own: &str| ["F16", "FP16"].iter().any(|name| name.eq_ignore_ascii_case(own));
        Some(Distance {
            kind: set.kind(),
            folders: self.folders.len().saturating_sub(self.common_folders(set)?),
            name,
            is_other_quantization: !quantization.is_some_and(is_same),
            bits: own.abs_diff(wanted),
            is_not_f16: !quantization.is_some_and(is_f16),
            path: set.path(),
        })
    }

    /// How many of the model's folders the file is in; `None` if it is in another one. A folder for files of its kind
    /// does not count, nor one for a quantisation in which there is no model.
    fn common_folders(&self, set: &FileSet<'_>) -> Option<usize> {
        let mut folders = set.folders();
        while !self.folders.starts_with(&folders) {
            let has_model = self.model_folders.contains(&folders);
            let last = folders.pop()?.to_ascii_lowercase();
            let is_plain = PROJECTOR_FOLDERS.contains(&last.as_str())
                || DRAFTS.iter().any(|(word, _)| *word == last)
                || !has_model && quantization_bits(&last).is_some();
            if !is_plain {
                return None;
            }
        }
        Some(folders.len())
    }
}

/// Of a name without a quantisation, as if it were F16.
fn bits(quantization: Option<&str>) -> u32 {
    quantization.and_then(quantization_bits).unwrap_or(16)
}

/// A sidecar's name without the words that tell its kind.
fn without_words(subject: &str) -> String {
    let mut subject = subject.to_owned();
    for word in PROJECTORS {
        subject = subject.replace(word, "");
    }
    let parts =
        subject.split('-').filter(|part| !part.is_empty() && !DRAFTS.iter().any(|(word, _)| word == part));
    parts.collect::<Vec<_>>().join("-").trim_matches(['-', '.', '_', ' ']).to_owned()
}
