//! What may still be stored: disk space, reservations of transactions, and what is charged to users.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tracing_mutex::stdsync::Mutex;

use crate::content::Content;

pub(crate) mod accounting;
pub(crate) mod charge_limit;
pub(crate) mod disk_space;
pub(crate) mod totals;
pub(crate) mod transactions;

/// The space that a store uses and has promised, and to whom it is charged.
#[derive(Debug)]
pub struct Ledger {
    content: Arc<Content>,
    pub(crate) transactions: transactions::Transactions,
    /// The quotas of groups.
    pools: Mutex<Arc<[charge_limit::Pool]>>,
    pub(crate) totals: totals::Totals,
    /// Whether this process has found or requested the reserve.
    wants_reserve: AtomicBool,
}

impl Ledger {
    pub(crate) fn new(content: Arc<Content>) -> Self {
        Self {
            content,
            transactions: transactions::Transactions::default(),
            pools: Mutex::new(Arc::new([])),
            totals: totals::Totals::default(),
            wants_reserve: AtomicBool::new(false),
        }
    }
}
