//! Checks of the user's environment and limits, and of the units of systemd.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use blobd_client::protocol::upkeep::{Check, CheckStatus};
use blobd_registry::Proxies;
use rustix::process::{Resource, geteuid, getrlimit};

use crate::cli::Global;
use crate::size::human_bytes;

/// Where systemd says that it runs.
const SYSTEMD: &str = "/run/systemd/system";
/// Where packages and admins install the unit.
const UNIT_DIRECTORIES: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

pub(super) fn environment(global: &Global) -> Check {
    let paths = ["BLOBD_ROOT", "BLOBD_SOCKET", "BLOBD_CONFIG"];
    let set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let mut found: Vec<String> = paths
        .iter()
        .filter(|name| set(name))
        .map(|name| format!("{name}={}", env::var_os(name).unwrap_or_default().to_string_lossy()))
        .collect();
    // The value may have a password in it.
    found.extend(Proxies::VARIABLES.iter().filter(|name| set(name)).map(|name| format!("{name} is set")));
    let detail =
        if found.is_empty() { "no variable of blobd or of a proxy".to_owned() } else { found.join(", ") };
    let foreign = env::var_os("XDG_RUNTIME_DIR").and_then(|directory| {
        let owner = fs::metadata(&directory).ok()?.uid();
        (owner != geteuid().as_raw() && !geteuid().is_root()).then_some((directory, owner))
    });
    match foreign {
        Some((directory, owner)) if global.socket.is_none() => Check::new(
            "environment",
            CheckStatus::Note,
            format!("XDG_RUNTIME_DIR={}: belongs to uid {owner}; {detail}", directory.to_string_lossy()),
        )
        .because("it is from another user's session, such as after `su`, so the daemon of this user is not found there")
        .with_hint("log in as this user, or unset it")
        .mended_by("unset XDG_RUNTIME_DIR"),
        _ => match Proxies::from_environment().faults().next() {
            Some(fault) => Check::new("environment", CheckStatus::Warning, format!("{fault}; {detail}"))
                .because("models cannot be pulled: no connection goes past a proxy that is set")
                .with_hint("set the variable to the proxy's URL, or unset it"),
            None => Check::new("environment", CheckStatus::Ok, detail),
        },
    }
}

/// Only `blobd warm --lock` locks memory.
pub(super) fn locked_memory() -> Check {
    let most = match getrlimit(Resource::Memlock).current {
        None => "any amount".to_owned(),
        Some(bytes) => human_bytes(bytes),
    };
    Check::new("locked memory", CheckStatus::Ok, format!("{most} for `blobd warm --lock`"))
}

pub(super) fn service() -> Check {
    let is_installed =
        UNIT_DIRECTORIES.iter().any(|directory| Path::new(directory).join("blobd.socket").exists());
    let is_enabled = Path::new("/etc/systemd/system/sockets.target.wants/blobd.socket").exists();
    service_of(Path::new(SYSTEMD).is_dir(), is_installed, is_enabled)
}

fn service_of(has_systemd: bool, is_installed: bool, is_enabled: bool) -> Check {
    let ok = |detail| Check::new("service", CheckStatus::Ok, detail);
    match (has_systemd, is_installed, is_enabled) {
        (false, _, _) => ok("systemd does not run here"),
        (true, false, _) => ok("blobd.socket is not installed; commands work without it"),
        (true, true, true) => ok("blobd.socket is enabled"),
        (true, true, false) => {
            Check::new("service", CheckStatus::Note, "blobd.socket is installed and not enabled")
                .because("the system's daemon does not start with the machine")
                .with_hint("enable it if this machine shall have one")
                .mended_by("sudo systemctl enable --now blobd.socket")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installed_unit_that_is_not_enabled_is_noted() {
        for (has_systemd, is_installed, is_enabled, status) in [
            (false, true, false, CheckStatus::Ok),
            (true, false, false, CheckStatus::Ok),
            (true, true, true, CheckStatus::Ok),
            (true, true, false, CheckStatus::Note),
        ] {
            assert_eq!(service_of(has_systemd, is_installed, is_enabled).status, status);
        }
    }
}
