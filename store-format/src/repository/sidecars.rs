//! The files beside a model that belong to it: its projector and its draft.

use std::collections::BTreeSet;

use super::file_set::{DRAFTS, FileSet, Kind, PROJECTOR_FOLDERS, PROJECTORS};
use super::tag::parts_of_name;
use crate::file_type::quantization_bits;

pub(super) fn choose_projector<'s, 'p>(
    model: &FileSet<'p>,
    sets: &'s [FileSet<'p>],
) -> Option<&'s FileSet<'p>> {
    let projectors = sets.iter().filter(|set| set.kind == Kind::Projector);
    nearest(model, projectors, sets)
}

pub(super) fn choose_draft<'s, 'p>(model: &FileSet<'p>, sets: &'s [FileSet<'p>]) -> Option<&'s FileSet<'p>> {
    let drafts = sets.iter().filter(|set| matches!(set.kind, Kind::Draft(_)));
    nearest(model, drafts, sets)
}

fn nearest<'s, 'p: 's>(
    model: &FileSet<'p>,
    candidates: impl Iterator<Item = &'s FileSet<'p>>,
    sets: &'s [FileSet<'p>],
) -> Option<&'s FileSet<'p>> {
    let others = SidecarContext::new(model, sets);
    let measured =
        candidates.filter(|set| set.is_complete()).filter_map(|set| Some((others.distance(set)?, set)));
    measured.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, set)| set)
}

/// What a sidecar is compared with.
struct SidecarContext<'p> {
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
    /// F16 is preferred among types of 16 bits, because every device can compute with it.
    is_not_f16: bool,
    /// Of two that are equal, the one beside the model is preferred to one in a folder for its kind.
    depth: usize,
    path: &'p str,
}

impl<'p> SidecarContext<'p> {
    fn new(model: &FileSet<'p>, sets: &[FileSet<'p>]) -> Self {
        let parts = parts_of_name(model);
        let subject = parts.subject;
        let models = || sets.iter().filter(|set| set.kind == Kind::Model);
        let mut subjects: BTreeSet<_> = models().map(|set| parts_of_name(set).subject).collect();
        subjects.remove(&subject);
        let model_folders = models().map(FileSet::folders).collect();
        let (folders, quantization) = (model.folders(), parts.quantization);
        Self { folders, subject, quantization, subjects, model_folders }
    }

    /// `None` for a file that belongs to another model.
    fn distance(&self, set: &FileSet<'p>) -> Option<Distance<'p>> {
        let parts = parts_of_name(set);
        let subject = without_words(&parts.subject);
        if self.subjects.contains(&subject) {
            return None;
        }
        let name = match subject.as_str() {
            own if own == self.subject => 0,
            "" | "model" => 1,
            _ => 2,
        };
        let quantization = parts.quantization;
        let (own, wanted) = (bits(quantization), bits(self.quantization));
        let is_same = |own: &str| self.quantization.is_some_and(|wanted| wanted.eq_ignore_ascii_case(own));
        let is_f16 = |own: &str| ["F16", "FP16"].iter().any(|name| name.eq_ignore_ascii_case(own));
        Some(Distance {
            kind: set.kind,
            folders: self.folders.len().saturating_sub(self.common_folders(set)?),
            name,
            is_other_quantization: !quantization.is_some_and(is_same),
            bits: own.abs_diff(wanted),
            is_not_f16: !quantization.is_some_and(is_f16),
            depth: set.depth(),
            path: set.path,
        })
    }

    /// How many of the model's folders the file is in; `None` if it is in another one. Folders for files of its kind do
    /// not count, and neither do folders that are named after a quantisation and have no model.
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

/// A name without a quantisation counts as F16.
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
