//! blobd's own credential file, which `login` and `logout` write.
//!
//! It is replaced by a rename while its directory is locked: readers see the old or the new file, and no login is lost
//! when two run at the same time. Only its owner may have access. A file that others may read is refused, because its
//! secrets must be considered known.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, fchown, lchown};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::{Credential, CredentialError, MAX_FILE_BYTES, RegistryHost, Secret};
use crate::regular_file::open_regular;

#[derive(Clone, Debug)]
pub struct CredentialFile {
    path: PathBuf,
}

impl CredentialFile {
    /// Uses the file at `path`. It need not exist yet.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn get(&self, host: &RegistryHost) -> Result<Option<Credential>, CredentialError> {
        let entry = self.read()?.registries.remove(host.as_str());
        entry.map(|entry| entry.checked().ok_or_else(|| self.malformed(ENTRY_FORM.to_owned()))).transpose()
    }

    pub fn set(&self, host: &RegistryHost, credential: &Credential) -> Result<(), CredentialError> {
        let _lock = self.lock()?;
        let mut entries = self.read()?;
        entries.registries.insert(host.as_str().to_owned(), Entry::from_credential(credential));
        self.write(&entries)
    }

    /// Removes the credential for a host; returns whether there was one.
    pub fn remove(&self, host: &RegistryHost) -> Result<bool, CredentialError> {
        if !self.path.exists() {
            return Ok(false);
        }
        let _lock = self.lock()?;
        let mut entries = self.read()?;
        if entries.registries.remove(host.as_str()).is_none() {
            return Ok(false);
        }
        self.write(&entries)?;
        Ok(true)
    }

    fn directory(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        }
    }

    /// Makes the directory if needed, and locks it until the result is dropped.
    fn lock(&self) -> Result<File, CredentialError> {
        let lock = || {
            self.make_directory()?;
            let directory = File::open(self.directory())?;
            flock(&directory, FlockOperation::LockExclusive)?;
            Ok(directory)
        };
        lock().map_err(|source| self.io(source))
    }

    /// Makes the directories that are missing. Those that root makes belong to the owner of the one that they are in.
    fn make_directory(&self) -> io::Result<()> {
        let missing: Vec<_> = self.directory().ancestors().take_while(|path| !path.exists()).collect();
        for path in missing.into_iter().rev().filter(|path| !path.as_os_str().is_empty()) {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) if geteuid().is_root() => {
                    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                    let above = fs::metadata(parent.unwrap_or(Path::new(".")))?;
                    lchown(path, Some(above.uid()), Some(above.gid()))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read(&self) -> Result<Entries, CredentialError> {
        let file = match open_regular(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Entries::default()),
            Err(error) => return Err(self.io(error)),
        };
        let metadata = file.metadata().map_err(|error| self.io(error))?;
        let mode = metadata.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(self.malformed(format!(
                "wrong mode: expected 0600, found {mode:04o}; change the passwords in it if others use this machine, then \
                 `chmod 600` it"
            )));
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(|error| self.io(error))?;
        let entries: Entries =
            serde_json::from_slice(&text).map_err(|error| self.malformed(super::error_position(&error)))?;
        if entries.version != VERSION {
            let version = entries.version;
            return Err(
                self.malformed(format!("version: expected {VERSION}, found {version}; is blobd too old?"))
            );
        }
        Ok(entries)
    }

    fn write(&self, entries: &Entries) -> Result<(), CredentialError> {
        let write = || {
            // `tempfile` creates it with mode 0600.
            let mut new = tempfile::NamedTempFile::new_in(self.directory())?;
            serde_json::to_writer_pretty(&mut new, entries)?;
            new.write_all(b"\n")?;
            self.keep_owner(new.as_file())?;
            new.as_file().sync_all()?;
            new.persist(&self.path).map_err(|error| error.error)?;
            File::open(self.directory())?.sync_all()
        };
        write().map_err(|source| self.io(source))
    }

    /// Gives the new file the owner of the file that it replaces, because root saves credentials for a daemon that runs
    /// as another user. The first file gets the owner of its directory. For any other user, the owner is already the same,
    /// or the call fails.
    fn keep_owner(&self, new: &File) -> io::Result<()> {
        let of_old = fs::symlink_metadata(&self.path).ok().filter(fs::Metadata::is_file);
        let owner = match of_old {
            Some(old) => old,
            None if geteuid().is_root() => fs::metadata(self.directory())?,
            None => return Ok(()),
        };
        if owner.uid() == new.metadata()?.uid() {
            return Ok(());
        }
        fchown(new, Some(owner.uid()), Some(owner.gid()))
    }

    fn io(&self, source: io::Error) -> CredentialError {
        CredentialError::Io { path: self.path.clone(), source }
    }

    fn malformed(&self, what: String) -> CredentialError {
        CredentialError::Malformed { path: self.path.clone(), what }
    }
}

const VERSION: u32 = 1;
const ENTRY_FORM: &str = "expected a token, or a user and a password, for each registry";

/// No `Debug`, because it contains secrets.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    version: u32,
    registries: BTreeMap<String, Entry>,
}

