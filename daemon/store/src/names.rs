//! What names mean: tags with their histories, pins and origins, and the trash.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::content::Content;
use crate::ledger::Ledger;
use crate::lock;

pub(crate) mod history;
pub(crate) mod models;
pub(crate) mod name_rule;
pub(crate) mod origins;
pub(crate) mod pins;
pub(crate) mod records;
pub(crate) mod resolve;
pub(crate) mod summaries;
pub(crate) mod tags;
pub(crate) mod trash;

/// The names of a store, and its trash.
#[derive(Debug)]
pub struct Names {
    content: Arc<Content>,
    ledger: Arc<Ledger>,
    summaries: summaries::Summaries,
    /// Those of the lower stores, in the order of these.
    lower_summaries: Box<[summaries::Summaries]>,
    tag_names: summaries::TagNames,
    /// How often a tag was set or removed.
    tag_changes: AtomicU64,
    /// Held from the check that allows a change of a tag until the change is done.
    changing: Mutex<()>,
    future_records: trash::FutureRecords,
}

impl Names {
    pub(crate) fn new(content: Arc<Content>, ledger: Arc<Ledger>) -> Self {
        Self {
            summaries: summaries::Summaries::default(),
            lower_summaries: content.lower.paths().map(|_| summaries::Summaries::default()).collect(),
            content,
            ledger,
            tag_names: summaries::TagNames::default(),
            tag_changes: AtomicU64::new(0),
            changing: Mutex::default(),
            future_records: trash::FutureRecords::default(),
        }
    }

    /// Prevents other changes of tags until the guard is dropped.
    pub fn lock_tags(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }
}
