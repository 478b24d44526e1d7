//! The settings that depend on options, on the environment and on the machine.

use std::collections::BTreeMap;

use blobd_client::paths::GivenPaths;
use blobd_client::protocol::configuration::{Configuration, SettingOrigin};
use blobd_client::protocol::error::ErrorBody;
use blobd_registry::RegistryClient;
use serde_json::json;

use super::endpoint::{Admitted, SYSTEM_GROUP, default_path};
use crate::config::{Config, ConfigError, Given, SocketOfUnit, mode, path};
use crate::embedded::{registry_policy, start_error};

/// Says that systemd has passed a socket.
const PASSED_SOCKET_VARIABLE: &str = "LISTEN_FDS";

/// Every setting as a daemon with these paths would use it. Refuses what such a daemon would refuse at its start:
/// `systemctl reload` runs `blobd config show` first.
pub(crate) fn settings_of_daemon(paths: &GivenPaths, config: &Config) -> Result<Configuration, ErrorBody> {
    if let Ok(root) = config.root_for(paths) {
        config.check_root(&root).map_err(ConfigError::body)?;
    }
    RegistryClient::new(&registry_policy(config)).map_err(|error| start_error(config, error))?;
    Ok(config.settings(&given(paths, config)?))
}

/// The values that do not come from the configuration file alone.
pub(super) fn given(paths: &GivenPaths, config: &Config) -> Result<BTreeMap<&'static str, Given>, ErrorBody> {
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
