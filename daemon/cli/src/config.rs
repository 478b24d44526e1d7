//! `blobd config show`

use std::path::Path;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, load_settings, print_result};
use blobd_cli_common::output::printable;
use blobd_client::paths::{SYSTEM_ROOT, default_root};
use blobd_client::protocol::upkeep::{AppliedBy, Configuration, Setting, SettingOrigin, differences};
use blobd_client::sockets::SYSTEM_SOCKET;
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;

use crate::{Client, ErrorBody};

/// Check the configuration, and show every setting
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd config show
  blobd config show --config new.toml          check a file before it is used")]
pub(super) struct Params {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    Show(ShowParams),
}

/// Show every setting, its value, where it comes from, and what a running daemon uses instead
#[derive(Debug, Args)]
#[command(
    after_help = "A configuration that is not valid is an error with its line and column, and exit code 2.
A daemon reads it at its start and at SIGHUP (`systemctl reload blobd`).

Examples:
  blobd config show
  blobd config show --config new.toml          check a file before it is used
  blobd config show --json | jq -r '.settings[] | select(.key == \"space.quota\").value'"
)]
struct ShowParams {}

#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    configuration: Configuration,
    /// `None` without a daemon on the configured socket.
    daemon: Option<Running>,
    /// `None` if commands use a daemon or a store with these settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<SystemDaemon>,
    /// Why the system's daemon does not answer, while commands use a store with these settings.
    #[serde(skip)]
    silent_system: Option<String>,
}

/// Set if commands of this user use the system's daemon.
#[derive(Debug, Serialize)]
struct SystemDaemon {
    socket: &'static str,
    /// Why it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct Running {
    socket: String,
    /// The configuration file that it has read; `None` if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// The settings that the daemon uses instead.
    differences: Vec<Setting>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let ConfigCommand::Show(ShowParams {}) = params.command;
    let settings = load_settings(global)?;
    let configuration = settings.of_daemon(&global.paths)?;
    let socket = configuration.settings.iter().find(|setting| setting.key == "socket");
    let socket = socket.and_then(|setting| setting.value.as_str()).unwrap_or_default();
    let daemon = running(Path::new(socket), &configuration)?;
    // A file that is named may be meant for another machine: only a daemon that reads it is compared.
    let file = configuration.file.clone();
    let reads_it = |daemon: &Running| other_file(daemon.file.as_deref(), file.as_deref()).is_none();
    let daemon = daemon.filter(|daemon| {
        global.paths.config.is_none()
            || global.paths.socket.is_some()
            || daemon.file.is_some() && reads_it(daemon)
    });
    let is_named = global.paths.root.is_some()
        || global.paths.socket.is_some()
        || settings.root().is_some()
        || settings.socket().is_some();
    let system = system_daemon();
    let (system, silent_system) = match is_named {
        true => (None, system.and_then(|system| system.problem)),
        false => (system, None),
    };
    print_result(global, &Shown { configuration, daemon, system, silent_system }, render)
}

/// The system's daemon, if this machine has one and commands of this user use it by default.
fn system_daemon() -> Option<SystemDaemon> {
    if default_root().is_ok_and(|root| root == Path::new(SYSTEM_ROOT)) {
        return None;
    }
    let problem = match Client::connect_to_system() {
        Ok(None) => return None,
        Ok(Some(_client)) => None,
        Err(error) => Some(client_error(error).message),
    };
    Some(SystemDaemon { socket: SYSTEM_SOCKET, problem })
}

fn running(socket: &Path, configuration: &Configuration) -> Result<Option<Running>, ErrorBody> {
    let Ok(client) = Client::connect(socket) else { return Ok(None) };
    let used = client.configuration().map_err(client_error)?;
    let differences = differences(&used, configuration).map(|(used, _found)| used.clone()).collect();
    Ok(Some(Running { socket: socket.display().to_string(), file: used.file, differences }))
}

