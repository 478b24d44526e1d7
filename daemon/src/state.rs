//! What the daemon is made of: the store and what it remembers beside it.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::ops::{Condemned, OpError};
use crate::registry::{RegistryClient, RegistryError, RegistryPolicy};
use crate::session::Sessions;
use crate::store::Store;

/// A daemon without its socket. Embedded in a command or listening, it is the same.
#[derive(Debug)]
pub struct Daemon {
    /// The store.
    pub store: Arc<Store>,
    /// How models are fetched.
    pub registry: RegistryClient,
    /// Who has what open.
    pub sessions: Sessions,
    /// What goes when a session ends.
    pub condemned: Condemned,
    /// Room for imports and pulls. The others wait, so that buffers and threads stay bounded and
    /// opening a model never waits behind them.
    pub intakes: Arc<Semaphore>,
    /// Room for verifications, each of which reads as fast as the disk goes: one at a time.
    pub verifications: Arc<Semaphore>,
}

/// How many imports and pulls run at once. Each takes some 30 MiB and three threads, and two or
/// three keep disk and processors busy.
const MAX_INTAKES: usize = 4;

impl Daemon {
    /// Joins the parts. Reads certificate files, so it blocks for some milliseconds.
    ///
    /// # Errors
    /// [`RegistryError`] when the policy names what is unusable.
    pub fn new(store: Store, policy: &RegistryPolicy) -> Result<Self, RegistryError> {
        Ok(Self {
            store: Arc::new(store),
            registry: RegistryClient::new(policy)?,
            sessions: Sessions::default(),
            condemned: Condemned::default(),
            intakes: Arc::new(Semaphore::new(MAX_INTAKES)),
            verifications: Arc::new(Semaphore::new(1)),
        })
    }

    /// Whether an import, a pull or a verification runs.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.intakes.available_permits() < MAX_INTAKES || self.verifications.available_permits() == 0
    }

    /// Runs work that blocks on the disk where that is allowed.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let daemon = Arc::clone(self);
        let done = spawn_blocking(move || work(&daemon)).await;
        done.unwrap_or_else(|panic| Err(OpError::Internal(panic.to_string())))
    }
}
