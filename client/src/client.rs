//! The client: one method per verb.
//!
//! Every request uses its own connection; the first uses the one made by [`Client::connect`]. No
//! connection is kept between requests, so a [`Client`] can be shared by threads and survives a
//! restart of the daemon.

mod stop;
mod transport;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blobd_store_format::manifest::{Manifest, ManifestError};
use blobd_store_format::reference::Reference;

use crate::error::{ClientError, ProtocolError};
use crate::http::{Request as HttpRequest, Response};
use crate::model::OpenModel;
use crate::open;
use crate::protocol::MAX_WANTED_FILES;
use crate::protocol::audit::{AuditRecord, LogEnd, LogParams};
use crate::protocol::connection::{Connection, ConnectionError};
use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::event::{Event, ImportProgress};
use crate::protocol::fit::{FitParams, FitReport};
use crate::protocol::frame::Frame;
use crate::protocol::params::{EvictionParams, NoParams, SessionParams, UsageParams};
use crate::protocol::pull::Imported;
use crate::protocol::request::{GcParams, ImportParams, OpenParams, OpenPurpose};
use crate::protocol::request_id::RequestIds;
use crate::protocol::response::SessionList;
use crate::protocol::route::{Encoded, Received, Route, markers, routes};
use crate::protocol::space::DiskUsage;
use crate::protocol::upkeep::EvictionPlan;
use crate::protocol::upkeep::GcReport;
use crate::protocol::{access, event, naming, pull, push, request, response, signatures, space, upkeep};
use crate::sockets;
pub use stop::Stop;

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
    /// [`ErrorBody`] is returned as [`ClientError::Daemon`].
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
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// The memory that a model in the store needs, and how much of it fits into the memory in the parameters.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name, and `invalid_input` when it has
    /// no GGUF file.
    pub fn fit(&self, reference: &Reference, params: &FitParams) -> Result<FitReport, ClientError> {
        self.document::<markers::Fit, _>(&(reference.clone(), params.clone()))
    }

    /// A model's manifest with the original bytes, whose digest is the model's ID.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, ClientError> {
        let raw = self.repeated::<markers::Manifest, _>(reference, Response::bytes)?;
        let malformed = |error: ManifestError| ProtocolError::Json { reason: error.to_string() };
        Ok(Manifest::parse(raw).map_err(malformed)?)
    }

    /// Disk usage of the store and of each model.
    pub fn disk_usage(&self) -> Result<DiskUsage, ClientError> {
        self.document::<markers::Usage, _>(&UsageParams { detail: None })
    }

    /// The same with details: which models share bytes, with at most `limit` names in each list, and what is in
    /// quarantine.
    pub fn disk_usage_in_detail(&self, limit: u32) -> Result<DiskUsage, ClientError> {
        self.document::<markers::Usage, _>(&UsageParams { detail: Some(limit.into()) })
    }

    /// Lists the sessions: which processes have which models open.
    pub fn sessions(&self) -> Result<SessionList, ClientError> {
        self.document::<markers::Sessions, _>(&SessionParams { residency: false })
    }

    /// The same, and how much of each model is in memory.
    pub fn sessions_with_residency(&self) -> Result<SessionList, ClientError> {
        self.document::<markers::Sessions, _>(&SessionParams { residency: true })
    }

    /// The models that would be evicted to free `bytes`, or to reach the low watermark.
    pub fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ClientError> {
        self.document::<markers::Eviction, _>(&EvictionParams { bytes })
    }

    /// Deletes unneeded data, or reports what would be deleted.
    pub fn gc(&self, params: &GcParams) -> Result<GcReport, ClientError> {
        let is_plan = params.dry_run && !params.quarantine;
        if is_plan {
            self.document::<markers::GcPlan, _>(&NoParams {})
        } else {
            self.document::<markers::Gc, _>(params)
        }
    }

    /// The document of a request, as the daemon has sent it. The parameters may come from an untrusted source.
    pub fn forward(&self, route: Route, received: &Received<'_>) -> Result<Vec<u8>, ClientError> {
        let Encoded { target, body } = route.forwarded(received)?;
        self.repeated_request(route, || Ok(HttpRequest::new(route, &target, body.clone())), Response::bytes)
    }

    /// Reads the audit log: `on_record` is called for each record, the oldest first. With [`LogParams::follow`], returns
    /// only when the daemon ends. A user that does not administer the store gets its own records.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when the audit log is off.
    pub fn log(
        &self,
        params: &LogParams,
        mut on_record: impl FnMut(AuditRecord),
    ) -> Result<LogEnd, ClientError> {
        self.events::<markers::Log, _, _>(params, |event| {
            if let Event::Progress(record) = event {
                on_record(*record);
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
        mut on_progress: impl FnMut(u64, u64),
    ) -> Result<Imported, ClientError> {
        self.import_files(params, &[file.as_fd()], |progress| on_progress(progress.completed, progress.total))
    }

    /// As [`Self::import`], for several files: the model's file, then its sidecars in the order of [`ImportParams::sidecars`].
    pub fn import_files(
        &self,
        params: &ImportParams,
        files: &[BorrowedFd<'_>],
        mut on_progress: impl FnMut(ImportProgress),
    ) -> Result<Imported, ClientError> {
        let exchange = |response: Response| {
            let mut connection = response.into_connection()?;
            send_files(&mut connection, 0, files)?;
            let no_more = |_number| Err(ErrorBody::new(ErrorCode::Internal, "import: no file was listed"));
            receive_imported(&mut connection, 0, no_more, &mut on_progress)
        };
        self.repeated::<markers::Import, _>(params, exchange)
    }

    /// Imports a model of several files, which [`ImportParams::files`] lists. `open` opens the file with this number in
    /// the list when the daemon wants it; few are open at once. Each is called once, unless the server ends and the
    /// request is repeated.
    ///
    /// # Errors
    /// The error of `open`, which ends the import; otherwise as [`Self::import`].
    pub fn import_listed(
        &self,
        params: &ImportParams,
        mut open: impl FnMut(usize) -> Result<OwnedFd, ErrorBody>,
        mut on_progress: impl FnMut(ImportProgress),
    ) -> Result<Imported, ClientError> {
        let exchange = |response: Response| {
            let mut connection = response.into_connection()?;
            receive_imported(&mut connection, params.files.len(), &mut open, &mut on_progress)
        };
        self.repeated::<markers::Import, _>(params, exchange)
    }

    /// Opens a model with all its tensors. It is in use until the [`OpenModel`] is dropped.
    ///
    /// # Errors
    /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
    pub fn open(&self, reference: &Reference) -> Result<OpenModel, ClientError> {
        self.open_with(&OpenParams::new(reference.clone()))
    }

    /// Opens a selection of a model's tensors and files.
    pub fn open_with(&self, params: &OpenParams) -> Result<OpenModel, ClientError> {
        let receive = |response: Response| open::receive(response.into_connection()?);
        let open = |params: &OpenParams| self.repeated::<markers::Open, _>(params, receive);
        match open(params) {
            // The daemon is older than this client, as after an upgrade until it is restarted.
            Err(error) if error.says_unknown_field("purpose") => {
                open(&OpenParams { purpose: OpenPurpose::Open, ..params.clone() })
            }
            opened => opened,
        }
    }
}

fn send_files(connection: &mut Connection, first: u32, files: &[impl AsFd]) -> Result<(), ConnectionError> {
    let count = u32::try_from(files.len()).unwrap_or(u32::MAX);
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    match connection.send(&Frame::Fds { first, count }, &files) {
        // The daemon may close early after an error, which can still be received.
        Err(ConnectionError::Closed { .. }) => Ok(()),
        sent => sent,
    }
}

/// Waits for the result of an import of `listed` files, and sends the files that the daemon wants, in order.
fn receive_imported(
    connection: &mut Connection,
    listed: usize,
    mut open: impl FnMut(usize) -> Result<OwnedFd, ErrorBody>,
    on_progress: &mut impl FnMut(ImportProgress),
) -> Result<Imported, ClientError> {
    let mut sent = 0;
    loop {
        match connection.receive()? {
            Frame::Progress(progress) => on_progress(progress),
            Frame::Want { first, count } => {
                let wanted = wanted_files(first, count, sent..listed)?;
                sent = wanted.end;
                let files = wanted.map(&mut open).collect::<Result<Vec<_>, _>>()?;
                send_files(connection, first, &files)?;
            }
            Frame::Imported(imported) => return Ok(imported),
            Frame::Error(error) => return Err(error.into()),
            other => {
                let (found, expected) = (other.kind(), "want, progress, imported or error");
                return Err(ProtocolError::UnexpectedFrame { found, expected }.into());
            }
        }
    }
}

/// Checks which files the daemon wants: the first few of those `left`, by number.
fn wanted_files(first: u32, count: u32, left: Range<usize>) -> Result<Range<usize>, ProtocolError> {
    let expected = left.len().min(MAX_WANTED_FILES);
    let is_next = usize::try_from(first) == Ok(left.start);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if is_next && (1..=expected).contains(&count) {
        return Ok(left.start..left.start.saturating_add(count));
    }
    let (found, expected) = (count as u64, expected as u64);
    Err(ProtocolError::Count { what: "wanted files", found, expected })
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// The methods of the requests whose parameters and answer have an ordinary form.
macro_rules! client_methods {
    (@row [$($doc:meta)*] $name:ident ($($params:tt)*) $answer:ident($($type:tt)*)) => {};
    (@row [$($doc:meta)*] $name:ident fn $call:ident(NoParams) Document($response:ty)) => {
        $(#[$doc])*
        pub fn $call(&self) -> Result<$response, ClientError> {
            self.document::<markers::$name, _>(&NoParams {})
        }
    };
    (@row [$($doc:meta)*] $name:ident fn $call:ident(Reference) Document($response:ty)) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// [`ClientError::Daemon`] with `not_found` when there is no model with this name.
        pub fn $call(&self, reference: &Reference) -> Result<$response, ClientError> {
            self.document::<markers::$name, _>(reference)
        }
    };
    (@row [$($doc:meta)*] $name:ident fn $call:ident($params:ty) Document($response:ty)) => {
        $(#[$doc])*
        pub fn $call(&self, params: &$params) -> Result<$response, ClientError> {
            self.document::<markers::$name, _>(params)
        }
    };
    (@row [$($doc:meta)*] $name:ident fn $call:ident($params:ty) Events($progress:ty, $done:ty)) => {
        $(#[$doc])*
        /// `on_event` is called for every line of the response, including the last, which is also returned.
        pub fn $call(
            &self,
            params: &$params,
            on_event: impl FnMut(Event<$progress, $done>),
        ) -> Result<$done, ClientError> {
            self.events::<markers::$name, _, _>(params, on_event)
        }
    };
    ($(
        $(#[$doc:meta])*
        $name:ident: $method:ident $path:tt, $verb:literal, $right:ident, [$($flag:ident),*],
            $(fn $call:ident)? ($($params:tt)*) -> $answer:ident($($type:tt)*);
    )*) => {
        impl Client {
            $(client_methods! { @row [$($doc)*] $name $(fn $call)? ($($params)*) $answer($($type)*) })*
        }
    };
}

routes!(client_methods);
