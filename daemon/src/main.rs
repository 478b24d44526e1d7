//! The `blobd` program: the command line and the daemon in one.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use blobd_cli_common::local_server::{
    ConfigurationKey, LocalServer, OpenedStore, ProxyVariables, Settings, StoreAccess, StoredNames,
};
use blobd_client::client::Client;
use blobd_client::paths::GivenPaths;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::upkeep::Configuration;
use blobd_server::local::{self, KEYS, LocalSettings, Opened};
use blobd_server::{client_file, serve};

mod demo;

/// The program runs itself for work that needs a process of its own: reading a client's file, and the readers of the demo.
fn main() -> ExitCode {
    let first = env::args_os().nth(1);
    match first.as_ref().and_then(|first| first.to_str()) {
        Some(client_file::COMMAND) => {
            client_file::run();
            ExitCode::SUCCESS
        }
        Some(demo::reader::COMMAND) => demo::reader::main(),
        _ => blobd_cli::main(THIS_MACHINE),
    }
}

/// This machine's store, configuration and daemon.
const THIS_MACHINE: LocalServer = LocalServer {
    serve: serve::run,
    exit_code_of_serve: serve::exit_code,
    settings: |paths| Ok(Arc::new(Loaded(LocalSettings::load(paths)?))),
    default_settings: || Arc::new(Loaded(LocalSettings::default())),
    configuration_keys: || KEYS.iter().map(configuration_key).collect(),
    find_store: local::find_store,
    stored_names: |root, kind| match kind {
        StoredNames::Models => local::stored_models(root),
        StoredNames::Trash => local::trashed_models(root),
        StoredNames::Downloads => local::unfinished_downloads(root),
    },
    client_of_holder: local::client_of_holder,
    registry_host: local::registry_host,
    proxies: || {
        let (names, fault) = local::proxies();
        ProxyVariables { names, fault }
    },
    demo: |is_json| demo::run(is_json).map_err(|error| error.body()),
};

fn configuration_key(key: &local::Key) -> ConfigurationKey {
    let local::Key { name, default, meaning, .. } = *key;
    ConfigurationKey { name, default, meaning, needs_restart: key.needs_restart() }
}

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
