//! The configuration file.

mod access;
mod credentials;
mod error;
mod keys;
mod members;
mod policy;
mod quotas;
mod registries;
mod sections;
mod serve;
mod settings;
mod stores;
mod trust;
mod values;

use std::collections::BTreeMap;

use std::io;
use std::path::{Path, PathBuf};

use blobd_client::paths::{GivenPaths, default_config, no_home};
use blobd_client::protocol::error::ErrorBody;
use blobd_registry::credentials::CredentialFile;
use blobd_registry::{RegistryPolicy, RetryPolicy, read_regular};
use blobd_store::scrub::ScrubPolicy;
use blobd_store::{Durability, SpacePolicy, StoreOptions};
use blobd_store_format::size::human_bytes;
use serde::Deserialize;

use self::access::AccessConfig;
use self::credentials::CredentialsConfig;
pub(crate) use self::error::ConfigError;
use self::error::Refusal;
pub use self::keys::{KEYS, Key};
use self::policy::PolicyConfig;
use self::quotas::QuotasConfig;
use self::registries::{Host, Mirrors, PeersConfig, ServerHeaders, headers_as_text};
use self::sections::{AuditConfig, MetricsConfig, ScrubConfig, SpaceConfig, TransferConfig, TrashConfig};
use self::serve::ServeConfig;
pub(crate) use self::settings::{Given, mode, path};
use self::stores::PlacedPath;
use self::trust::TrustConfig;
use crate::access::Access;
use crate::names::Names;
use crate::offer::Offer;
use crate::policy::Policy;
use crate::quotas::Quotas;
use crate::transfer::TransferPolicy;
use crate::trust::Trust;
use crate::user_set::NameOrNumber;

/// The content of the configuration file. All keys are optional; [`KEYS`] says what each means.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    pub(crate) root: Option<PathBuf>,
    lower: Vec<PlacedPath>,
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    pub(crate) socket: Option<PathBuf>,
    #[serde(deserialize_with = "values::optional::<values::Group, _>")]
    pub(crate) socket_group: Option<NameOrNumber>,
    #[serde(deserialize_with = "values::optional::<values::Mode, _>")]
    pub(crate) socket_mode: Option<u32>,
    mirrors: BTreeMap<Host, Mirrors>,
    peers: PeersConfig,
    headers: ServerHeaders,
    insecure_registries: Vec<Host>,
    ca_files: Vec<PlacedPath>,
    durability: Durability,
    single_user: Option<bool>,
    access: AccessConfig,
    quotas: QuotasConfig,
    policy: PolicyConfig,
    trust: TrustConfig,
    space: SpaceConfig,
    trash: TrashConfig,
    pub(crate) scrub: ScrubConfig,
    pub(crate) audit: AuditConfig,
    transfer: TransferConfig,
    pub(crate) metrics: MetricsConfig,
    pub(crate) serve: ServeConfig,
    credentials: CredentialsConfig,
    /// The path of the configuration file, which need not exist: `credentials.json` is beside it.
    #[serde(skip)]
    location: Option<PathBuf>,
    /// The socket that systemd has passed to this daemon.
    #[serde(skip)]
    pub(crate) passed_socket: Option<SocketOfUnit>,
    /// The error about a name that the name service does not know at present. Only a daemon needs the names.
    #[serde(skip)]
    pub(crate) unresolved: Option<ErrorBody>,
    #[serde(skip)]
    was_read: bool,
    /// The lines of the keys in the file, counted from 1.
    #[serde(skip)]
    lines: BTreeMap<String, usize>,
}

/// A socket that systemd has made, as its unit says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SocketOfUnit {
    pub(crate) path: PathBuf,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
}

impl Config {
    /// Loads the configuration of a command or a daemon with these paths.
    pub(crate) fn load_for(paths: &GivenPaths) -> Result<Self, ErrorBody> {
        let config = Self::load(paths.config.as_deref()).map_err(ConfigError::body)?;
        // A store that a command names may be a lower store of the user's own one: it is left out then.
        if paths.root.is_none()
            && let Ok(root) = config.root_for(paths)
        {
            config.check_root(&root).map_err(ConfigError::body)?;
        }
        Ok(config)
    }

