//! Prints the demo's headings, texts, command lines, their output, and aligned rows.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_cli_common::colour::Paint;
use blobd_cli_common::output::{print, wrap};

use super::DemoError;

/// Whether output is suppressed. One flag for the process, which runs one demo.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

pub(super) fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

pub(super) fn heading(text: &str) -> Result<(), DemoError> {
    show(&format!("\n{}\n", bold(text)))
}

pub(super) fn text(text: &str) -> Result<(), DemoError> {
    show(&wrap(text, COLUMNS, INDENT, INDENT))
}

pub(super) fn command(line: &str) -> Result<(), DemoError> {
    show(&format!("{INDENT}{}\n", bold(&format!("$ {line}"))))
}

/// The output of a command, with long lines wrapped.
pub(super) fn output(text: &str) -> Result<(), DemoError> {
    show(&text.lines().fold(String::new(), |text, line| text + &fit(line)))
}

pub(super) fn facts(rows: &[(&str, String)]) -> Result<(), DemoError> {
    show(&aligned(rows))
}

fn aligned(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
    rows.iter().fold(String::new(), |text, (name, fact)| text + &format!("{INDENT}{name:<width$}  {fact}\n"))
}

fn fit(line: &str) -> String {
    if INDENT.len() + line.trim_end().chars().count() > COLUMNS {
        return wrap(line, COLUMNS, INDENT, "      ");
    }
    format!("{INDENT}{}\n", line.trim_end())
}

/// Bold on a terminal, plain text elsewhere.
fn bold(text: &str) -> String {
    Paint::of(&io::stdout()).bold(text)
}

fn show(text: &str) -> Result<(), DemoError> {
    if IS_SILENT.load(Ordering::Relaxed) {
        return Ok(());
    }
    Ok(print(text)?)
}

const INDENT: &str = "  ";
const COLUMNS: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_between_words() {
        let text = wrap(&"word ".repeat(40), COLUMNS, INDENT, INDENT);
        assert!(text.lines().all(|line| line.starts_with("  word") && line.len() <= COLUMNS), "{text}");
        assert_eq!(text.split_whitespace().count(), 40);
    }

    #[test]
    fn only_long_lines_are_broken() {
        assert_eq!(fit("a  table   row "), "  a  table   row\n");
        let broken = fit(&"12345678 ".repeat(10));
        assert_eq!(broken.lines().count(), 2);
        assert!(broken.lines().all(|line| line.len() <= COLUMNS), "{broken}");
    }

    #[test]
    fn facts_are_aligned() {
        let rows = [("a", "1".to_owned()), ("long name", "2".to_owned())];
        assert_eq!(aligned(&rows), "  a          1\n  long name  2\n");
    }
}
