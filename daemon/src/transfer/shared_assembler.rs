//! An assembler that one thread writes and others read while bytes arrive.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blobd_store::{Assembler, StoreError};

use super::TransferError;

/// An assembler with what its readers need to wait for bytes, and the failure that ends the wait.
#[derive(Debug)]
pub(super) struct SharedAssembler {
    assembler: Assembler,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Why no more will arrive.
    failure: Option<TransferError>,
    /// Whether somebody has given up waiting.
    is_over: bool,
}

impl SharedAssembler {
    pub(super) fn new(assembler: Assembler) -> Arc<Self> {
        Arc::new(Self { assembler, state: Mutex::default(), changed: Condvar::new() })
    }

    pub(super) const fn assembler(&self) -> &Assembler {
        &self.assembler
    }

    /// Writes bytes that have come.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.assembler.write(offset, bytes)?;
        drop(self.lock());
        self.changed.notify_all();
        Ok(())
    }

    /// No more will arrive, for this reason. Only the first counts.
    pub(super) fn fail(&self, error: TransferError) {
        self.lock().failure.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Somebody waits for what is missing.
    pub(super) fn begin(&self) {
        *self.lock() = State::default();
    }

    /// Nobody waits any more.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
    }

    /// Whether nobody waits any more, or it has failed.
    pub(super) fn is_over(&self) -> bool {
        let state = self.lock();
        state.is_over || state.failure.is_some()
    }

    /// Why it has failed.
    pub(super) fn take_failure(&self) -> Option<TransferError> {
        self.lock().failure.take()
    }

    /// Waits until a byte has arrived at `offset`, and says where the run ends that it begins;
    /// `None` when it never will. `report` is called now and then; it may give up by returning false.
    pub(super) fn wait_for(&self, offset: u64, mut report: impl FnMut() -> bool) -> Option<u64> {
        const NOW_AND_THEN: Duration = Duration::from_millis(100);
        let mut state = self.lock();
        loop {
            let end = self.assembler.end_of_run(offset);
            if end > offset {
                return Some(end);
            }
            if state.failure.is_some() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, NOW_AND_THEN);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if !report() {
                return None;
            }
            state = self.lock();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is complete before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
