//! The configuration file, and the default paths.

mod credentials;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

pub(crate) use self::credentials::CredentialsConfig;
use blobd_registry::credentials::CredentialFile;
use blobd_registry::{RegistryPolicy, RetryPolicy};
use blobd_store::scrub::ScrubPolicy;
use blobd_store::{Durability, Eviction, SpacePolicy, StoreOptions};

use crate::size;
use crate::transfer::TransferPolicy;

/// The content of the configuration file. All keys are optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The store's directory.
    pub root: Option<PathBuf>,
    pub socket: Option<PathBuf>,
    /// For a registry's host, the base URLs to use instead, in this order.
    pub mirrors: BTreeMap<String, OneOrMore>,
    /// Registries, as `HOST:PORT`, that are used over plain HTTP.
    pub insecure_registries: Vec<String>,
    /// PEM files with certificate authorities to trust in addition to the system's.
    pub ca_files: Vec<PathBuf>,
    /// How the content of new blobs is made durable: `auto`, `fsync` or `syncfs`.
    pub durability: Durability,
    /// Whether only the daemon's own user, who can change blobs anyway, is expected as a client. Default:
    /// true unless the daemon runs as root.
    pub single_user: Option<bool>,
    pub space: SpaceConfig,
    pub scrub: ScrubConfig,
    pub transfer: TransferConfig,
    pub credentials: CredentialsConfig,
    /// The path of the configuration file, which need not exist: `credentials.json` is beside it.
    #[serde(skip)]
    pub location: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a URL or a list of URLs expected")]
pub(crate) enum OneOrMore {
    One(String),
    Many(Vec<String>),
}

impl OneOrMore {
    fn to_vec(&self) -> Vec<String> {
        match self {
            Self::One(only) => vec![only.clone()],
            Self::Many(all) => all.clone(),
        }
    }
}

/// The section `[scrub]`: verification in the background. `docs/STORE-FORMAT.md` describes what happens to
/// damaged blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ScrubConfig {
    /// 0 turns verification off.
    pub rate_bytes_per_second: u64,
    /// Days from the start of one pass over all blobs to the start of the next.
    pub pass_days: u32,
    /// Pauses while the kernel's I/O pressure (time in which tasks wait for disks) is above this.
    pub pause_above_pressure_percent: u8,
}

impl Default for ScrubConfig {
    fn default() -> Self {
        // 50 MiB/s is a tenth of what a SATA disk reads: 100 GiB in 35 minutes, at a few percent of one core.
        // The scrubber's own reads add to the pressure, so the limit is well above what they cause.
        Self { rate_bytes_per_second: 50 << 20, pass_days: 30, pause_above_pressure_percent: 30 }
    }
}

/// The section `[space]`. Sizes are numbers of bytes or strings such as `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SpaceConfig {
    /// The most disk space that the store may use; unlimited if absent.
    #[serde(deserialize_with = "size::deserialize")]
    pub quota: Option<u64>,
    /// Free space to leave on the file system; if absent, the smaller of 2 % of it and 1 GiB.
    #[serde(deserialize_with = "size::deserialize")]
    pub min_free: Option<u64>,
    /// Eviction starts above this percentage of the quota; 95 if absent.
    pub high_watermark: Option<u8>,
    /// Eviction stops below this percentage of the quota; 85 if absent.
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
        }
    }

    fn check(&self) -> Result<(), String> {
        let SpacePolicy { high_percent, low_percent, quota_bytes, eviction, .. } = self.policy();
        if high_percent > 100 || low_percent > high_percent {
            return Err(format!(
                "space: low_watermark {low_percent} and high_watermark {high_percent}: two percentages expected, \
                 the low one not above the high one"
            ));
        }
        if eviction != Eviction::Never && quota_bytes.is_none() && self.min_free.is_none() {
            return Err("space: evict is set without a limit; set quota or min_free too".to_owned());
        }
        Ok(())
    }
}

/// The section `[transfer]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TransferConfig {
    /// Bytes per second of all pulls together, until `blobd limit` changes it; no limit if absent or 0.
    #[serde(deserialize_with = "size::deserialize")]
    pub limit_rate: Option<u64>,
    /// To one host, of all pulls together; 8 if absent.
    pub max_connections: Option<usize>,
}

impl TransferConfig {
    /// More connections are not faster, and registries may treat them as an attack.
    const MAX_CONNECTIONS: usize = 64;

    fn policy(self) -> TransferPolicy {
        let default = TransferPolicy::default();
        TransferPolicy {
            bytes_per_second: self.limit_rate,
            max_connections: self.max_connections.unwrap_or(default.max_connections),
            ..default
        }
    }

