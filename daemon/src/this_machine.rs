//! What the command line gets of the daemon's crate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_cli::LocalServer;
use blobd_cli::local_server::{
    ConfigurationKey, OpenedStore, ProxyVariables, Settings, StoreAccess, StoredNames,
};
use blobd_client::client::Client;
use blobd_client::paths::GivenPaths;
use blobd_client::protocol::configuration::Configuration;
use blobd_client::protocol::error::ErrorBody;
use blobd_server::local::{self, KEYS, LocalSettings, Opened};
use blobd_server::serve;

use crate::demo;

/// This machine's store, configuration and daemon.
#[derive(Debug)]
pub(crate) struct ThisMachine;

impl LocalServer for ThisMachine {
    fn serve(&self, paths: &GivenPaths) -> Result<(), ErrorBody> {
        serve::run(paths)
    }

    fn exit_code_of_serve(&self, error: &ErrorBody) -> u8 {
        serve::exit_code(error)
    }

    fn settings(&self, paths: &GivenPaths) -> Result<Arc<dyn Settings>, ErrorBody> {
        Ok(Arc::new(Loaded(LocalSettings::load(paths)?)))
    }

    fn default_settings(&self) -> Arc<dyn Settings> {
        Arc::new(Loaded(LocalSettings::default()))
    }

    fn configuration_keys(&self) -> Vec<ConfigurationKey> {
        let key = |key: &local::Key| ConfigurationKey {
            name: key.name,
            default: key.default,
            meaning: key.meaning,
            needs_restart: key.needs_restart(),
        };
        KEYS.iter().map(key).collect()
    }

    fn find_store(&self, root: &Path) -> Result<(), ErrorBody> {
        local::find_store(root)
    }

    fn stored_names(&self, root: &Path, kind: StoredNames) -> Vec<String> {
        match kind {
            StoredNames::Models => local::stored_models(root),
            StoredNames::Trash => local::trashed_models(root),
            StoredNames::Downloads => local::unfinished_downloads(root),
        }
    }

    fn client_of_holder(&self, root: &Path) -> Option<Client> {
        local::client_of_holder(root)
    }

    fn registry_host(&self, text: &str) -> Result<String, ErrorBody> {
        local::registry_host(text)
    }

    fn proxies(&self) -> ProxyVariables {
        let (names, fault) = local::proxies();
        ProxyVariables { names, fault }
    }

    fn demo(&self, is_json: bool) -> Result<(), ErrorBody> {
        demo::run(is_json).map_err(|error| error.body())
    }
}

/// The configuration file as it was read.
#[derive(Debug)]
struct Loaded(LocalSettings);

impl Settings for Loaded {
    fn root(&self) -> Option<&Path> {
        self.0.root()
    }

    fn socket(&self) -> Option<&Path> {
        self.0.socket()
    }

    fn lower_stores(&self) -> Vec<PathBuf> {
        self.0.lower_stores()
    }

    fn registry_hosts(&self) -> Vec<String> {
        self.0.registry_hosts().map(str::to_owned).collect()
    }

    fn of_daemon(&self, paths: &GivenPaths) -> Result<Configuration, ErrorBody> {
        self.0.of_daemon(paths)
    }

    fn open_store(&self, root: &Path) -> Result<OpenedStore, ErrorBody> {
        Ok(match self.0.open_store(root)? {
            Opened::ByDaemon(socket) => OpenedStore::ByDaemon(socket),
            Opened::ByCommand(access) => OpenedStore::ByCommand(Box::new(Access(access))),
        })
    }

    fn credential_file(&self) -> Result<PathBuf, ErrorBody> {
        self.0.credential_file()
    }

    fn save_credential(&self, host: &str, user: Option<&str>, secret: &str) -> Result<(), ErrorBody> {
        self.0.save_credential(host, user, secret)
    }

    fn delete_credential(&self, host: &str) -> Result<bool, ErrorBody> {
        self.0.delete_credential(host)
    }
}

/// A store that this process or another command serves.
#[derive(Debug)]
struct Access(Arc<local::StoreAccess>);

impl StoreAccess for Access {
    fn client(&self) -> Client {
        self.0.client()
    }

    fn is_served_here(&self) -> bool {
        self.0.is_here()
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        // The client has references of its own.
        self.0.close();
    }
}
