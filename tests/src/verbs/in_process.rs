//! The verbs called as functions on a store in this process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{EditParams, Edited};
use blobd_client::protocol::naming::{Pinned, TrashList, Undeleted};
use blobd_client::protocol::naming::{Removed, Renamed, Tagged};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{
    GcParams, ImportParams, PinParams, RemoveParams, RenameParams, TagParams, UndeleteParams,
};
use blobd_client::protocol::response::{ModelDetails, ModelList};
use blobd_client::protocol::space::DiskUsage;
use blobd_client::protocol::upkeep::GcReport;
use blobd_client::protocol::upkeep::{DoctorReport, EvictionPlan};
use blobd_server::ops::{self, DoctorContext, OpError, Requester};
use blobd_store::{FileReader, Store, StoreError, StoreOptions};

use super::{Verbs, reference};
use crate::file_source::import_file;
use crate::wait::eventually_some;

/// An open store without a daemon.
#[derive(Debug)]
pub struct InProcess {
    /// The store.
    pub store: Arc<Store>,
    root: PathBuf,
}

impl InProcess {
    /// Opens or creates the store in `root`. A store that was just closed may stay locked for a moment: a
    /// child that another test has forked has a copy of every descriptor until it calls exec.
    ///
    /// # Panics
    /// When it cannot be opened.
    #[must_use]
    pub fn open(root: &Path) -> Self {
        Self::open_with(root, &StoreOptions::default()).unwrap()
    }

    /// The same with options.
    ///
    /// # Errors
    /// Those of [`Store::open_with`].
    pub fn open_with(root: &Path, options: &StoreOptions) -> Result<Self, StoreError> {
        let opened = || match Store::open_with(root, options.clone()) {
            Err(StoreError::Locked { .. }) => None,
            opened => Some(opened),
        };
        let store = eventually_some("the store is unlocked", opened)?;
        Ok(Self::of(Arc::new(store), root))
    }

    /// A store in `root` that is already open.
    #[must_use]
    pub fn of(store: Arc<Store>, root: &Path) -> Self {
        Self { store, root: root.to_path_buf() }
    }
}

impl Verbs for InProcess {
    fn root(&self) -> &Path {
        &self.root
    }

    fn import_with(&self, file: &Path, name: Option<&str>, force: bool) -> Result<Imported, ErrorBody> {
        let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let params = ImportParams { name: name.map(reference), force, ..ImportParams::new(file_name) };
        let file = File::open(file).map_err(|error| ErrorBody::new(ErrorCode::NotFound, error))?;
        let never = AtomicBool::new(false);
        import_file(&self.store, &params, &file, &never, &mut |_, _| ()).map_err(|error| error.body())
    }

    fn export(&self, name: &str) -> Result<Vec<u8>, ErrorBody> {
        let model =
            self.store.names().model(&reference(name)).map_err(|error| OpError::from(error).body())?;
        let contents = model.contents().map_err(|error| OpError::from(error).body())?;
        let mut files = contents.iter().map(|named| &named.file);
        let file = files.find(|file| file.descriptor.media_type.component() == "model");
        let mut reader = FileReader::new(self.store.content(), file.expect("an imported model has its file"));
        reader.read_range(0..u64::MAX).map_err(|error| OpError::from(error).body())
    }

    fn list(&self) -> Result<ModelList, ErrorBody> {
        ops::list(&self.store).map_err(|error| error.body())
    }

    fn show(&self, name: &str) -> Result<ModelDetails, ErrorBody> {
        ops::show(&self.store, &reference(name)).map_err(|error| error.body())
    }

    fn usage(&self) -> Result<DiskUsage, ErrorBody> {
        ops::usage(&self.store, &|_, _| None).map_err(|error| error.body())
    }

    fn tag_with(&self, source: &str, target: &str, force: bool) -> Result<Tagged, ErrorBody> {
        let params = TagParams { source: reference(source), target: reference(target), force, origin: None };
        ops::tag(&self.store, Requester::own(), &ops::CallerPolicy::default(), &params)
            .map_err(|error| error.body())
    }

    fn rename(&self, source: &str, target: &str, force: bool) -> Result<Renamed, ErrorBody> {
        let params = RenameParams { source: reference(source), target: reference(target), force };
        ops::rename(&self.store, Requester::own(), &ops::CallerPolicy::default(), &params)
            .map_err(|error| error.body())
    }

    fn edit(&self, params: &EditParams) -> Result<Edited, ErrorBody> {
        ops::edit(&self.store, Requester::own(), &ops::CallerPolicy::default(), params, &mut |_, _| true)
            .map_err(|error| error.body())
    }

    fn remove(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        let params = RemoveParams { references, ..RemoveParams::default() };
        ops::remove(&self.store, &|_, _| None, Requester::own(), &params).map_err(|error| error.body())
    }

    fn plan_removal(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        let params = RemoveParams { references, dry_run: true, ..RemoveParams::default() };
        ops::remove(&self.store, &|_, _| None, Requester::own(), &params).map_err(|error| error.body())
    }

    fn move_to_trash(&self, names: &[&str], keep_seconds: u64) -> Result<Removed, ErrorBody> {
        let references = names.iter().map(|name| reference(name)).collect();
        let params = RemoveParams { references, keep_seconds: Some(keep_seconds), ..RemoveParams::default() };
        ops::remove(&self.store, &|_, _| None, Requester::own(), &params).map_err(|error| error.body())
    }

    fn undelete(&self, name: &str) -> Result<Undeleted, ErrorBody> {
        let params = UndeleteParams { reference: reference(name), name: None, force: false };
        ops::undelete(&self.store, Requester::own(), &ops::CallerPolicy::default(), &params)
            .map_err(|error| error.body())
    }

    fn trash(&self) -> Result<TrashList, ErrorBody> {
        ops::trash(&self.store).map_err(|error| error.body())
    }

    fn pin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        let params = PinParams { reference: reference(name), pinned: true };
        ops::pin(&self.store, Requester::own(), &params).map_err(|error| error.body())
    }

    fn unpin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        let params = PinParams { reference: reference(name), pinned: false };
        ops::pin(&self.store, Requester::own(), &params).map_err(|error| error.body())
    }

    fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ErrorBody> {
        ops::eviction_plan(&self.store, &|_, _| None, bytes).map_err(|error| error.body())
    }

    fn doctor(&self) -> Result<DoctorReport, ErrorBody> {
        let surroundings =
            DoctorContext { is_single_user: true, has_met_owner: false, ..DoctorContext::default() };
        ops::doctor(&self.store, surroundings).map_err(|error| error.body())
    }

    fn gc(&self, dry_run: bool) -> Result<GcReport, ErrorBody> {
        ops::gc(&self.store, GcParams { dry_run, ..GcParams::default() }).map_err(|error| error.body())
    }
}
