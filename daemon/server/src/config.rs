//! The configuration file.

mod access;
mod audit;
mod credentials;
mod error;
mod keys;
mod members;
mod metrics;
mod policy;
mod quotas;
mod read;
mod registries;
mod settings;
mod stores;
mod values;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_client::paths::{GivenPaths, default_config, no_home};
use blobd_client::protocol::error::ErrorBody;
use blobd_registry::credentials::CredentialFile;
use blobd_registry::{RegistryPolicy, RetryPolicy};
use blobd_store::scrub::ScrubPolicy;
use blobd_store::{Durability, Eviction, SpacePolicy, StoreOptions};
use serde::Deserialize;

use self::access::AccessConfig;
pub(crate) use self::audit::AuditConfig;
pub(crate) use self::credentials::CredentialsConfig;
pub(crate) use self::error::ConfigError;
use self::error::Refusal;
pub use self::keys::{KEYS, Key};
use self::metrics::MetricsConfig;
use self::policy::PolicyConfig;
use self::quotas::QuotasConfig;
use self::registries::{Host, Mirrors};
pub(crate) use self::settings::{Given, mode, path};
use self::stores::PlacedPath;
use crate::access::Access;
use crate::names::Names;
use crate::policy::Policy;
use crate::quotas::Quotas;
use crate::transfer::TransferPolicy;

/// The content of the configuration file. All keys are optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The store's directory.
    #[serde(deserialize_with = "values::path")]
    pub root: Option<PathBuf>,
    /// Read-only stores in which is looked for what the store lacks, in this order.
    lower: Vec<PlacedPath>,
    #[serde(deserialize_with = "values::path")]
    pub socket: Option<PathBuf>,
    /// The group whose members may connect.
    #[serde(deserialize_with = "values::group")]
    pub socket_group: Option<SocketGroup>,
    /// The socket's permissions.
    #[serde(deserialize_with = "values::mode")]
    pub socket_mode: Option<u32>,
    /// For a registry's host, the base URLs to use instead, in this order.
    mirrors: BTreeMap<Host, Mirrors>,
    /// Registries, as `HOST:PORT`, that are used over plain HTTP.
    insecure_registries: Vec<Host>,
    /// PEM files with certificate authorities to trust in addition to the system's.
    ca_files: Vec<PlacedPath>,
    /// How the content of new blobs is made durable: `auto`, `fsync` or `syncfs`.
    pub durability: Durability,
    /// Whether only the daemon's own user, who can change blobs anyway, is expected as a client. Default:
    /// true unless the daemon runs as root.
    pub single_user: Option<bool>,
    pub access: AccessConfig,
    pub quotas: QuotasConfig,
    pub policy: PolicyConfig,
    pub space: SpaceConfig,
    pub trash: TrashConfig,
    pub scrub: ScrubConfig,
    pub audit: AuditConfig,
    pub transfer: TransferConfig,
    pub metrics: MetricsConfig,
    pub credentials: CredentialsConfig,
    /// The path of the configuration file, which need not exist: `credentials.json` is beside it.
    #[serde(skip)]
    pub location: Option<PathBuf>,
    /// The socket that systemd has passed to this daemon.
    #[serde(skip)]
    pub passed_socket: Option<SocketOfUnit>,
    /// The error about a name that the name service does not know at present. Only a daemon needs the names.
    #[serde(skip)]
    pub unresolved: Option<ErrorBody>,
    /// Whether the file was there.
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

/// A group of users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SocketGroup {
    Name(String),
    Number(u32),
}

/// The section `[scrub]`: verification in the background. `docs/STORE-FORMAT.md` describes what happens to
/// damaged blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ScrubConfig {
    /// 0 turns verification off.
    #[serde(deserialize_with = "values::rate")]
    pub rate_bytes_per_second: u64,
    /// From the start of one pass over all blobs to the start of the next.
    #[serde(rename = "pass_days", deserialize_with = "values::days")]
    pub period: Duration,
    /// Pauses while the kernel's I/O pressure (time in which tasks wait for disks) is above this.
    #[serde(deserialize_with = "values::percent")]
    pub pause_above_pressure_percent: u8,
}

