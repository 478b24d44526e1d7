//! The value of every key, with defaults, and where it comes from.

use std::collections::BTreeMap;
use std::path::Path;

use blobd_client::protocol::upkeep::{Configuration, Setting, SettingOrigin};
use blobd_registry::DEFAULT_STALL_TIMEOUT;
use blobd_registry::credentials::CredentialFile;
use serde_json::{Value, json};

use super::Config;
use super::keys::{KEYS, Key};
use super::registries::headers_as_text;
use super::values::{optional_size, size_value};
use crate::user_set::NameOrNumber;

/// A value that does not come from the configuration file alone.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) value: Value,
    pub(crate) origin: SettingOrigin,
    /// The environment variable or the option.
    pub(crate) place: Option<&'static str>,
}

impl Config {
    /// The key with the file and the line where it has its value, for errors that only a use of the value finds.
    pub(crate) fn place_of(&self, key: &str) -> String {
        match self.location.as_ref().zip(self.lines.get(key)) {
            Some((file, line)) => format!("{}:{line}: {key}", file.display()),
            None => key.to_owned(),
        }
    }

    /// In the order of [`KEYS`]. `given` contains values that take precedence over the file, and defaults that depend
    /// on the machine.
    pub(crate) fn settings(&self, given: &BTreeMap<&'static str, Given>) -> Configuration {
        let values = self.values();
        let file = self.location.as_ref().filter(|_| self.was_read);
        let settings = KEYS.iter().map(|&Key { name, applied_by, .. }| {
            let setting =
                |value, origin, place| Setting { key: name.to_owned(), value, origin, place, applied_by };
            if let Some(Given { value, origin, place }) = given.get(name) {
                return setting(value.clone(), *origin, place.map(str::to_owned));
            }
            let value = values.get(name).cloned().unwrap_or_default();
            match file.zip(self.lines.get(name)) {
                Some((file, line)) => {
                    setting(value, SettingOrigin::File, Some(format!("{}:{line}", file.display())))
                }
                None => setting(value, SettingOrigin::Default, None),
            }
        });
        Configuration { file: file.map(|file| file.display().to_string()), settings: settings.collect() }
    }

    fn values(&self) -> BTreeMap<&'static str, Value> {
        let Self { space, scrub, audit, credentials, .. } = self;
        let (limits, transfer) = (space.policy(), self.transfer_policy());
        let stall_timeout = self.transfer.stall_timeout().unwrap_or(DEFAULT_STALL_TIMEOUT);
        let mirrors = self.mirrors.iter().map(|(host, bases)| (host.0.clone(), bases.value()));
        let credential_file = credentials.file(self.location.as_deref());
        let mut values = BTreeMap::from([
            ("root", optional_path(self.root.as_deref())),
            ("lower", self.lower.iter().map(|store| path(store.path())).collect()),
            ("socket", optional_path(self.socket.as_deref())),
            ("socket_group", self.socket_group.as_ref().map_or(Value::Null, group)),
            ("socket_mode", self.socket_mode.map_or(Value::Null, mode)),
            ("mirrors", mirrors.collect()),
            ("peers.urls", self.peers.urls.iter().map(|url| json!(url.0)).collect()),
            ("headers", json!(headers_as_text(&self.headers))),
            ("insecure_registries", self.insecure_registries.iter().map(|host| json!(host.0)).collect()),
            ("ca_files", self.ca_files.iter().map(|file| path(file.path())).collect()),
            ("durability", json!(self.durability.name())),
            ("single_user", json!(self.is_single_user())),
            ("trust", self.trust.value()),
            ("space.quota", optional_size(limits.quota_bytes)),
            ("space.min_free", optional_size(limits.min_free_bytes)),
            ("space.evict", json!(limits.eviction.name())),
            ("space.high_watermark", json!(limits.high_percent)),
            ("space.low_watermark", json!(limits.low_percent)),
            ("trash.displaced", days(self.trash.keep_displaced.as_secs())),
            ("scrub.rate_bytes_per_second", size_value(scrub.rate_bytes_per_second)),
            ("scrub.pass_days", days(scrub.period.as_secs())),
            ("scrub.pause_above_pressure_percent", json!(scrub.pause_above_pressure_percent)),
            ("audit.enabled", json!(audit.enabled)),
            ("audit.directory", optional_path(audit.directory.as_deref())),
            ("audit.max_bytes", size_value(audit.max_bytes)),
            ("audit.keep", json!(audit.keep)),
            ("audit.journal", json!(audit.journal)),
            ("transfer.limit_rate", optional_size(transfer.bytes_per_second)),
            ("transfer.max_connections", json!(transfer.max_connections)),
            ("transfer.stall_timeout_seconds", json!(stall_timeout.as_secs())),
            ("metrics.listen", self.metrics.listen.map_or(Value::Null, |address| json!(address.to_string()))),
            ("credentials.file", optional_path(credential_file.as_ref().map(CredentialFile::path))),
            ("credentials.use_docker_helpers", json!(credentials.use_docker_helpers)),
            ("credentials.insecure_hosts", json!(credentials.insecure_hosts)),
            ("credentials.ollama_key_hosts", json!(credentials.ollama_key_hosts)),
            ("credentials.token_services", json!(credentials.token_services)),
        ]);
        values.extend(self.access.values());
        values.extend(self.quotas.values());
        values.extend(self.policy.values());
        values.extend(self.serve.values());
        values
    }

    /// Keeps the values of `running` for all keys that need a restart.
    pub(crate) fn with_fixed_of(self, running: &Self) -> Self {
        Self {
            root: running.root.clone(),
            lower: running.lower.clone(),
            socket: running.socket.clone(),
            socket_group: running.socket_group.clone(),
            socket_mode: running.socket_mode,
            passed_socket: running.passed_socket.clone(),
            durability: running.durability,
            single_user: running.single_user,
            metrics: running.metrics,
            audit: running.audit.clone(),
            serve: self.serve.with_fixed_of(&running.serve),
            ..self
        }
    }
}

