//! The settings of the running daemon: from the configuration file, options, the environment and the machine. The file is
//! read again while the daemon runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_client::paths::GivenPaths;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::upkeep::{AppliedBy, Configuration, Setting, SettingOrigin, differences};
use blobd_registry::RegistryClient;
use blobd_store::scrub::{Scrubber, Verdict};
use serde_json::json;

use super::endpoint::{Admitted, SYSTEM_GROUP, default_path};
use crate::audit::reload_record;
use crate::config::{Config, ConfigError, Given, SocketOfUnit, mode, path};
use crate::embedded::{registry_policy, start_error};
use crate::names::Names;
use crate::state::Daemon;
use crate::verb_log;

pub(super) struct Reloader {
    paths: GivenPaths,
    daemon: Arc<Daemon>,
    config: Config,
    scrubber: Option<Scrubber>,
}

impl Reloader {
    /// Starts the verification in the background.
    pub(super) fn start(paths: &GivenPaths, daemon: &Arc<Daemon>, config: Config) -> Result<Self, ErrorBody> {
        let given = given(paths, &config)?;
        daemon.access.set(config.access());
        daemon.set_quotas(config.quotas());
        daemon.policy.set(config.policy());
        daemon.trust.set(config.trust()?);
        daemon.offer.set(config.offer()?);
        daemon.configuration.set(config.settings(&given));
        daemon.metrics.events.configuration_read(true);
        let scrubber = Some(start_scrubber(daemon, &config)?);
        Ok(Self { paths: paths.clone(), daemon: Arc::clone(daemon), config, scrubber })
    }

    pub(super) fn stop(&mut self) {
        self.scrubber = None;
    }

    /// Applies what has changed in the configuration file, and logs each change. After an error everything stays as it
    /// was. Running requests end with the settings that they began with.
    pub(super) fn reload(&mut self) {
        let reloaded = self.try_reload();
        self.daemon.metrics.events.configuration_read(reloaded.is_ok());
        match reloaded.as_deref() {
            Ok([]) => tracing::info!("SIGHUP: the configuration has not changed"),
            Ok([_]) => tracing::info!("SIGHUP: the configuration was reloaded: 1 change"),
            Ok(changes) => {
                tracing::info!("SIGHUP: the configuration was reloaded: {} changes", changes.len());
            }
            // The error includes its hint.
            Err(error) => tracing::error!("SIGHUP: the configuration stays as it is: {error}"),
        }
        self.daemon.audit.record(reload_record(reloaded.as_deref()));
    }

    /// Returns the settings that differ, before and after.
    fn try_reload(&mut self) -> Result<Vec<(Setting, Setting)>, ErrorBody> {
        Names::system().refresh();
        let mut read = Config::load_for(&self.paths)?.with_known_names()?;
        read.passed_socket.clone_from(&self.config.passed_socket);
        let running = self.daemon.configuration.get();
        read.check_root(&read.root_for(&self.paths)?).map_err(ConfigError::body)?;
        let found = read.settings(&given(&self.paths, &read)?);
        self.apply(read.with_fixed_of(&self.config))?;
        report_changes(&running, &found);
        Ok(differences(&running, &found).map(|(old, new)| (old.clone(), new.clone())).collect())
    }

    /// Steps that can fail come first.
    fn apply(&mut self, config: Config) -> Result<(), ErrorBody> {
        let registry =
            RegistryClient::new(&registry_policy(&config)).map_err(|error| start_error(&config, error))?;
        let settings = config.settings(&given(&self.paths, &config)?);
        let (offer, trust) = (config.offer()?, config.trust()?);
        let daemon = Arc::clone(&self.daemon);
        let refused = |error| ErrorBody::new(ErrorCode::Internal, error);
        daemon.store.ledger().set_space_policy(config.store_options().space).map_err(refused)?;
        daemon.access.set(config.access());
        daemon.set_quotas(config.quotas());
        daemon.policy.set(config.policy());
        daemon.trust.set(trust);
        daemon.offer.set(offer);
        daemon.set_registry(registry);
        let transfers = config.transfer_policy();
        daemon.transfers.set_policy(transfers);
        // Otherwise a limit that an administrator has set meanwhile stays.
        if transfers.bytes_per_second != self.config.transfer_policy().bytes_per_second {
            daemon.transfers.limit.set(transfers.bytes_per_second);
        }
        if config.scrub != self.config.scrub && self.scrubber.is_some() {
            self.stop();
            self.scrubber = Some(start_scrubber(&daemon, &config)?);
        }
        daemon.configuration.set(settings);
        self.config = config;
        Ok(())
    }
}

