//! A private mount namespace: other programs do not see what is mounted in it.

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Enters a private mount namespace; returns the reason if that is not possible. `devices` must exist.
///
/// The program restarts itself in the namespace with `marker` in its environment; then this function does not
/// return. The mounts disappear with the last process in the namespace, even if this one is killed.
#[must_use]
pub fn enter(marker: &str, devices: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("mounting takes root".to_owned());
    }
    if let Some(device) = devices.iter().find(|device| !Path::new(device).exists()) {
        return Some(format!("{device} does not exist"));
    }
    if env::var_os(marker).is_some() {
        return None;
    }
    match Command::new("unshare").args(["--mount", "true"]).output() {
        Err(error) => return Some(format!("unshare: {error}; Debian has it in util-linux")),
        Ok(run) if !run.status.success() => {
            return Some("a private mount namespace is not allowed here".to_owned());
        }
        Ok(_) => {}
    }
    let restart = |own: PathBuf| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--"]).arg(own).args(env::args_os().skip(1)).env(marker, "1");
        command.exec().to_string()
    };
    Some(env::current_exe().map_or_else(|error| error.to_string(), restart))
}
