//! The memory of a graph's tensors, as ggml's allocator places them.
//!
//! A tensor is allocated when it is computed, in the best-fitting free range, and freed after its last use. The size of
//! the buffer is the highest address ever used. Because of fragmentation, that can exceed the largest sum of live
//! tensors, so the sum alone does not give the size.
//!
//! Source: `ggml-alloc.c` of llama.cpp b11434.

/// A tensor of a [`Graph`]: the index of an earlier tensor, since only [`Graph::add`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(usize);

/// The tensors of a computation in the order in which they are computed. Views have no memory and are omitted: using a
/// view means using its source.
#[derive(Debug, Default)]
pub(super) struct Graph {
    tensors: Vec<Tensor>,
}

#[derive(Debug)]
struct Tensor {
    bytes: u128,
    sources: Vec<Id>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Allocated before everything else.
    Input,
    /// Allocated when it is computed.
    Plain,
    /// Reuses the memory of a source of the same size that nothing else uses.
    InPlace,
    /// Allocated when it is computed, and never freed.
    Kept,
}

impl Graph {
    /// Tensors are aligned to this many bytes.
    const ALIGNMENT: u128 = 32;

    pub(super) fn input(&mut self, bytes: u128) -> Id {
        self.add(bytes, &[], Kind::Input)
    }

    pub(super) fn tensor(&mut self, bytes: u128, sources: &[Id]) -> Id {
        self.add(bytes, sources, Kind::Plain)
    }

    /// A tensor of an operation that can overwrite its source, such as an addition.
    pub(super) fn in_place(&mut self, bytes: u128, sources: &[Id]) -> Id {
        self.add(bytes, sources, Kind::InPlace)
    }

    pub(super) fn kept(&mut self, bytes: u128, sources: &[Id]) -> Id {
        self.add(bytes, sources, Kind::Kept)
    }

    /// Records a use of tensors that produces no tensor, such as a write into the cache.
    pub(super) fn used(&mut self, sources: &[Id]) {
        self.add(0, sources, Kind::Plain);
    }

    fn add(&mut self, bytes: u128, sources: &[Id], kind: Kind) -> Id {
        let bytes = bytes.checked_next_multiple_of(Self::ALIGNMENT).unwrap_or(u128::MAX);
        self.tensors.push(Tensor { bytes, sources: sources.to_vec(), kind });
        Id(self.tensors.len() - 1)
    }

    /// The size of the buffer in bytes.
    pub(super) fn buffer_bytes(&self) -> u128 {
        let mut uses = vec![0_usize; self.tensors.len()];
        for Id(source) in self.tensors.iter().flat_map(|tensor| &tensor.sources) {
            uses[*source] += 1;
        }
        let mut run =
            Run { graph: self, uses, places: vec![None; self.tensors.len()], buffer: Buffer::default() };
        let inputs = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.kind == Kind::Input);
        for (number, tensor) in inputs {
            run.places[number] = Some(run.buffer.allocate(tensor.bytes));
        }
        for number in 0..self.tensors.len() {
            run.compute(number);
        }
        run.buffer.size
    }
}

/// An allocation of all tensors of a graph.
struct Run<'g> {
    graph: &'g Graph,
    /// The remaining uses of each tensor.
    uses: Vec<usize>,
    /// The offset of each tensor that has memory.
    places: Vec<Option<u128>>,
    buffer: Buffer,
}

impl Run<'_> {
    fn compute(&mut self, number: usize) {
        let tensor = &self.graph.tensors[number];
        if tensor.kind != Kind::Input {
            self.places[number] = match self.overwritten(tensor) {
                Some(Id(source)) => self.places[source].take(),
                None => Some(self.buffer.allocate(tensor.bytes)),
            };
        }
        for Id(source) in &tensor.sources {
            self.uses[*source] -= 1;
            let Tensor { bytes, kind, .. } = self.graph.tensors[*source];
            if self.uses[*source] == 0
                && kind != Kind::Kept
                && let Some(offset) = self.places[*source].take()
            {
                self.buffer.free(offset, bytes);
            }
        }
    }

    /// The source whose memory a tensor takes.
    fn overwritten(&self, tensor: &Tensor) -> Option<Id> {
        let is_free = |Id(source): &Id| {
            let Tensor { bytes, kind, .. } = self.graph.tensors[*source];
            self.uses[*source] == 1
                && self.places[*source].is_some()
                && bytes == tensor.bytes
                && kind != Kind::Kept
        };
        tensor.sources.iter().copied().find(|source| tensor.kind == Kind::InPlace && is_free(source))
    }
}