    fn check(&self) -> Result<(), String> {
        let (found, most) = (self.policy().max_connections, Self::MAX_CONNECTIONS);
        if (1..=most).contains(&found) {
            return Ok(());
        }
        Err(format!("transfer: max_connections {found}, 1 to {most} expected"))
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ConfigError {
    #[error("{}: cannot read: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}", path.display())]
    Toml { path: PathBuf, source: Box<toml::de::Error> },
    #[error("{}: {what}", path.display())]
    Value { path: PathBuf, what: String },
}

impl Config {
    /// Reads the given file, or the default one. The default file may be missing.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let path = named.map_or_else(|| Defaults::of_user().config, Path::to_path_buf);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self { location: Some(path), ..Self::default() });
            }
            Err(source) => return Err(ConfigError::Io { path, source }),
        };
        let config: Self = match toml::from_str(&text) {
            Ok(config) => config,
            Err(source) => return Err(ConfigError::Toml { path, source: Box::new(source) }),
        };
        let checked = config.space.check().and_then(|()| config.transfer.check());
        match checked.and_then(|()| config.credentials.check()) {
            Ok(()) => Ok(Self { location: Some(path), ..config }),
            Err(what) => Err(ConfigError::Value { path, what }),
        }
    }

    pub(crate) fn store_options(&self) -> StoreOptions {
        StoreOptions { durability: self.durability, space: self.space.policy(), ..StoreOptions::default() }
    }

    pub(crate) fn is_single_user(&self) -> bool {
        self.single_user.unwrap_or_else(|| !rustix::process::geteuid().is_root())
    }

    pub(crate) fn scrub_policy(&self) -> ScrubPolicy {
        let ScrubConfig { rate_bytes_per_second, pass_days, pause_above_pressure_percent } = self.scrub;
        ScrubPolicy {
            bytes_per_second: rate_bytes_per_second,
            period: Duration::from_secs(u64::from(pass_days) * 86400),
            max_pressure_percent: pause_above_pressure_percent,
        }
    }

    pub(crate) fn transfer_policy(&self) -> TransferPolicy {
        self.transfer.policy()
    }

    pub(crate) fn registry_policy(&self) -> RegistryPolicy {
        RegistryPolicy {
            mirrors: self.mirrors.iter().map(|(host, bases)| (host.clone(), bases.to_vec())).collect(),
            insecure: self.insecure_registries.clone(),
            ca_files: self.ca_files.clone(),
            credentials: self.credentials.policy(self.location.as_deref()),
            retry: RetryPolicy::default(),
        }
    }

    /// The file of `blobd login`.
    pub(crate) fn credential_file(&self) -> CredentialFile {
        self.credentials.file(self.location.as_deref())
    }
}

/// Default paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Defaults {
    /// The store's directory.
    pub root: PathBuf,
    pub socket: PathBuf,
    pub config: PathBuf,
}

impl Defaults {
    /// The system's paths for root, the user's own for other users.
    pub(crate) fn of_user() -> Self {
        if rustix::process::geteuid().is_root() { Self::system() } else { Self::user() }
    }

    pub(crate) fn system() -> Self {
        Self {
            root: "/var/lib/blobd".into(),
            socket: "/run/blobd/blobd.sock".into(),
            config: "/etc/blobd/config.toml".into(),
        }
    }

    fn user() -> Self {
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        let directory = |variable: &str, fallback: &str| match std::env::var_os(variable) {
            Some(path) if Path::new(&path).is_absolute() => PathBuf::from(path),
            _ => home.join(fallback),
        };
        Self {
            root: directory("XDG_DATA_HOME", ".local/share").join("blobd"),
            // From the client library, because both must use the same path.
            socket: blobd_client::client::default_sockets().pop().unwrap_or_default(),
            config: directory("XDG_CONFIG_HOME", ".config").join("blobd/config.toml"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_with_an_unknown_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "rooot = \"/x\"").unwrap();
        let error = Config::load(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("rooot"), "{error}");
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
            ("[space]\nevict = \"all\"", "without a limit"),
            ("[space]\nquota = 1\nlow_watermark = 96", "the low one not above"),
            ("[space]\nquota = \"much\"", "not a size"),
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
            ("[transfer]\nmax_connections = 0", "1 to 64 expected"),
            ("[transfer]\nmax_connections = 65", "1 to 64 expected"),
            ("[transfer]\nlimit_rate = \"fast\"", "not a size"),
            ("[transfer]\nlimit = 1", "unknown field"),
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
}
