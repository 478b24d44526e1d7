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
    /// Its socket, if it is a daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            0 => f.write_str("another process")?,
            pid => write!(f, "process {pid}")?,
        }
        self.socket.as_ref().map_or(Ok(()), |socket| write!(f, ", which serves {}", socket.display()))
    }
}

/// Reads the holder; tries again for a moment, since the holder may be writing the record.
pub(super) fn read_holder(file: &File) -> LockHolder {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(10);
    for _ in 0..TRIES {
        let mut json = vec![0; HOLDER_BYTES];
        let read = file.read_at(&mut json, 0).unwrap_or_default();
        if let Ok(holder) = serde_json::from_slice(json.get(..read).unwrap_or_default()) {
            return holder;
        }
        std::thread::sleep(PAUSE);
    }
    LockHolder::default()
}

/// Long enough for the path of a socket.
const HOLDER_BYTES: usize = 4096;

/// Overwrites the record in place, so that a reader always finds a complete one, and so that it works on
/// a full disk.
pub(super) fn write_holder(file: &File, holder: &LockHolder) -> io::Result<()> {
    let mut json = serde_json::to_vec(holder)?;
    let length = file.metadata()?.len();
    // Blanks overwrite the rest of a longer old record; JSON permits them.
    let before = usize::try_from(length).unwrap_or(HOLDER_BYTES).min(HOLDER_BYTES);
    json.resize(json.len().max(before), b' ');
    file.write_all_at(&json, 0)
}