fn render(shown: &Shown) -> String {
    let Configuration { file, settings } = &shown.configuration;
    let mut text = match file {
        Some(file) => format!("configuration: {}\n\n", printable(file)),
        None => "configuration: no file; all settings have their defaults\n\n".to_owned(),
    };
    let rows: Vec<[String; 3]> = settings.iter().flat_map(rows).collect();
    let width = rows.iter().map(|[key, ..]| key.chars().count()).max().unwrap_or_default();
    for [key, value, place] in rows {
        text.push_str(&format!("{key:width$}  {value}  ({place})\n"));
    }
    if let Some(daemon) = &shown.daemon {
        text.push_str(&format!("\n{}", render_daemon(daemon, file.as_deref())));
    }
    match &shown.system {
        None => {}
        Some(SystemDaemon { problem: None, socket }) => {
            text.push_str(&format!(
                "\ncommands of this user use the system's daemon at {socket}, not these settings\n"
            ));
        }
        Some(SystemDaemon { problem: Some(problem), .. }) => {
            text.push_str(&format!("\ncommands of this user fail: {}\n", printable(problem)));
        }
    }
    if let Some(problem) = &shown.silent_system {
        let problem = printable(problem);
        text.push_str(&format!(
            "\nnote: commands of this user use these settings, not the models of the system's daemon: {problem}\n"
        ));
    }
    text
}

/// Key, value and place; a table has one row for each entry.
fn rows(setting: &Setting) -> Vec<[String; 3]> {
    let Setting { key, value, .. } = setting;
    let row = |key: String, value| [printable(&key), printable(&in_words(value)), printable(&place(setting))];
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            entries.iter().map(|(name, value)| row(format!("{key}.{name:?}"), value)).collect()
        }
        value => vec![row(key.clone(), value)],
    }
}

fn place(Setting { origin, place, .. }: &Setting) -> String {
    match (origin, place) {
        (SettingOrigin::Default, _) | (_, None) => "default".to_owned(),
        (SettingOrigin::File, Some(place)) => {
            place.rsplit_once(':').map_or_else(|| place.clone(), |(_, line)| format!("line {line}"))
        }
        (_, Some(place)) => place.clone(),
    }
}

fn in_words(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Object(entries) if entries.is_empty() => "none".to_owned(),
        value => value.to_string(),
    }
}

/// The daemon's own file, unless it is the one that this command has read (`shown`).
fn other_file<'f>(daemon: Option<&'f str>, shown: Option<&str>) -> Option<&'f str> {
    let canonical = |path: &str| Path::new(path).canonicalize().unwrap_or_else(|_| path.into());
    daemon.filter(|file| shown.is_none_or(|shown| canonical(file) != canonical(shown)))
}

fn render_daemon(Running { socket, file, differences }: &Running, shown: Option<&str>) -> String {
    let socket = printable(socket);
    if differences.is_empty() {
        return format!("the daemon at {socket} uses these settings\n");
    }
    let other = other_file(file.as_deref(), shown);
    let mut text = match other {
        Some(file) => format!("the daemon at {socket} reads another file, {}, and uses:\n", printable(file)),
        None => format!("the daemon at {socket} still uses:\n"),
    };
    for Setting { key, value, origin, place, applied_by } in differences {
        let how = match (origin, place, applied_by) {
            (SettingOrigin::Option | SettingOrigin::Environment, Some(place), _) => {
                format!("given by {} when it was started", printable(place))
            }
            (_, _, AppliedBy::Restart) if other.is_some() => "change it there and restart it".to_owned(),
            _ if other.is_some() => "change it there and send it SIGHUP".to_owned(),
            (_, _, AppliedBy::Restart) => "restart it to change this".to_owned(),
            _ => "send it SIGHUP to change this".to_owned(),
        };
        text.push_str(&format!("  {key} = {}: {how}\n", printable(&in_words(value))));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn file_of_the_daemon_is_named_if_it_is_another_one() {
        let setting = |key: &str, applied_by| Setting {
            key: key.to_owned(),
            value: json!(1),
            origin: SettingOrigin::File,
            place: Some("/etc/blobd/config.toml:3".to_owned()),
            applied_by,
        };
        let daemon = Running {
            socket: "/run/blobd/blobd.sock".to_owned(),
            file: Some("/etc/blobd/config.toml".to_owned()),
            differences: vec![
                setting("space.quota", AppliedBy::Reload),
                setting("durability", AppliedBy::Restart),
            ],
        };
        let same = render_daemon(&daemon, Some("/etc/blobd/./config.toml"));
        assert!(same.contains("space.quota = 1: send it SIGHUP to change this"), "{same}");
        for shown in [None, Some("/home/ann/.config/blobd/config.toml")] {
            let other = render_daemon(&daemon, shown);
            assert!(other.contains("reads another file, /etc/blobd/config.toml, and uses:"), "{other}");
            assert!(other.contains("space.quota = 1: change it there and send it SIGHUP\n"), "{other}");
            assert!(other.contains("durability = 1: change it there and restart it\n"), "{other}");
        }
    }
}
