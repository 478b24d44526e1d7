//! Patterns of texts, compared without case: `*` is any characters or none, `?` one character, `[a-c]` one of these,
//! `[!a-c]` one of the others.

use std::ops::RangeInclusive;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
}

/// What is matched next, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// `*`
    Any,
    /// `?`
    One,
    Char(char),
    /// `[a-c]`
    Class {
        is_negated: bool,
        ranges: Vec<RangeInclusive<char>>,
    },
}

impl Glob {
    /// Reads all wildcards. A `[` that is not closed stands for itself.
    pub fn new(pattern: &str) -> Self {
        let pattern: Vec<char> = pattern.to_lowercase().chars().collect();
        let (mut parts, mut rest) = (Vec::new(), &pattern[..]);
        while let Some((first, after)) = rest.split_first() {
            rest = after;
            parts.push(match first {
                '*' => Part::Any,
                '?' => Part::One,
                '[' => match class(after) {
                    Some((class, after)) => {
                        rest = after;
                        class
                    }
                    None => Part::Char('['),
                },
                other => Part::Char(*other),
            });
        }
        Self { parts }
    }

    /// Reads only `*`; all other characters stand for themselves.
    pub fn with_stars(pattern: &str) -> Self {
        let part = |c| if c == '*' { Part::Any } else { Part::Char(c) };
        Self { parts: pattern.to_lowercase().chars().map(part).collect() }
    }

    /// Without wildcards.
    pub fn literal(text: &str) -> Self {
        Self { parts: text.to_lowercase().chars().map(Part::Char).collect() }
    }

    /// Matches every text that contains this one.
    pub fn containing(text: &str) -> Self {
        let star = Self { parts: vec![Part::Any] };
        star.followed_by(&Self::literal(text)).followed_by(&star)
    }

    pub(crate) fn followed_by(&self, other: &Self) -> Self {
        Self { parts: self.parts.iter().chain(&other.parts).cloned().collect() }
    }

    /// Whether the pattern matches the whole text. Takes at most as many steps as the product of both lengths: after
    /// a mismatch only the last star takes one more character.
    pub fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.to_lowercase().chars().collect();
        let (mut at, mut next, mut star) = (0_usize, 0_usize, None);
        while let Some(character) = text.get(at) {
            match self.parts.get(next) {
                Some(Part::Any) => {
                    star = Some((next.saturating_add(1), at));
                    next = next.saturating_add(1);
                }
                Some(part) if part.matches(*character) => {
                    (at, next) = (at.saturating_add(1), next.saturating_add(1));
                }
                _ => match star {
                    Some((after_star, taken)) => {
                        let taken = taken.saturating_add(1);
                        star = Some((after_star, taken));
                        (at, next) = (taken, after_star);
                    }
                    None => return false,
                },
            }
        }
        self.parts.get(next..).is_some_and(|rest| rest.iter().all(|part| *part == Part::Any))
    }
}

impl Part {
    fn matches(&self, character: char) -> bool {
        match self {
            Self::Any => false,
            Self::One => true,
            Self::Char(expected) => *expected == character,
            Self::Class { is_negated, ranges } => {
                ranges.iter().any(|range| range.contains(&character)) != *is_negated
            }
        }
    }
}

/// The class that begins after a `[`, and what follows its `]`. A `]` in the first place belongs to the class.
fn class(text: &[char]) -> Option<(Part, &[char])> {
    let (is_negated, text) = match text.split_first() {
        Some(('!' | '^', rest)) => (true, rest),
        _ => (false, text),
    };
    let end = text.iter().skip(1).position(|c| *c == ']')?.saturating_add(1);
    let (mut inner, after) = (text.get(..end)?, text.get(end.saturating_add(1)..)?);
    let mut ranges = Vec::new();
    while let Some((first, rest)) = inner.split_first() {
        let (last, rest) = match rest {
            ['-', last, rest @ ..] => (last, rest),
            _ => (first, rest),
        };
        ranges.push(*first..=*last);
        inner = rest;
    }
    Some((Part::Class { is_negated, ranges }, after))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn wildcards_stand_for_characters_and_case_does_not_matter() {
        for (pattern, text, expected) in [
            ("a", "A", true),
            ("a", "ab", false),
            ("", "", true),
            ("*", "", true),
            ("*", "a/b", true),
            ("**", "x", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("a**c", "ac", true),
            ("ab*ba", "aba", false),
            ("*ab*ab", "xabab", true),
            ("*x*", "abc", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("?", "ä", true),
            ("[abc]", "B", true),
            ("[a-c]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[!a-c]", "d", true),
            ("[^a-c]", "a", false),
            ("[]x]", "]", true),
            ("[a-]", "-", true),
            ("q[48]_*", "Q8_0", true),
            ("q[48]_*", "Q6_K", false),
            ("[", "[", true),
            ("[a", "[a", true),
            ("a[]", "a[]", true),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern} {text}");
        }
        assert!(Glob::with_stars("[::1]:*").matches("[::1]:80") && !Glob::with_stars("a?").matches("ab"));
        assert!(Glob::containing("b*").matches("AB*C") && !Glob::containing("b*").matches("ABC"));
    }

    #[test]
    fn hostile_pattern_does_not_take_exponential_time() {
        assert!(!Glob::new(&"*a".repeat(500)).matches(&"a".repeat(499)));
    }

    proptest! {
        #[test]
        fn text_matches_itself_and_patterns_made_from_it(text in "[a-zA-Z0-9./:_-]{1,30}", cut in 0usize..30) {
            let cut = cut.min(text.len());
            prop_assert!(Glob::new(&text).matches(&text.to_uppercase()));
            let (start, end) = text.split_at(cut);
            prop_assert!([start.to_owned() + "*", "*".to_owned() + end].iter().all(|glob| Glob::new(glob).matches(&text)));
            prop_assert!(Glob::containing(&text[cut..]).matches(&text));
            prop_assert!(Glob::new(&"?".repeat(text.len())).matches(&text));
        }
    }
}
