//! The messages between the daemon and the process that reads a client's file: records of one length.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ops::FileFacts;

/// The longest message has three numbers of 20 digits, one of 10, and how the file is open.
pub(super) const RECORD_BYTES: usize = 192;

/// A request of the daemon. Each request has one note as its response, in the order of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The metadata of a file.
    Inspect { file: u8 },
    /// The bytes of a file from `offset` on, in a slot of the shared memory.
    Read { file: u8, slot: usize, offset: u64, length: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    /// The client has sent so many files, and the process has closed the connection.
    Received(u8),
    /// The client has not sent a file.
    Refused(Refusal),
    /// The metadata of the file.
    Facts(FileFacts),
    /// The number of bytes read: as many as requested, or all up to the end of the file.
    Read(usize),
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

/// As JSON, filled up with spaces.
pub(super) fn encode(message: &impl Serialize) -> io::Result<[u8; RECORD_BYTES]> {
    let mut record = [b' '; RECORD_BYTES];
    serde_json::to_writer(record.as_mut_slice(), message)?;
    Ok(record)
}

pub(super) fn decode<T: DeserializeOwned>(record: &[u8; RECORD_BYTES]) -> Option<T> {
    serde_json::from_slice(record).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::FileAccess;

    #[test]
    fn encoded_messages_decode_to_the_same_values() {
        let (modified, access) = ((i64::MIN, i64::MIN), FileAccess::WriteOnly);
        let longest = FileFacts { mode: u32::MAX, size: u64::MAX, modified, access };
        let refused = Note::Refused(Refusal::NoFile);
        let read = Note::Read(usize::MAX);
        for note in [Note::Received(u8::MAX), refused, Note::Facts(longest), read, Note::Failed(i32::MIN)] {
            assert_eq!(decode(&encode(&note).unwrap()), Some(note));
        }
        let read = Request::Read { file: u8::MAX, slot: usize::MAX, offset: u64::MAX, length: usize::MAX };
        for request in [Request::Inspect { file: u8::MAX }, read] {
            assert_eq!(decode(&encode(&request).unwrap()), Some(request));
        }
        assert_eq!(decode::<Note>(&[b'x'; RECORD_BYTES]), None);
    }
}
