//! The verbs of blobd behind one trait, so that one suite of tests runs on the store in this
//! process, through the socket, and through commands that open the store themselves.

use std::path::Path;

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::response::{
    DiskUsage, GcReport, Imported, ModelDetails, ModelList, Removed, Tagged,
};
use blobd_client::protocol::upkeep::{DoctorReport, EvictionPlan, Pinned, TrashList, Undeleted};

mod commands;
mod in_process;
mod socket;

pub use commands::Commands;
pub use in_process::InProcess;
pub use socket::ThroughSocket;

/// One method per verb. Names are texts as the user writes them.
pub trait Verbs {
    /// The store's directory.
    fn root(&self) -> &Path;

    /// Takes in a file; its name makes the model's if none is given.
    ///
    /// # Errors
    /// What a client is told.
    fn import(&self, file: &Path, name: Option<&str>) -> Result<Imported, ErrorBody>;

    /// The model's file.
    ///
    /// # Errors
    /// What a client is told.
    fn export(&self, name: &str) -> Result<Vec<u8>, ErrorBody>;

    /// All models.
    ///
    /// # Errors
    /// What a client is told.
    fn list(&self) -> Result<ModelList, ErrorBody>;

    /// One model in depth.
    ///
    /// # Errors
    /// What a client is told.
    fn show(&self, name: &str) -> Result<ModelDetails, ErrorBody>;

    /// Where the bytes go.
    ///
    /// # Errors
    /// What a client is told.
    fn usage(&self) -> Result<DiskUsage, ErrorBody>;

    /// A further name.
    ///
    /// # Errors
    /// What a client is told.
    fn tag(&self, source: &str, target: &str) -> Result<Tagged, ErrorBody>;

    /// Drops names.
    ///
    /// # Errors
    /// What a client is told.
    fn remove(&self, names: &[&str]) -> Result<Removed, ErrorBody>;

    /// Puts models into the trash for so many seconds.
    ///
    /// # Errors
    /// What a client is told.
    fn put_aside(&self, names: &[&str], keep_seconds: u64) -> Result<Removed, ErrorBody>;

    /// Takes a model out of the trash.
    ///
    /// # Errors
    /// What a client is told.
    fn undelete(&self, name: &str) -> Result<Undeleted, ErrorBody>;

    /// What is in the trash.
    ///
    /// # Errors
    /// What a client is told.
    fn trash(&self) -> Result<TrashList, ErrorBody>;

    /// Has eviction and removal leave a model alone.
    ///
    /// # Errors
    /// What a client is told.
    fn pin(&self, name: &str) -> Result<Pinned, ErrorBody>;

    /// Lets a pinned model go.
    ///
    /// # Errors
    /// What a client is told.
    fn unpin(&self, name: &str) -> Result<Pinned, ErrorBody>;

    /// What would be evicted to free so many bytes, or to come down to the low watermark.
    ///
    /// # Errors
    /// What a client is told.
    fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ErrorBody>;

    /// What is wrong with the set-up.
    ///
    /// # Errors
    /// What a client is told.
    fn doctor(&self) -> Result<DoctorReport, ErrorBody>;

    /// Collects, or says what would be collected.
    ///
    /// # Errors
    /// What a client is told.
    fn gc(&self, dry_run: bool) -> Result<GcReport, ErrorBody>;
}

/// A name that the test knows to be well-formed.
fn reference(name: &str) -> blobd_store_format::reference::Reference {
    name.parse().unwrap_or_else(|error| panic!("{name:?}: {error}"))
}
