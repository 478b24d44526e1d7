//! What the command line does not do itself, because it is an ordinary client: it gets this as a value from the program
//! that it is part of.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_client::client::Client;
use blobd_client::paths::GivenPaths;
use blobd_client::protocol::configuration::Configuration;
use blobd_client::protocol::error::ErrorBody;

/// The daemon, the store's directory, the configuration file and the demo.
pub trait LocalServer: fmt::Debug + Sync {
    /// Runs the daemon until it is stopped.
    ///
    /// # Errors
    /// If it cannot start.
    fn serve(&self, paths: &GivenPaths) -> Result<(), ErrorBody>;

    /// The exit code of a daemon that has ended with this error.
    fn exit_code_of_serve(&self, error: &ErrorBody) -> u8;

    /// Reads the configuration file.
    ///
    /// # Errors
    /// If it is not valid.
    fn settings(&self, paths: &GivenPaths) -> Result<Arc<dyn Settings>, ErrorBody>;

    /// The settings without a configuration file.
    fn default_settings(&self) -> Arc<dyn Settings>;

    /// Every key of the configuration file, in the order of its documentation.
    fn configuration_keys(&self) -> Vec<ConfigurationKey>;

    /// Looks for a store without opening it.
    ///
    /// # Errors
    /// If nothing is there.
    fn find_store(&self, root: &Path) -> Result<(), ErrorBody>;

    /// Names in the directory of a store, which is not opened. What cannot be read is left out.
    fn stored_names(&self, root: &Path, kind: StoredNames) -> Vec<String>;

    /// A client of the process that has a store open.
    fn client_of_holder(&self, root: &Path) -> Option<Client>;

    /// The name under which credentials for a registry are kept.
    ///
    /// # Errors
    /// If the text is not a host.
    fn registry_host(&self, text: &str) -> Result<String, ErrorBody>;

    /// The proxies that the environment names.
    fn proxies(&self) -> ProxyVariables;

    /// Runs the demo.
    ///
    /// # Errors
    /// If a step has an unexpected result.
    fn demo(&self, is_json: bool) -> Result<(), ErrorBody>;
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

    /// Every setting as a daemon with these paths would use it.
    ///
    /// # Errors
    /// If a daemon would refuse to start with it.
    fn of_daemon(&self, paths: &GivenPaths) -> Result<Configuration, ErrorBody>;

    /// Opens a store in this process, or finds the process that has it open.
    ///
    /// # Errors
    /// If the store cannot be used.
    fn open_store(&self, root: &Path) -> Result<OpenedStore, ErrorBody>;

    /// The file with the credentials of `blobd login`.
    ///
    /// # Errors
    /// If there is no home directory.
    fn credential_file(&self) -> Result<PathBuf, ErrorBody>;

    /// Saves a password, or a token if there is no user.
    ///
    /// # Errors
    /// If the file cannot be changed.
    fn save_credential(&self, host: &str, user: Option<&str>, secret: &str) -> Result<(), ErrorBody>;

    /// Deletes a credential; false if there is none.
    ///
    /// # Errors
    /// If the file cannot be changed.
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
    /// What the unfinished downloads are of.
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

/// For tests of what needs none of this.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NoServer;

#[cfg(test)]
impl LocalServer for NoServer {
    fn serve(&self, _paths: &GivenPaths) -> Result<(), ErrorBody> {
        Err(crate::usage("no server"))
    }

    fn exit_code_of_serve(&self, error: &ErrorBody) -> u8 {
        error.code.exit_code()
    }

    fn settings(&self, _paths: &GivenPaths) -> Result<Arc<dyn Settings>, ErrorBody> {
        Err(crate::usage("no configuration"))
    }

    fn default_settings(&self) -> Arc<dyn Settings> {
        panic!("no configuration")
    }

    fn configuration_keys(&self) -> Vec<ConfigurationKey> {
        let key = |name, default| ConfigurationKey { name, default, meaning: "`x`", needs_restart: false };
        vec![key("root", "none"), key("access.read", "`[\"*\"]`")]
    }

    fn find_store(&self, _root: &Path) -> Result<(), ErrorBody> {
        Err(crate::usage("no store"))
    }

    fn stored_names(&self, _root: &Path, kind: StoredNames) -> Vec<String> {
        vec![format!("{kind:?}")]
    }

    fn client_of_holder(&self, _root: &Path) -> Option<Client> {
        None
    }

    fn registry_host(&self, text: &str) -> Result<String, ErrorBody> {
        Ok(text.to_owned())
    }

    fn proxies(&self) -> ProxyVariables {
        ProxyVariables { names: &[], fault: None }
    }

    fn demo(&self, _is_json: bool) -> Result<(), ErrorBody> {
        Ok(())
    }
}
