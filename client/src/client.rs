//! The client: one method per verb.
//!
//! Every request uses its own connection; the first uses the one made by [`Client::connect`]. No
//! connection is kept between requests, so a [`Client`] can be shared by threads and survives a
//! restart of the daemon.

mod audit_log;
mod import;
mod transport;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::reference::Reference;

use self::transport::Repeat;
use crate::error::{ClientError, ProtocolError};
use crate::http::Request;
use crate::model::OpenModel;
use crate::open;
use crate::protocol::access::OwnAccess;
use crate::protocol::accounts::UserUsage;
use crate::protocol::configuration::Configuration;
use crate::protocol::edit::{EditEvent, EditParams, Edited};
use crate::protocol::fit::{FitParams, FitReport};
use crate::protocol::heads::ModelHeads;
use crate::protocol::health::Health;
use crate::protocol::history::NameHistory;
use crate::protocol::promote::{PromoteEvent, PromoteParams, Promoted};
use crate::protocol::request::{
    GcParams, ImportParams, LimitParams, OpenParams, OpenPurpose, PinParams, PullParams, ReleaseParams,
    RemoveParams, RenameParams, TagParams, UndeleteParams, VerifyParams,
};
use crate::protocol::request_id::RequestIds;
use crate::protocol::response::{
    DiskUsage, GcReport, Imported, ModelDetails, ModelList, ModelSharing, PullDone, PullEvent, PullPlan,
    Released, Removed, Renamed, Resolved, RunningPulls, SessionList, Tagged, Version,
};
use crate::protocol::space::{DroppedDownloads, RemovePartialsParams, UnfinishedDownloads};
use crate::protocol::upkeep::{
    DoctorReport, EvictionPlan, Pinned, PullLimit, Reindexed, TrashList, Undeleted, Verified, VerifyEvent,
};
use crate::sockets;

type Connector = dyn Fn() -> io::Result<UnixStream> + Send + Sync;

/// Whether the server that was connected to last may have been replaced by another one.
type Replaced = dyn Fn() -> bool + Send + Sync;

/// The environment variable that names the socket.
pub const SOCKET_VARIABLE: &str = "BLOBD_SOCKET";

/// A client of a daemon.
#[derive(Clone)]
pub struct Client {
    connector: Arc<Connector>,
    /// Set if requests are repeated when the server ends.
    replaced: Option<Arc<Replaced>>,
    /// Where the daemon is, for messages.
    socket: String,
    timeout: Option<Duration>,
    /// The connection made by [`Client::connect`], for the first request.
    spare: Arc<Mutex<Option<(Instant, UnixStream)>>>,
    /// The IDs of its requests, which all begin with the same digits.
    ids: Arc<RequestIds>,
}

/// After this, the daemon may have been restarted, so the first request connects again.
const MAX_SPARE_AGE: Duration = Duration::from_millis(100);

impl Client {
    /// A client of the daemon at this socket. Connects once, to check that the daemon runs.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`] when nothing listens there, [`ClientError::Connect`] when
    /// connecting fails for another reason, such as missing permission.
    pub fn connect(socket: impl Into<PathBuf>) -> Result<Self, ClientError> {
        let path = socket.into();
        let socket = path.display().to_string();
        let client = Self { socket, ..Self::with_connector(Arc::new(move || sockets::connect(&path))) };
        *client.spare() = Some((Instant::now(), client.new_stream()?));
        Ok(client)
    }

    /// A client that connects in another way, such as to a server in the same process. An error that wraps an
    /// [`ErrorBody`](crate::protocol::error::ErrorBody) is returned as [`ClientError::Daemon`].
    #[must_use]
    pub fn with_connector(connector: Arc<Connector>) -> Self {
        let socket = "its private socket".to_owned();
        Self { connector, replaced: None, socket, timeout: None, spare: Arc::default(), ids: Arc::default() }
    }

    /// Repeats a request whose server ends before its response is complete, if `replaced` returns true: then the
    /// connector finds another server. Requests whose second execution would have another result, such as
    /// [`remove`](Self::remove), are repeated only if the server has not read them.
    #[must_use]
    pub fn repeating_if(mut self, replaced: Arc<Replaced>) -> Self {
        self.replaced = Some(replaced);
        self
    }

