//! The lock file: which process has the store open.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The process that has the store open, as recorded in the lock file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// The process id; 0 if not recorded yet.
    pub pid: u32,
    /// The socket on which it serves other processes. A relative path is one in the store's directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Set if it is a command, which serves other processes only while it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// Its own work. If it has a socket, it serves other processes meanwhile.
    Working,
    /// It has done its own work, and completes requests of other processes. It accepts no new ones.
    Ending,
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            0 => f.write_str("another process")?,
            pid => write!(f, "process {pid}")?,
        }
        if self.command.is_some() {
            return f.write_str(", a blobd command");
        }
        self.socket.as_ref().map_or(Ok(()), |socket| write!(f, ", which serves {}", socket.display()))
    }
}

/// Reads the holder; tries again for a moment, since the holder may be writing the record.
pub(crate) fn read_holder(file: &File) -> LockHolder {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(10);
    for _ in 0..TRIES {
        if let Some(holder) = recorded_holder(file) {
            return holder;
        }
        std::thread::sleep(PAUSE);
    }
    LockHolder::default()
}

/// The holder in the lock file; `None` if it is just being written.
pub(crate) fn recorded_holder(file: &File) -> Option<LockHolder> {
    let mut json = vec![0; HOLDER_BYTES];
    let read = file.read_at(&mut json, 0).ok()?;
    serde_json::from_slice(json.get(..read)?).ok()
}

/// Long enough for the path of a socket.
const HOLDER_BYTES: usize = 4096;

/// Overwrites the record in place: a reader always finds a complete one, and it works on a full disk.
pub(crate) fn write_holder(file: &File, holder: &LockHolder) -> io::Result<()> {
    let mut json = serde_json::to_vec(holder)?;
    let length = file.metadata()?.len();
    // Blanks overwrite the rest of a longer old record; JSON permits them.
    let before = usize::try_from(length).unwrap_or(HOLDER_BYTES).min(HOLDER_BYTES);
    json.resize(json.len().max(before), b' ');
    file.write_all_at(&json, 0)
}
