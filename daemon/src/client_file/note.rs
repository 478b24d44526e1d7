//! The messages of the process that reads a client's file: records of one length.

use crate::ops::FileFacts;

pub(super) const NOTE_BYTES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl Refusal {
    const ALL: [Self; 6] = [Self::Closed, Self::Slow, Self::Frame, Self::NoFile, Self::Files, Self::Failed];
}

impl Note {
    pub(super) fn encode(self) -> [u8; NOTE_BYTES] {
        let (kind, word, facts): (u64, u32, _) = match self {
            Self::Received => (1, 0, None),
            Self::Refused(refusal) => (2, refusal as u32, None),
            Self::Facts(facts) => (3, facts.mode, Some(facts)),
            Self::Short => (4, 0, None),
            Self::Failed(errno) => (5, errno.cast_unsigned(), None),
        };
        let (size, (seconds, nanoseconds)) = facts.map_or((0, (0, 0)), |facts| (facts.size, facts.modified));
        let words =
            [kind << 32 | u64::from(word), size, seconds.cast_unsigned(), nanoseconds.cast_unsigned()];
        let mut record = [0; NOTE_BYTES];
        for (place, word) in record.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        record
    }

    pub(super) fn decode(record: &[u8; NOTE_BYTES]) -> Option<Self> {
        let mut words =
            record.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let first = words.next()?;
        let word = u32::try_from(first & u64::from(u32::MAX)).ok()?;
        match first >> 32 {
            1 => Some(Self::Received),
            2 => Refusal::ALL.into_iter().find(|refusal| *refusal as u32 == word).map(Self::Refused),
            3 => {
                let (size, seconds, nanoseconds) = (words.next()?, words.next()?, words.next()?);
                let modified = (seconds.cast_signed(), nanoseconds.cast_signed());
                Some(Self::Facts(FileFacts { mode: word, size, modified }))
            }
            4 => Some(Self::Short),
            5 => Some(Self::Failed(word.cast_signed())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_notes_decode_to_the_same_values() {
        let facts = FileFacts { mode: 0o100_644, size: u64::MAX, modified: (-1, 999_999_999) };
        let refusals = Refusal::ALL.map(Note::Refused);
        let others = [Note::Received, Note::Facts(facts), Note::Short, Note::Failed(5), Note::Failed(-1)];
        for note in refusals.into_iter().chain(others) {
            assert_eq!(Note::decode(&note.encode()), Some(note));
        }
        assert_eq!(Note::decode(&[b'x'; NOTE_BYTES]), None);
    }
}
