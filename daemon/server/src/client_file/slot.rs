//! Slots of the memory that a process shares with the daemon.

use std::sync::mpsc::Sender;

use memmap2::MmapMut;

/// A slot without content, and its number.
pub(super) type EmptySlot = (usize, MmapMut);

/// A slot with content. On drop it is sent back, to be filled again.
#[derive(Debug)]
pub(super) struct FilledSlot {
    /// `None` once it was sent back.
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

    use crate::sys::{map_shared, shared_memory};

    use super::*;

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
