//! Where things are, and the configuration file.

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

/// The configuration file's content. Everything in it is optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The store's directory.
    pub root: Option<PathBuf>,
    /// The daemon's socket.
    pub socket: Option<PathBuf>,
    /// A registry's host and the base URLs to use in its place, in this order.
    pub mirrors: BTreeMap<String, OneOrMore>,
    /// Registries, as `HOST:PORT`, that are spoken to over plain HTTP.
    pub insecure_registries: Vec<String>,
    /// PEM files with certificate authorities to trust beside the machine's own.
    pub ca_files: Vec<PathBuf>,
    /// How the content of new blobs is made durable: `auto`, `fsync` or `syncfs`.
    pub durability: Durability,
    /// Whether clients are meant to be of the daemon's own user, who could change blobs. By
    /// default that is so unless the daemon runs as root.
    pub single_user: Option<bool>,
    /// How much of the disk the store may take.
    pub space: SpaceConfig,
    /// How the daemon verifies in the background.
    pub scrub: ScrubConfig,
    /// How much of the network pulls may take.
    pub transfer: TransferConfig,
    /// How credentials of registries are found, and where they may go.
    pub credentials: CredentialsConfig,
    /// The file this is from, or would be from: credentials are beside it.
    #[serde(skip)]
    pub location: Option<PathBuf>,
}

/// A text, or a list of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a URL or a list of URLs expected")]
pub(crate) enum OneOrMore {
    /// One.
    One(String),
    /// Several.
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

/// The background verification. `docs/STORE-FORMAT.md` says what becomes of damaged blobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ScrubConfig {
    /// The most bytes that are read per second; 0 turns it off.
    pub rate_bytes_per_second: u64,
    /// How many days after one pass over all blobs began the next one begins.
    pub pass_days: u32,
    /// It pauses while tasks wait for disks in more than so many percent of the time.
    pub pause_above_pressure_percent: u8,
}

impl Default for ScrubConfig {
    fn default() -> Self {
        // A tenth of what a SATA disk reads: 100 GiB in 35 minutes, at a few percent of one core.
        // The scrubber's own waiting is part of the pressure, so its limit is well above that.
        Self { rate_bytes_per_second: 50 << 20, pass_days: 30, pause_above_pressure_percent: 30 }
    }
}

/// The section `[space]`. Sizes are numbers of bytes or texts like `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SpaceConfig {
    /// The most the store may take on disk; only the disk limits it if absent.
    #[serde(deserialize_with = "size::deserialize")]
    pub quota: Option<u64>,
    /// What others are left of the file system; if absent, the smaller of a fiftieth of it and 1 GiB.
    #[serde(deserialize_with = "size::deserialize")]
    pub min_free: Option<u64>,
    /// Eviction begins above this percentage of the quota; 95 if absent.
    pub high_watermark: Option<u8>,
    /// Eviction ends below this percentage of the quota; 85 if absent.
    pub low_watermark: Option<u8>,
    /// Which models may be evicted: `never`, those that are `pullable` again, or `all`.
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
                "space: watermarks {low_percent} and {high_percent}, percentages expected, the low one first"
            ));
        }
        if eviction != Eviction::Never && quota_bytes.is_none() && self.min_free.is_none() {
            return Err("space: eviction without a limit; set quota or min_free".to_owned());
        }
        Ok(())
    }
}

/// The section `[transfer]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TransferConfig {
    /// The most bytes per second of all pulls together, until `blobd limit` says otherwise; no limit
    /// if absent or 0.
    #[serde(deserialize_with = "size::deserialize")]
    pub limit_rate: Option<u64>,
    /// The most connections to one host, of all pulls together; 8 if absent.
    pub max_connections: Option<usize>,
}

impl TransferConfig {
    /// More bring nothing, and registries take them for an attack.
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

/// The configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ConfigError {
    /// It cannot be read.
    #[error("{}: cannot read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no TOML, or has a key that does not exist.
    #[error("{}: {source}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<toml::de::Error>,
    },
    /// It says something that makes no sense.
    #[error("{}: {what}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

impl Config {
    /// Reads the file that the user named, or the default one if there is one.
    ///
    /// # Errors
    /// [`ConfigError`]; a default file that is not there is no error.
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

    /// How the store is opened.
    #[must_use]
    pub(crate) fn store_options(&self) -> StoreOptions {
        StoreOptions { durability: self.durability, space: self.space.policy(), ..StoreOptions::default() }
    }

    /// Whether clients are meant to be of the daemon's own user.
    #[must_use]
    pub(crate) fn is_single_user(&self) -> bool {
        self.single_user.unwrap_or_else(|| !rustix::process::geteuid().is_root())
    }

    /// How the daemon verifies in the background.
    #[must_use]
    pub(crate) fn scrub_policy(&self) -> ScrubPolicy {
        let ScrubConfig { rate_bytes_per_second, pass_days, pause_above_pressure_percent } = self.scrub;
        ScrubPolicy {
            bytes_per_second: rate_bytes_per_second,
            period: Duration::from_secs(u64::from(pass_days) * 86400),
            max_pressure_percent: pause_above_pressure_percent,
        }
    }

    /// How files are transferred.
    #[must_use]
    pub(crate) fn transfer_policy(&self) -> TransferPolicy {
        self.transfer.policy()
    }

    /// How registries are reached.
    #[must_use]
    pub(crate) fn registry_policy(&self) -> RegistryPolicy {
        RegistryPolicy {
            mirrors: self.mirrors.iter().map(|(host, bases)| (host.clone(), bases.to_vec())).collect(),
            insecure: self.insecure_registries.clone(),
            ca_files: self.ca_files.clone(),
            credentials: self.credentials.policy(self.location.as_deref()),
            retry: RetryPolicy::default(),
        }
    }

    /// Where blobd keeps credentials of its own.
    #[must_use]
    pub(crate) fn credential_file(&self) -> CredentialFile {
        self.credentials.file(self.location.as_deref())
    }
}

/// Where things are unless the user says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Defaults {
    /// The store's directory.
    pub root: PathBuf,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The configuration file.
    pub config: PathBuf,
}

impl Defaults {
    /// The system's for root, the user's own for everyone else.
    #[must_use]
    pub(crate) fn of_user() -> Self {
        if rustix::process::geteuid().is_root() { Self::system() } else { Self::user() }
    }

    /// Those of the system service.
    #[must_use]
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
            // Its place is the client library's business: both must look at the same one.
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
    fn named_file_must_be_there() {
        assert!(Config::load(Some(Path::new("/nonexistent/config.toml"))).is_err());
    }

    #[test]
    fn scrub_is_on_and_can_be_turned_off() {
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
            ("[space]\nquota = 1\nlow_watermark = 96", "the low one first"),
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
