//! Disk images that a crash could leave.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::Outcome;
use crate::random::Random;
use crate::recorder::Event;

/// The unit that a disk writes atomically.
const BLOCK_BYTES: usize = 4096;

/// A disk's initial content, and its recorded events.
#[derive(Debug)]
pub(crate) struct Record {
    /// The blocks of the initial content that are not all zeros, with their offsets.
    base: Vec<(u64, Vec<u8>)>,
    size: u64,
    events: Vec<Event>,
}

/// The moment of a crash, and which of the last writes reached the disk.
#[derive(Clone, Debug)]
pub(crate) struct CrashState {
    /// The number of events before the crash.
    pub(crate) crash: usize,
    /// The number of these that are durable, because a flush followed them.
    durable: usize,
    /// The later writes that reached the disk, in order.
    survivors: Vec<usize>,
    /// One of them that was cut off, and the number of its bytes that reached the disk.
    torn: Option<(usize, usize)>,
}

impl Record {
    /// The record of a disk with this initial content.
    pub(crate) fn new(base: &[u8], events: Vec<Event>) -> Self {
        let blocks = (0u64..).step_by(BLOCK_BYTES).zip(base.chunks(BLOCK_BYTES));
        let used = blocks.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
        let base_blocks = used.map(|(offset, block)| (offset, block.to_vec())).collect();
        Self { base: base_blocks, size: base.len() as u64, events }
    }

    /// The number of events.
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    /// The number of flushes.
    pub(crate) fn flush_count(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Flush)).count()
    }

    /// A crash at a random moment, which loses none, all or some of the writes since the last flush;
    /// sometimes one write is cut off.
    pub(crate) fn crash_at_random(&self, random: &mut Random) -> CrashState {
        let crash = random.below(self.events.len() + 1);
        let before = self.events.get(..crash).unwrap_or_default();
        let last_flush = before.iter().rposition(|event| matches!(event, Event::Flush));
        let durable = last_flush.map_or(0, |flush| flush + 1);
        let survivors: Vec<usize> = match random.below(6) {
            0 => Vec::new(),
            1 => (durable..crash).collect(),
            fate => (durable..crash).filter(|_| !random.one_in(fate)).collect(),
        };
        let torn = if random.one_in(2) { self.tear(&survivors, random) } else { None };
        CrashState { crash, durable, survivors, torn }
    }

    /// Writes an image of the disk after a crash.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_image(&self, state: &CrashState, path: &Path) -> Outcome<()> {
        let image = File::create(path)?;
        image.set_len(self.size)?;
        for (offset, block) in &self.base {
            image.write_all_at(block, *offset)?;
        }
        for number in (0..state.durable).chain(state.survivors.iter().copied()) {
            if let Some(Event::Write { offset, bytes }) = self.events.get(number) {
                let kept =
                    state.torn.filter(|(torn, _)| *torn == number).map_or(bytes.len(), |(_, kept)| kept);
                image.write_all_at(bytes.get(..kept).unwrap_or(bytes), *offset)?;
            }
        }
        Ok(())
    }

    /// Chooses one of these writes and a length at which it is cut off.
    fn tear(&self, writes: &[usize], random: &mut Random) -> Option<(usize, usize)> {
        let blocks = |number: &usize| match self.events.get(*number) {
            Some(Event::Write { bytes, .. }) => bytes.len() / BLOCK_BYTES,
            _ => 0,
        };
        let long: Vec<usize> = writes.iter().copied().filter(|number| blocks(number) > 1).collect();
        let torn = *long.get(random.below(long.len()))?;
        Some((torn, random.below(blocks(&torn)) * BLOCK_BYTES))
    }
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unflushed = self.crash - self.durable;
        write!(f, "after {} events, {} of the last {unflushed} on disk", self.crash, self.survivors.len())?;
        self.torn.map_or(Ok(()), |(write, kept)| write!(f, ", write {write} cut off after {kept} bytes"))
    }
}

#[cfg(test)]
mod tests {
    use blobd_tests::temp_dirs::tmpfs_directory;

    use super::*;

    fn write(offset: u64, byte: u8, blocks: usize) -> Event {
        Event::Write { offset, bytes: vec![byte; blocks * BLOCK_BYTES] }
    }

    /// Two writes to the same offset with a flush between them, then a long write.
    fn record() -> Record {
        let mut base = vec![0; 16 * BLOCK_BYTES];
        base[15 * BLOCK_BYTES] = 9;
        Record::new(&base, vec![write(0, 1, 1), Event::Flush, write(0, 2, 1), write(4096, 3, 4)])
    }

    fn image(state: &CrashState) -> Vec<u8> {
        let folder = tmpfs_directory();
        let path = folder.path().join("image");
        record().write_image(state, &path).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn flushed_writes_are_never_lost_and_every_other_loss_occurs() {
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..500 {
            let state = record().crash_at_random(&mut Random::new(number, "test"));
            let image = image(&state);
            assert_eq!((image.len(), image[15 * BLOCK_BYTES]), (16 * BLOCK_BYTES, 9));
            let bytes = (image[0], image[4096], image[4 * 4096]);
            if state.crash >= 2 {
                assert_ne!(bytes.0, 0, "{state}");
            }
            seen.insert(bytes);
        }
        let expected = [(0, 0, 0), (1, 0, 0), (1, 3, 0), (1, 3, 3), (2, 0, 0), (2, 3, 0), (2, 3, 3)];
        assert_eq!(seen, expected.into());
    }
}