    /// Reads the given file, or the default one. The default file may be missing.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = named.map(Path::to_path_buf).or_else(default_config) else {
            return Ok(Self::default());
        };
        match read(&path) {
            Ok(content) => match String::from_utf8(content) {
                Ok(text) => Self::parse(&path, &text),
                Err(error) => Err(ConfigError::not_utf8(&path, &error)),
            },
            Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => {
                Ok(Self { location: Some(path), ..Self::default() })
            }
            Err(error) => Err(ConfigError::unreadable(&path, &error)),
        }
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let mut config: Self =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(path, text, &error))?;
        match config.check(Names::system) {
            Ok(()) => {}
            Err(refusal) if refusal.is_temporary => config.unresolved = Some(refusal.body(path, text)),
            Err(refusal) => return Err(ConfigError::from_refusal(path, text, &refusal)),
        }
        config.policy.note_lines(|offset| error::line(text, offset));
        config
            .trust
            .note_places(|offset| error::place(path, text, offset), |offset| error::line(text, offset));
        for placed in config.lower.iter_mut().chain(&mut config.ca_files) {
            placed.note_place(|offset| error::place(path, text, offset));
        }
        let (location, lines) = (Some(path.to_path_buf()), error::lines(text));
        Ok(Self { location, was_read: true, lines, ..config })
    }

    /// Checks what the type of one value cannot say: values that contradict each other, and names of users and groups.
    fn check(&self, names: impl Fn() -> Names + Copy) -> Result<(), Refusal> {
        self.space.check()?;
        self.transfer.check()?;
        self.credentials.check()?;
        self.audit.check()?;
        self.serve.check(names)?;
        stores::check_lower(&self.lower)?;
        self.socket_gid_by(names)?;
        self.access.check(names)?;
        self.policy.check(names)?;
        self.trust.check()?;
        self.quotas.check(names)
    }

    /// Fails if the name service does not know the users and groups in the file at present.
    pub(crate) fn with_known_names(mut self) -> Result<Self, ErrorBody> {
        self.unresolved.take().map_or(Ok(self), Err)
    }

    /// Uses the name service if the file names a group.
    pub(crate) fn socket_gid(&self) -> Result<Option<u32>, ErrorBody> {
        let path = self.location.as_deref().unwrap_or_else(|| Path::new(""));
        self.socket_gid_by(Names::system).map_err(|refusal| refusal.body(path, ""))
    }

    fn socket_gid_by(&self, names: impl Fn() -> Names) -> Result<Option<u32>, Refusal> {
        self.socket_group.as_ref().map(|group| members::socket_gid(group, names)).transpose()
    }

    /// Uses the name service.
    pub(crate) fn access(&self) -> Access {
        self.access.access(self.location.as_deref())
    }

    /// Uses the name service if there are quotas.
    pub(crate) fn quotas(&self) -> Quotas {
        self.quotas.quotas()
    }

    /// Uses the name service if there are rules.
    pub(crate) fn policy(&self) -> Policy {
        self.policy.policy(self.location.as_deref())
    }

    /// Reads the files of the keys that models are signed with.
    pub(crate) fn trust(&self) -> Result<Trust, ErrorBody> {
        self.trust.trust(self.location.as_deref())
    }

    /// Reads the file of tokens, and uses the name service if a user is named.
    pub(crate) fn offer(&self) -> Result<Offer, ErrorBody> {
        self.serve.offer(|key| self.place_of(key))
    }

    pub(crate) fn store_options(&self) -> StoreOptions {
        StoreOptions {
            durability: self.durability,
            space: SpacePolicy { keep_displaced: self.trash.keep_displaced, ..self.space.policy() },
            lower: self.lower_paths(),
            ..StoreOptions::default()
        }
    }

    pub(crate) fn is_single_user(&self) -> bool {
        self.single_user.unwrap_or_else(|| !self.is_shared() && !rustix::process::geteuid().is_root())
    }

    fn is_shared(&self) -> bool {
        match &self.passed_socket {
            Some(passed) => passed.mode & 0o022 != 0,
            None => self.socket_group.is_some() || self.socket_mode.is_some_and(|mode| mode & 0o077 != 0),
        }
    }

    pub(crate) fn scrub_policy(&self) -> ScrubPolicy {
        self.scrub.policy()
    }

    pub(crate) fn transfer_policy(&self) -> TransferPolicy {
        self.transfer.policy()
    }

    pub(crate) fn registry_policy(&self) -> RegistryPolicy {
        let mirrors = self.mirrors.iter().map(|(host, bases)| (host.0.clone(), bases.0.as_slice().to_vec()));
        RegistryPolicy {
            mirrors: mirrors.collect(),
            peers: self.peers.urls.iter().map(|url| url.0.clone()).collect(),
            headers: headers_as_text(&self.headers),
            insecure: self.insecure_registries.iter().map(|host| host.0.clone()).collect(),
            ca_files: stores::paths(&self.ca_files),
            credentials: self.credentials.policy(self.location.as_deref()),
            retry: RetryPolicy::default(),
            stall_timeout: self.transfer.stall_timeout(),
        }
    }

    /// The hosts that have mirrors or are contacted over plain HTTP.
    pub(crate) fn registry_hosts(&self) -> impl Iterator<Item = &str> {
        self.mirrors.keys().chain(&self.insecure_registries).map(|host| &*host.0)
    }

    /// The file of `blobd login`.
    pub(crate) fn credential_file(&self) -> Result<CredentialFile, ErrorBody> {
        let file = self.credentials.file(self.location.as_deref());
        file.ok_or_else(|| no_home("the file of credentials", "give --config"))
    }
}

