//! How many connections there may be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Connections of all users together. Each costs a few kilobytes and a descriptor.
const MAX_CONNECTIONS: usize = 8192;
/// Connections of one user, so that none can keep the others out.
const MAX_CONNECTIONS_PER_UID: usize = 1024;
/// Counts connections by user.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connections(Arc<Mutex<BTreeMap<u32, usize>>>);

impl Connections {
    /// Counts one more, unless the user or all users together have too many.
    pub(crate) fn admit(&self, uid: u32) -> Option<Permit> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = counts.values().sum();
        let own = counts.entry(uid).or_default();
        if all >= MAX_CONNECTIONS || *own >= MAX_CONNECTIONS_PER_UID {
            return None;
        }
        *own += 1;
        Some(Permit { connections: self.clone(), uid })
    }
}

/// One counted connection.
#[derive(Debug)]
pub(crate) struct Permit {
    connections: Connections,
    uid: u32,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = self.connections.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.uid) {
            *count = count.saturating_sub(1);
        }
        counts.retain(|_, count| *count > 0);
    }
}
