//! How a tag matches the name of a model.

use super::file_set::FileSet;
use crate::file_format::FileFormat;
use crate::file_type::quantization_bits;

/// Words that publishers put in front of a quantisation to tell it from another of the same name: Unsloth's dynamic
/// ones, those made with an importance matrix.
const QUALIFIERS: [&str; 6] = ["UD", "i1", "I", "imat", "imatrix", "dynamic"];
const SEPARATORS: [char; 4] = ['-', '.', '_', ' '];

/// How well a tag matches, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It is the whole name.
    Name,
    /// The name ends in it.
    End,
    /// The name ends in it, with a qualifier in front.
    QualifiedEnd,
    /// It is inside the name.
    Inside,
    QualifiedInside,
    /// A folder has it as its name.
    Folder,
    /// A folder's name contains it.
    InFolder,
    QualifiedInFolder,
}

#[derive(Clone, Debug)]
pub(super) struct Tag {
    /// In lower case, without extension.
    text: String,
    is_quantization: bool,
}

impl Tag {
    pub(super) fn new(text: &str) -> Self {
        let text = FileFormat::GGUF.stem_of(text).unwrap_or(text);
        Self { text: text.to_ascii_lowercase(), is_quantization: quantization_bits(text).is_some() }
    }

    /// How well the tag matches a model; `None` if not at all.
    pub(super) fn rank(&self, set: &FileSet<'_>) -> Option<Rank> {
        if self.text.is_empty() {
            return None;
        }
        let name = set.name().to_ascii_lowercase();
        if name == self.text {
            return Some(Rank::Name);
        }
        let in_name = self.occurrences(&name).map(|occurrence| match occurrence {
            Occurrence { is_end: true, is_qualified: false } => Rank::End,
            Occurrence { is_end: true, is_qualified: true } => Rank::QualifiedEnd,
            Occurrence { is_end: false, is_qualified: false } => Rank::Inside,
            Occurrence { is_end: false, is_qualified: true } => Rank::QualifiedInside,
        });
        in_name.min().or_else(|| self.rank_in_folders(set))
    }

    /// A folder says nothing about a file in it whose own name has another quantisation.
    fn rank_in_folders(&self, set: &FileSet<'_>) -> Option<Rank> {
        if self.is_quantization && quantization_in(set.name()).is_some_and(|own| !self.may_mean(own.text)) {
            return None;
        }
        let in_folder = |folder: &str| {
            let folder = folder.to_ascii_lowercase();
            if folder == self.text {
                return Some(Rank::Folder);
            }
            let ranks = self.occurrences(&folder);
            ranks
                .map(
                    |occurrence| {
                        if occurrence.is_qualified { Rank::QualifiedInFolder } else { Rank::InFolder }
                    },
                )
                .min()
        };
        set.folders().into_iter().filter_map(in_folder).min()
    }

    /// Whether a folder with this tag as its name may have a file of this quantisation: `q8` of `Q8_0`, `fp16` of `F16`.
    fn may_mean(&self, quantization: &str) -> bool {
        let (wanted, own) = (common_spelling(&self.text), common_spelling(quantization));
        // `Q4_0_4_4` is not `Q4_0`.
        own == wanted || !wanted.contains('_') && own.split('_').next() == Some(&wanted)
    }

    /// Where the tag is in a name, as whole parts of it. Tags other than quantisations match only with their
    /// qualifier: `Compact` is not `I-Compact`, but `Q4_K_XL` may be `UD-Q4_K_XL`.
    fn occurrences<'n>(&'n self, name: &'n str) -> impl Iterator<Item = Occurrence> + 'n {
        let occurrences = name.match_indices(self.text.as_str()).filter_map(|(start, found)| {
            let before = name.get(..start)?;
            let after = name.get(start.saturating_add(found.len())..)?;
            // `_` separates parts of a quantisation's own name: `Q4_0_4_4` is not `Q4_0`.
            let begins = match before.chars().next_back() {
                None | Some('-' | '.' | ' ') => true,
                Some('_') => self.is_quantization,
                Some(_) => false,
            };
            let ends = matches!(after.chars().next(), None | Some('-' | '.' | ' '));
            let occurrence = Occurrence { is_end: after.is_empty(), is_qualified: ends_in_qualifier(before) };
            (begins && ends).then_some(occurrence)
        });
        occurrences.filter(|occurrence| self.is_quantization || !occurrence.is_qualified)
    }
}

#[derive(Clone, Copy, Debug)]
struct Occurrence {
    is_end: bool,
    is_qualified: bool,
}

