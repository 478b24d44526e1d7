//! Where the store and the configuration file are.

use std::env;
use std::ffi::OsString;
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

/// A path in a variable of the environment, as Hugging Face's libraries and other programs in Python read it: `~` at its
/// start, and `$NAME` and `${NAME}` anywhere, stand for the home directory and for other variables. What is not set stays as
/// it is.
pub fn expanded(path: PathBuf, variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let Some(text) = path.to_str().filter(|text| text.contains(['~', '$'])) else { return path };
    let (mut expanded, mut left) = (OsString::new(), text);
    if let Some(rest) = text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'))
        && let Some(home) = variable("HOME")
    {
        expanded.push(home);
        left = rest;
    }
    while let Some((before, behind)) = left.split_once('$') {
        expanded.push(before);
        let (name, rest) = match behind.strip_prefix('{').and_then(|behind| behind.split_once('}')) {
            Some((name, rest)) => (name, rest),
            None => {
                let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                behind.split_at(behind.find(|c| !is_of_name(c)).unwrap_or(behind.len()))
            }
        };
        match variable(name).filter(|_| !name.is_empty()) {
            Some(value) => expanded.push(value),
            None => expanded.push(&left[before.len()..left.len() - rest.len()]),
        }
        left = rest;
    }
    expanded.push(left);
    expanded.into()
}

/// The error about a path that needs the home directory, which is not known.
pub fn no_home(what: &str, option: &str) -> ErrorBody {
    let home = env::var_os("HOME").unwrap_or_default();
    let message = format!("HOME: expected an absolute path, found {home:?}; it is needed to find {what}");
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(format!("set HOME, or {option}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_and_variables_in_a_path_are_expanded() {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/me".into()),
            "FOO" => Some("/data".into()),
            "EMPTY" => Some("".into()),
            _ => None,
        };
        for (text, path) in [
            ("/plain/hub", "/plain/hub"),
            ("~", "/home/me"),
            ("~/x/hub", "/home/me/x/hub"),
            ("/a/~/b", "/a/~/b"),
            ("~you/hub", "~you/hub"),
            ("$FOO/hub", "/data/hub"),
            ("${FOO}/hub", "/data/hub"),
            ("~/${EMPTY}x$FOO$FOO", "/home/me/x/data/data"),
            ("$FOOD/hub", "$FOOD/hub"),
            ("${FOO/hub", "${FOO/hub"),
            ("${}/$/$-", "${}/$/$-"),
        ] {
            assert_eq!(expanded(text.into(), variable), Path::new(path), "{text}");
        }
    }
}
