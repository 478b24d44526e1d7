//! Colours, which only a terminal gets, and only if its user has not refused them.

use std::{env, io};

/// Colours for a terminal; none if the output is something else, or if NO_COLOR is set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Paint {
    is_on: bool,
}

/// What a colour means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Nothing is wrong.
    Good,
    /// Something should be looked at.
    Warning,
    /// Something has failed.
    Bad,
    /// Advice.
    Hint,
}

impl Paint {
    /// Colours if `output` is a terminal that shows them.
    #[must_use]
    pub fn of(output: &impl io::IsTerminal) -> Self {
        let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = env::var_os("TERM").is_some_and(|name| name == "dumb");
        Self { is_on: output.is_terminal() && !is_refused && !is_dumb }
    }

    /// Whether there are colours.
    pub const fn is_on(self) -> bool {
        self.is_on
    }

    /// The text in bold.
    #[must_use]
    pub fn bold(self, text: &str) -> String {
        self.with_code(1, text)
    }

    /// The text in the colour of its meaning.
    #[must_use]
    pub fn text(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => 32,
            Tone::Warning => 33,
            Tone::Bad => 31,
            Tone::Hint => 36,
        };
        self.with_code(code, text)
    }

    fn with_code(self, code: u8, text: &str) -> String {
        if self.is_on { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    /// Colours the labels of an error, whose lines begin with `blobd:` and `hint:`.
    #[must_use]
    pub fn labels(self, text: &str) -> String {
        let labels = [("blobd:", Tone::Bad), ("hint:", Tone::Hint)];
        let painted = |line: &str| {
            let label = labels.into_iter().find(|(label, _)| line.starts_with(label));
            label.map_or_else(
                || line.to_owned(),
                |(label, tone)| line.replacen(label, &self.text(tone, label), 1),
            )
        };
        text.split_inclusive('\n').map(painted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_labels_of_an_error_are_coloured() {
        let text = "blobd: a: wrong\nhint: look\n";
        let painted = Paint { is_on: true }.labels(text);
        assert_eq!(painted, "\u{1b}[31mblobd:\u{1b}[0m a: wrong\n\u{1b}[36mhint:\u{1b}[0m look\n");
        assert_eq!(Paint::default().labels(text), text);
    }

    #[test]
    fn text_has_its_colour_only_on_a_terminal() {
        assert_eq!(Paint { is_on: true }.text(Tone::Good, "ok"), "\u{1b}[32mok\u{1b}[0m");
        assert_eq!(Paint { is_on: true }.bold("a"), "\u{1b}[1ma\u{1b}[0m");
        assert_eq!(Paint::default().text(Tone::Bad, "no"), "no");
        let file = tempfile::tempfile().unwrap();
        assert!(!Paint::of(&file).is_on());
    }
}