/// More than any configuration has. A longer file is something else, such as a model that was named by mistake.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let content = read_regular(path, MAX_CONFIG_BYTES + 1)?;
    if content.len() as u64 > MAX_CONFIG_BYTES {
        let most = human_bytes(MAX_CONFIG_BYTES);
        return Err(io::Error::other(format!("too long: expected at most {most}")));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon that a group or everybody may connect to has other clients than its own user.
    #[test]
    fn shared_socket_means_several_users() {
        let is_single = |text: &str| toml::from_str::<Config>(text).unwrap().is_single_user();
        assert!(!is_single("socket_group = \"models\""));
        assert!(!is_single("socket_mode = \"0666\""));
        assert!(is_single("socket_group = 7\nsingle_user = true"));
        let alone = !rustix::process::geteuid().is_root();
        assert_eq!([is_single(""), is_single("socket_mode = 0o600")], [alone; 2]);
    }

    #[test]
    fn mode_of_a_passed_socket_says_whether_it_is_shared() {
        let is_single = |mode| {
            let passed = SocketOfUnit { path: "/run/s".into(), gid: 7, mode };
            Config { passed_socket: Some(passed), ..Config::default() }.is_single_user()
        };
        let alone = !rustix::process::geteuid().is_root();
        assert_eq!([0o600, 0o644, 0o660, 0o666].map(is_single), [alone, alone, false, false]);
    }

    #[test]
    fn group_is_a_name_or_a_number() {
        let group = |text: &str| toml::from_str::<Config>(text).map(|config| config.socket_group);
        assert_eq!(group("socket_group = \"models\""), Ok(Some(NameOrNumber::Name("models".to_owned()))));
        assert_eq!(group("socket_group = 7"), Ok(Some(NameOrNumber::Number(7))));
        assert_eq!(group("socket_group = \"7\""), Ok(Some(NameOrNumber::Number(7))));
        assert!(group("socket_group = \"\"").is_err() && group("socket_group = \"a:b\"").is_err());
    }

    #[test]
    fn missing_file_is_refused_if_it_was_given() {
        assert!(Config::load(Some(Path::new("/nonexistent/config.toml"))).is_err());
    }

    #[test]
    fn mirrors_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let text = "root = \"/x\"\ninsecure_registries = [\"lan:5000\"]\n[mirrors]\n\"hf.co\" = \"http://m\"\n\
                    \"registry.ollama.ai\" = [\"http://127.0.0.1:1\", \"https://registry.ollama.ai\"]\n";
        std::fs::write(&path, text).unwrap();
        let config = Config::load(Some(&path)).unwrap();
        assert_eq!(config.root.as_deref(), Some(Path::new("/x")));
        let policy = config.registry_policy();
        assert_eq!(
            policy.mirrors["registry.ollama.ai"],
            ["http://127.0.0.1:1", "https://registry.ollama.ai"]
        );
        assert_eq!(policy.mirrors["hf.co"], ["http://m"]);
        assert_eq!(policy.insecure, ["lan:5000"]);
        std::fs::write(&path, "[mirrors]\n\"hf.co\" = 1\n").unwrap();
        assert!(Config::load(Some(&path)).unwrap_err().to_string().contains("a URL or a list"));
    }

    #[test]
    fn file_that_is_not_utf8_is_named_with_the_place_of_its_first_wrong_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, b"# \xc3\xbc\nroot = \"/m\xf6dels\"\n").unwrap();
        let error = Config::load(Some(&path)).unwrap_err().body();
        let expected = format!("{}:2:11: expected text in UTF-8, found the byte 0xf6", path.display());
        assert_eq!(error.message, expected);
        assert_eq!(error.hint.as_deref(), Some("save the file in the encoding UTF-8"));
    }

    #[test]
    fn group_of_the_socket_that_does_not_exist_is_named_with_its_place_and_a_hint() {
        let error = Config::parse(Path::new("c"), "\nsocket_group = \"no-such-group\"").unwrap_err().body();
        assert_eq!(
            error.message,
            "c:2:1: socket_group: no such group: expected a group that `getent group` finds, found \"no-such-group\""
        );
        assert!(error.hint.unwrap().contains("`groupadd no-such-group`"));
        Config::parse(Path::new("c"), "socket_group = 64999").unwrap();
    }

    #[test]
    fn file_that_is_too_long_is_not_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        let error = read(file.path()).unwrap_err().to_string();
        assert_eq!(error, "too long: expected at most 4.00 MiB");
    }
}
