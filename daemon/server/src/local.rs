//! What a process does on this machine without a daemon: it reads the configuration file, looks into the store's
//! directory, or opens the store and serves it to itself.

use std::io;
use std::path::{Path, PathBuf};

use blobd_client::client::Client;
use blobd_client::paths::GivenPaths;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::upkeep::Configuration;
use blobd_registry::Proxies;
use blobd_registry::credentials::{Credential, CredentialError, RegistryHost, Secret};
use blobd_store::{StoreError, StoreListing};
use blobd_store_format::reference::Reference;

use crate::config::Config;
pub use crate::config::{KEYS, Key};
use crate::serve::settings_of_daemon;
use crate::socket::connect_announced;
pub use crate::store_access::{Opened, StoreAccess};

/// The content of a configuration file.
#[derive(Clone, Debug, Default)]
pub struct LocalSettings(Config);

impl LocalSettings {
    /// Reads the file that is given, or the default one, which may be missing.
    ///
    /// # Errors
    /// If it is not valid.
    pub fn load(paths: &GivenPaths) -> Result<Self, ErrorBody> {
        Config::load_for(paths).map(Self)
    }

    /// The store's directory.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.0.root.as_deref()
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        self.0.socket.as_deref()
    }

    /// The directories of the lower stores.
    #[must_use]
    pub fn lower_stores(&self) -> Vec<PathBuf> {
        self.0.lower_paths()
    }

    /// The hosts that have mirrors or are contacted over plain HTTP.
    pub fn registry_hosts(&self) -> impl Iterator<Item = &str> {
        self.0.registry_hosts()
    }

    /// Every setting as a daemon with these paths would use it.
    ///
    /// # Errors
    /// If a daemon would refuse to start with it.
    pub fn of_daemon(&self, paths: &GivenPaths) -> Result<Configuration, ErrorBody> {
        settings_of_daemon(paths, &self.0)
    }

    /// Opens a store in this process, or finds the process that has it open.
    ///
    /// # Errors
    /// If the store cannot be used.
    pub fn open_store(&self, root: &Path) -> Result<Opened, ErrorBody> {
        StoreAccess::open(root, &self.0)
    }

    /// The file of `blobd login`.
    ///
    /// # Errors
    /// If there is no home directory.
    pub fn credential_file(&self) -> Result<PathBuf, ErrorBody> {
        self.0.credential_file().map(|file| file.path().to_path_buf())
    }

    /// Saves a password, or a token if there is no user.
    ///
    /// # Errors
    /// If the file cannot be changed.
    pub fn save_credential(&self, host: &str, user: Option<&str>, secret: &str) -> Result<(), ErrorBody> {
        let secret = Secret::new(secret);
        let credential = match user {
            Some(user) => Credential::Password { user: user.to_owned(), password: secret },
            None => Credential::Token(secret),
        };
        self.0.credential_file()?.set(&parsed_host(host)?, &credential).map_err(|error| file_error(&error))
    }

    /// Deletes a credential; false if there is none.
    ///
    /// # Errors
    /// If the file cannot be changed.
    pub fn delete_credential(&self, host: &str) -> Result<bool, ErrorBody> {
        self.0.credential_file()?.remove(&parsed_host(host)?).map_err(|error| file_error(&error))
    }
}

fn file_error(error: &CredentialError) -> ErrorBody {
    ErrorBody::new(ErrorCode::Denied, error)
}

/// The host under which credentials for a registry are kept.
///
/// # Errors
/// If the text is not a host.
pub fn registry_host(text: &str) -> Result<String, ErrorBody> {
    parsed_host(text).map(|host| host.as_str().to_owned())
}

fn parsed_host(text: &str) -> Result<RegistryHost, ErrorBody> {
    text.parse().map_err(|error: CredentialError| ErrorBody::new(ErrorCode::InvalidRequest, error))
}

/// The variables that name proxies, and the first value of the environment that cannot be used.
#[must_use]
pub fn proxies() -> (&'static [&'static str], Option<String>) {
    (&Proxies::VARIABLES, Proxies::from_environment().faults().next().map(ToString::to_string))
}

/// Looks for a store without opening it.
///
/// # Errors
/// If nothing is there.
pub fn find_store(root: &Path) -> Result<(), ErrorBody> {
    const HINT: &str = "check the path; `blobd pull` and `blobd import` create a store";
    let found = match StoreListing::open(root) {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => "no such directory",
        Ok(listing) if listing.is_empty() => "the directory is empty",
        // Opening it reports what else is wrong with it.
        _ => return Ok(()),
    };
    let message = format!("{}: contains no store: {found}", root.display());
    Err(ErrorBody::new(ErrorCode::NotFound, message).with_hint(HINT))
}

/// The models in the directory of a store, which is not opened.
#[must_use]
pub fn stored_models(root: &Path) -> Vec<String> {
    StoreListing::open(root).map(|store| short(&store.models())).unwrap_or_default()
}

/// The models in the trash, like [`stored_models`].
#[must_use]
pub fn trashed_models(root: &Path) -> Vec<String> {
    StoreListing::open(root).map(|store| short(&store.trash())).unwrap_or_default()
}

/// The models of unfinished downloads, like [`stored_models`].
#[must_use]
pub fn unfinished_downloads(root: &Path) -> Vec<String> {
    StoreListing::open(root).map(|store| store.downloads()).unwrap_or_default()
}

fn short(names: &[Reference]) -> Vec<String> {
    names.iter().map(Reference::short).collect()
}

/// A client of the process that has a store open, if its lock file names one.
#[must_use]
pub fn client_of_holder(root: &Path) -> Option<Client> {
    let (root, socket) = (root.to_owned(), StoreListing::open(root).ok()?.holder()?.socket?);
    Some(Client::with_connector(std::sync::Arc::new(move || connect_announced(&root, &socket))))
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::new_store;

    use super::*;

    #[test]
    fn inspection_does_not_change_an_open_absent_or_empty_store() {
        let (folder, _store) = new_store();
        let root = folder.path().join("store");
        let before = std::fs::read(root.join("lock")).unwrap();
        for names in [stored_models, trashed_models, unfinished_downloads] {
            assert_eq!(names(&root), Vec::<String>::new());
        }
        find_store(&root).unwrap();
        assert!(client_of_holder(&root).is_none(), "the store's process does not listen");
        assert_eq!(std::fs::read(root.join("lock")).unwrap(), before);
        let absent = folder.path().join("absent");
        assert_eq!(stored_models(&absent), Vec::<String>::new());
        assert!(find_store(&absent).unwrap_err().message.ends_with("contains no store: no such directory"));
        assert!(!absent.exists());
    }
}
