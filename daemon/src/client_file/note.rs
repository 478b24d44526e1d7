//! The messages of the process that reads a client's file: records of one length.

use std::io;

use serde::{Deserialize, Serialize};

use crate::ops::FileFacts;

/// The longest note has three numbers of 20 digits and one of 10.
pub(super) const NOTE_BYTES: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    /// The client has sent a file, and the process has closed the connection.
    Received,
    /// The client has not sent a file.
    Refused(Refusal),
    /// The metadata of the file.
    Facts(FileFacts),
    /// The file ends before its length.
    Short,
    /// The file cannot be inspected or read: the error number.
    Failed(i32),
}

/// Why no descriptor was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    Closed,
    /// The client has sent nothing in time.
    Slow,
    /// The client has sent another frame, or several.
    Frame,
    NoFile,
    Files,
    /// Reading from the connection failed.
    Failed,
}

impl Note {
    /// As JSON, filled up with spaces.
    pub(super) fn encode(self) -> io::Result<[u8; NOTE_BYTES]> {
        let mut record = [b' '; NOTE_BYTES];
        serde_json::to_writer(record.as_mut_slice(), &self)?;
        Ok(record)
    }

    pub(super) fn decode(record: &[u8; NOTE_BYTES]) -> Option<Self> {
        serde_json::from_slice(record).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_notes_decode_to_the_same_values() {
        let longest = FileFacts { mode: u32::MAX, size: u64::MAX, modified: (i64::MIN, i64::MIN) };
        let refused = Note::Refused(Refusal::NoFile);
        for note in [Note::Received, refused, Note::Facts(longest), Note::Short, Note::Failed(-1)] {
            assert_eq!(Note::decode(&note.encode().unwrap()), Some(note));
        }
        assert_eq!(Note::decode(&[b'x'; NOTE_BYTES]), None);
    }
}