fn report_changes(running: &Configuration, found: &Configuration) {
    for (old, new) in differences(running, found) {
        let (key, old, new, applied_by) = (&new.key, &old.value, &new.value, new.applied_by);
        match applied_by {
            AppliedBy::Restart => {
                tracing::warn!("configuration: {key}: {new} takes effect when the daemon is restarted");
            }
            _ => tracing::info!("configuration: {key}: {old} before, {new} now"),
        }
    }
}

fn start_scrubber(daemon: &Arc<Daemon>, config: &Config) -> Result<Scrubber, ErrorBody> {
    let busy = Arc::clone(daemon);
    let audit = Arc::clone(&daemon.audit);
    let observe = move |blob, verdict: &Verdict| {
        if let Some((reason, is_quarantined)) = verdict.damage() {
            audit.record(verb_log::scrub_record(blob, reason, is_quarantined));
        }
    };
    let store = Arc::clone(&daemon.store);
    let scrubber = Scrubber::start(store, config.scrub_policy(), move || busy.is_busy(), observe);
    scrubber.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))
}

/// Says that systemd has passed a socket.
const PASSED_SOCKET_VARIABLE: &str = "LISTEN_FDS";

/// Every setting as a daemon with these paths would use it. Refuses what such a daemon would refuse at its start:
/// `systemctl reload` runs `blobd config show` first.
pub(crate) fn settings_of_daemon(paths: &GivenPaths, config: &Config) -> Result<Configuration, ErrorBody> {
    if let Ok(root) = config.root_for(paths) {
        config.check_root(&root).map_err(ConfigError::body)?;
    }
    RegistryClient::new(&registry_policy(config)).map_err(|error| start_error(config, error))?;
    config.offer()?;
    config.trust()?;
    Ok(config.settings(&given(paths, config)?))
}

/// The values that do not come from the configuration file alone.
fn given(paths: &GivenPaths, config: &Config) -> Result<BTreeMap<&'static str, Given>, ErrorBody> {
    let mut given = BTreeMap::new();
    let mut by_default = |key, value| {
        given.insert(key, Given { value, origin: SettingOrigin::Default, place: None });
    };
    if config.root.is_none() {
        by_default("root", path(&config.root_for(paths)?));
    }
    if config.socket.is_none() {
        by_default("socket", path(&default_path()));
    }
    let admitted = Admitted::by(config)?;
    if config.socket_group.is_none() && admitted.gid.is_some() {
        by_default("socket_group", json!(SYSTEM_GROUP));
    }
    if config.socket_mode.is_none() {
        by_default("socket_mode", mode(admitted.mode));
    }
    let named_paths = [
        ("root", &paths.root, "--root", paths.root_is_from_environment.then_some("BLOBD_ROOT")),
        ("socket", &paths.socket, "--socket", paths.socket_is_from_environment.then_some("BLOBD_SOCKET")),
    ];
    for (key, named, option, variable) in named_paths {
        let Some(named) = named else { continue };
        let origin = variable.map_or(SettingOrigin::Option, |_| SettingOrigin::Environment);
        given.insert(key, Given { value: path(named), origin, place: Some(variable.unwrap_or(option)) });
    }
    if let Some(SocketOfUnit { path: socket, gid, mode: permissions }) = &config.passed_socket {
        let values =
            [("socket", path(socket)), ("socket_group", json!(gid)), ("socket_mode", mode(*permissions))];
        given.extend(values.map(|(key, value)| {
            (key, Given { value, origin: SettingOrigin::Environment, place: Some(PASSED_SOCKET_VARIABLE) })
        }));
    }
    Ok(given)
}
