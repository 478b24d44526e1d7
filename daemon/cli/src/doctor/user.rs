//! Checks of the user's environment and limits, and of the units of systemd.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::{env, fs};

use blobd_cli_common::Global;
use blobd_cli_common::output::human_bytes;
use blobd_cli_common::system_service::{self, Unit, telling};
use blobd_cli_import::other_stores;
use blobd_client::protocol::upkeep::{Check, CheckStatus};
use blobd_client::sockets::{SYSTEM_UNITS, unit_file};
use rustix::process::{Resource, geteuid, getrlimit};

pub(super) fn environment(global: &Global) -> Check {
    let paths = ["BLOBD_ROOT", "BLOBD_SOCKET", "BLOBD_CONFIG"];
    let set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let mut found: Vec<String> = paths
        .iter()
        .filter(|name| set(name))
        .map(|name| format!("{name}={}", env::var_os(name).unwrap_or_default().to_string_lossy()))
        .collect();
    // The value may have a password in it.
    let proxies = (global.server.proxies)();
    found.extend(proxies.names.iter().filter(|name| set(name)).map(|name| format!("{name} is set")));
    let detail =
        if found.is_empty() { "no variable of blobd or of a proxy".to_owned() } else { found.join(", ") };
    let foreign = env::var_os("XDG_RUNTIME_DIR").and_then(|directory| {
        let owner = fs::metadata(&directory).ok()?.uid();
        (owner != geteuid().as_raw() && !geteuid().is_root()).then_some((directory, owner))
    });
    match foreign {
        Some((directory, owner)) if global.paths.socket.is_none() => Check::new(
            "environment",
            CheckStatus::Note,
            format!("XDG_RUNTIME_DIR={}: belongs to uid {owner}; {detail}", directory.to_string_lossy()),
        )
        .because("it is from another user's session, such as after `su`, so the daemon of this user is not found there")
        .with_hint("log in as this user, or unset it")
        .mended_by("unset XDG_RUNTIME_DIR"),
        _ => match proxies.fault {
            Some(fault) => Check::new("environment", CheckStatus::Warning, format!("{fault}; {detail}"))
                .because("models cannot be pulled: no connection bypasses a configured proxy")
                .with_hint("set the variable to the proxy's URL, or unset it"),
            None => Check::new("environment", CheckStatus::Ok, detail),
        },
    }
}

/// The models that other programs have on this machine.
pub(super) fn other_programs() -> Check {
    let found = other_stores::present();
    let detail = found.unwrap_or_else(|| "no models found in the usual folders".to_owned());
    Check::new("other programs", CheckStatus::Ok, detail)
}

/// Only `blobd warm --lock` locks memory.
pub(super) fn locked_memory() -> Check {
    let most = match getrlimit(Resource::Memlock).current {
        None => "any amount".to_owned(),
        Some(bytes) => human_bytes(bytes),
    };
    Check::new("locked memory", CheckStatus::Ok, format!("{most} for `blobd warm --lock`"))
}

/// The system's daemon, if it is installed: commands of users fail while it does not answer.
pub(super) fn service() -> Check {
    let installed = SYSTEM_UNITS.into_iter().find_map(unit_file);
    service_of(system_service::has_systemd(), installed.as_deref(), &system_service::units())
}

fn service_of(has_systemd: bool, installed: Option<&Path>, units: &[Unit]) -> Check {
    let check = |status, detail| Check::new("service", status, detail);
    let file = match installed {
        None if has_systemd => {
            return check(
                CheckStatus::Ok,
                "blobd.socket is not installed; commands work without it".to_owned(),
            );
        }
        None => return check(CheckStatus::Ok, "systemd does not run here".to_owned()),
        Some(file) => file.display(),
    };
    let Some(unit) = telling(units) else {
        let detail = format!("{file} is installed, and systemd does not say whether it is used");
        return check(CheckStatus::Note, detail)
            .because("commands fail while the system's daemon does not answer")
            .with_hint("start the daemon, or remove the file if this machine should have none")
            .mended_by("systemctl status blobd.socket blobd.service");
    };
    // The service says more than its socket.
    let failed = units.iter().filter(|unit| unit.has_failed()).max_by_key(|unit| unit.is_service());
    let idle = units.iter().find(|unit| !unit.is_service() && !unit.is_active());
    match (failed, idle) {
        (Some(unit), _) => {
            let reason = unit.last_error().map_or_else(String::new, |line| format!(": {line}"));
            check(CheckStatus::Failure, format!("{unit}{reason}"))
                .because("the system's daemon does not run, and commands of users fail")
                .with_hint(unit.next_step())
                .mended_by("sudo journalctl -u blobd.service -n 20")
        }
        (None, Some(socket)) => check(CheckStatus::Warning, format!("installed, but {socket}"))
            .because("commands of users fail instead of using another store")
            .with_hint(socket.next_step())
            .mended_by(socket.mended_by()),
        (None, None) => check(CheckStatus::Ok, unit.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(socket: &str, service: &str) -> Vec<Unit> {
        [("blobd.socket", socket), ("blobd.service", service)]
            .map(|(id, state)| {
                Unit::parse(&format!("Id={id}\nLoadState=loaded\n{}", state.replace(' ', "\n"))).unwrap()
            })
            .into()
    }

    #[test]
    fn service_that_has_failed_or_does_not_listen_is_reported() {
        let socket = Path::new("/usr/lib/systemd/system/blobd.socket");
        for (socket_state, service_state, status, detail) in [
            ("ActiveState=active", "ActiveState=active", CheckStatus::Ok, "blobd.service is active"),
            ("ActiveState=active", "ActiveState=inactive", CheckStatus::Ok, "blobd.socket is active"),
            (
                "ActiveState=active",
                "ActiveState=failed ExecMainStatus=78",
                CheckStatus::Failure,
                "blobd.service is failed (exit code 78)",
            ),
            (
                "ActiveState=failed Result=service-start-limit-hit",
                "ActiveState=inactive",
                CheckStatus::Failure,
                "blobd.socket is failed (service-start-limit-hit)",
            ),
            (
                "ActiveState=inactive UnitFileState=disabled",
                "ActiveState=inactive",
                CheckStatus::Warning,
                "installed, but blobd.socket is inactive (disabled)",
            ),
        ] {
            let check = service_of(true, Some(socket), &units(socket_state, service_state));
            assert_eq!((check.status, check.detail.as_str()), (status, detail));
        }
        assert_eq!(service_of(false, Some(socket), &[]).status, CheckStatus::Note);
        assert_eq!(service_of(true, None, &[]).status, CheckStatus::Ok);
        assert_eq!(service_of(false, None, &[]).status, CheckStatus::Ok);
    }
}