    /// Sets the timeout for each send or receive. The default is none; a pull may be silent for minutes.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Where the daemon is, for messages.
    #[must_use]
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// The daemon's version and the store it serves.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn version(&self) -> Result<Version, ClientError> {
        self.query("/v1/version")
    }

    /// Lists the models.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn models(&self) -> Result<ModelList, ClientError> {
        self.query("/v1/models")
    }

    /// The details of one model: its metadata, its files, and name, type, shape and size of every
    /// tensor. Passes no descriptors and maps nothing.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn model(&self, reference: &Reference) -> Result<ModelDetails, ClientError> {
        self.query(&format!("/v1/models/{}", in_path(reference)))
    }

    /// The headers and short texts of a model in the store. Takes no lease and is no use of the model.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn heads(&self, reference: &Reference) -> Result<ModelHeads, ClientError> {
        self.query(&format!("/v1/heads/{}", in_path(reference)))
    }

    /// The memory that a model in the store needs, and how much of it fits into the memory in the parameters.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name, and `invalid_input` when it has
    /// no GGUF file.
    pub fn fit(&self, reference: &Reference, params: &FitParams) -> Result<FitReport, ClientError> {
        self.query(&format!("/v1/fit/{}?{}", in_path(reference), params.to_query()))
    }

    /// The bytes that a model shares with others.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name, and as
    /// [`disk_usage`](Self::disk_usage).
    pub fn sharing(&self, reference: &Reference) -> Result<ModelSharing, ClientError> {
        self.query(&format!("/v1/sharing/{}", in_path(reference)))
    }

    /// What a name has meant, and who changed that. The name may have been removed.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there never was a model with this name.
    pub fn history(&self, reference: &Reference) -> Result<NameHistory, ClientError> {
        self.query(&format!("/v1/history/{}", in_path(reference)))
    }

    /// A model's manifest with the original bytes, whose digest is the model's ID.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, ClientError> {
        let path = format!("/v1/manifests/{}", in_path(reference));
        let raw = self.repeated(Repeat::Always, || self.send(Request::query(&path))?.bytes())?;
        let malformed = |error: ManifestError| ProtocolError::Json { reason: error.to_string() };
        Ok(Manifest::parse(raw).map_err(malformed)?)
    }

    /// Disk usage of the store and of each model.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn disk_usage(&self) -> Result<DiskUsage, ClientError> {
        self.query("/v1/df")
    }

    /// The same with details: which models share bytes, with at most `limit` names in each list, and what is in
    /// quarantine.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn disk_usage_in_detail(&self, limit: u32) -> Result<DiskUsage, ClientError> {
        self.query(&format!("/v1/df?detail={limit}"))
    }

    /// What is charged to each user, and the quotas. Administrators see all users, others themselves.
    ///
    /// # Errors
    /// As for [`disk_usage`](Self::disk_usage).
    pub fn user_usage(&self) -> Result<UserUsage, ClientError> {
        self.query("/v1/df/users")
    }

    /// Lists unfinished downloads.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn unfinished_downloads(&self) -> Result<UnfinishedDownloads, ClientError> {
        self.query("/v1/partials")
    }

    /// Drops unfinished downloads.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when a target has none, and with `busy` when a pull uses it.
    pub fn remove_unfinished_downloads(
        &self,
        params: &RemovePartialsParams,
    ) -> Result<DroppedDownloads, ClientError> {
        self.post_once("/v1/partials/remove", params)
    }

    /// Lists the sessions: which processes have which models open.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn sessions(&self) -> Result<SessionList, ClientError> {
        self.query("/v1/ps")
    }

    /// The same, and how much of each model is in memory.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn sessions_with_residency(&self) -> Result<SessionList, ClientError> {
        self.query("/v1/ps?residency=true")
    }

    /// Lists the pulls in progress.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn running_pulls(&self) -> Result<RunningPulls, ClientError> {
        self.query("/v1/pulls")
    }

    /// Ends the leases of a process or of a model. Maps stay valid; blobs of models that were removed
    /// meanwhile are freed.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there are none, and with `denied` when all belong to
    /// other users and the caller is not an administrator.
    pub fn release(&self, params: &ReleaseParams) -> Result<Released, ClientError> {
        self.post_once("/v1/release", params)
    }

    /// Lists the models in the trash.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn trash(&self) -> Result<TrashList, ClientError> {
        self.query("/v1/trash")
    }

    /// Restores a model from the trash.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when it is not in the trash.
    pub fn undelete(&self, params: &UndeleteParams) -> Result<Undeleted, ClientError> {
        self.post_once("/v1/undelete", params)
    }

    /// Pins or unpins a model. Eviction and removal do not affect a pinned model.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn pin(&self, params: &PinParams) -> Result<Pinned, ClientError> {
        self.post("/v1/pin", params)
    }

    /// The settings that the daemon uses, and where each comes from.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn configuration(&self) -> Result<Configuration, ClientError> {
        self.query("/v1/config")
    }

    /// The user of this connection as the daemon sees it, and its rights.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn access(&self) -> Result<OwnAccess, ClientError> {
        self.query("/v1/access")
    }

    /// Whether the daemon works.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn health(&self) -> Result<Health, ClientError> {
        self.query("/v1/health")
    }

    /// The rate limit of all pulls together.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn limit(&self) -> Result<PullLimit, ClientError> {
        self.query("/v1/limit")
    }

    /// Sets the rate limit of all pulls together, including running ones, until the daemon stops.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn set_limit(&self, params: &LimitParams) -> Result<PullLimit, ClientError> {
        self.post("/v1/limit", params)
    }

    /// The models that would be evicted to free `bytes`, or to reach the low watermark.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ClientError> {
        let query = bytes.map_or_else(String::new, |bytes| format!("?bytes={bytes}"));
        self.query(&format!("/v1/eviction{query}"))
    }

    /// Checks the setup.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn doctor(&self) -> Result<DoctorReport, ClientError> {
        self.query("/v1/doctor")
    }

    /// Removes names, and the data that only they need.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn remove(&self, params: &RemoveParams) -> Result<Removed, ClientError> {
        self.post_once("/v1/remove", params)
    }

    /// Gives a model another name.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn tag(&self, params: &TagParams) -> Result<Tagged, ClientError> {
        self.post("/v1/tag", params)
    }

    /// Gives a model another name in place of its own.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `busy` when another model has the new name.
    pub fn rename(&self, params: &RenameParams) -> Result<Renamed, ClientError> {
        self.post_once("/v1/rename", params)
    }

    /// Deletes unneeded data, or reports what would be deleted.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn gc(&self, params: &GcParams) -> Result<GcReport, ClientError> {
        let is_plan = params.dry_run && !params.quarantine;
        if is_plan { self.query("/v1/gc") } else { self.post("/v1/gc", params) }
    }

    /// Compares the daemon's index with the disk and repairs it.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn reindex(&self) -> Result<Reindexed, ClientError> {
        self.post("/v1/reindex", &serde_json::json!({}))
    }

    /// Pulls a model from its registry. `on_event` is called for every line of the response, including
    /// the last, which is also returned.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] when the pull fails, before or after it starts.
    pub fn pull(
        &self,
        params: &PullParams,
        mut on_event: impl FnMut(PullEvent),
    ) -> Result<PullDone, ClientError> {
        self.post_for_events("/v1/pull", params, |event: PullEvent| {
            on_event(event.clone());
            match event {
                PullEvent::Progress(_) => None,
                PullEvent::Done(done) => Some(Ok(done)),
                PullEvent::Failed(response) => Some(Err(response.error.into())),
            }
        })
    }

    /// The plan of a pull: the bytes to download and those to reuse. Requests the manifest, headers and samples of
    /// tensors from the registry, and stores nothing.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn plan_pull(&self, params: &PullParams) -> Result<PullPlan, ClientError> {
        self.post("/v1/pull/plan", params)
    }

    /// Finds out which model a source names at its server now. Requests its manifest or its list of files, and
    /// stores nothing. Only the source of `params` is used.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn resolve(&self, params: &PullParams) -> Result<Resolved, ClientError> {
        self.post("/v1/resolve", params)
    }

    /// A model that is not in the store: its files, with their headers and short texts. Requests the manifest,
    /// headers and texts from the registry, and stores nothing. Only the source of `params` is used.
    ///
    /// # Errors
    /// [`ClientError`], as every verb.
    pub fn inspect(&self, params: &PullParams) -> Result<ModelHeads, ClientError> {
        self.post("/v1/inspect", params)
    }

    /// Reads the store's content from the disk, compares it with its digests, and repairs it if requested.
    /// `on_event` is called for every line of the response, including the last, which is also returned.
    /// Damage is reported in the result, not as an error.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] when the verification fails, before or after it starts.
    pub fn verify(
        &self,
        params: &VerifyParams,
        mut on_event: impl FnMut(VerifyEvent),
    ) -> Result<Verified, ClientError> {
        self.post_for_events("/v1/verify", params, |event: VerifyEvent| {
            on_event(event.clone());
            match event {
                VerifyEvent::Progress(_) => None,
                VerifyEvent::Done(verified) => Some(Ok(verified)),
                VerifyEvent::Failed(response) => Some(Err(response.error.into())),
            }
        })
    }

    /// Makes a model with other metadata and the same tensors. `on_event` is called for every line of the
    /// response, including the last, which is also returned.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] when the edit fails, before or after it starts.
    pub fn edit(
        &self,
        params: &EditParams,
        mut on_event: impl FnMut(EditEvent),
    ) -> Result<Edited, ClientError> {
        self.post_for_events("/v1/edit", params, |event: EditEvent| {
            on_event(event.clone());
            match event {
                EditEvent::Progress(_) => None,
                EditEvent::Done(edited) => Some(Ok(edited)),
                EditEvent::Failed(response) => Some(Err(response.error.into())),
            }
        })
    }

    /// Copies what a model uses of lower stores into the writable one.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] when the copy fails, before or after it starts.
    pub fn promote(
        &self,
        params: &PromoteParams,
        mut on_event: impl FnMut(PromoteEvent),
    ) -> Result<Promoted, ClientError> {
        self.post_for_events("/v1/promote", params, |event: PromoteEvent| {
            on_event(event.clone());
            match event {
                PromoteEvent::Progress(_) => None,
                PromoteEvent::Done(promoted) => Some(Ok(promoted)),
                PromoteEvent::Failed(response) => Some(Err(response.error.into())),
            }
        })
    }

    /// Imports a file into the store. The daemon reads it through this descriptor, from offset 0, and
    /// never opens a path of the caller. `on_progress` receives the bytes read and the total.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `invalid_input` when the file is not a model.
    pub fn import(
        &self,
        params: &ImportParams,
        file: impl AsFd,
        on_progress: impl FnMut(u64, u64),
    ) -> Result<Imported, ClientError> {
        self.import_files(params, &[file.as_fd()], on_progress)
    }

    /// As [`Self::import`], for several files: the model's file, then its sidecars in the order of [`ImportParams::sidecars`].
    ///
    /// # Errors
    /// As [`import`](Self::import).
    pub fn import_files(
        &self,
        params: &ImportParams,
        files: &[BorrowedFd<'_>],
        mut on_progress: impl FnMut(u64, u64),
    ) -> Result<Imported, ClientError> {
        self.repeated(Repeat::Always, || self.import_once(params, files, &mut on_progress))
    }

    fn import_once(
        &self,
        params: &ImportParams,
        files: &[BorrowedFd<'_>],
        on_progress: &mut impl FnMut(u64, u64),
    ) -> Result<Imported, ClientError> {
        let mut connection = self.send(Request::upgrade("/v1/import", params)?)?.into_connection()?;
        import::exchange(&mut connection, files, on_progress)
    }

    /// Opens a model with all its tensors. It is in use until the [`OpenModel`] is dropped.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn open(&self, reference: &Reference) -> Result<OpenModel, ClientError> {
        self.open_with(&OpenParams::new(reference.clone()))
    }

    /// Opens a selection of a model's tensors and files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(&self, params: &OpenParams) -> Result<OpenModel, ClientError> {
        let open = |params: &OpenParams| {
            let once = || open::receive(self.send(Request::upgrade("/v1/open", params)?)?.into_connection()?);
            self.repeated(Repeat::Always, once)
        };
        match open(params) {
            // The daemon is older than this client, as after an upgrade until it is restarted.
            Err(error) if error.says_unknown_field("purpose") => {
                open(&OpenParams { purpose: OpenPurpose::Open, ..params.clone() })
            }
            opened => opened,
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// A reference in a URL path: percent-encoded except for slashes and other safe characters.
fn in_path(reference: &Reference) -> String {
    let name = reference.as_requested();
    name.bytes().fold(String::new(), |mut path, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b':' | b'.' | b'-' | b'_' | b'@' => {
                path.push(byte.into());
            }
            _ => path.push_str(&format!("%{byte:02X}")),
        }
        path
    })
}
