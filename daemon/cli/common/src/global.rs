//! The context of every command: its options, and the parts of blobd that are not a client's work.

use std::path::PathBuf;
use std::{env, io};

use blobd_client::paths::GivenPaths;
use clap::{ArgAction, Args};

use crate::local_server::LocalServer;
use crate::{ErrorBody, ErrorCode};

/// Options of every command, as they are typed.
#[derive(Clone, Debug, Default, Args)]
pub struct GlobalOptions {
    /// The store's directory, which the command opens itself if no daemon has it [env: BLOBD_ROOT]
    #[arg(long, global = true, help_heading = "Global options", value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// The daemon's socket [env: BLOBD_SOCKET]
    #[arg(long, global = true, help_heading = "Global options", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The configuration file [env: BLOBD_CONFIG]
    #[arg(long, global = true, help_heading = "Global options", value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// Print one JSON document instead of text; `pull` and `log` print one object per line
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    /// Print only results and errors: no progress, no reports of what was done, no hints
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub quiet: bool,
    /// Print more detail; given twice, also a log of the work of this process on standard error
    #[arg(short, long, action = ArgAction::Count, global = true, help_heading = "Global options")]
    pub verbose: u8,
}

impl GlobalOptions {
    /// Takes missing options from the environment; an empty variable counts as unset. All paths become absolute:
    /// they are compared, printed, and written into the lock file for other processes.
    pub fn or_environment(&self, server: LocalServer) -> Result<Global, ErrorBody> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let (None, Some(root)) = (&self.root, variable("BLOBD_ROOT").filter(|root| root.is_relative())) {
            // A variable lasts longer than a command, and a relative one names another store in each directory.
            let message = format!("BLOBD_ROOT: expected an absolute path, found {root:?}");
            return Err(usage(message).with_hint("--root takes relative paths too"));
        }
        let path = |option: &str, given: &Option<PathBuf>, name| {
            let given = given.clone().map(|path| (option, path));
            let Some((source, path)) = given.or_else(|| Some((name, variable(name)?))) else {
                return Ok(None);
            };
            let absolute = std::path::absolute(&path);
            absolute.map(Some).map_err(|error| usage(format!("{source}: {path:?}: {error}")))
        };
        let paths = GivenPaths {
            root: path("--root", &self.root, "BLOBD_ROOT")?,
            root_is_from_environment: self.root.is_none(),
            socket: path("--socket", &self.socket, "BLOBD_SOCKET")?,
            socket_is_from_environment: self.socket.is_none(),
            config: path("--config", &self.config, "BLOBD_CONFIG")?,
        };
        let Self { json, quiet, verbose, .. } = *self;
        Ok(Global { paths, json, quiet, verbose: verbose > 0, server })
    }
}

/// The options of every command, completed from the environment.
#[derive(Clone, Debug)]
pub struct Global {
    /// The paths that were given, all absolute.
    pub paths: GivenPaths,
    /// Whether results are printed as JSON.
    pub json: bool,
    /// Whether only results and errors are printed.
    pub quiet: bool,
    /// Whether more detail is printed.
    pub verbose: bool,
    /// The parts of blobd that are not a client's work.
    pub server: LocalServer,
}

impl Global {
    /// Whether progress is not shown.
    pub const fn hides_progress(&self) -> bool {
        self.json || self.quiet
    }

    /// Whether reports of what was done, such as `removed llama3:8b`, are left out. Requested results are not.
    pub const fn hides_reports(&self) -> bool {
        self.json || self.quiet
    }
}

#[cfg(any(test, feature = "testing"))]
impl Default for Global {
    fn default() -> Self {
        let server = LocalServer::default();
        Self { paths: GivenPaths::default(), json: false, quiet: false, verbose: false, server }
    }
}

/// The error of a command that was called in a wrong way.
pub fn usage(message: impl std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidRequest, message)
}

/// A failure of this program or of the system, such as of a thread that cannot be started.
pub fn internal(error: impl std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::Internal, error)
}

/// The error of an operation on a file that the user has named.
pub fn file_error(name: &str, error: &io::Error) -> ErrorBody {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        io::ErrorKind::PermissionDenied => ErrorCode::Denied,
        io::ErrorKind::NotFound => ErrorCode::NotFound,
        _ => ErrorCode::Internal,
    };
    let body = ErrorBody::new(code, format!("{name}: {error}"));
    match error.kind() {
        io::ErrorKind::NotFound => body.with_hint("check the path; the directories in it must exist"),
        io::ErrorKind::PermissionDenied => {
            body.with_hint("use a file that this user may use, or run the command as its owner")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            body.with_hint("free space there, or choose another place")
        }
        _ => body,
    }
}
