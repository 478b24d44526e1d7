//! Default paths of the store and of the configuration file.

use std::env;
use std::path::{Path, PathBuf};

use blobd_client::sockets::SYSTEM_CONFIGURATION;

use super::ConfigError;

/// The system's store.
pub(crate) const SYSTEM_ROOT: &str = "/var/lib/blobd";

/// The store of this user: the system's for root.
pub(crate) fn default_root() -> Result<PathBuf, ConfigError> {
    if is_root() {
        return Ok(SYSTEM_ROOT.into());
    }
    let data = base_directory("XDG_DATA_HOME", ".local/share");
    data.map(|data| data.join("blobd")).ok_or_else(|| ConfigError::no_home("the store", "give --root"))
}

/// The configuration file of this user; `None` without a home directory.
pub(crate) fn default_config() -> Option<PathBuf> {
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
