//! The progress of all files together: of what is sent, and of what is read before.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _, WorkProgress};
use blobd_store_format::digest::Digest;
use tokio::sync::mpsc::Sender;

use super::super::send_progress;
use crate::running_pulls::PullWatch;

/// The receivers of progress: the client, and the table of running pulls, pushes and transfers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listeners<'l> {
    /// Receives progress. The work stops when the receiver is dropped.
    pub(crate) events: &'l Sender<WorkProgress>,
    pub(crate) watch: &'l PullWatch,
}

impl Listeners<'_> {
    pub(super) fn tell(self, progress: WorkProgress) {
        self.watch.work_step(&progress);
        send_progress(self.events, progress);
    }
}

/// Adds up how much of all files has been sent, or read, and tells the client now and then.
pub(super) struct Progress<'p> {
    listeners: Listeners<'p>,
    status: &'static str,
    phase: Phase,
    total: Cell<u64>,
    completed: RefCell<BTreeMap<Digest, u64>>,
    last_event: Cell<Option<Instant>>,
}

impl<'p> Progress<'p> {
    const INTERVAL: Duration = Duration::from_millis(100);

    pub(super) fn new(listeners: Listeners<'p>, status: &'static str, phase: Phase) -> Self {
        let (total, last_event) = (Cell::new(0), Cell::new(None));
        Self { listeners, status, phase, total, completed: RefCell::default(), last_event }
    }

    pub(super) fn expect(&self, sizes: impl Iterator<Item = u64>) {
        self.total.set(sizes.fold(0, u64::saturating_add));
        if self.moves() {
            self.listeners.watch.expect(self.total.get());
        }
    }

    /// Whether files move, and are not only read before.
    fn moves(&self) -> bool {
        self.phase == Phase::Sending
    }

    pub(super) fn set(&self, file: Digest, completed: u64) {
        self.completed.borrow_mut().insert(file, completed);
        if self.moves() {
            self.listeners.watch.note(file, completed);
        }
        let sum = self.completed.borrow().values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let is_last = sum == self.total.get();
        if !is_last && self.last_event.get().is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            return;
        }
        self.last_event.set(Some(Instant::now()));
        let (total, completed) = (Some(self.total.get()), Some(sum));
        let working = WorkProgress::working(self.status, self.phase);
        self.listeners.tell(WorkProgress { total, completed, ..working });
    }
}
