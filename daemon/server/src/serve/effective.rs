//! The settings that depend on options, on the environment and on the machine.

use std::collections::BTreeMap;

use blobd_client::protocol::configuration::SettingOrigin;
use blobd_client::protocol::error::ErrorBody;
use serde_json::json;

use super::endpoint::{Admitted, SYSTEM_GROUP, default_path};
use super::{Global, connect};
use crate::config::{Config, Given, SocketOfUnit, mode, path};

/// Says that systemd has passed a socket.
const PASSED_SOCKET_VARIABLE: &str = "LISTEN_FDS";

/// The values that do not come from the configuration file alone.
pub(super) fn given(global: &Global, config: &Config) -> Result<BTreeMap<&'static str, Given>, ErrorBody> {
    let mut given = BTreeMap::new();
    let mut by_default = |key, value| {
        given.insert(key, Given { value, origin: SettingOrigin::Default, place: None });
    };
    if config.root.is_none() {
        by_default("root", path(&connect::root(global, config)?));
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
    let is_from = global.from_environment;
    let paths = [
        ("root", &global.root, "--root", is_from.root.then_some("BLOBD_ROOT")),
        ("socket", &global.socket, "--socket", is_from.socket.then_some("BLOBD_SOCKET")),
    ];
    for (key, named, option, variable) in paths {
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
