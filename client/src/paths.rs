//! Where the store and the configuration file are.

use std::env;
use std::path::{Path, PathBuf};

use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::sockets::SYSTEM_CONFIGURATION;

/// The paths that options and the environment name for a command or a daemon. All are absolute.
#[derive(Clone, Debug, Default)]
pub struct GivenPaths {
    /// The store's directory.
    pub root: Option<PathBuf>,
    /// Whether `BLOBD_ROOT` names it, and not `--root`.
    pub root_is_from_environment: bool,
    /// The daemon's socket.
    pub socket: Option<PathBuf>,
    /// Whether `BLOBD_SOCKET` names it, and not `--socket`.
    pub socket_is_from_environment: bool,
    /// The configuration file.
    pub config: Option<PathBuf>,
}

/// The system's store.
pub const SYSTEM_ROOT: &str = "/var/lib/blobd";

/// The store of this user: the system's for root.
pub fn default_root() -> Result<PathBuf, ErrorBody> {
    if is_root() {
        return Ok(SYSTEM_ROOT.into());
    }
    let data = base_directory("XDG_DATA_HOME", ".local/share");
    data.map(|data| data.join("blobd")).ok_or_else(|| no_home("the store", "give --root"))
}

/// The configuration file of this user; `None` without a home directory.
pub fn default_config() -> Option<PathBuf> {
    if is_root() {
        return Some(SYSTEM_CONFIGURATION.into());
    }
    base_directory("XDG_CONFIG_HOME", ".config").map(|directory| directory.join("blobd/config.toml"))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn base_directory(variable: &str, in_home: &str) -> Option<PathBuf> {
    let directory = env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    // A relative path would mean another store in each directory.
    let home = || env::var_os("HOME").map(PathBuf::from).filter(|home| Path::is_absolute(home));
    directory.or_else(|| home().map(|home| home.join(in_home)))
}

/// The error about a path that needs the home directory, which is not known.
pub fn no_home(what: &str, option: &str) -> ErrorBody {
    let home = env::var_os("HOME").unwrap_or_default();
    let message = format!("HOME: expected an absolute path, found {home:?}; it is needed to find {what}");
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(format!("set HOME, or {option}"))
}