/// A buffer and its free ranges, sorted by offset.
#[derive(Default)]
struct Buffer {
    /// Offset and size.
    free: Vec<(u128, u128)>,
    /// Everything from this offset on is free.
    end: u128,
    /// The largest end so far.
    size: u128,
}

impl Buffer {
    fn allocate(&mut self, bytes: u128) -> u128 {
        if bytes == 0 {
            return self.end;
        }
        let fitting = self.free.iter().enumerate().filter(|(_, (_, size))| *size >= bytes);
        // Of free ranges with the same size, ggml takes the last.
        let Some((best, _)) = fitting.rev().min_by_key(|(_, (_, size))| *size) else {
            let offset = self.end;
            self.end = self.end.saturating_add(bytes);
            self.size = self.size.max(self.end);
            return offset;
        };
        let (offset, size) = self.free[best];
        self.free[best] = (offset.saturating_add(bytes), size - bytes);
        if size == bytes {
            self.free.remove(best);
        }
        offset
    }

    fn free(&mut self, offset: u128, bytes: u128) {
        if bytes == 0 {
            return;
        }
        let next = self.free.partition_point(|(other, _)| *other < offset);
        self.free.insert(next, (offset, bytes));
        self.join(next);
        if let Some(before) = next.checked_sub(1) {
            self.join(before);
        }
        if let Some(&(offset, bytes)) = self.free.last()
            && offset.saturating_add(bytes) == self.end
        {
            self.end = offset;
            self.free.pop();
        }
    }

    /// Joins a free range with the next one if they are adjacent.
    fn join(&mut self, place: usize) {
        let (Some(&(offset, bytes)), Some(&(next, next_bytes))) =
            (self.free.get(place), self.free.get(place + 1))
        else {
            return;
        };
        if offset.saturating_add(bytes) == next {
            self.free[place].1 = bytes.saturating_add(next_bytes);
            self.free.remove(place + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_take_the_memory_of_those_that_are_no_longer_used() {
        let mut graph = Graph::default();
        let input = graph.input(64);
        let first = graph.tensor(64, &[input]);
        let second = graph.tensor(64, &[first]);
        graph.tensor(64, &[second]);
        assert_eq!(graph.buffer_bytes(), 128);
    }

    #[test]
    fn sources_that_are_used_later_are_not_overwritten() {
        let mut graph = Graph::default();
        let input = graph.input(64);
        let norm = graph.in_place(64, &[input]);
        graph.in_place(64, &[norm, input]);
        assert_eq!(graph.buffer_bytes(), 128);
        let mut graph = Graph::default();
        let input = graph.input(64);
        let norm = graph.in_place(64, &[input]);
        graph.in_place(64, &[norm]);
        assert_eq!(graph.buffer_bytes(), 64);
    }

    #[test]
    fn free_places_that_are_too_small_make_the_buffer_larger_than_the_live_tensors() {
        let mut graph = Graph::default();
        let input = graph.input(32);
        let first = graph.tensor(64, &[input]);
        let second = graph.tensor(64, &[first]);
        graph.tensor(160, &[second]);
        // At the end, 96 bytes are free before the second tensor, and 224 are in use.
        assert_eq!(graph.buffer_bytes(), 320);
    }

    #[test]
    fn sizes_are_rounded_up_and_never_overflow() {
        let mut graph = Graph::default();
        let input = graph.input(1);
        graph.kept(u128::MAX, &[input]);
        assert_eq!(graph.buffer_bytes(), u128::MAX);
        let mut graph = Graph::default();
        graph.input(1);
        assert_eq!(graph.buffer_bytes(), 32);
    }
}
