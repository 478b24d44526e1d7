//! The progress of all files together: of what is sent, and of what is read before.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_store_format::digest::Digest;
use tokio::sync::mpsc::Sender;

use super::super::send_progress;

/// Adds up how much of all files has been sent, or read, and tells the client now and then.
pub(super) struct Progress<'p> {
    events: &'p Sender<WorkProgress>,
    status: &'static str,
    phase: Phase,
    total: Cell<u64>,
    completed: RefCell<BTreeMap<Digest, u64>>,
    last_event: Cell<Option<Instant>>,
}

impl<'p> Progress<'p> {
    const INTERVAL: Duration = Duration::from_millis(100);

    pub(super) fn new(events: &'p Sender<WorkProgress>, status: &'static str, phase: Phase) -> Self {
        let (total, last_event) = (Cell::new(0), Cell::new(None));
        Self { events, status, phase, total, completed: RefCell::default(), last_event }
    }

    pub(super) fn expect(&self, sizes: impl Iterator<Item = u64>) {
        self.total.set(sizes.fold(0, u64::saturating_add));
    }

    pub(super) fn set(&self, file: Digest, completed: u64) {
        self.completed.borrow_mut().insert(file, completed);
        let sum = self.completed.borrow().values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let is_last = sum == self.total.get();
        if !is_last && self.last_event.get().is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            return;
        }
        self.last_event.set(Some(Instant::now()));
        let (total, completed) = (Some(self.total.get()), Some(sum));
        send_progress(
            self.events,
            WorkProgress { total, completed, ..WorkProgress::working(self.status, self.phase) },
        );
    }
}
