//! Images of a disk as a crash could have left it.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::Outcome;
use crate::random::Random;
use crate::recorder::Event;

/// What a disk writes wholly or not at all.
const ATOM_BYTES: usize = 4096;

/// A disk's content before the record, and the record.
#[derive(Debug)]
pub(crate) struct Record {
    /// The content that is not zeros, in atoms, by its offset.
    base: Vec<(u64, Vec<u8>)>,
    size: u64,
    events: Vec<Event>,
}

/// A moment and what of the last writes was lost at it.
#[derive(Clone, Debug)]
pub(crate) struct CrashState {
    /// How many events had happened.
    pub(crate) crash: usize,
    /// How many of them are durable, because a flush came behind them.
    durable: usize,
    /// The later writes that reached the disk, in order.
    survivors: Vec<usize>,
    /// One of them of which only so many bytes did.
    torn: Option<(usize, usize)>,
}

impl Record {
    /// A record that begins with this content.
    pub(crate) fn new(base: &[u8], events: Vec<Event>) -> Self {
        let atoms = (0u64..).step_by(ATOM_BYTES).zip(base.chunks(ATOM_BYTES));
        let used = atoms.filter(|(_, atom)| atom.iter().any(|byte| *byte != 0));
        let base_atoms = used.map(|(offset, atom)| (offset, atom.to_vec())).collect();
        Self { base: base_atoms, size: base.len() as u64, events }
    }

    /// How many events there are.
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    /// How many of them are flushes.
    pub(crate) fn flush_count(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Flush)).count()
    }

    /// A moment, and the loss of some of what was written since the last flush: nothing of it,
    /// all of it, or any part; sometimes one write is cut off.
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
        for (offset, atom) in &self.base {
            image.write_all_at(atom, *offset)?;
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

    /// One of these writes and a length at which it may be cut off.
    fn tear(&self, writes: &[usize], random: &mut Random) -> Option<(usize, usize)> {
        let atoms = |number: &usize| match self.events.get(*number) {
            Some(Event::Write { bytes, .. }) => bytes.len() / ATOM_BYTES,
            _ => 0,
        };
        let long: Vec<usize> = writes.iter().copied().filter(|number| atoms(number) > 1).collect();
        let torn = *long.get(random.below(long.len()))?;
        Some((torn, random.below(atoms(&torn)) * ATOM_BYTES))
    }
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unsure = self.crash - self.durable;
        write!(f, "after {} events, {} of the last {unsure} on disk", self.crash, self.survivors.len())?;
        self.torn.map_or(Ok(()), |(write, kept)| write!(f, ", write {write} cut off after {kept} bytes"))
    }
}

#[cfg(test)]
mod tests {
    use blobd_tests::places::fast_folder;

    use super::*;

    fn write(offset: u64, byte: u8, atoms: usize) -> Event {
        Event::Write { offset, bytes: vec![byte; atoms * ATOM_BYTES] }
    }

    /// Two writes to one place with a flush between them, then a long one.
    fn record() -> Record {
        let mut base = vec![0; 16 * ATOM_BYTES];
        base[15 * ATOM_BYTES] = 9;
        Record::new(&base, vec![write(0, 1, 1), Event::Flush, write(0, 2, 1), write(4096, 3, 4)])
    }

    fn image(state: &CrashState) -> Vec<u8> {
        let folder = fast_folder();
        let path = folder.path().join("image");
        record().write_image(state, &path).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn nothing_before_a_flush_is_lost_and_all_losses_occur() {
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..500 {
            let state = record().crash_at_random(&mut Random::new(number, "test"));
            let image = image(&state);
            assert_eq!((image.len(), image[15 * ATOM_BYTES]), (16 * ATOM_BYTES, 9));
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
