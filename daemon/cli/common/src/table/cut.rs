//! Cuts cells that are too long for their column, so that different cells still look different.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Where a cell that is too long is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Names, which differ at the end: the repository's end and the tag stay.
    Middle,
    /// Texts and values, which are read from the start.
    End,
}

impl Cut {
    /// The narrowest column.
    pub(super) const fn min_width(self) -> usize {
        match self {
            Self::Middle => 16,
            Self::End => 10,
        }
    }

    /// The width down to which a column is cut before others are left out.
    pub(super) const fn comfortable_width(self) -> usize {
        match self {
            Self::Middle => 32,
            Self::End => 16,
        }
    }
}

/// The first characters of a text, and `…` if that is not all of it.
pub fn end_cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Cuts one name after the other, for rows that are printed while they arrive. A name has the same text each time, and no
/// other name has that text.
#[derive(Debug)]
pub struct NameCutter {
    width: usize,
    shown: HashMap<String, String>,
    taken: HashSet<String>,
}

impl NameCutter {
    /// For a column of this width.
    #[must_use]
    pub fn new(width: usize) -> Self {
        Self { width, shown: HashMap::new(), taken: HashSet::new() }
    }

    /// The name, cut if it is too long.
    pub fn shown(&mut self, name: &str) -> String {
        if name.chars().count() <= self.width {
            // No cut name looks like one without the sign of a cut.
            self.taken.extend(name.contains('…').then(|| name.to_owned()));
            return name.to_owned();
        }
        if let Some(shown) = self.shown.get(name) {
            return shown.clone();
        }
        let text = unused(&Letters::new(name), self.width, &self.taken);
        self.taken.insert(text.clone());
        self.shown.insert(name.to_owned(), text.clone());
        text
    }
}

/// The texts of those cells that are longer than `width`. Different cells have different texts.
pub(super) fn distinct_cuts<'c>(
    cells: impl Iterator<Item = &'c str>,
    width: usize,
) -> HashMap<&'c str, String> {
    let (mut long, mut taken) = (BTreeSet::new(), HashSet::new());
    for cell in cells {
        if cell.chars().count() > width {
            long.insert(cell);
        } else {
            taken.insert(cell.to_owned());
        }
    }
    let mut groups: BTreeMap<String, Vec<Letters<'c>>> = BTreeMap::new();
    for letters in long.into_iter().map(Letters::new) {
        groups.entry(letters.cut(letters.usual_tail(width), width)).or_default().push(letters);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(Vec::len);
    let mut shown = HashMap::new();
    for group in groups {
        let texts = texts_of(&group, width, &taken);
        taken.extend(texts.iter().cloned());
        shown.extend(group.iter().map(|letters| letters.text).zip(texts));
    }
    shown
}

/// The texts of names that look the same when they are cut at the usual place.
fn texts_of(group: &[Letters<'_>], width: usize, taken: &HashSet<String>) -> Vec<String> {
    let tails = group.iter().map(|letters| letters.usual_tail(width)).max().unwrap_or_default();
    for tail in tails_from(tails, width) {
        let texts: Vec<_> = group.iter().map(|letters| letters.cut(tail, width)).collect();
        let distinct: HashSet<&String> = texts.iter().collect();
        if distinct.len() == group.len() && texts.iter().all(|text| !taken.contains(text)) {
            return texts;
        }
    }
    let mut taken = taken.clone();
    let mut texts = Vec::with_capacity(group.len());
    for letters in group {
        let text = unused(letters, width, &taken);
        taken.insert(text.clone());
        texts.push(text);
    }
    texts
}

/// A text that no other name has: with another tail, or else with a number.
fn unused(letters: &Letters<'_>, width: usize, taken: &HashSet<String>) -> String {
    let tails = tails_from(letters.usual_tail(width), width).map(|tail| letters.cut(tail, width));
    let numbered = (2_u64..).map(|number| {
        let number = format!("#{number}");
        letters.cut(letters.usual_tail(width), width.saturating_sub(number.len())) + &number
    });
    tails.chain(numbered).find(|text| !taken.contains(text)).unwrap_or_default()
}

/// The usual length of the end that stays, then the other lengths.
fn tails_from(usual: usize, width: usize) -> impl Iterator<Item = usize> {
    let most = width.saturating_sub(1);
    let usual = usual.min(most);
    (0..=usual).rev().chain(usual.saturating_add(1)..=most)
}

/// A name by its characters.
#[derive(Clone, Debug)]
struct Letters<'c> {
    text: &'c str,
    letters: Vec<char>,
}

