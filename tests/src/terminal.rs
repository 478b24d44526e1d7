//! A pseudo-terminal for a command, and what the command shows there.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// One side is for the command, the other is read by a thread until the command closes it.
#[derive(Debug)]
pub struct Terminal {
    /// The command's side, for its standard input, output or error.
    pub slave: OwnedFd,
    master: OwnedFd,
    reader: JoinHandle<String>,
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
        Self { slave, master, reader: thread::spawn(move || read(read_from)) }
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
        drop(self.slave);
        self.reader.join().expect("the terminal is read")
    }
}

fn read(master: OwnedFd) -> String {
    let mut shown = Vec::new();
    // Reading ends with an error when the other side is closed.
    let _ = File::from(master).read_to_end(&mut shown);
    String::from_utf8_lossy(&shown).into_owned()
}
