//! Removes as root what the witness and the attackers have imported: otherwise the store would grow, and `ls`
//! would become slower. It also is the third side of the attack on locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blobd_client::Client;
use blobd_client::protocol::request::RemoveParams;

use crate::Outcome;
use crate::attacks::REMOVABLE;
use crate::witness::IMPORTED;

const EVERY: Duration = Duration::from_millis(500);

/// Removes models until it is dropped.
pub(crate) struct Janitor {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Janitor {
    pub(crate) fn start(client: Client) -> Self {
        let stopping = Arc::<AtomicBool>::default();
        let ended = Arc::clone(&stopping);
        let work = move || {
            while !ended.load(Ordering::Relaxed) {
                // What fails is tried again the next time.
                let _ = remove(&client);
                thread::sleep(EVERY);
            }
        };
        Self { stopping, thread: Some(thread::spawn(work)) }
    }
}

/// Removes what may be removed, all at once: each removal looks at everything that is stored.
///
/// # Errors
/// When the models cannot be listed, or one of them is gone meanwhile.
pub(crate) fn remove(client: &Client) -> Outcome<()> {
    let list = client.models()?;
    let names = list.models.iter().map(|model| model.name.as_str());
    let removable = |name: &&str| [IMPORTED, REMOVABLE].iter().any(|start| name.starts_with(start));
    let references = names.filter(removable).map(str::parse).collect::<Result<Vec<_>, _>>()?;
    if !references.is_empty() {
        client.remove(&RemoveParams { references, keep_seconds: None })?;
    }
    Ok(())
}

impl Drop for Janitor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