impl<'c> Letters<'c> {
    fn new(text: &'c str) -> Self {
        Self { text, letters: text.chars().collect() }
    }

    /// Two thirds of the width, and never less than the repository with its tag, or the tag, if there is room for it.
    fn usual_tail(&self, width: usize) -> usize {
        /// The fewest characters before the cut.
        const MIN_HEAD: usize = 3;
        let room = width.saturating_sub(1);
        let from_last = |sign: char| {
            self.letters.iter().rev().position(|letter| *letter == sign).map(|length| length + 1)
        };
        let parts = ['/', ':'].into_iter().filter_map(from_last);
        let whole = parts.filter(|length| length + MIN_HEAD <= room).max();
        (room * 2 / 3).max(whole.unwrap_or_default())
    }

    /// `tail` characters of the end, and as many of the start as fit before them.
    fn cut(&self, tail: usize, width: usize) -> String {
        let room = width.saturating_sub(1);
        let tail = tail.min(room);
        let end = self.letters.iter().skip(self.letters.len().saturating_sub(tail));
        self.letters.iter().take(room - tail).chain([&'…']).chain(end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_keeps_the_end_of_its_repository_and_its_tag() {
        let name = Letters::new("hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M");
        let cut = |width| name.cut(name.usual_tail(width), width);
        assert_eq!(cut(42), "hf.co/b…/Llama-3.2-1B-Instruct-GGUF:Q4_K_M");
        assert_eq!(cut(36), "hf.co/bartow…1B-Instruct-GGUF:Q4_K_M");
        assert_eq!(cut(16), "hf.co…GUF:Q4_K_M");
        let tagged = Letters::new("hf.co/unsloth/Qwen3-GGUF:UD-Q4_K_XL-imatrix");
        assert_eq!(tagged.cut(tagged.usual_tail(24), 24), "hf.c…:UD-Q4_K_XL-imatrix");
    }

    #[test]
    fn names_that_would_look_the_same_are_cut_elsewhere() {
        let names =
            ["hf.co/ann/llama-a-very-long-name-GGUF:Q4_K_M", "hf.co/ann/qwen2-a-very-long-name-GGUF:Q4_K_M"];
        let shown = distinct_cuts(names.into_iter(), 24);
        assert_eq!(
            names.map(|name| shown[name].as_str()),
            ["hf.co/ann/l…-GGUF:Q4_K_M", "hf.co/ann/q…-GGUF:Q4_K_M"]
        );
    }

    #[test]
    fn any_names_stay_different() {
        // They differ in the middle only.
        let names: Vec<String> =
            (0..300).map(|number| format!("hf.co/{0}{number:03}{0}:Q4", "x".repeat(40))).collect();
        for width in [8, 16, 24, 60] {
            let shown = distinct_cuts(names.iter().map(String::as_str), width);
            let distinct: HashSet<&String> = shown.values().collect();
            assert_eq!((shown.len(), distinct.len()), (300, 300));
            assert!(distinct.iter().all(|text| text.chars().count() <= width), "{shown:?}");
            let mut cutter = NameCutter::new(width);
            let one_by_one: HashSet<_> = names.iter().map(|name| cutter.shown(name)).collect();
            assert_eq!(one_by_one.len(), 300);
            assert_eq!(cutter.shown(&names[7]), cutter.shown(&names[7]));
        }
    }
}
