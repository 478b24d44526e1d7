//! A pseudo-terminal for a command, and what the command shows there.

use std::fs::File;
use std::io::Read as _;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// One side is for the command, the other is read by a thread until the command closes it.
#[derive(Debug)]
pub struct Terminal {
    /// The command's side, for its standard input, output or error.
    pub slave: OwnedFd,
    master: OwnedFd,
    written: Arc<Mutex<Written>>,
    reader: JoinHandle<()>,
}

/// What was written, in pieces, each with the time when it was read.
type Written = Vec<(Instant, Vec<u8>)>;

/// What a command showed at one time.
#[derive(Clone, Debug)]
pub struct Frame {
    /// When.
    pub at: Instant,
    /// The text, with the control sequences of the terminal.
    pub text: String,
}

impl Terminal {
    /// A terminal of this size.
    ///
    /// # Panics
    /// When the system has none.
    #[must_use]
    pub fn new(rows: u16, columns: u16) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("its rights");
        unlockpt(&master).expect("its lock");
        let slave = ptsname(&master, Vec::new()).expect("its name");
        let slave = open(slave, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty());
        let slave = slave.expect("its other side");
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).expect("its size");
        let read_from = master.try_clone().expect("a descriptor");
        let written = Arc::<Mutex<Written>>::default();
        let to = Arc::clone(&written);
        Self { slave, master, written, reader: thread::spawn(move || read(read_from, &to)) }
    }

    /// Types this, for a command that reads the terminal now or later.
    ///
    /// # Panics
    /// When the terminal is gone.
    pub fn type_in(&self, text: &str) {
        rustix::io::write(&self.master, text.as_bytes()).expect("the terminal is there");
    }

    /// Another descriptor of the command's side.
    ///
    /// # Panics
    /// When the process has too many.
    #[must_use]
    pub fn another(&self) -> OwnedFd {
        self.slave.try_clone().expect("a descriptor")
    }

    /// Everything that was shown, once no process has the command's side open. Lines end with `\r\n`.
    ///
    /// # Panics
    /// When the thread that reads has failed.
    #[must_use]
    pub fn shown(self) -> String {
        text(&self.read())
    }

    /// Everything that was shown until now.
    ///
    /// # Panics
    /// When the thread that reads has failed.
    #[must_use]
    pub fn shown_so_far(&self) -> String {
        text(&self.written.lock().expect("the terminal is read"))
    }

    /// As [`Self::shown`], in the pieces that were written, with their times.
    ///
    /// # Panics
    /// As [`Self::shown`].
    #[must_use]
    pub fn frames(self) -> Vec<Frame> {
        let frame = |(at, bytes): (Instant, Vec<u8>)| Frame {
            at,
            text: String::from_utf8_lossy(&bytes).into_owned(),
        };
        self.read().into_iter().map(frame).collect()
    }

    fn read(self) -> Written {
        drop(self.slave);
        self.reader.join().expect("the terminal is read");
        mem::take(&mut self.written.lock().expect("the terminal is read"))
    }
}

fn read(master: OwnedFd, written: &Mutex<Written>) {
    let (mut master, mut buffer) = (File::from(master), vec![0; 64 << 10]);
    // Reading ends with an error when the other side is closed.
    while let Ok(count @ 1..) = master.read(&mut buffer) {
        let piece = (Instant::now(), buffer.get(..count).unwrap_or_default().to_vec());
        written.lock().expect("nobody panics with the lock").push(piece);
    }
}

fn text(written: &Written) -> String {
    let bytes: Vec<u8> = written.iter().flat_map(|(_, bytes)| bytes).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The lines that stay on a terminal when this was written to it, without spaces at their ends and empty lines at the end.
/// Understands what progress bars write: carriage returns, cursor movements up and down, and deletion of a line.
#[must_use]
pub fn screen_after(written: &str) -> Vec<String> {
    let (mut lines, mut row, mut column) = (vec![Vec::new()], 0_usize, 0_usize);
    let mut rest = written.chars().peekable();
    while let Some(character) = rest.next() {
        match character {
            '\r' => column = 0,
            '\n' => row += 1,
            '\u{1b}' if rest.next_if_eq(&'[').is_some() => {
                let mut number = String::new();
                while let Some(digit) = rest.next_if(|c| c.is_ascii_digit() || ";?".contains(*c)) {
                    number.push(digit);
                }
                let count = number.parse().unwrap_or(1);
                match rest.next() {
                    Some('A') => row = row.saturating_sub(count),
                    Some('B') => row += count,
                    Some('K') => lines.get_mut(row).into_iter().for_each(Vec::clear),
                    _ => {}
                }
            }
            _ => {
                if lines.len() <= row {
                    lines.resize(row + 1, Vec::new());
                }
                if let Some(line) = lines.get_mut(row) {
                    if line.len() <= column {
                        line.resize(column + 1, ' ');
                    }
                    line[column] = character;
                }
                column += 1;
            }
        }
        if lines.len() <= row {
            lines.resize(row + 1, Vec::new());
        }
    }
    let text = |line: Vec<char>| line.into_iter().collect::<String>().trim_end().to_owned();
    let mut lines: Vec<String> = lines.into_iter().map(text).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}