/// `fp16` as `f16`, which is the same type.
fn common_spelling(quantization: &str) -> String {
    let quantization = quantization.to_ascii_lowercase();
    quantization.strip_prefix("fp").map_or_else(|| quantization.clone(), |bits| format!("f{bits}"))
}

fn ends_in_qualifier(before: &str) -> bool {
    let last = before.trim_end_matches(SEPARATORS).rsplit(SEPARATORS).next().unwrap_or_default();
    is_qualifier(last)
}

fn is_qualifier(part: &str) -> bool {
    QUALIFIERS.iter().any(|known| known.eq_ignore_ascii_case(part))
}

/// A model's name: what it is, and its quantisation.
#[derive(Clone, Debug)]
pub(super) struct Parts<'n> {
    name: &'n str,
    /// In lower case, without quantisations in their names.
    folders: Vec<String>,
    /// The name's or a folder's.
    pub(super) quantization: Option<&'n str>,
    /// `quantization` with its qualifier.
    qualified: Option<&'n str>,
    /// The name without the quantisation, in lower case.
    pub(super) subject: String,
}

pub(super) fn parts_of_name<'n>(set: &FileSet<'n>) -> Parts<'n> {
    let (name, folders) = (set.name(), set.folders());
    let of_folder = folders.iter().rev().find_map(|folder| quantization_in(folder)).map(|found| found.text);
    let rest = folders.iter().map(|folder| subject_of(folder)).filter(|folder| !folder.is_empty()).collect();
    let (quantization, qualified) = match quantization_in(name) {
        Some(found) => (Some(found.text), Some(found.qualified)),
        None => (of_folder, of_folder),
    };
    Parts { name, folders: rest, quantization, qualified, subject: subject_of(name) }
}

impl<'n> Parts<'n> {
    /// The shortest text that usually tells it from the others: its quantisation, or its name.
    pub(super) fn label(&self) -> &'n str {
        self.qualified.unwrap_or(self.name)
    }

    /// A text that all quantisations of a model share.
    pub(super) fn model(&self) -> String {
        let parts = self.folders.iter().chain([&self.subject]);
        parts.map(String::as_str).collect::<Vec<_>>().join("/")
    }

    /// A text that all forms of one quantisation share: whole or in shards, in the root or in a folder.
    pub(super) fn file(&self) -> String {
        let quantization = self.quantization.unwrap_or_default();
        format!("{}/{}/{quantization}", self.folders.join("/"), self.name).to_ascii_lowercase()
    }
}

/// A name without its quantisation, in lower case.
fn subject_of(name: &str) -> String {
    match quantization_in(name) {
        Some(Found { before, after, .. }) => format!("{before}{after}").to_ascii_lowercase(),
        None => name.to_ascii_lowercase(),
    }
}

/// A quantisation in a name, and the text around it.
struct Found<'n> {
    text: &'n str,
    /// With its qualifiers in front.
    qualified: &'n str,
    before: &'n str,
    after: &'n str,
}

/// The last part of a name that is a quantisation. Its parts are separated by `-`, `.` or a space, or the
/// quantisation is all that follows a `_`.
fn quantization_in(name: &str) -> Option<Found<'_>> {
    let mut end = name.len();
    for part in name.rsplit(['-', '.', ' ']) {
        let start = end.saturating_sub(part.len());
        if let Some(offset) = quantization_start(part) {
            return found(name, start.saturating_add(offset), end);
        }
        end = start.saturating_sub(1);
    }
    None
}

/// Where a quantisation begins that is all of a part, or all that follows one of its `_`.
fn quantization_start(part: &str) -> Option<usize> {
    let after_separator = part.match_indices('_').map(|(at, _)| at.saturating_add(1));
    std::iter::once(0).chain(after_separator).find(|at| {
        let rest = part.get(*at..).unwrap_or_default();
        // `0` of `Q8_0` follows a `_` too, but `Q8_0` itself was found before.
        quantization_bits(rest).is_some()
    })
}

fn found(name: &str, start: usize, end: usize) -> Option<Found<'_>> {
    let (text, after) = (name.get(start..end)?, name.get(end..)?);
    let mut qualified = start;
    let mut before = name.get(..start)?.trim_end_matches(SEPARATORS);
    loop {
        let last = before.rsplit(SEPARATORS).next().unwrap_or_default();
        if last.is_empty() || !is_qualifier(last) {
            break;
        }
        let place = before.len().saturating_sub(last.len());
        qualified = place;
        before = before.get(..place)?.trim_end_matches(SEPARATORS);
    }
    Some(Found { text, qualified: name.get(qualified..end)?, before, after })
}
