//! Work that an ordinary client does not do: the command line gets it as a value from the program that it is part of.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_client::paths::GivenPaths;
use blobd_client::protocol::upkeep::Configuration;

#[cfg(any(test, feature = "testing"))]
use crate::ErrorCode;
use crate::{Client, ErrorBody};

/// The daemon, the store's directory, the configuration file and the demo.
#[derive(Clone, Copy, Debug)]
pub struct LocalServer {
    /// Runs the daemon until it is stopped.
    pub serve: fn(&GivenPaths) -> Result<(), ErrorBody>,
    /// The exit code of a daemon that has ended with this error.
    pub exit_code_of_serve: fn(&ErrorBody) -> u8,
    /// Reads the configuration file.
    pub settings: fn(&GivenPaths) -> Result<Arc<dyn Settings>, ErrorBody>,
    /// The settings without a configuration file.
    pub default_settings: fn() -> Arc<dyn Settings>,
    /// Every key of the configuration file, in the order of its documentation.
    pub configuration_keys: fn() -> Vec<ConfigurationKey>,
    /// Looks for a store without opening it; fails if there is none.
    pub find_store: fn(root: &Path) -> Result<(), ErrorBody>,
    /// Names in the directory of a store, which is not opened. Omits what cannot be read.
    pub stored_names: fn(root: &Path, StoredNames) -> Vec<String>,
    /// A client of the process that has a store open.
    pub client_of_holder: fn(root: &Path) -> Option<Client>,
    /// The name under which credentials for a registry are kept; fails if the text is not a host.
    pub registry_host: fn(text: &str) -> Result<String, ErrorBody>,
    /// The proxies that the environment names.
    pub proxies: fn() -> ProxyVariables,
    /// Runs the demo; fails if a step has an unexpected result.
    pub demo: fn(is_json: bool) -> Result<(), ErrorBody>,
}

/// The content of a configuration file.
pub trait Settings: fmt::Debug + Send + Sync {
    /// The store's directory.
    fn root(&self) -> Option<&Path>;

    /// The daemon's socket.
    fn socket(&self) -> Option<&Path>;

    /// The directories of read-only stores.
    fn lower_stores(&self) -> Vec<PathBuf>;

    /// The registries that have settings of their own.
    fn registry_hosts(&self) -> Vec<String>;

    /// Every setting as a daemon with these paths would use it; fails if it would refuse to start.
    fn of_daemon(&self, paths: &GivenPaths) -> Result<Configuration, ErrorBody>;

    /// Opens a store in this process, or finds the process that has it open.
    fn open_store(&self, root: &Path) -> Result<OpenedStore, ErrorBody>;

    /// The file with the credentials of `blobd login`; fails without a home directory.
    fn credential_file(&self) -> Result<PathBuf, ErrorBody>;

    /// Saves a password, or a token if there is no user.
    fn save_credential(&self, host: &str, user: Option<&str>, secret: &str) -> Result<(), ErrorBody>;

    /// Deletes a credential; false if there is none.
    fn delete_credential(&self, host: &str) -> Result<bool, ErrorBody>;
}

/// Where a store is served.
#[derive(Debug)]
pub enum OpenedStore {
    /// A daemon serves the store at this socket.
    ByDaemon(PathBuf),
    /// This process or another command has the store open.
    ByCommand(Box<dyn StoreAccess>),
}

/// Access to a store that no daemon serves. Ends on drop, and another command may then open the store.
pub trait StoreAccess: fmt::Debug + Send + Sync {
    /// A client of the process that serves the store, whichever that is at the time of a request.
    fn client(&self) -> Client;

    /// Whether this process serves it.
    fn is_served_here(&self) -> bool;
}

/// A key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct ConfigurationKey {
    /// With its section, such as `space.quota`.
    pub name: &'static str,
    /// In Markdown: a value of TOML in backticks, or words.
    pub default: &'static str,
    /// In Markdown; links are relative to `docs/`.
    pub meaning: &'static str,
    /// Whether a change takes effect only when the daemon is restarted.
    pub needs_restart: bool,
}

/// Names that can be read without opening a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredNames {
    /// The models.
    Models,
    /// The models in the trash.
    Trash,
    /// The models of unfinished downloads.
    Downloads,
}

/// The environment's settings of proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyVariables {
    /// The names of all variables that are read.
    pub names: &'static [&'static str],
    /// The first value that cannot be used.
    pub fault: Option<String>,
}

#[cfg(any(test, feature = "testing"))]
impl Default for LocalServer {
    /// For tests that need neither a daemon nor a store.
    fn default() -> Self {
        const fn key(name: &'static str, default: &'static str) -> ConfigurationKey {
            ConfigurationKey { name, default, meaning: "`x`", needs_restart: false }
        }
        fn without(what: &str) -> ErrorBody {
            ErrorBody::new(ErrorCode::InvalidRequest, format!("no {what}"))
        }
        Self {
            serve: |_paths| Err(without("server")),
            exit_code_of_serve: |error| error.code.exit_code(),
            settings: |_paths| Err(without("configuration")),
            default_settings: || panic!("no configuration"),
            configuration_keys: || vec![key("root", "none"), key("access.read", "`[\"*\"]`")],
            find_store: |_root| Err(without("store")),
            stored_names: |_root, kind| vec![format!("{kind:?}")],
            client_of_holder: |_root| None,
            registry_host: |text| Ok(text.to_owned()),
            proxies: || ProxyVariables { names: &[], fault: None },
            demo: |_is_json| Ok(()),
        }
    }
}
