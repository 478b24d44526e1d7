//! An assembler that one thread writes and others read while bytes arrive.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use blobd_registry::Sender;
use blobd_store::{Assembler, StoreError};
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use super::TransferError;
use super::two_copies::Senders;

/// An assembler whose readers wait for bytes until they arrive or the transfer fails.
#[derive(Debug)]
pub(super) struct SharedAssembler {
    assembler: Assembler,
    senders: Mutex<Senders>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<TransferError>,
    is_over: bool,
}

impl SharedAssembler {
    pub(super) fn new(assembler: Assembler, senders: Senders) -> Arc<Self> {
        let senders = Mutex::new(senders);
        Arc::new(Self { assembler, senders, state: Mutex::default(), changed: Condvar::new() })
    }

    pub(super) const fn assembler(&self) -> &Assembler {
        &self.assembler
    }

    pub(super) fn senders(&self) -> Senders {
        self.lock_senders().clone()
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8], sender: &Arc<Sender>) -> Result<(), StoreError> {
        self.assembler.write(offset, bytes)?;
        self.lock_senders().note(&(offset..offset.saturating_add(bytes.len() as u64)), sender);
        drop(self.lock());
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the wait of readers. Only the first error counts.
    pub(super) fn fail(&self, error: TransferError) {
        self.lock().failure.get_or_insert(error);
        self.changed.notify_all();
    }

    pub(super) fn begin(&self) {
        *self.lock() = State::default();
    }

    pub(super) fn end(&self) {
        self.lock().is_over = true;
    }

    pub(super) fn is_over(&self) -> bool {
        let state = self.lock();
        state.is_over || state.failure.is_some()
    }

    pub(super) fn take_failure(&self) -> Option<TransferError> {
        self.lock().failure.take()
    }

    /// Waits until the byte at `offset` has arrived, and returns the end of the run of bytes that starts there; `None` if
    /// it will never arrive. Calls `report` regularly, which ends the wait by returning false.
    pub(super) fn wait_for(&self, offset: u64, mut report: impl FnMut() -> bool) -> Option<u64> {
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        let mut state = self.lock();
        loop {
            let end = self.assembler.end_of_run(offset);
            if end > offset {
                return Some(end);
            }
            if state.failure.is_some() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, POLL_INTERVAL);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if !report() {
                return None;
            }
            state = self.lock();
        }
    }

    fn lock_senders(&self) -> MutexGuard<'_, Senders> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