impl Default for Entries {
    fn default() -> Self {
        Self { version: VERSION, registries: BTreeMap::new() }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    password: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl Entry {
    fn from_credential(credential: &Credential) -> Self {
        match credential {
            Credential::Password { user, password } => Self {
                user: Some(user.clone()),
                password: Some(password.reveal().to_owned()),
                ..Self::default()
            },
            Credential::Token(token) => Self { token: Some(token.reveal().to_owned()), ..Self::default() },
        }
    }

    fn checked(self) -> Option<Credential> {
        match self {
            Self { user: Some(user), password: Some(password), token: None } => {
                Some(Credential::Password { user, password: Secret::new(password) })
            }
            Self { user: None, password: None, token: Some(token) } => {
                Some(Credential::Token(Secret::new(token)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn host(text: &str) -> RegistryHost {
        text.parse().unwrap()
    }

    fn password() -> Credential {
        Credential::Password { user: "me".to_owned(), password: Secret::new("hunter2") }
    }

    fn file_with(text: &str) -> (tempfile::TempDir, CredentialFile) {
        let dir = tempfile::tempdir().unwrap();
        let file = CredentialFile::at(dir.path().join("credentials.json"));
        fs::write(file.path(), text).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).unwrap();
        (dir, file)
    }

    #[test]
    fn saved_credentials_are_read_until_they_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = CredentialFile::at(dir.path().join("config/credentials.json"));
        assert!(file.get(&host("r.example")).unwrap().is_none());
        assert!(!file.remove(&host("r.example")).unwrap());
        file.set(&host("r.example"), &password()).unwrap();
        file.set(&host("hf.co"), &Credential::Token(Secret::new("hf_x"))).unwrap();
        let kept = file.get(&host("R.example:443")).unwrap();
        assert!(
            matches!(kept, Some(Credential::Password { user, password }) if user == "me" && password.reveal() == "hunter2")
        );
        assert!(
            matches!(file.get(&host("hf.co")).unwrap(), Some(Credential::Token(token)) if token.reveal() == "hf_x")
        );
        assert!(file.get(&host("r.example:444")).unwrap().is_none());
        assert!(file.remove(&host("r.example")).unwrap());
        assert!(file.get(&host("r.example")).unwrap().is_none());
        assert!(file.get(&host("hf.co")).unwrap().is_some());
    }

    /// `sudo blobd login` saves credentials for the daemon, which runs as another user.
    #[test]
    fn file_that_root_replaces_keeps_its_owner() {
        if !geteuid().is_root() {
            blobd_fixtures::skipped::skipped("only root can give files away");
            return;
        }
        let (_dir, file) = file_with(r#"{"version":1,"registries":{}}"#);
        std::os::unix::fs::chown(file.path(), Some(65534), Some(65534)).unwrap();
        file.set(&host("r.example"), &password()).unwrap();
        let metadata = fs::metadata(file.path()).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (65534, 65534, 0o600));
    }

    /// Without the owner, the daemon could not read what was saved for it.
    #[test]
    fn first_file_of_root_belongs_to_the_owner_of_its_directory() {
        if !geteuid().is_root() {
            blobd_fixtures::skipped::skipped("only root can give files away");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(65534), Some(65533)).unwrap();
        for name in ["credentials.json", "config/blobd/credentials.json"] {
            let file = CredentialFile::at(dir.path().join(name));
            file.set(&host("r.example"), &password()).unwrap();
            for path in file.path().ancestors().take_while(|path| *path != dir.path()) {
                let status = fs::metadata(path).unwrap();
                assert_eq!((status.uid(), status.gid()), (65534, 65533), "{}", path.display());
            }
        }
    }

    #[test]
    fn only_the_owner_may_read_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = CredentialFile::at(dir.path().join("credentials.json"));
        file.set(&host("r.example"), &password()).unwrap();
        assert_eq!(fs::metadata(file.path()).unwrap().mode() & 0o7777, 0o600);
        for mode in [0o640, 0o604, 0o620] {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
            let error = file.get(&host("r.example")).unwrap_err();
            assert!(error.to_string().contains("expected 0600"), "{error}");
            assert!(file.set(&host("r.example"), &password()).is_err());
        }
    }

    #[test]
    fn malformed_files_are_refused_without_their_content() {
        for text in [
            "",
            "hunter2",
            r#"{"version":1}"#,
            r#"{"version":2,"registries":{}}"#,
            r#"{"version":1,"registries":{"r.example":"hunter2"}}"#,
            r#"{"version":1,"registries":{"r.example":{"hunter2":""}}}"#,
            r#"{"version":1,"registries":{"r.example":{"password":"hunter2"}}}"#,
            r#"{"version":1,"registries":{"r.example":{"user":"a","password":"hunter2","token":"b"}}}"#,
        ] {
            let error = file_with(text).1.get(&host("r.example")).unwrap_err();
            assert!(matches!(error, CredentialError::Malformed { .. }), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn special_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(CredentialFile::at(dir.path()).get(&host("r.example")).is_err());
    }
}
