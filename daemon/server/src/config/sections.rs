//! The sections `[space]`, `[trash]`, `[scrub]`, `[transfer]`, `[audit]` and `[metrics]`. The table in [`super::keys`] says
//! what each key means.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blobd_store::scrub::ScrubPolicy;
use blobd_store::{Eviction, SpacePolicy, Store};
use blobd_store_format::size::exact_bytes;
use serde::Deserialize;

use super::Refusal;
use super::values::{self, AbsolutePath, Bytes, BytesPerSecond, Days, LoopbackAddress, Percent, Rate, Size};
use crate::audit::{LogDirectory, LogSettings, Rotation};
use crate::transfer::TransferPolicy;

/// Sizes are strings such as `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SpaceConfig {
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    quota: Option<u64>,
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    min_free: Option<u64>,
    #[serde(deserialize_with = "values::optional::<Percent, _>")]
    high_watermark: Option<u8>,
    #[serde(deserialize_with = "values::optional::<Percent, _>")]
    low_watermark: Option<u8>,
    evict: Eviction,
}

impl SpaceConfig {
    pub(super) fn policy(self) -> SpacePolicy {
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

    pub(super) fn check(&self) -> Result<(), Refusal> {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TrashConfig {
    #[serde(rename = "displaced", deserialize_with = "values::required::<Days, _>")]
    pub(super) keep_displaced: Duration,
}

impl Default for TrashConfig {
    fn default() -> Self {
        Self { keep_displaced: SpacePolicy::default().keep_displaced }
    }
}

/// Verification in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ScrubConfig {
    #[serde(deserialize_with = "values::required::<BytesPerSecond, _>")]
    pub(super) rate_bytes_per_second: u64,
    /// From the start of one pass over all blobs to the start of the next.
    #[serde(rename = "pass_days", deserialize_with = "values::required::<Days, _>")]
    pub(super) period: Duration,
    /// A percentage of the time in which tasks wait for disks: the kernel's I/O pressure.
    #[serde(deserialize_with = "values::required::<Percent, _>")]
    pub(super) pause_above_pressure_percent: u8,
}

impl Default for ScrubConfig {
    fn default() -> Self {
        // 50 MiB/s is a tenth of what a SATA disk reads: 100 GiB in 35 minutes, at a few percent of one core.
        // The scrubber's own reads add to the pressure, so the limit is well above what they cause.
        let period = Duration::from_secs(30 * 86400);
        Self { rate_bytes_per_second: 50 << 20, period, pause_above_pressure_percent: 30 }
    }
}

impl ScrubConfig {
    pub(super) const fn policy(self) -> ScrubPolicy {
        let Self { rate_bytes_per_second: bytes_per_second, period, .. } = self;
        ScrubPolicy { bytes_per_second, period, max_pressure_percent: self.pause_above_pressure_percent }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TransferConfig {
    #[serde(deserialize_with = "values::optional::<Rate, _>")]
    limit_rate: Option<u64>,
    max_connections: Option<usize>,
    stall_timeout_seconds: Option<u64>,
}

impl TransferConfig {
    pub(super) fn policy(self) -> TransferPolicy {
        let default = TransferPolicy::default();
        let policy = TransferPolicy {
            bytes_per_second: self.limit_rate,
            max_connections: self.max_connections.unwrap_or(default.max_connections),
            ..default
        };
        self.stall_timeout().map_or(policy, |timeout| policy.with_stall_timeout(timeout))
    }

    pub(super) fn stall_timeout(self) -> Option<Duration> {
        self.stall_timeout_seconds.map(Duration::from_secs)
    }

    pub(super) fn check(&self) -> Result<(), Refusal> {
        let connections = self.max_connections.map(|connections| connections as u64);
        // More connections are not faster, and registries may treat them as an attack.
        in_range("transfer.max_connections", connections, 1..=64, &number)?;
        // No user waits longer for a byte.
        in_range("transfer.stall_timeout_seconds", self.stall_timeout_seconds, 1..=600, &number)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AuditConfig {
    pub(crate) enabled: bool,
    #[serde(deserialize_with = "values::optional::<AbsolutePath, _>")]
    pub(crate) directory: Option<PathBuf>,
    #[serde(deserialize_with = "values::required::<Bytes, _>")]
    pub(super) max_bytes: u64,
    pub(super) keep: usize,
    pub(super) journal: bool,
}

impl Default for AuditConfig {
    fn default() -> Self {
        // A record has about 300 bytes: half a million records.
        Self { enabled: true, directory: None, max_bytes: 16 << 20, keep: 10, journal: false }
    }
}

impl AuditConfig {
    pub(super) fn check(&self) -> Result<(), Refusal> {
        // Smaller files would be replaced within a few records. A request for records that few files have reads whole files.
        in_range("audit.max_bytes", Some(self.max_bytes), 64 << 10..=1 << 30, &exact_bytes)?;
        // With one, a file would have little more than the longest record. A reader lists all of them.
        in_range("audit.keep", Some(self.keep as u64), 2..=10_000, &number)
    }

    /// The log that the configuration means, whether it is on or off.
    pub(crate) fn log(&self, store: &Arc<Store>) -> LogSettings {
        let directory = match &self.directory {
            Some(path) => LogDirectory::at(path, store.content().owner()),
            None => LogDirectory::in_store(store),
        };
        self.log_at(directory)
    }

    /// The log in the store, if the configuration names another place.
    pub(crate) fn log_left_in_store(&self, store: &Arc<Store>) -> Option<LogSettings> {
        self.directory.as_ref().map(|_| self.log_at(LogDirectory::in_store(store)))
    }

    const fn log_at(&self, directory: LogDirectory) -> LogSettings {
        let rotation = Rotation { max_bytes: self.max_bytes, keep: self.keep };
        LogSettings { directory, rotation, is_forwarded: self.journal }
    }
}

/// Refuses a number outside of a range, if the file has one.
pub(super) fn in_range(
    key: &'static str,
    found: Option<u64>,
    range: RangeInclusive<u64>,
    shown: &dyn Fn(u64) -> String,
) -> Result<(), Refusal> {
    let Some(wrong) = found.filter(|found| !range.contains(found)) else { return Ok(()) };
    let (least, most, wrong) = (shown(*range.start()), shown(*range.end()), shown(wrong));
    Err(Refusal::new(key, format!("expected {least} to {most}, found {wrong}")))
}

pub(super) fn number(number: u64) -> String {
    number.to_string()
}

/// Where metrics can be read besides the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MetricsConfig {
    #[serde(deserialize_with = "values::optional::<LoopbackAddress, _>")]
    pub(crate) listen: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("c"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn scrub_is_on_by_default_and_can_be_turned_off() {
        let policy = |text: &str| parse(text).unwrap().scrub.policy();
        assert_eq!(policy("").bytes_per_second, 50 << 20);
        assert_eq!(policy("").period, Duration::from_secs(30 * 86400));
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = 0").bytes_per_second, 0);
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = \"50MB\"").bytes_per_second, 50_000_000);
        assert_eq!(policy("[scrub]\nrate_bytes_per_second = \"1 MiB/s\"").bytes_per_second, 1 << 20);
        assert_eq!(policy("[scrub]\npass_days = 7"), policy("[scrub]\npass_days = \"1 week\""));
        assert!(parse("[scrub]\nrate = 1").is_err());
    }

    #[test]
    fn space_is_read_and_checked() {
        let config =
            parse("durability = \"fsync\"\n[space]\nquota = \"2 GiB\"\nevict = \"pullable\"").unwrap();
        let options = config.store_options();
        assert_eq!(options.durability, blobd_store::Durability::Fsync);
        assert_eq!(options.space.quota_bytes, Some(2 << 30));
        assert_eq!(options.space.low_bytes(), Some((2 << 30) / 100 * 85 + (2 << 30) % 100 * 85 / 100));
        for (text, what) in [
            ("[space]\nevict = \"all\"", "expected quota or min_free beside it"),
            (
                "[space]\nquota = '1 B'\nlow_watermark = 96",
                "expected low_watermark to be at most high_watermark",
            ),
            ("[space]\nquota = \"much\"", "a size such as"),
        ] {
            assert!(parse(text).unwrap_err().contains(what), "{text}");
        }
    }

    #[test]
    fn transfer_is_read_and_checked() {
        let policy = parse("").unwrap().transfer.policy();
        assert_eq!((policy.bytes_per_second, policy.max_connections), (None, 8));
        let text = "[transfer]\nlimit_rate = \"20MB\"\nmax_connections = 64";
        let policy = parse(text).unwrap().transfer.policy();
        assert_eq!((policy.bytes_per_second, policy.max_connections), (Some(20_000_000), 64));
        for (text, what) in [
            ("[transfer]\nmax_connections = 0", "expected 1 to 64, found "),
            ("[transfer]\nmax_connections = 65", "expected 1 to 64, found "),
            ("[transfer]\nlimit_rate = \"fast\"", "a rate such as"),
            ("[transfer]\nlimit = 1", "unknown key"),
        ] {
            assert!(parse(text).unwrap_err().contains(what), "{text}");
        }
    }

    #[test]
    fn files_have_a_smallest_and_a_largest_size() {
        let check = |max_bytes| AuditConfig { max_bytes, ..AuditConfig::default() }.check();
        assert!(check(64 << 10).is_ok() && check(1 << 30).is_ok());
        for bytes in [(64 << 10) - 1, (1 << 30) + 1] {
            let refusal = format!("{:?}", check(bytes).unwrap_err());
            assert!(refusal.contains("expected 64 KiB to 1 GiB, found "), "{refusal}");
        }
    }

    #[test]
    fn only_addresses_of_loopback_are_accepted() {
        let parse = |listen: &str| super::tests::parse(&format!("[metrics]\nlisten = {listen}"));
        for listen in ["127.0.0.1:9750", "127.1.2.3:0", "[::1]:9750"] {
            let config = parse(&format!("{listen:?}")).unwrap();
            assert_eq!(config.metrics.listen.map(|address| address.to_string()).as_deref(), Some(listen));
        }
        for listen in
            ["0.0.0.0:9750", "192.168.1.2:9750", "[::]:9750", "localhost:9750", "127.0.0.1", ":9750", ""]
        {
            let error = parse(&format!("{listen:?}")).unwrap_err();
            assert!(error.contains("an address of loopback with a port"), "{listen}: {error}");
        }
        assert!(parse("9750").is_err());
    }
}
