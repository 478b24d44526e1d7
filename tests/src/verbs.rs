//! The verbs of blobd behind one trait, so that one suite of tests runs on the store in this
//! process, through the socket, and through commands that open the store themselves.

use std::path::Path;

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::naming::{EditParams, Edited};
use blobd_client::protocol::naming::{Pinned, TrashList, Undeleted};
use blobd_client::protocol::naming::{Removed, Renamed, Tagged};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::response::{ModelDetails, ModelList};
use blobd_client::protocol::space::DiskUsage;
use blobd_client::protocol::upkeep::GcReport;
use blobd_client::protocol::upkeep::{DoctorReport, EvictionPlan};

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

    /// Imports a file. The model's name is made from the file's if none is given.
    ///
    /// # Errors
    /// The error that a client gets.
    fn import(&self, file: &Path, name: Option<&str>) -> Result<Imported, ErrorBody> {
        self.import_with(file, name, false)
    }

    /// Imports a file; with `force`, in place of another model that has the name.
    ///
    /// # Errors
    /// The error that a client gets.
    fn import_with(&self, file: &Path, name: Option<&str>, force: bool) -> Result<Imported, ErrorBody>;

    /// The model's file.
    ///
    /// # Errors
    /// The error that a client gets.
    fn export(&self, name: &str) -> Result<Vec<u8>, ErrorBody>;

    /// All models.
    ///
    /// # Errors
    /// The error that a client gets.
    fn list(&self) -> Result<ModelList, ErrorBody>;

    /// The details of a model.
    ///
    /// # Errors
    /// The error that a client gets.
    fn show(&self, name: &str) -> Result<ModelDetails, ErrorBody>;

    /// The disk usage.
    ///
    /// # Errors
    /// The error that a client gets.
    fn usage(&self) -> Result<DiskUsage, ErrorBody>;

    /// Gives a model another name.
    ///
    /// # Errors
    /// The error that a client gets.
    fn tag(&self, source: &str, target: &str) -> Result<Tagged, ErrorBody> {
        self.tag_with(source, target, false)
    }

    /// Gives a model another name; with `force`, in place of another model that has it.
    ///
    /// # Errors
    /// The error that a client gets.
    fn tag_with(&self, source: &str, target: &str, force: bool) -> Result<Tagged, ErrorBody>;

    /// Gives a model another name in place of its own.
    ///
    /// # Errors
    /// The error that a client gets.
    fn rename(&self, source: &str, target: &str, force: bool) -> Result<Renamed, ErrorBody>;

    /// Makes a model with other metadata.
    ///
    /// # Errors
    /// The error that a client gets.
    fn edit(&self, params: &EditParams) -> Result<Edited, ErrorBody>;

    /// Removes names.
    ///
    /// # Errors
    /// The error that a client gets.
    fn remove(&self, names: &[&str]) -> Result<Removed, ErrorBody>;

    /// Reports what a removal of names would do.
    ///
    /// # Errors
    /// The error that a client gets.
    fn plan_removal(&self, names: &[&str]) -> Result<Removed, ErrorBody>;

    /// Moves models to the trash for this many seconds.
    ///
    /// # Errors
    /// The error that a client gets.
    fn move_to_trash(&self, names: &[&str], keep_seconds: u64) -> Result<Removed, ErrorBody>;

    /// Takes a model out of the trash.
    ///
    /// # Errors
    /// The error that a client gets.
    fn undelete(&self, name: &str) -> Result<Undeleted, ErrorBody>;

    /// What is in the trash.
    ///
    /// # Errors
    /// The error that a client gets.
    fn trash(&self) -> Result<TrashList, ErrorBody>;

    /// Protects a model from eviction and removal.
    ///
    /// # Errors
    /// The error that a client gets.
    fn pin(&self, name: &str) -> Result<Pinned, ErrorBody>;

    /// Ends this protection.
    ///
    /// # Errors
    /// The error that a client gets.
    fn unpin(&self, name: &str) -> Result<Pinned, ErrorBody>;

    /// The models to evict in order to free this many bytes, or to reach the low watermark.
    ///
    /// # Errors
    /// The error that a client gets.
    fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ErrorBody>;

    /// Runs the checks of `blobd doctor`.
    ///
    /// # Errors
    /// The error that a client gets.
    fn doctor(&self) -> Result<DoctorReport, ErrorBody>;

    /// Collects, or reports what a collection would delete.
    ///
    /// # Errors
    /// The error that a client gets.
    fn gc(&self, dry_run: bool) -> Result<GcReport, ErrorBody>;
}

/// Parses a name, which must be well-formed.
fn reference(name: &str) -> blobd_store_format::reference::Reference {
    name.parse().unwrap_or_else(|error| panic!("{name:?}: {error}"))
}
