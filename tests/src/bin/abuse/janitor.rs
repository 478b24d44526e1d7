//! Root, who removes what the witness and the attackers have imported: else the store would grow, and `ls`
//! with it. Removing beside attacks on locks is a part of them.

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
                // A daemon that does not answer is asked again.
                let _ = remove(&client);
                thread::sleep(EVERY);
            }
        };
        Self { stopping, thread: Some(thread::spawn(work)) }
    }
}

/// Removes what may be removed; names that are gone already are no error.
///
/// # Errors
/// When the models cannot be listed.
pub(crate) fn remove(client: &Client) -> Outcome<()> {
    let list = client.models()?;
    let names = list.models.iter().map(|model| model.name.as_str());
    for name in names.filter(|name| [IMPORTED, REMOVABLE].iter().any(|start| name.starts_with(start))) {
        let references = vec![name.parse()?];
        // Names that are busy are there the next time.
        let _ = client.remove(&RemoveParams { references, keep_seconds: None });
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
