//! An assembler that one thread writes and others read while bytes arrive.

use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Set while the file is received and hashed.
    attempt: Option<Arc<Attempt>>,
}

/// One pass over a file, at whose end its digest is compared. What arrives in it never changes until then, so whoever has read
/// all bytes in one attempt that is verified has read the file.
#[derive(Debug, Default)]
pub(crate) struct Attempt(AtomicBool);

/// Bytes, and the attempt that they belong to.
pub(crate) type Arrived = (Arc<Attempt>, Vec<u8>);

impl Attempt {
    /// Whether the file had its digest.
    pub(crate) fn is_verified(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
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
        *self.lock() = State { attempt: Some(Arc::default()), ..State::default() };
    }

    /// The file has the digest that it must have.
    pub(super) fn set_verified(&self) {
        if let Some(attempt) = &self.lock().attempt {
            attempt.0.store(true, Ordering::Release);
        }
    }

    pub(super) fn attempt(&self) -> Option<Arc<Attempt>> {
        self.lock().attempt.clone()
    }

    /// At most so many bytes from an offset; `None` if there are none yet.
    pub(super) fn arrived(&self, offset: u64, most: u64) -> Result<Option<Arrived>, StoreError> {
        let Some(attempt) = self.attempt() else { return Ok(None) };
        let end = self.assembler.end_of_run(offset).min(offset.saturating_add(most));
        let length = end.saturating_sub(offset);
        if length == 0 {
            return Ok(None);
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        self.assembler.read(offset, &mut bytes)?;
        // What was forgotten meanwhile has been replaced.
        let is_same = self.attempt().is_some_and(|now| Arc::ptr_eq(&now, &attempt));
        Ok(is_same.then_some((attempt, bytes)))
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