impl Default for ScrubConfig {
    fn default() -> Self {
        // 50 MiB/s is a tenth of what a SATA disk reads: 100 GiB in 35 minutes, at a few percent of one core.
        // The scrubber's own reads add to the pressure, so the limit is well above what they cause.
        let period = Duration::from_secs(30 * 86400);
        Self { rate_bytes_per_second: 50 << 20, period, pause_above_pressure_percent: 30 }
    }
}

/// The section `[space]`. Sizes are numbers of bytes or strings such as `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SpaceConfig {
    /// The most disk space that the store may use; unlimited if absent.
    #[serde(deserialize_with = "values::size")]
    pub quota: Option<u64>,
    /// Free space to leave on the file system; if absent, the smaller of 2 % of it and 1 GiB.
    #[serde(deserialize_with = "values::size")]
    pub min_free: Option<u64>,
    /// Eviction starts above this percentage of the quota; 95 if absent.
    #[serde(deserialize_with = "values::optional_percent")]
    pub high_watermark: Option<u8>,
    /// Eviction stops below this percentage of the quota; 85 if absent.
    #[serde(deserialize_with = "values::optional_percent")]
    pub low_watermark: Option<u8>,
    /// `never`, `pullable` (only models that can be pulled again) or `all`.
    pub evict: Eviction,
}

impl SpaceConfig {
    fn policy(self) -> SpacePolicy {
        let default = SpacePolicy::default();
        SpacePolicy {
            quota_bytes: self.quota,
            min_free_bytes: self.min_free,
            high_percent: self.high_watermark.unwrap_or(default.high_percent),
            low_percent: self.low_watermark.unwrap_or(default.low_percent),
            eviction: self.evict,
            ..default
        }
    }

    fn check(&self) -> Result<(), Refusal> {
        let SpacePolicy { high_percent, low_percent, quota_bytes, eviction, .. } = self.policy();
        if low_percent > high_percent {
            let key =
                if self.low_watermark.is_some() { "space.low_watermark" } else { "space.high_watermark" };
            let what = format!(
                "expected low_watermark to be at most high_watermark, found {low_percent} and {high_percent}"
            );
            return Err(Refusal::new(key, what));
        }
        if eviction != Eviction::Never && quota_bytes.is_none() && self.min_free.is_none() {
            let what = "expected quota or min_free beside it, found neither".to_owned();
            return Err(Refusal::new("space.evict", what));
        }
        Ok(())
    }
}

/// The section `[trash]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TrashConfig {
    /// How long a model is kept whose name another model has taken. 0 keeps none.
    #[serde(rename = "displaced", deserialize_with = "values::days")]
    keep_displaced: Duration,
}

impl Default for TrashConfig {
    fn default() -> Self {
        Self { keep_displaced: SpacePolicy::default().keep_displaced }
    }
}

/// The section `[transfer]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TransferConfig {
    /// Bytes per second of all pulls together, until `blobd limit` changes it; no limit if absent or 0.
    #[serde(deserialize_with = "values::optional_rate")]
    pub limit_rate: Option<u64>,
    /// To one host, of all pulls together; 8 if absent.
    pub max_connections: Option<usize>,
    /// After how many seconds without a byte a connection is given up; 15 if absent.
    pub stall_timeout_seconds: Option<u64>,
}

impl TransferConfig {
    /// More connections are not faster, and registries may treat them as an attack.
    const MAX_CONNECTIONS: usize = 64;
    /// No user waits longer for a byte.
    const LONGEST_STALL_SECONDS: u64 = 600;

    fn policy(self) -> TransferPolicy {
        let default = TransferPolicy::default();
        let policy = TransferPolicy {
            bytes_per_second: self.limit_rate,
            max_connections: self.max_connections.unwrap_or(default.max_connections),
            ..default
        };
        self.stall_timeout().map_or(policy, |timeout| policy.with_stall_timeout(timeout))
    }

    fn stall_timeout(self) -> Option<Duration> {
        self.stall_timeout_seconds.map(Duration::from_secs)
    }

