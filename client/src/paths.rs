//! Default paths of the store and of the configuration file, and reading that file.

use std::env;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use blobd_client::sockets::SYSTEM_CONFIGURATION;
use blobd_store_format::size::human_bytes;

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

/// More than any configuration has. A longer file is something else, such as a model that was named by mistake.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Reads a configuration file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_CONFIG_BYTES {
        let most = human_bytes(MAX_CONFIG_BYTES);
        return Err(io::Error::other(format!("too long: expected at most {most}")));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_too_long_is_not_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        let error = read(file.path()).unwrap_err().to_string();
        assert_eq!(error, "too long: expected at most 4.00 MiB");
    }
}
