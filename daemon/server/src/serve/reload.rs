//! Reads the configuration again while the daemon runs.

use std::sync::Arc;

use blobd_client::paths::GivenPaths;
use blobd_client::protocol::configuration::{AppliedBy, Configuration, Setting, differences};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::RegistryClient;
use blobd_store::scrub::{Scrubber, Verdict};

use super::effective;
use crate::audit::reload_record;
use crate::config::{Config, ConfigError};
use crate::embedded::{registry_policy, start_error};
use crate::names::Names;
use crate::state::Daemon;
use crate::verb_log;

/// The configuration that a daemon uses, and what depends on it.
pub(super) struct Reloader {
    paths: GivenPaths,
    daemon: Arc<Daemon>,
    config: Config,
    /// `None` after the daemon has stopped.
    scrubber: Option<Scrubber>,
}

impl Reloader {
    /// Starts the verification in the background.
    pub(super) fn start(paths: &GivenPaths, daemon: &Arc<Daemon>, config: Config) -> Result<Self, ErrorBody> {
        let given = effective::given(paths, &config)?;
        daemon.set_access(config.access());
        daemon.set_quotas(config.quotas());
        daemon.set_policy(config.policy());
        daemon.set_configuration(config.settings(&given));
        daemon.metrics.events.configuration_read(true);
        let scrubber = Some(start_scrubber(daemon, &config)?);
        Ok(Self { paths: paths.clone(), daemon: Arc::clone(daemon), config, scrubber })
    }

    /// Stops the verification.
    pub(super) fn stop(&mut self) {
        self.scrubber = None;
    }

    /// Uses what has changed in the configuration file, and logs each change. After an error everything stays as it
    /// was. Pulls and other requests that are running end with the settings that they began with.
    pub(super) fn reload(&mut self) {
        let reloaded = self.try_reload();
        self.daemon.metrics.events.configuration_read(reloaded.is_ok());
        match reloaded.as_deref() {
            Ok([]) => tracing::info!("SIGHUP: the configuration has not changed"),
            Ok([_]) => tracing::info!("SIGHUP: the configuration was reloaded: 1 change"),
            Ok(changes) => {
                tracing::info!("SIGHUP: the configuration was reloaded: {} changes", changes.len());
            }
            // With its hint.
            Err(error) => tracing::error!("SIGHUP: the configuration stays as it is: {error}"),
        }
        self.daemon.audit.record(reload_record(reloaded.as_deref()));
    }

    /// Returns the settings that differ, before and after.
    fn try_reload(&mut self) -> Result<Vec<(Setting, Setting)>, ErrorBody> {
        Names::system().refresh();
        let mut read = Config::load_for(&self.paths)?.with_known_names()?;
        read.passed_socket.clone_from(&self.config.passed_socket);
        let running = self.daemon.configuration();
        read.check_root(&read.root_for(&self.paths)?).map_err(ConfigError::body)?;
        let found = read.settings(&effective::given(&self.paths, &read)?);
        self.apply(read.with_fixed_of(&self.config))?;
        report_changes(&running, &found);
        Ok(differences(&running, &found).map(|(old, new)| (old.clone(), new.clone())).collect())
    }

    /// What can fail comes first.
    fn apply(&mut self, config: Config) -> Result<(), ErrorBody> {
        let registry =
            RegistryClient::new(&registry_policy(&config)).map_err(|error| start_error(&config, error))?;
        let settings = config.settings(&effective::given(&self.paths, &config)?);
        let daemon = Arc::clone(&self.daemon);
        let refused = |error| ErrorBody::new(ErrorCode::Internal, error);
        daemon.store.ledger().set_space_policy(config.store_options().space).map_err(refused)?;
        daemon.set_access(config.access());
        daemon.set_quotas(config.quotas());
        daemon.set_policy(config.policy());
        daemon.set_registry(registry);
        let transfers = config.transfer_policy();
        daemon.transfers.set_policy(transfers);
        // Otherwise a limit that an administrator has set since stays.
        if transfers.bytes_per_second != self.config.transfer_policy().bytes_per_second {
            daemon.transfers.limit.set(transfers.bytes_per_second);
        }
        if config.scrub != self.config.scrub && self.scrubber.is_some() {
            self.stop();
            self.scrubber = Some(start_scrubber(&daemon, &config)?);
        }
        daemon.set_configuration(settings);
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
