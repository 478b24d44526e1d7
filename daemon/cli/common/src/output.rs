//! Writes text and JSON to standard output, and messages to standard error.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::os::fd::AsFd;

use blobd_client::protocol::audit::escape_controls;
use blobd_client::protocol::error::ErrorResponse;
pub use blobd_store_format::size::human_bytes;
pub use blobd_store_format::text::printable;
use serde::Serialize;
use serde_json::json;

use crate::colour::Paint;
use crate::log::at_error_priority;
pub use crate::table::Table;
use crate::{ErrorBody, ErrorCode, internal};

/// Writes to standard output.
///
/// # Errors
/// If the text cannot be written. A closed pipe is not an error.
pub fn print(text: &str) -> Result<(), ErrorBody> {
    let mut out = io::stdout().lock();
    output_written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// A closed pipe (`blobd ls | head`) is not an error; a full disk is.
pub fn output_written(written: io::Result<()>) -> Result<(), ErrorBody> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let code = match error.kind() {
                io::ErrorKind::StorageFull => ErrorCode::NoSpace,
                _ => ErrorCode::Internal,
            };
            Err(ErrorBody::new(code, format!("standard output: cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Standard output for data that is written in many parts. A reader that closes the pipe ends the work.
#[derive(Debug)]
pub struct DataOutput {
    out: io::StdoutLock<'static>,
    is_closed: bool,
}

impl DataOutput {
    /// Locks standard output.
    pub fn lock() -> Self {
        Self { out: io::stdout().lock(), is_closed: false }
    }

    /// The result of the work: none of its failures counts if the reader has closed the pipe.
    pub fn result(&self, written: Result<(), ErrorBody>) -> Result<(), ErrorBody> {
        if self.is_closed { Ok(()) } else { written }
    }

    fn noted<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        self.is_closed |=
            result.as_ref().err().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
        result
    }
}

impl io::Write for DataOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes);
        self.noted(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.out.flush();
        self.noted(flushed)
    }
}

/// Writes one JSON document on a line of its own.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl Serialize) -> Result<(), ErrorBody> {
    let json = serde_json::to_string(value).map_err(internal)?;
    print(&format!("{}\n", escape_controls(json)))
}

/// Writes text to standard error. Unlike `eprint!`, which panics, it ignores a failure: a command must not fail
/// because nobody can read its messages (a full disk, a closed pipe, a terminal that is gone).
///
/// On a terminal, lines that are too long are broken between words.
pub fn print_message(text: &str) {
    print_message_unbroken(&broken(text, width_of(&io::stderr())));
}

