//! The settings of a daemon.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Response to `Route::Configuration`: the settings that the daemon uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// The path of the configuration file; absent if there is no such file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Every key of the configuration file, whether it is set or not.
    pub settings: Vec<Setting>,
}

/// The value of one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The key with its section, such as `space.quota`.
    pub key: String,
    /// The value as the configuration file would have it; `null` if the key has neither a value nor a default.
    /// Sizes are texts such as `"200 GiB"`, or numbers of bytes if they are not whole KiB.
    pub value: Value,
    /// Where the value comes from.
    pub origin: SettingOrigin,
    /// The exact place: `FILE:LINE`, the environment variable, or the option; absent for defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// What makes a changed value take effect.
    pub applied_by: AppliedBy,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SettingOrigin {
    /// The key is not set.
    Default,
    /// The configuration file.
    File,
    /// An environment variable.
    Environment,
    /// An option of the command line.
    Option,
}

/// What makes a running daemon use a changed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AppliedBy {
    /// SIGHUP, as `systemctl reload` sends it.
    Reload,
    /// A restart of the daemon.
    Restart,
}

/// The settings whose values differ, as pairs of `old` and `new`.
pub fn differences<'s>(
    old: &'s Configuration,
    new: &'s Configuration,
) -> impl Iterator<Item = (&'s Setting, &'s Setting)> {
    let pairs = new
        .settings
        .iter()
        .filter_map(|new| old.settings.iter().find(|old| old.key == new.key).map(|old| (old, new)));
    pairs.filter(|(old, new)| old.value != new.value)
}
