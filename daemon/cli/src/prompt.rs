//! Prompts on the terminal.

use std::io::{self, BufRead as _, IsTerminal as _};

use blobd_cli_common::output::{print_message, printable};
use blobd_cli_common::usage;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::ErrorBody;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Echo {
    On,
    Off,
}

pub(super) fn ask(question: &str, echo: Echo) -> Result<String, ErrorBody> {
    if !io::stdin().is_terminal() {
        let hint = "give -u USER --password-stdin, or --token-stdin";
        return Err(blobd_cli_common::usage("standard input: is not a terminal, so there can be no prompt")
            .with_hint(hint));
    }
    // If the terminal is gone, the read fails.
    print_message(&printable(question));
    let line = match echo {
        Echo::On => visible_line(),
        Echo::Off => hidden_line(),
    };
    match line {
        Ok(Some(line)) => Ok(line),
        Ok(None) => Err(usage("prompt: cancelled")),
        Err(error) => Err(usage(format!("terminal: {error}"))),
    }
}

fn visible_line() -> io::Result<Option<String>> {
    let mut line = String::new();
    let count = io::stdin().lock().read_line(&mut line)?;
    Ok((count > 0).then(|| line.trim().to_owned()))
}

/// Reads key by key, with echo and the terminal's signal keys off, so that Ctrl-C cannot end the process
/// before the terminal's mode is restored.
///
/// The crate `rpassword` 7.5 is not used: at Ctrl-C it raises `SIGINT` before it restores the terminal,
/// which then stays without echo; it also reads `/dev/tty` instead of standard input.
fn hidden_line() -> io::Result<Option<String>> {
    let _mode = Hidden::enter()?;
    let mut line = Line::default();
    loop {
        let mut key = [0];
        if rustix::io::read(io::stdin(), &mut key)? == 0 {
            return Ok(None);
        }
        match line.press(key[0]) {
            Pressed::More => {}
            Pressed::Done => return Ok(String::from_utf8(line.bytes).ok()),
            Pressed::Cancelled => return Ok(None),
        }
    }
}

struct Hidden {
    before: Termios,
}

impl Hidden {
    fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut mode = before.clone();
        mode.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
        tcsetattr(io::stdin(), OptionalActions::Flush, &mode)?;
        Ok(Self { before })
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // Fails only if the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
        print_message("\n");
    }
}

const INTERRUPT: u8 = 3;
const END: u8 = 4;
const BACKSPACE: u8 = 8;
const KILL: u8 = 21;
const QUIT: u8 = 28;
const DELETE: u8 = 127;

#[derive(Default)]
struct Line {
    bytes: Vec<u8>,
}

enum Pressed {
    More,
    Done,
    Cancelled,
}

impl Line {
    fn press(&mut self, key: u8) -> Pressed {
        match key {
            b'\n' | b'\r' => return Pressed::Done,
            INTERRUPT | QUIT => return Pressed::Cancelled,
            END if self.bytes.is_empty() => return Pressed::Cancelled,
            END => return Pressed::Done,
            BACKSPACE | DELETE => self.remove_last(),
            KILL => self.bytes.clear(),
            _ => self.bytes.push(key),
        }
        Pressed::More
    }

    fn remove_last(&mut self) {
        while self.bytes.pop().is_some_and(|byte| byte & 0xc0 == 0x80) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(keys: &str) -> Option<String> {
        let mut line = Line::default();
        for key in keys.bytes() {
            match line.press(key) {
                Pressed::More => {}
                Pressed::Done => return String::from_utf8(line.bytes).ok(),
                Pressed::Cancelled => return None,
            }
        }
        None
    }

    #[test]
    fn hidden_line_is_edited_as_usual() {
        assert_eq!(typed("hunter2\r").as_deref(), Some("hunter2"));
        assert_eq!(typed("a\u{e4}\u{7f}\u{8}\u{8}bc\n").as_deref(), Some("bc"));
        assert_eq!(typed("wrong\u{15}right\n").as_deref(), Some("right"));
        assert_eq!(typed("abc\u{4}").as_deref(), Some("abc"));
        assert_eq!(typed("abc\u{3}"), None);
        assert_eq!(typed("\u{4}"), None);
    }
}