/// For text that a program reads, such as JSON.
pub fn print_message_unbroken(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Prints an error and its hint to standard error. `is_quiet` leaves out the hint.
pub fn print_error(is_json: bool, is_quiet: bool, error: &ErrorBody) {
    if is_json {
        let response = ErrorResponse { error: error.clone() };
        let json = serde_json::to_string(&response).unwrap_or_default();
        print_message_unbroken(&at_error_priority(&format!("{json}\n")));
        return;
    }
    let hint = error.hint.as_ref().filter(|_hint| !is_quiet);
    let hint = hint.map_or_else(String::new, |hint| format!("hint: {}\n", printable(hint)));
    let text = format!("blobd: {}\n{hint}{}", printable(&error.message), request_note(error));
    let text = at_error_priority(&broken(&text, width_of(&io::stderr())));
    print_message_unbroken(&Paint::of(&io::stderr()).labels(&text));
}

/// Says that Ctrl-C has stopped the command, and what is left of its work.
pub fn print_stopped(is_json: bool, verb: &str, left: &str) {
    if is_json {
        // Not a code of the protocol: the daemon did not fail.
        let error = json!({ "code": "interrupted", "message": format!("{verb}: stopped"), "hint": left });
        return print_message_unbroken(&format!("{}\n", json!({ "error": error })));
    }
    print_message(&format!("blobd: stopped; {left}\n"));
}

/// Helps to find a failure of the daemon itself in its log.
fn request_note(error: &ErrorBody) -> String {
    let request = error.request.as_ref().filter(|_| error.code == ErrorCode::Internal);
    request.map_or_else(String::new, |id| format!("request: {}, as in the daemon's log\n", printable(id)))
}

/// Writes a result for a person. On a terminal, lines that are too long are broken between words.
pub fn print_text(text: &str) -> Result<(), ErrorBody> {
    print(&broken(text, terminal_width()))
}

/// The text with each line of more than `width` characters broken at spaces. Lines that fit stay as they are.
fn broken(text: &str, width: usize) -> String {
    const INDENT: &str = "  ";
    let mut lines = String::new();
    for line in text.split_inclusive('\n') {
        let (mut rest, mut room) = (line, width);
        while let Some((first, second)) = split_at_width(rest, room) {
            lines.push_str(first);
            lines.push('\n');
            lines.push_str(INDENT);
            (rest, room) = (second, width.saturating_sub(INDENT.len()));
        }
        lines.push_str(rest);
    }
    lines
}

/// Splits a line of more than `width` characters at its last space before that, or else at its first one.
fn split_at_width(line: &str, width: usize) -> Option<(&str, &str)> {
    let text = line.trim_end();
    let end = text.char_indices().nth(width)?.0;
    let (head, tail) = text.split_at(end);
    let indent = text.len() - text.trim_start().len();
    let before = if tail.starts_with(' ') { Some(end) } else { head.rfind(' ') };
    let at = before.filter(|at| *at > indent).or_else(|| Some(end + tail.find(' ')?))?;
    Some((text.get(..at)?.trim_end(), line.get(at..)?.trim_start_matches(' ')))
}

/// Breaks a text into lines of at most `width` characters, between words. A longer word has a line of its own.
#[must_use]
pub fn wrap(text: &str, width: usize, first_indent: &str, indent: &str) -> String {
    let (mut lines, mut line) = (String::new(), first_indent.to_owned());
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > width {
            lines.push_str(&line);
            lines.push('\n');
            line = indent.to_owned();
            is_empty = true;
        }
        line.push_str(if is_empty { "" } else { " " });
        line.push_str(word);
        is_empty = false;
    }
    lines + &line + "\n"
}

/// Unlimited if standard output is not a terminal.
pub fn terminal_width() -> usize {
    width_of(&io::stdout())
}

fn width_of(output: &(impl io::IsTerminal + AsFd)) -> usize {
    if !output.is_terminal() {
        return usize::MAX;
    }
    rustix::termios::tcgetwinsize(output).map_or(80, |size| usize::from(size.ws_col).max(40))
}

/// `1 blob`, `2 blobs`
pub fn counted(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    let plural = if count == "1" { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// The cell of a table for a value that may be missing.
pub fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Bytes that a command has added to the store, and bytes that it needed and that were stored before: the words of the
/// glossary (`docs/GLOSSARY.md`, Bytes) for all commands that store something.
pub fn new_and_reused(new_bytes: u64, reused_bytes: u64) -> String {
    format!("{} {NEW}, {} {REUSED}", human_bytes(new_bytes), human_bytes(reused_bytes))
}

/// Written by this command.
pub const NEW: &str = "new";
/// Needed by this command, and stored before, by whatever command.
pub const REUSED: &str = "reused";

/// The parts of a total behind it, those of 0 bytes left out: `, all sent`, or ` = 3 MiB sent + 1 MiB mounted`.
pub fn sum_of_parts(parts: &[(u64, &str)]) -> String {
    let parts: Vec<_> = parts.iter().filter(|(bytes, _)| *bytes > 0).collect();
    match parts[..] {
        [] => String::new(),
        [(_, what)] => format!(", all {what}"),
        _ => {
            let sizes = parts.iter().map(|(bytes, what)| format!("{} {what}", human_bytes(*bytes)));
            format!(" = {}", sizes.collect::<Vec<_>>().join(" + "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_broken_between_words() {
        let text = "blobd: a file: not found here\nhint: look\n";
        assert_eq!(broken(text, 20), "blobd: a file: not\n  found here\nhint: look\n");
        assert_eq!(broken(text, usize::MAX), text);
        assert_eq!(broken("Password: ", 80), "Password: ");
        assert_eq!(broken("/a/very/long/path/without/end x\n", 10), "/a/very/long/path/without/end\n  x\n");
    }

    #[test]
    fn noun_has_a_plural_unless_the_count_is_one() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "recipe")), ["0 recipes", "1 recipe", "2 recipes"]);
    }
}
