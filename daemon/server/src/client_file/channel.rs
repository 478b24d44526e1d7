//! The channel between the daemon and the process that reads a client's file: messages, which are records of one length,
//! and shared memory, which consists of slots.

use std::io;
use std::sync::mpsc::Sender;

use memmap2::MmapMut;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ops::FileFacts;

/// The longest message has three numbers of 20 digits, one of 10, and how the file is open.
pub(super) const RECORD_BYTES: usize = 192;

/// A request of the daemon. Each gets one note as its response, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The next files that the client sends: `count` from number `first` on.
    Receive {
        first: u32,
        count: u8,
        /// Whether those before stay open. Otherwise they are closed, and the new ones are numbered from 0.
        keeps: bool,
        /// Whether no more files follow, so that the process closes the connection.
        is_last: bool,
    },
    Inspect {
        file: u16,
    },
    /// The bytes of a file from `offset` on, or without one the next bytes of a pipe, in a slot of the shared memory.
    Read {
        file: u16,
        slot: usize,
        offset: Option<u64>,
        length: usize,
    },
    /// To share all blocks of a file with the file whose descriptor comes with this request.
    Reflink {
        file: u16,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    /// The client has sent the files.
    Received,
    Refused(Refusal),
    Facts(FileFacts),
    /// The number of bytes read: as many as requested, or all up to the end of the file.
    Read(usize),
    /// The blocks are shared, and the descriptor that came with the request is closed.
    Shared,
    /// The file cannot be inspected or read, or its blocks cannot be shared: the error number.
    Failed(i32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    Closed,
    /// The client has sent nothing in time.
    Slow,
    /// The client has sent another frame, or several.
    Frame,
    /// The frame has no descriptor.
    NoFile,
    /// The frame has another number of descriptors.
    Files,
    Failed,
}

/// Encodes a message as JSON, padded with spaces.
pub(super) fn encode(message: &impl Serialize) -> io::Result<[u8; RECORD_BYTES]> {
    let mut record = [b' '; RECORD_BYTES];
    serde_json::to_writer(record.as_mut_slice(), message)?;
    Ok(record)
}

pub(super) fn decode<T: DeserializeOwned>(record: &[u8; RECORD_BYTES]) -> Option<T> {
    serde_json::from_slice(record).ok()
}

/// A slot without content, and its number.
pub(super) type EmptySlot = (usize, MmapMut);

/// A slot with content. On drop it is sent back, to be filled again.
#[derive(Debug)]
pub(super) struct FilledSlot {
    slot: Option<EmptySlot>,
    length: usize,
    empty: Sender<EmptySlot>,
}

impl FilledSlot {
    pub(super) fn new(slot: EmptySlot, length: usize, empty: Sender<EmptySlot>) -> Self {
        Self { slot: Some(slot), length, empty }
    }
}

impl AsRef<[u8]> for FilledSlot {
    fn as_ref(&self) -> &[u8] {
        self.slot.as_ref().and_then(|(_, memory)| memory.get(..self.length)).unwrap_or_default()
    }
}

impl Drop for FilledSlot {
    fn drop(&mut self) {
        // Fails when the import has ended; then the memory is unmapped.
        let _ = self.slot.take().map(|slot| self.empty.send(slot));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::ops::FileAccess;
    use crate::sys::{map_shared, shared_memory};

    #[test]
    fn encoded_messages_decode_to_the_same_values() {
        let (modified, access) = ((i64::MIN, i64::MIN), FileAccess::WriteOnly);
        let longest = FileFacts { mode: u32::MAX, size: u64::MAX, modified, access };
        let refused = Note::Refused(Refusal::NoFile);
        let read = Note::Read(usize::MAX);
        for note in
            [Note::Received, refused, Note::Facts(longest), read, Note::Shared, Note::Failed(i32::MIN)]
        {
            assert_eq!(decode(&encode(&note).unwrap()), Some(note));
        }
        let read =
            Request::Read { file: u16::MAX, slot: usize::MAX, offset: Some(u64::MAX), length: usize::MAX };
        let receive = Request::Receive { first: u32::MAX, count: u8::MAX, is_last: false, keeps: false };
        let reflink = Request::Reflink { file: u16::MAX };
        for request in [Request::Inspect { file: u16::MAX }, receive, read, reflink] {
            assert_eq!(decode(&encode(&request).unwrap()), Some(request));
        }
        assert_eq!(decode::<Note>(&[b'x'; RECORD_BYTES]), None);
    }

    fn slots(count: usize) -> (File, Vec<EmptySlot>) {
        let memory = shared_memory(count * 4096).unwrap();
        let slots = map_shared(&memory, count, 4096).unwrap();
        (memory, slots.into_iter().enumerate().collect())
    }

    #[test]
    fn slot_shows_what_another_process_writes_there() {
        let ((memory, slots), (empty, _)) = (slots(2), channel());
        let filled = |slot| FilledSlot::new(slot, 6, empty.clone());
        let slots: Vec<FilledSlot> = slots.into_iter().map(filled).collect();
        memory.write_all_at(b"first ", 0).unwrap();
        memory.write_all_at(b"second", 4096).unwrap();
        assert_eq!((slots[0].as_ref(), slots[1].as_ref()), (&b"first "[..], &b"second"[..]));
    }

    #[test]
    fn slot_is_sent_back_on_drop() {
        let ((_memory, mut slots), (empty, back)) = (slots(2), channel());
        let filled = FilledSlot::new(slots.pop().unwrap(), 1, empty);
        assert!(back.try_recv().is_err());
        drop(filled);
        assert_eq!(back.recv().unwrap().0, 1);
    }

    #[test]
    fn length_beyond_the_slot_shows_nothing() {
        let ((_memory, mut slots), (empty, _)) = (slots(1), channel());
        assert!(FilledSlot::new(slots.pop().unwrap(), 4097, empty).as_ref().is_empty());
    }

    #[test]
    fn size_of_shared_memory_cannot_be_changed() {
        let (mut memory, _slots) = slots(1);
        assert!(memory.set_len(0).is_err() && memory.set_len(8192).is_err());
        memory.write_all(b"still writable").unwrap();
    }
}