    fn check(&self) -> Result<(), Refusal> {
        let (found, most) = (self.policy().max_connections, Self::MAX_CONNECTIONS);
        if !(1..=most).contains(&found) {
            let what = format!("expected 1 to {most}, found {found}");
            return Err(Refusal::new("transfer.max_connections", what));
        }
        let (seconds, most) = (self.stall_timeout_seconds.unwrap_or(1), Self::LONGEST_STALL_SECONDS);
        if !(1..=most).contains(&seconds) {
            let what = format!("expected 1 to {most}, found {seconds}");
            return Err(Refusal::new("transfer.stall_timeout_seconds", what));
        }
        Ok(())
    }
}

impl Config {
    /// The configuration of a command or a daemon with these paths.
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
        match read::read(&path) {
            Ok(content) => match String::from_utf8(content) {
                Ok(text) => Self::parse(&path, &text),
                Err(error) => Err(ConfigError::not_utf8(&path, &error)),
            },
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self { location: Some(path), ..Self::default() })
            }
            Err(error) => Err(ConfigError::unreadable(&path, &error)),
        }
    }

    /// `text` is the content of the file.
    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let mut config: Self =
            toml::from_str(text).map_err(|error| ConfigError::of_toml(path, text, &error))?;
        match config.check(Names::system) {
            Ok(()) => {}
            Err(refusal) if refusal.is_temporary => {
                config.unresolved = Some(refusal.body(path, text));
            }
            Err(refusal) => return Err(ConfigError::of_refusal(path, text, &refusal)),
        }
        config.policy.note_lines(|offset| error::line(text, offset));
        for placed in config.lower.iter_mut().chain(&mut config.ca_files) {
            placed.note_place(|offset| error::place(path, text, offset));
        }
        let (location, lines) = (Some(path.to_path_buf()), error::lines(text));
        Ok(Self { location, was_read: true, lines, ..config })
    }

    /// What the type of one value cannot say: values that do not agree with each other, and names of users and
    /// groups.
    fn check(&self, names: impl Fn() -> Names + Copy) -> Result<(), Refusal> {
        self.space.check()?;
        self.transfer.check()?;
        self.credentials.check()?;
        self.audit.check()?;
        stores::check_lower(&self.lower)?;
        members::check_socket_group(self.socket_group.as_ref(), names)?;
        self.access.check(names)?;
        self.policy.check(names)?;
        self.quotas.check(names)
    }

    /// Fails if the name service does not know the users and groups in the file at present.
    pub(crate) fn with_known_names(mut self) -> Result<Self, ErrorBody> {
        self.unresolved.take().map_or(Ok(self), Err)
    }

    /// The number of the socket's group, if the file names one. Asks the name service.
    pub(crate) fn socket_gid(&self) -> Result<Option<u32>, ErrorBody> {
        let path = self.location.as_deref().unwrap_or_else(|| Path::new(""));
        let gid = self.socket_group.as_ref().map(|group| members::socket_gid(group, Names::system));
        gid.transpose().map_err(|refusal| refusal.body(path, ""))
    }

    /// Who has which rights. Asks the name service.
    pub(crate) fn access(&self) -> Access {
        self.access.access(self.location.as_deref())
    }

    /// How much may be charged to each user. Asks the name service if there are quotas.
    pub(crate) fn quotas(&self) -> Quotas {
        self.quotas.quotas()
    }

    /// Which models are allowed to whom. Asks the name service if there are rules.
    pub(crate) fn policy(&self) -> Policy {
        self.policy.policy(self.location.as_deref())
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

    /// Whether the socket is meant for other users too.
    fn is_shared(&self) -> bool {
        match &self.passed_socket {
            Some(passed) => passed.mode & 0o022 != 0,
            None => self.socket_group.is_some() || self.socket_mode.is_some_and(|mode| mode & 0o077 != 0),
        }
    }

    pub(crate) fn scrub_policy(&self) -> ScrubPolicy {
        let ScrubConfig { rate_bytes_per_second, period, pause_above_pressure_percent } = self.scrub;
        ScrubPolicy {
            bytes_per_second: rate_bytes_per_second,
            period,
            max_pressure_percent: pause_above_pressure_percent,
        }
    }

    pub(crate) fn transfer_policy(&self) -> TransferPolicy {
        self.transfer.policy()
    }

    pub(crate) fn registry_policy(&self) -> RegistryPolicy {
        let mirrors = self.mirrors.iter().map(|(host, bases)| (host.as_str().to_owned(), bases.to_vec()));
        RegistryPolicy {
            mirrors: mirrors.collect(),
            insecure: self.insecure_registries.iter().map(|host| host.as_str().to_owned()).collect(),
            ca_files: stores::paths(&self.ca_files),
            credentials: self.credentials.policy(self.location.as_deref()),
            retry: RetryPolicy::default(),
            stall_timeout: self.transfer.stall_timeout(),
        }
    }

    /// The hosts that have mirrors or are contacted over plain HTTP.
    pub(crate) fn registry_hosts(&self) -> impl Iterator<Item = &str> {
        self.mirrors.keys().chain(&self.insecure_registries).map(Host::as_str)
    }

    /// The file of `blobd login`.
    pub(crate) fn credential_file(&self) -> Result<CredentialFile, ErrorBody> {
        let file = self.credentials.file(self.location.as_deref());
        file.ok_or_else(|| no_home("the file of credentials", "give --config"))
    }
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
        assert_eq!(group("socket_group = \"models\""), Ok(Some(SocketGroup::Name("models".to_owned()))));
        assert_eq!(group("socket_group = 7"), Ok(Some(SocketGroup::Number(7))));
        assert_eq!(group("socket_group = \"7\""), Ok(Some(SocketGroup::Number(7))));
        assert!(group("socket_group = \"\"").is_err() && group("socket_group = \"a:b\"").is_err());
    }

    #[test]
    fn missing_file_is_refused_if_it_was_given() {
        assert!(Config::load(Some(Path::new("/nonexistent/config.toml"))).is_err());
    }

    #[test]
    fn scrub_is_on_by_default_and_can_be_turned_off() {
        let policy = |text: &str| toml::from_str::<Config>(text).unwrap().scrub_policy();
        assert_eq!(policy("").bytes_per_second, 50 << 20);
        assert_eq!(policy("").period, Duration::from_secs(30 * 86400));
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = 0").bytes_per_second, 0);
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = \"50MB\"").bytes_per_second, 50_000_000);
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = \"1 MiB/s\"").bytes_per_second, 1 << 20);
        assert_eq!(policy("[scrub]\npass_days = 7"), policy("[scrub]\npass_days = \"1 week\""));
        assert!(toml::from_str::<Config>("[scrub]\nrate = 1").is_err());
    }

    #[test]
    fn space_is_read_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load(Some(&path)).map_err(|error| error.to_string())
        };
        let config =
            load("durability = \"fsync\"\n[space]\nquota = \"2 GiB\"\nevict = \"pullable\"").unwrap();
        let options = config.store_options();
        assert_eq!(options.durability, Durability::Fsync);
        assert_eq!(options.space.quota_bytes, Some(2 << 30));
        assert_eq!(options.space.low_bytes(), Some((2 << 30) / 100 * 85 + (2 << 30) % 100 * 85 / 100));
        for (text, what) in [
            ("[space]\nevict = \"all\"", "expected quota or min_free beside it"),
            ("[space]\nquota = 1\nlow_watermark = 96", "expected low_watermark to be at most high_watermark"),
            ("[space]\nquota = \"much\"", "a size such as"),
        ] {
            assert!(load(text).unwrap_err().contains(what), "{text}");
        }
    }

    #[test]
    fn transfer_is_read_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load(Some(&path)).map_err(|error| error.to_string())
        };
        let policy = load("").unwrap().transfer_policy();
        assert_eq!((policy.bytes_per_second, policy.max_connections), (None, 8));
        let text = "[transfer]\nlimit_rate = \"20MB\"\nmax_connections = 64";
        let policy = load(text).unwrap().transfer_policy();
        assert_eq!((policy.bytes_per_second, policy.max_connections), (Some(20_000_000), 64));
        for (text, what) in [
            ("[transfer]\nmax_connections = 0", "expected 1 to 64, found "),
            ("[transfer]\nmax_connections = 65", "expected 1 to 64, found "),
            ("[transfer]\nlimit_rate = \"fast\"", "a rate such as"),
            ("[transfer]\nlimit = 1", "unknown key"),
        ] {
            assert!(load(text).unwrap_err().contains(what), "{text}");
        }
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
}