fn group(group: &NameOrNumber) -> Value {
    match group {
        NameOrNumber::Name(name) => json!(name),
        NameOrNumber::Number(gid) => json!(gid),
    }
}

pub(crate) fn mode(mode: u32) -> Value {
    json!(format!("{mode:04o}"))
}

pub(crate) fn path(path: &Path) -> Value {
    json!(path.to_string_lossy())
}

fn optional_path(given: Option<&Path>) -> Value {
    given.map_or(Value::Null, path)
}

fn days(seconds: u64) -> Value {
    if seconds.is_multiple_of(86400) { json!(seconds / 86400) } else { json!(format!("{seconds} s")) }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::differences;

    use super::*;

    fn settings(text: &str) -> Configuration {
        let given = Given { value: json!("0600"), origin: SettingOrigin::Default, place: None };
        let given = BTreeMap::from([("socket_mode", given)]);
        Config::parse(Path::new("/c.toml"), text).unwrap().settings(&given)
    }

    #[test]
    fn every_key_has_a_setting_in_the_documented_order() {
        let names: Vec<String> = settings("").settings.into_iter().map(|setting| setting.key).collect();
        let keys: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
        assert_eq!(names, keys);
        let config = Config::default();
        let mut with_value: Vec<&str> = config.values().into_keys().collect();
        with_value.sort_by_key(|name| keys.iter().position(|key| key == name));
        assert_eq!(with_value, keys);
    }

    #[test]
    fn values_that_are_printed_can_be_written_into_the_file() {
        let text = "mirrors = { \"hf.co\" = [\"http://m\"] }\nca_files = [\"/a\"]\ndurability = \"syncfs\"\n\
                    [space]\nquota = \"3221225472 B\"\nmin_free = \"1234567 B\"\nevict = \"pullable\"\n\
                    [scrub]\npass_days = \"36 hours\"\n[transfer]\nlimit_rate = \"20MB\"\n";
        let first = settings(text);
        let mut again = String::new();
        for section in ["", "access", "policy", "space", "scrub", "transfer", "credentials"] {
            again.push_str(&if section.is_empty() { String::new() } else { format!("[{section}]\n") });
            for setting in first.settings.iter().filter(|setting| !setting.value.is_null()) {
                let (of, name) = setting.key.split_once('.').unwrap_or(("", &setting.key));
                if of == section && !setting.value.is_object() {
                    again.push_str(&format!("{name} = {}\n", setting.value));
                }
            }
        }
        let again = settings(&again);
        let differing = differences(&first, &again).map(|(old, _)| old.key.as_str());
        assert_eq!(differing.collect::<Vec<_>>(), ["mirrors"], "tables are not written by this test");
        let value =
            |key: &str| first.settings.iter().find(|setting| setting.key == key).unwrap().value.clone();
        assert_eq!(value("space.quota"), json!("3 GiB"));
        assert_eq!(value("transfer.limit_rate"), json!("20 MB"));
        assert_eq!(value("space.min_free"), json!("1234567 B"));
        assert_eq!(value("mirrors"), json!({ "hf.co": ["http://m"] }));
        assert_eq!(value("scrub.pass_days"), json!("129600 s"));
    }

    #[test]
    fn values_of_the_file_have_its_line() {
        let configuration = settings("durability = \"fsync\"\n\n[space]\n# much\nquota = \"1 B\"\n");
        let place = |key: &str| {
            let setting = configuration.settings.iter().find(|setting| setting.key == key).unwrap();
            (setting.origin, setting.place.clone())
        };
        assert_eq!(place("durability"), (SettingOrigin::File, Some("/c.toml:1".to_owned())));
        assert_eq!(place("space.quota"), (SettingOrigin::File, Some("/c.toml:5".to_owned())));
        assert_eq!(place("space.evict"), (SettingOrigin::Default, None));
    }

    #[test]
    fn changes_of_the_store_and_its_socket_wait_for_a_restart() {
        let running = Config::parse(Path::new("/c"), "root = \"/a\"\nsocket_mode = \"0600\"").unwrap();
        let new = "root = \"/b\"\nsocket_mode = \"0666\"\nsingle_user = true\n[space]\nquota = '5 B'";
        let new = Config::parse(Path::new("/c"), new).unwrap().with_fixed_of(&running);
        assert_eq!((new.root.as_deref(), new.space.policy().quota_bytes), (Some(Path::new("/a")), Some(5)));
        assert_eq!((new.socket_mode, new.single_user), (Some(0o600), None));
        let changed = differences(&settings("root = \"/a\""), &settings("root = \"/b\"")).count();
        assert_eq!(changed, 1);
    }
}
