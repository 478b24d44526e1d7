//! Removes, as root, the models that the witness and the attackers have imported: otherwise the store would
//! grow, and `ls` would become slower. In the attack `contention` these removals compete for the store's
//! locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blobd_client::Client;
use blobd_client::protocol::request::RemoveParams;

use crate::Outcome;
use crate::attacks::REMOVABLE;
use crate::witness::IMPORTED;

const PERIOD: Duration = Duration::from_millis(500);

/// Removes models until it is dropped.
pub(crate) struct PeriodicCleanup {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PeriodicCleanup {
    pub(crate) fn start(client: Client) -> Self {
        let stopping = Arc::<AtomicBool>::default();
        let ended = Arc::clone(&stopping);
        let work = move || {
            while !ended.load(Ordering::Relaxed) {
                // A removal that fails is repeated in the next period.
                let _ = remove(&client);
                thread::sleep(PERIOD);
            }
        };
        Self { stopping, thread: Some(thread::spawn(work)) }
    }
}

/// Removes all these models in one request, since each removal reads the whole store.
///
/// # Errors
/// When the models cannot be listed, or another client has removed one of them.
pub(crate) fn remove(client: &Client) -> Outcome<()> {
    let list = client.models()?;
    let names = list.models.iter().map(|model| model.name.as_str());
    let removable = |name: &&str| [IMPORTED, REMOVABLE].iter().any(|prefix| name.starts_with(prefix));
    let references = names.filter(removable).map(str::parse).collect::<Result<Vec<_>, _>>()?;
    if !references.is_empty() {
        client.remove(&RemoveParams { references, ..RemoveParams::default() })?;
    }
    Ok(())
}

impl Drop for PeriodicCleanup {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
